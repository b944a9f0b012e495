"""Content hashes of files, remembered by size, time of change and inode, so that a restart need not read them again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ember.data.folder import write_atomically
from ember.errors import UserError


class FileHashes:
    """SHA-256 of files, remembered in a small JSON file.

    Args:
        memory: where hashes are remembered; a missing or broken file is an empty memory.
        verify: hash every file again, whatever is remembered.
    """

    def __init__(self, memory: Path, *, verify: bool = False) -> None:
        self._memory = memory
        self._known: dict[str, str] = {} if verify else _load(memory)
        self._used: dict[str, str] = {}

    def of(self, path: str | Path) -> str:
        """The hex SHA-256 of a file's bytes.

        Raises:
            UserError: it can't be read.
        """
        try:
            stat = os.stat(path)
            key = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_dev}-{stat.st_ino}"
            digest = self._known.get(key) or _sha256(path)
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}") from error
        self._used[key] = digest
        return digest

    def save(self) -> None:
        """Remember the hashes that were asked for.

        Raises:
            UserError: the memory can't be written.
        """
        text = json.dumps(self._known | self._used, indent=1)
        write_atomically(self._memory, lambda file: file.write(text.encode()))


def _sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in known.items()} if isinstance(known, dict) else {}
