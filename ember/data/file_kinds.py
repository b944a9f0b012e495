"""What an input file is, by its ending, and the one-line error about one. The same for local files and URLs."""

from __future__ import annotations

import os

from ember.data.text import one_line, without_credentials
from ember.errors import ConfigError, UserError

JSONL_ENDINGS = (".jsonl", ".ndjson", ".json")
PARQUET_ENDINGS = (".parquet", ".pq")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings that may follow a JSONL ending, and Arrow's name for each."""
READABLE = "what is read ends in .jsonl, .ndjson, .json (each also with .gz or .zst), .parquet or .pq"


def data_error(path: str, what: str) -> UserError:
    """A one-line error about a file or folder that the setting `data` names; of a URL without its credentials."""
    return ConfigError("data", shown_path(path), what)


def shown_path(path: str) -> str:
    """A path or URL as messages show it: on one line, a URL without its credentials."""
    return one_line(without_credentials(path), 500)


def compression(path: str) -> str | None:
    """Arrow's name of the compression that a file's ending stands for, or None."""
    return COMPRESSIONS.get(os.path.splitext(without_credentials(path))[1].lower())


def is_parquet(path: str) -> bool:
    """Whether a file is read as Parquet, by its ending."""
    return without_credentials(path).lower().endswith(PARQUET_ENDINGS)


def is_jsonl(path: str) -> bool:
    """Whether a file is read as JSON lines, by its ending."""
    path = without_credentials(path)
    stem = os.path.splitext(path)[0] if compression(path) else path
    return stem.lower().endswith(JSONL_ENDINGS)
