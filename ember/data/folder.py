"""The output folder of a job: its layout, its lock, and its small files.

One job at a time writes to a folder, and never over another job's results. Every file appears under its final name
only when it is whole and on the disk, so a reader, or a later run, may trust whatever it finds there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from ember.errors import ConfigError, UserError

CONFIG_HEADER = "# Written by ember: the resolved settings of this job.\n"
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_ANOTHER = "choose another output"


class OutputFolder:
    """`OUTPUT/` with `completions/`, `steps/`, `manifest.json`, `config.yaml` and `summary.json`.

    Hydra's `.hydra/` and a log may lie in it too; they are not results. Also a context manager that releases the lock.

    Args:
        path: a local folder, made by `create()` if it does not exist; relative to the working directory.
    """

    def __init__(self, path: str) -> None:
        self._given = path
        self.path = Path(path).expanduser()
        self._lock: int | None = None

    @property
    def completions_dir(self) -> Path:
        """Where the completions' parts go."""
        return self.path / "completions"

    @property
    def steps_dir(self) -> Path:
        """Where the step statistics' parts go."""
        return self.path / "steps"

    def has_results(self) -> bool:
        """True if a job has written here: a manifest, or any part of completions. Writes nothing."""
        manifest = self.path / "manifest.json"
        return manifest.exists() or next(self.completions_dir.glob("*.parquet"), None) is not None

    def create(self) -> Self:
        """Make the folder and lock it; the lock ends with `release()` or with the process, however it dies.

        Raises:
            ConfigError: `output` is a URL, is no folder, or already holds results.
            UserError: another job is writing to it, or it can't be written.
        """
        if "://" in self._given:
            raise ConfigError("output", self._given, "must be a local folder; URLs are not supported yet")
        self._make(self.path)
        self._acquire()
        try:
            self._refuse_what_is_there()
            self._make(self.completions_dir)
            self._make(self.steps_dir)
            self._sync()
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise self._unusable(error) from error
            raise
        return self

    def write_config(self, text: str) -> None:
        """Write the resolved settings (YAML) as `config.yaml`, below a comment line that marks it as ember's.

        Raises:
            UserError: the file can't be written.
        """
        self._write("config.yaml", CONFIG_HEADER + text)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Write `manifest.json`; from then on the folder holds results.

        Raises:
            UserError: the file can't be written.
        """
        self._write("manifest.json", _json(manifest))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, in place of an earlier one.

        Raises:
            UserError: the file can't be written.
        """
        self._write("summary.json", _json(summary))

    def release(self) -> None:
        """Give the lock back. The empty `.lock` file stays: removing it would let two jobs lock two files."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self if self._lock is not None else self.create()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            place = "" if folder == self.path else f" ({folder} is in the way)"
            raise ConfigError("output", self._given, f"is a file, must be a folder{place}; {_ANOTHER}") from error
        except OSError as error:
            raise self._unusable(error) from error

    def _acquire(self) -> None:
        if self._lock is not None:
            raise RuntimeError(f"{self.path} is already locked by this OutputFolder")
        fd: int | None = None
        try:
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise UserError(f"another job is writing to {self._given}; wait for it or {_ANOTHER}") from error
            raise self._unusable(error) from error
        self._lock = fd

    def _refuse_what_is_there(self) -> None:
        if self.has_results():
            raise ConfigError("output", self._given, f"already holds results; {_ANOTHER}, or remove that folder")
        config = self.path / "config.yaml"
        if config.exists() and not config.read_bytes().startswith(CONFIG_HEADER.encode()):
            raise ConfigError("output", self._given, f"holds a config.yaml that ember did not write; {_ANOTHER}")

    def _sync(self) -> None:
        """Make the new folders themselves survive a power cut."""
        for folder in (self.path, self.path.parent):
            sync_folder(folder)

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError("output", self._given, f"is not writable: {os_reason(error)}; {_ANOTHER}")

    def _write(self, name: str, text: str) -> None:
        if self._lock is None:
            raise RuntimeError(f"{name} is written under the folder's lock: call create() first")
        # A lone surrogate (it can come from a JSON prompt in an error message) becomes its \ud800 escape.
        data = text.encode("utf-8", "backslashreplace")
        write_atomically(self.path / name, lambda file: file.write(data))


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, flush it to the disk and rename it.

    After a failure or a crash `path` is what it was before; the temporary file (`.<name>.tmp-<pid>`) is removed if
    the process lives.

    Raises:
        UserError: the operating system refused: one line with the path and its reason.
    """
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"can't write {path}: {os_reason(error)}") from error
        raise


def temporary_path(path: Path) -> Path:
    """The hidden name under which `path` is written; Parquet readers skip it."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


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


def os_reason(error: OSError) -> str:
    """What the operating system says, on one line: `No space left on device`."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
