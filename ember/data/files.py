"""From the setting `data` to the files that hold the rows: paths, URLs, folders and globs, in one sorted order."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from ember.data.file_kinds import READABLE, data_error, is_jsonl, is_parquet, shown_path
from ember.data.own_files import OwnFiles
from ember.data.remote import RemoteFile, is_remote, listed


def resolve_files(data: list[str]) -> tuple[list[str], list[str]]:
    """The files that `data` names, sorted by absolute path and then by URL, and warnings.

    A path that exists is taken literally, whatever characters it has; only then is it a glob (`**` crosses folders).
    Folders are read with all their sub-folders. In folders and globs, hidden files, names that start with `_` and
    unknown endings are passed over, and so are results of ember (see OwnFiles), with a warning. A file that is named
    twice, also through a link, is read once, with a warning.
    All of this holds for URLs too, where what answers them can list.

    Raises:
        UserError: an entry that leads to no readable file, or stdin, which a job makes a file of first.
    """
    expanded = [_expand(entry) for entry in data]
    found = sorted((path for paths, _ in expanded for path in paths), key=_place)
    warnings = [f"data: {note}" for _, notes in expanded for note in notes]
    unique: dict[str, str] = {}
    repeated = []
    for path in found:
        real = RemoteFile(path).identity if is_remote(path) else os.path.realpath(path)
        if real in unique:
            repeated.append(path)
        unique.setdefault(real, path)
    if not repeated:
        return found, warnings
    warnings.append(f"data: {shown_path(repeated[0])} is named {_times(repeated)}; it is read once")
    return list(unique.values()), warnings


def _place(path: str) -> tuple[bool, str]:
    remote = is_remote(path)
    return remote, path if remote else os.path.abspath(path)


def _times(repeated: list[str]) -> str:
    more = len(repeated) - 1
    return f"more than once (so are {more} others)" if more else "more than once"


def _expand(entry: str) -> tuple[list[str], list[str]]:
    """The files of one entry, and notes on what was passed over."""
    if is_remote(entry):
        return listed(entry)
    if entry == "-":
        raise data_error(entry, "stdin can't be read here; write the rows to a .jsonl file (a file called - is ./-)")
    path = entry if os.path.lexists(entry) else os.path.expanduser(entry)
    own = OwnFiles(lambda file: Path(file).read_bytes())
    try:
        if os.path.isdir(path):
            return _folder(path, own), own.notes
        if os.path.lexists(path):
            return [_file(path)], []
        return _glob(path, own), own.notes
    except OSError as error:
        where = error.filename or path
        raise data_error(path, f"{where} can't be read ({error.strerror}); check its permissions") from error


def _file(path: str) -> str:
    if not os.path.exists(path):
        raise data_error(path, "the link leads to no file; mend it or name another file")
    if not os.path.isfile(path):
        raise data_error(path, "not a regular file, and rows are read twice; write them to a .jsonl file first")
    if not (is_parquet(path) or is_jsonl(path)):
        raise data_error(path, f"unknown ending; {READABLE}: convert or rename the file")
    return path


def _folder(path: str, own: OwnFiles) -> list[str]:
    files = list(_walk(path, set(), own))
    if not files:
        raise data_error(path, "; ".join(["the folder holds no file to read", *(own.notes or [READABLE])]))
    return files


def _walk(folder: str, seen: set[str], own: OwnFiles) -> Iterator[str]:
    """Readable files below `folder`; links to folders are followed, each real folder once."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith((".", "_")) or own.has(folder, name):
            continue
        if os.path.isdir(path):
            yield from _walk(path, seen, own)
        elif os.path.isfile(path) and (is_parquet(path) or is_jsonl(path)):
            yield path


def _glob(pattern: str, own: OwnFiles) -> list[str]:
    if not glob.has_magic(pattern):
        raise data_error(pattern, "no such file or folder; check the path (it is relative to the current folder)")
    found = [path for path in glob.glob(pattern, recursive=True) if _wanted(path, pattern)]
    files: dict[str, None] = {}
    for path in found:
        if not own.on_the_way(path, pattern):
            files.update(dict.fromkeys(_walk(path, set(), own) if os.path.isdir(path) else [path]))
    if not files:
        more = own.notes or [f"check the pattern ({READABLE})"]
        raise data_error(pattern, "; ".join(["the glob matches no file to read", *more]))
    return list(files)


def _wanted(path: str, pattern: str) -> bool:
    """Whether a glob's match is read: a `_name` on the way to it only if the pattern itself says `_`."""
    asked = [part for part in pattern.split(os.sep) if part.startswith("_")]
    for part in path.split(os.sep):
        if part.startswith("_") and not any(fnmatch.fnmatchcase(part, name) for name in asked):
            return False
    return os.path.isdir(path) or (os.path.isfile(path) and (is_parquet(path) or is_jsonl(path)))
