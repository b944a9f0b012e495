"""Content hashes of files, so that a restart need not read them again.

Those of local files are remembered by size, time of change and inode; those of remote ones by URL, size and ETag or
time of change, where the server tells these, else not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ember.data.remote import RemoteFile, is_remote
from ember.data.store import Store
from ember.data.text import without_credentials
from ember.errors import UserError

_MEMORY = ".hashes.json"


class FileHashes:
    """SHA-256 of files, remembered in a small JSON file.

    Args:
        folder: where hashes are remembered, as `.hashes.json`; a missing or broken file is an empty memory.
        verify: hash every file again, whatever is remembered.
    """

    def __init__(self, folder: Store, *, verify: bool = False) -> None:
        self._folder = folder
        self._known: dict[str, str] = {} if verify else _load(folder)
        self._used: dict[str, str] = {}

    def of(self, path: str | Path) -> str:
        """The hex SHA-256 of a file's bytes; of a URL's, which are streamed and not kept.

        Raises:
            UserError: it can't be read.
        """
        if isinstance(path, str) and is_remote(path):
            return self._of_remote(RemoteFile(path))
        try:
            stat = os.stat(path)
            key = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_dev}-{stat.st_ino}"
            digest = self._known.get(key) or _sha256(path)
        except OSError as error:
            raise UserError(f"can't read {path}: {error.strerror}") from error
        self._used[key] = digest
        return digest

    def _of_remote(self, file: RemoteFile) -> str:
        size, tag = file.state()
        key = f"{_key(file)} {size} {tag}"
        digest = self._known.get(key) if tag else None
        if digest is None:
            with file.open() as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if tag:
            self._used[key] = digest
        return digest

    def save(self) -> None:
        """Remember the hashes that were asked for.

        Raises:
            JobError: the memory can't be written.
        """
        text = json.dumps(self._known | self._used, indent=1)
        self._folder.put_atomically(_MEMORY, lambda file: file.write(text.encode()))


def _key(file: RemoteFile) -> str:
    """The URL without its credentials; a digest stands for them, since two queries may lead to two contents."""
    plain = without_credentials(file.url)
    if plain == file.url:
        return plain
    return f"{plain} {hashlib.sha256(file.url.encode()).hexdigest()[:16]}"


def _sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(folder: Store) -> dict[str, str]:
    try:
        with folder.open(_MEMORY) as file:
            known = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in known.items()} if isinstance(known, dict) else {}
