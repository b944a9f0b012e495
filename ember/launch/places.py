"""Where things lie: the shipped conf/ and jobs/ folders, and the folder of each job of a sweep."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

CONFIG_DIR = "EMBER_CONFIG_DIR"
"""Carries `-cd FOLDER` to the search path: Hydra builds that plugin itself, with no arguments."""
PACKAGE = Path(__file__).resolve().parent.parent
MAX_NAME = 100
_UNSAFE = re.compile(r"[^\w.,=+@-]+")
_NOT_IN_NAMES = ("output", "shard")


def shipped(name: str) -> Path:
    """The shipped folder `name` (conf or jobs): inside the package in a wheel, beside it in a checkout."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def job_folders() -> list[Path]:
    """The folders of job files that exist, the user's own first: `-cd FOLDER`, ./jobs, the shipped ones."""
    own = os.environ.get(CONFIG_DIR)
    folders = [Path(own)] if own else []
    return [f.resolve() for f in [*folders, Path("jobs"), shipped("jobs")] if f.is_dir()]


def job_names(folders: Sequence[Path]) -> list[str]:
    """The names that `-cn` takes from these folders."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def override_key(override: str) -> str:
    """The key of `key=value`, with the `+` or `~` of Hydra's grammar taken off."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def varied(overrides: Sequence[str], fixed: Collection[str]) -> list[str]:
    """The overrides that set one job of a sweep apart from the others."""
    return [override for override in overrides if override_key(override) not in fixed]


def folder_name(overrides: Sequence[str]) -> str:
    """A file name for a job's varied overrides; a hash tells apart what was cut or replaced.

    Jobs that differ only in `shard` get the same name; a job that varies nothing else gets none.
    """
    raw = ",".join(o for o in overrides if override_key(o) not in _NOT_IN_NAMES)
    safe = _UNSAFE.sub("_", raw)
    if safe == raw and len(safe.encode()) <= MAX_NAME:
        return safe
    digest = hashlib.sha256(raw.encode()).hexdigest()[:8]
    kept = safe.encode()[: MAX_NAME - len(digest) - 1].decode(errors="ignore")
    return f"{kept}-{digest}"


def results_folder(output: str | None, hydra_folder: str, name: str) -> str:
    """Where a job's results go: Hydra's own folder, or `output` with the job's sub-folder below it."""
    if output is None:
        return hydra_folder
    return f"{output.rstrip('/') or '/'}/{name}" if name else output
