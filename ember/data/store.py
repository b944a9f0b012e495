"""Where results are kept: the few things a job asks of a folder, and how a local disk does them.

What has its final name is whole and on the disk, so a reader, or a later run, may trust whatever it finds. Object
stores (`ember.data.remote_store`) do the same with other means, so that nothing else needs to know which of the two it
is writing to.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self, cast

from ember.errors import JobError, UserError

Write = Callable[[BinaryIO], Any]
"""Fills an open file."""

_TEMPORARY = re.compile(r"\.(.*)\.tmp-\w+")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Lock(Protocol):
    """What `Store.lock` gives: held until `release()`, or until the process dies, however it dies."""

    def release(self) -> None:
        """Give it back; a second call does nothing."""

    def __enter__(self) -> Self:
        """Hold it for a block."""

    def __exit__(self, *_: object) -> None:
        """Release it."""


class Store(Protocol):
    """A folder of files. Names are plain, without a slash.

    `put_atomically` and `create_exclusive` raise JobError, one line with the path and the reason; everything else that
    fails raises OSError.

    Attributes:
        shown: the folder as people know it, a path or a URL.
    """

    shown: str

    def sub(self, name: str) -> Store:
        """The folder `name` in this one; it need not exist."""

    def make(self) -> bool:
        """Make the folder, with its parents, durably; True if there was none."""

    def names(self) -> list[str]:
        """The files and folders in it, sorted; empty if it does not exist."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""

    def open(self, name: str) -> BinaryIO:
        """A file to read and seek in."""

    def put_atomically(self, name: str, write: Write, *, new: bool = False) -> None:
        """Let `write` fill the file; before, it is what it was, after, it is whole and durable; never between.

        Args:
            new: refuse, with a UserError, to replace a file.
        """

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """Write a whole file where none is; False if there is one: of several processes exactly one is first."""

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        """An exclusive lock.

        Raises:
            BlockingIOError: somebody else has it, and `wait` is False.
        """

    def move(self, name: str, below: str) -> None:
        """Move a file or folder into the folder `below` in this one; `name` may have slashes, which are kept."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove_if_empty(self) -> None:
        """Remove the folder, if nothing is in it."""

    def clear_temporary(self, own: Callable[[str], bool]) -> None:
        """Remove what killed writers left half written of the files whose (final) names are `own`."""


def open_store(place: str) -> Store:
    """The store for a path or a URL (`s3://bucket/folder`); nothing is made yet.

    Raises:
        ConfigError: a URL that nothing installed can open; names what to install.
    """
    if place.startswith("file://"):
        return LocalStore(Path(place.removeprefix("file://")))
    if "://" in place:
        from ember.data.remote_store import RemoteStore

        return RemoteStore.of(place)
    return LocalStore(Path(place).expanduser())


class LocalStore:
    """A folder on a local or mounted disk: rename, fsync, flock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = str(path)

    def sub(self, name: str) -> LocalStore:
        """See Store."""
        return LocalStore(self.path / name)

    def make(self) -> bool:
        """See Store."""
        new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.path.parent):
            sync_folder(folder)
        return new

    def names(self) -> list[str]:
        """See Store."""
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """See Store."""
        return (self.path / name).exists()

    def open(self, name: str) -> BinaryIO:
        """See Store."""
        return (self.path / name).open("rb")

    def put_atomically(self, name: str, write: Write, *, new: bool = False) -> None:
        """See Store. `new` is checked, not enforced: the folder's lock keeps other writers away."""
        if new and self.exists(name):
            raise in_the_way(self.shown, name)
        write_atomically(self.path / name, write)

    def create_exclusive(self, name: str, data: bytes) -> bool:
        """See Store. By a hard link, which, unlike a rename, never replaces a file; see `_create_under_lock`."""
        draft = temporary_path(self.path / name)
        try:
            write_atomically(draft, lambda file: file.write(data))
            os.link(draft, self.path / name)
            sync_folder(self.path)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                return self._create_under_lock(name, data)
            raise cant_write(self.path / name, error) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _create_under_lock(self, name: str, data: bytes) -> bool:
        """For file systems without hard links (FAT, some FUSE and network ones).

        O_EXCL would let another process see an empty file, so whoever holds a lock looks, then renames. Only as good
        as the file system's locks between hosts; jobs lock their folder the same way.
        """
        try:
            with self.lock(f".lock-{name}", wait=True):
                if self.exists(name):
                    return False
                write_atomically(self.path / name, lambda file: file.write(data))
                return True
        except OSError as error:
            raise cant_write(self.path / name, error) from error

    def lock(self, name: str, *, wait: bool = False) -> Lock:
        """See Store. The empty lock file stays: removing it would let two jobs lock two files."""
        return FileLock(self.path / name, wait=wait)

    def move(self, name: str, below: str) -> None:
        """See Store."""
        target = self.path / below / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).rename(target)

    def remove(self, name: str) -> None:
        """See Store."""
        (self.path / name).unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        """See Store."""
        if not self.names():
            self.path.rmdir()

    def clear_temporary(self, own: Callable[[str], bool]) -> None:
        """See Store."""
        for name in self.names():
            if (match := _TEMPORARY.fullmatch(name)) and own(match[1]):
                self.remove(name)


class FileLock:
    """An exclusive `flock` on a file, which is made if it does not exist.

    Raises:
        BlockingIOError: another process, or another FileLock of this one, holds it, and `wait` is False.
        OSError: the file can't be opened or locked.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self._fd: int | None = None
        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        while self._fd is None:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, how)
                if _same_file(fd, path):
                    self._fd = fd
            finally:
                if self._fd is None:
                    os.close(fd)

    def release(self) -> None:
        """See Lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> Self:
        """See Lock."""
        return self

    def __exit__(self, *_: object) -> None:
        """See Lock."""
        self.release()


def _same_file(fd: int, path: Path) -> bool:
    """Whether `path` still names the file that was locked: a failed start removes its lock with its folder."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def write_atomically(path: Path, write: Write) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk and rename it.

    After a failure or a crash `path` is what it was before; the temporary file (`.<name>.tmp-...`) is removed if the
    process lives.

    Raises:
        JobError: the operating system refused: one line with the path and its reason.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            write(cast(BinaryIO, file))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cant_write(path, error) from error
        raise


def temporary_path(path: Path) -> Path:
    """A hidden name for `path` that no other process, on this host or another, uses too; Parquet readers skip it."""
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:12]}")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where its file system knows how.

    Raises:
        OSError: the flush failed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def cant_write(path: object, error: OSError) -> JobError:
    """The line for a file that the operating system, or a remote service, refused to write: no mistake in a setting."""
    return JobError(f"can't write {path}: {os_reason(error)}")


def disk_is_full(error: OSError) -> bool:
    """Whether there is no room, which no setting can mend, rather than no permission or no such folder."""
    return error.errno in _FULL


def in_the_way(folder: str, name: str) -> UserError:
    """The line for a file that is there and must not be replaced."""
    return UserError(f"can't write {folder}/{name}: it exists already; another job writes to this folder")


def os_reason(error: OSError) -> str:
    """What the operating system says, on one line: `No space left on device`."""
    return " ".join((error.strerror or str(error) or type(error).__name__).split())
