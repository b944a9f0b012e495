"""Standard input (`data=-`) as a file: rows are read twice, and a resume needs them again, so they are kept first.

They go to `OUTPUT/stdin.jsonl`, whole and durable before anything is read from there. A resume compares what comes now
with what is kept; if nothing comes, what is kept is enough.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from ember.config import STDIN, JobConfig
from ember.data.file_kinds import data_error
from ember.data.folder import OutputFolder
from ember.data.manifest import MANIFEST
from ember.data.reader import PromptReader
from ember.data.store import LocalStore, Store

SPOOL = "stdin.jsonl"
_NEW = "stdin-new.jsonl"
_CHUNK_BYTES = 1 << 20
_PIPE = "pipe rows into it (cat rows.jsonl | ember data=- ...) or name a file"


@contextmanager
def stdin_as_file(config: JobConfig, folder: OutputFolder | None) -> Iterator[JobConfig]:
    """The settings with `data=-` replaced by the file that stdin went to; others as they are.

    If the file differs from the one that the output's results were made from, it goes when the block ends: the block
    is to find that out by the fingerprint, and to fail.

    Args:
        folder: the output, locked; None for a dry run, which keeps stdin for the block only.

    Raises:
        UserError: nothing comes from stdin and nothing is kept, or it can't be written.
    """
    if config.data != [STDIN]:
        yield config
    elif folder is None:
        with tempfile.TemporaryDirectory(prefix="ember-") as place:
            store = LocalStore(Path(place))
            yield _reading(config, store, _Spool(store).take())
    else:
        with _Spool(folder.store) as spool:
            if config.force and (folder.store.exists(MANIFEST) or folder.has_parts()):
                _move_aside(config, folder, spool)
            yield _reading(config, folder.store, spool.take())


def _reading(config: JobConfig, store: Store, name: str) -> JobConfig:
    config = copy.copy(config)
    config.data = [f"{store.shown}/{name}"]
    return config


def _move_aside(config: JobConfig, folder: OutputFolder, spool: _Spool) -> None:
    """With `force`: the old results and their stdin, but not before the new one is there and can be read."""
    spool.receive(_NEW)
    PromptReader(_reading(config, folder.store, _NEW))
    print(f"force=true: the old results are now in {folder.move_aside()}", file=sys.stderr)


class _Spool:
    """The file that stdin is kept in; on the way out, what must not stay of it is removed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_foreign = store.exists(MANIFEST) and not store.exists(SPOOL)

    def __enter__(self) -> Self:
        self._store.clear_temporary((SPOOL, _NEW).__contains__)
        self._store.remove(_NEW)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._store.remove(_NEW)
        if self._is_foreign and error is not None:
            self._store.remove(SPOOL)

    def take(self) -> str:
        """Read stdin, unless that is done, and settle with what was kept; the name of the file to read."""
        if not self._store.exists(_NEW):
            if not self._store.exists(SPOOL):
                self.receive(SPOOL)
                return SPOOL
            if not self._comes(_NEW):
                return SPOOL
        if self._store.exists(SPOOL):
            if self._is_same():
                return SPOOL
            if self._store.exists(MANIFEST):
                return _NEW
        self._store.put_atomically(SPOOL, self._copy_new)
        return SPOOL

    def receive(self, name: str) -> None:
        """Read stdin into a file.

        Raises:
            UserError: nothing comes.
        """
        if _stdin() is None:
            raise data_error(STDIN, f"stdin is a terminal or closed; {_PIPE}")
        if not self._comes(name):
            raise data_error(STDIN, f"nothing came from stdin; {_PIPE}")

    def _comes(self, name: str) -> bool:
        """Read stdin into a file if there is anything to read."""
        stdin = _stdin()
        first = b"" if stdin is None else _read(stdin)
        if not first:
            return False
        self._store.put_atomically(name, lambda file: _pour(first, stdin, file))
        return True

    def _is_same(self) -> bool:
        with self._store.open(SPOOL) as old, self._store.open(_NEW) as new:
            while True:
                chunk = old.read(_CHUNK_BYTES)
                if chunk != new.read(_CHUNK_BYTES):
                    return False
                if not chunk:
                    return True

    def _copy_new(self, file: BinaryIO) -> None:
        with self._store.open(_NEW) as new:
            while chunk := new.read(_CHUNK_BYTES):
                file.write(chunk)


def _stdin() -> Any:
    """Stdin's bytes; None if it is a terminal or closed."""
    stdin = sys.stdin
    try:
        return None if stdin is None or stdin.isatty() else stdin.buffer
    except (ValueError, AttributeError):
        return None


def _read(stdin: Any) -> bytes:
    """What is there, or waits for more; empty at the end, and where nothing can be read. A signal may break it off."""
    try:
        return bytes(stdin.read1(_CHUNK_BYTES))
    except (OSError, ValueError):
        return b""


def _pour(first: bytes, stdin: Any, file: BinaryIO) -> None:
    chunk = first
    while chunk:
        file.write(chunk)
        try:
            chunk = stdin.read1(_CHUNK_BYTES)
        except (OSError, ValueError) as error:
            raise data_error(STDIN, f"stdin broke off ({error}); run again") from error
