"""The settings there are, by dotted key: what a typo may have meant, and what type a value must have."""

from __future__ import annotations

import difflib
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ember.config import JobConfig

NO_BASE = "the job file does not build on ember's settings: begin it with `defaults: [config, _self_]`"
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping, {name: value}",
    list: "a list, [value, value]",
}


def known_keys(schema: type = JobConfig, prefix: str = "") -> dict[str, Any]:
    """Every setting's dotted key and its type; a group's own key has the group's dataclass."""
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        keys[prefix + name] = kind
        if is_dataclass(kind) and isinstance(kind, type):
            keys |= known_keys(kind, f"{prefix}{name}.")
    return keys


def must_be(key: str) -> str | None:
    """`must be a whole number, or null`: the type of a known key in words."""
    kind = known_keys().get(key)
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [_WORDS[o] for option in options if (o := get_origin(option) or option) in _WORDS]
    if not words:
        return None
    return f"must be {words[0]}" + (", or null" if NoneType in options else "")


def no_such_key(key: str, value: Any = None) -> str:
    """The line for a key that does not exist, with the nearest one that does."""
    what = key if value is None else f"{key}={value}"
    near = nearest_key(key)
    hint = f"did you mean {near}?" if near else f"there are: {', '.join(_siblings(key))}"
    return f"{what}: no such setting; {hint}"


def nearest_key(key: str) -> str | None:
    """The known key that `key` most likely meant: the same name elsewhere first, then by spelling."""
    last = key.rpartition(".")[2]
    names = {k.rpartition(".")[2]: k for k in reversed(known_keys())}
    if last in names and names[last] != key:
        return names[last]
    siblings = {k.rpartition(".")[2]: k for k in _siblings(key)}
    for candidates in (siblings, names):
        if close := difflib.get_close_matches(last, candidates, n=1, cutoff=0.7):
            return candidates[close[0]]
    return None


def _siblings(key: str) -> list[str]:
    group = key.rpartition(".")[0]
    known = known_keys()
    group = group if group in known and is_dataclass(known[group]) else ""
    return [k for k in known if k.rpartition(".")[0] == group]
