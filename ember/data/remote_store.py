"""A results folder in an object store: any URL that fsspec opens (`s3://bucket/folder`, `gs://...`).

An object is there whole or not at all, so a file is one put; there is no rename and no lock. Where the service knows
the conditional put, a file that must be new fails if another job was first. The only module that knows fsspec.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Self, cast

from ember.data.store import Lock, Write, cant_write, in_the_way
from ember.errors import ConfigError

_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs")}


class RemoteStore:
    """A folder (a key prefix) of an object store.

    Two jobs that write to one output at once are not kept apart by a lock here: the second to write a part of a name
    stops with an error, where the service supports conditional puts (S3 and GCS do); elsewhere the name is looked up
    first.

    Args:
        fs: fsspec's file system.
        path: the folder as `fs` knows it, without the protocol.
        url: the folder as people know it.
    """

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs, self._path, self.shown = fs, path.rstrip("/"), url.rstrip("/")

    @staticmethod
    def of(url: str) -> RemoteStore:
        """The store of a URL; nothing is asked of the service yet.

        Raises:
            ConfigError: no file system for the URL; names what to install.
        """
        protocol = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            fs, path = url_to_fs(url)
        except ImportError as error:
            package, extra = _EXTRAS.get(protocol, ("fsspec and its file system", "s3"))
            raise ConfigError("output", url, f"needs {package}: pip install 'ember-batch[{extra}]'") from error
        except ValueError as error:
            raise ConfigError("output", url, f"no such kind of URL ({error}); use a folder, s3:// or gs://") from error
        return RemoteStore(fs, path, url)

    def sub(self, name: str) -> RemoteStore:
        """See Store."""
        return RemoteStore(self._fs, f"{self._path}/{name}", f"{self.shown}/{name}")

    def make(self) -> bool:
        """See Store. There are no folders to make: keys with slashes look like them."""
        return not self.names()

    def names(self) -> list[str]:
        """See Store. Always asks the service, never a remembered listing."""
        with _as_os_error():
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found} - {""})

    def exists(self, name: str) -> bool:
        """See Store."""
        with _as_os_error():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(f"{self._path}/{name}"))

    def open(self, name: str) -> BinaryIO:
        """See Store."""
        with _as_os_error():
            return cast(BinaryIO, self._fs.open(f"{self._path}/{name}", "rb"))

    def put_atomically(self, name: str, write: Write, *, new: bool = False) -> None:
        """See Store. The file is made in memory and sent as one object."""
        file = io.BytesIO()
        write(file)
        if new:
            if not self.create_exclusive(name, file.getvalue()):
                raise in_the_way(self.shown, name)
            return
        self._put(name, file.getvalue())

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """See Store. Without conditional puts it is looked up first, which two processes in one instant both pass."""
        try:
            self._put(name, data, mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError):
            try:
                if self.exists(name):
                    return False
            except OSError as error:
                raise cant_write(f"{self.shown}/{name}", error) from error
            self._put(name, data)
        return True

    def _put(self, name: str, data: bytes, **how: Any) -> None:
        try:
            with _as_os_error():
                self._fs.pipe_file(f"{self._path}/{name}", data, **how)
        except FileExistsError:
            raise
        except OSError as error:
            raise cant_write(f"{self.shown}/{name}", error) from error

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        """See Store. Keeps nobody out: object stores have no locks."""
        return _NoLock()

    def move(self, name: str, below: str) -> None:
        """See Store. Objects are copied one by one, then removed: copies are all there before the first is gone."""
        source = f"{self._path}/{name}"
        with _as_os_error():
            self._fs.invalidate_cache()
            paths = self._fs.find(source) or [source]
            for path in paths:
                self._fs.cp_file(path, f"{self._path}/{below}/{name}{str(path)[len(source) :]}")
            for path in paths:
                self._fs.rm_file(path)

    def remove(self, name: str) -> None:
        """See Store."""
        if self.exists(name):
            with _as_os_error():
                self._fs.rm_file(f"{self._path}/{name}")

    def remove_if_empty(self) -> None:
        """See Store. An empty folder is no object, so there is nothing to remove."""

    def clear_temporary(self, own: Callable[[str], bool]) -> None:
        """See Store. Nothing is ever half written."""


class _NoLock:
    def release(self) -> None:
        """See Lock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Services raise errors of their own classes (credentials, end points): make them OSErrors with their text."""
    try:
        yield
    except (OSError, NotImplementedError, TypeError):
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
