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
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from ember.errors import ConfigError, UserError

CONFIG_HEADER = "# Written by ember: the resolved settings of this job.\n"
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_ANOTHER = "choose another output"
_RESULTS = ("completions", "steps", "config.yaml", ".hashes.json")


class OutputFolder:
    """`OUTPUT/` with `completions/`, `steps/`, `manifest.json`, `config.yaml` and `summary.json`.

    Hydra's `.hydra/` and a log may lie in it too; they are not results. Also a context manager that releases the lock.

    Args:
        path: a local folder, made by `create()` if it does not exist; relative to the working directory.
        shard: of a job spread over `num_shards` processes that share the folder; None for a job that is alone in it.
            Every shard has a lock, parts and a summary of its own.
    """

    def __init__(self, path: str, shard: int | None = None, num_shards: int = 1) -> None:
        self._given = path
        self.path = Path(path).expanduser()
        self._tag = "" if shard is None or num_shards == 1 else f"s{shard:03d}of{num_shards:03d}"
        self._lock: int | None = None
        self._made: list[Path] = []

    @property
    def part_prefix(self) -> str:
        """How this job's parts are named before the number."""
        return f"part-{self._tag}-" if self._tag else "part-"

    @property
    def manifest_path(self) -> Path:
        """The manifest, one for all shards."""
        return self.path / "manifest.json"

    @property
    def summary_path(self) -> Path:
        """This job's own summary: `summary.json`, of a shard `summary-s003of008.json`."""
        return self.path / (f"summary-{self._tag}.json" if self._tag else "summary.json")

    @property
    def hashes_path(self) -> Path:
        """Where content hashes of large files are remembered."""
        return self.path / ".hashes.json"

    @property
    def completions_dir(self) -> Path:
        """Where the completions' parts go."""
        return self.path / "completions"

    @property
    def steps_dir(self) -> Path:
        """Where the step statistics' parts go."""
        return self.path / "steps"

    def has_parts(self) -> bool:
        """Whether any part of completions is there."""
        return next(self.completions_dir.glob("part-*"), None) is not None

    def create(self) -> Self:
        """Make the folder and lock it; the lock ends with `release()` or with the process, however it dies.

        Raises:
            ConfigError: `output` is a URL or is no folder.
            UserError: another job is writing to it, or it can't be written.
        """
        if "://" in self._given:
            raise ConfigError("output", self._given, "must be a local folder; URLs are not supported yet")
        self._make(self.path)
        self._acquire()
        try:
            self._refuse_a_foreign_config()
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

    def write_summary(self, summary: dict[str, Any], name: str | None = None) -> None:
        """Write this job's summary (or the one of that `name`), in place of an earlier one.

        Raises:
            UserError: the file can't be written.
        """
        self._write(name or self.summary_path.name, _json(summary))

    def move_aside(self) -> Path | None:
        """Move all results into a new folder `old-...` below this one; returns it, None if there were none.

        The manifest goes last: if this is broken off, what stays still belongs to it.

        Raises:
            UserError: a shard of the job is at work here, or a file can't be moved.
        """
        names = [*_RESULTS, *(path.name for path in self.path.glob("summary*.json")), "manifest.json"]
        there = [name for name in names if (self.path / name).exists()]
        if not self.manifest_path.exists() and not self.has_parts():
            return None
        self._check_alone()
        aside = self.path / time.strftime("old-%Y%m%d-%H%M%S")
        try:
            aside.mkdir()
            for name in there:
                (self.path / name).rename(aside / name)
            self._make(self.completions_dir)
            self._make(self.steps_dir)
        except OSError as error:
            raise self._unusable(error) from error
        return aside

    def _check_alone(self) -> None:
        """Refuse if another shard holds its lock."""
        for path in self.path.glob(".lock*"):
            if path.name == self._lock_name:
                continue
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"another job is writing to {self._given}; wait for it or {_ANOTHER}") from None

    @property
    def _lock_name(self) -> str:
        return f".lock-{self._tag}" if self._tag else ".lock"

    def _remove_if_unused(self) -> None:
        """Leave nothing behind if the job failed before it had a manifest."""
        if self.manifest_path.exists():
            return
        with contextlib.suppress(OSError):
            for folder in reversed(self._made):
                if folder == self.path:
                    (folder / self._lock_name).unlink(missing_ok=True)
                folder.rmdir()

    def release(self) -> None:
        """Give the lock back. The empty `.lock` file stays: removing it would let two jobs lock two files."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self if self._lock is not None else self.create()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._remove_if_unused()
        self.release()

    def _make(self, folder: Path) -> None:
        try:
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if new:
                self._made.append(folder)
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
            fd = os.open(self.path / self._lock_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                raise UserError(f"another job is writing to {self._given}; wait for it or {_ANOTHER}") from error
            raise self._unusable(error) from error
        self._lock = fd

    def _refuse_a_foreign_config(self) -> None:
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
