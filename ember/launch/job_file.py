"""Mistakes in a job file, in one line that names the file, the key and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from ember.errors import UserError
from ember.launch.keys import is_group, known_keys, must_be, no_such_key, shape
from ember.launch.places import job_folders

_RAISED = re.compile(r"In '(?P<file>.*)': \w+ raised while composing config:\n(?P<what>.*)\n\s*full_key: ?(?P<key>.*)")
_DEFAULTS = "a job file begins with `defaults: [config, override sampling: creative, _self_]`"


def check_flags(files: Iterable[str]) -> None:
    """Nothing, if every flag in these files, and in those they build on, is true or false: OmegaConf takes numbers too.

    Args:
        files: names of job files, or of group files (`sampling/mine`); Hydra itself refuses those that can't be read.

    Raises:
        UserError: one is a number.
    """
    known = known_keys()
    for file in _with_bases(files):
        for key, value in _read(file).items():
            if known[key] is bool and type(value) in (int, float):
                raise UserError(f"{file}.yaml: {key}={value}: {must_be(key)}")


def _with_bases(files: Iterable[str]) -> Iterator[str]:
    """These files and, through their defaults lists, those they build on; each once."""
    left, seen = list(files), set()
    while left:
        file = left.pop()
        if file not in seen:
            seen.add(file)
            left += _bases(_load(file))
            yield file


def _bases(settings: Any) -> Iterator[str]:
    defaults = settings.get("defaults") if isinstance(settings, dict) else None
    for entry in defaults if isinstance(defaults, list) else []:
        for group, name in entry.items() if isinstance(entry, dict) else [("", entry)]:
            words = f"{group}/{name}".strip("/").split()
            yield words[-1].strip("/") if words else ""


def in_file(text: str) -> str | None:
    """The line for what Hydra says of a file that it composes; None if it says no such thing."""
    if match := _RAISED.match(text):
        return f"{match['file']}.yaml: {_in_settings(match['file'], match['key'], match['what'])}"
    return _in_defaults(text)


def _in_settings(file: str, key: str, what: str) -> str:
    if group := re.match(r"Merge error: \w+ is not a subclass of (\w+)\. value: (.*)", what):
        return _choice(
            next(k for k, kind in known_keys().items() if is_group(k) and kind.__name__ == group[1]), group[2]
        )
    if is_group(key):
        return _choice(key, "null")
    if what.startswith("Cannot merge"):
        return _misplaced(file)
    if re.match(r"Key '.*' (not in|is not in)", what):
        return _unknown(key)
    value = re.match(r"Value '(.*)' (of type|is not)", what)
    shown = f"={value[1]}" if value else "=null" if what.endswith("is not Optional") else ""
    return f"{key}{shown}: {must_be(key) or what}"


def _choice(group: str, value: str) -> str:
    name = value if re.fullmatch(r"[A-Za-z][\w-]*", value) and value != "null" else "NAME"
    return (
        f"{group}={value}: a choice by name goes into the defaults list: `defaults: [config, override {group}: {name}, "
        f"_self_]`; below `{group}:` stand single settings, {{key: value}}"
    )


def _unknown(key: str) -> str:
    if key.startswith("hydra"):
        return f"{key}: Hydra has no such setting"
    if key in known_keys():
        group, _, name = key.partition(".")
        return f"{key}: in a file it is written {group}: {{{name}: VALUE}}"
    return no_such_key(key)


def _misplaced(file: str) -> str:
    """The key that holds a list for a mapping or the other way round, which Hydra does not name."""
    for key, value in _read(file).items():
        if isinstance(value, list if shape(key) is dict else dict) and not is_group(key):
            return f"{key}={value}: {must_be(key)}"
    return "a list stands where a mapping belongs, or a mapping for a list"


def _read(file: str) -> dict[str, Any]:
    """The known settings in a job file, or in a group's file (`sampling/mine`), by dotted key."""
    settings = _load(file)
    group = file.rpartition("/")[0]
    found = {key: _select({group: settings} if is_group(group) else settings, key) for key in known_keys()}
    return {key: value for key, value in found.items() if value is not None}


def _load(file: str) -> Any:
    """What a file in a folder of job files holds; None if there is none: Hydra's search path may name other folders."""
    path = next((p for folder in job_folders() if (p := folder / f"{file}.yaml").is_file()), None)
    try:
        return None if path is None else yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _select(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def _in_defaults(text: str) -> str | None:
    if twice := re.match(r"Multiple values for (\S+)\. To override a value use '(.*)'", text):
        return f"{twice[1]} is chosen twice; in a job file's defaults list write `{twice[2]}`"
    if wrong := re.match(r"In '(.*)': Could not override '(.*)'\. No match", text):
        return f"{wrong[1]}.yaml: override {wrong[2]}: nothing of that name to override; {_DEFAULTS}"
    if wrong := re.match(r"Invalid defaults list in '(.*)', ", text):
        return f"{wrong[1]}.yaml: defaults must be a list; {_DEFAULTS}"
    if text.startswith("Unsupported item"):
        return f"the defaults list holds something that is no name; {_DEFAULTS}"
    return None
