"""The settings there are, by dotted key: what a typo may have meant, and what type a value must have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ember.config import JobConfig

NO_BASE = "the job file does not build on ember's settings: begin it with `defaults: [config, _self_]`"
FREE = ("schema", "sampling_columns", "chat_template_kwargs", "sampling.logit_bias")
"""Mappings with any keys."""
_BY_HAND = {
    "data": "a file, folder or glob, or a list of them",
    "sampling.stop": "text, or a list of texts",
    "progress": "true, false or json",
    "sampling.logit_bias": "a mapping of token ids to numbers in [-100, 100]",
    "sampling.bad_words": "a list of texts",
    "sampling.json_schema": "a JSON schema: a mapping, or its text; or null",
    "sampling.choice": "a list of texts, or null",
}
"""What the keys of type Any take."""
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping, {name: value}",
    list: "a list of whole numbers, [1, 2]",
}


@cache
def known_keys() -> MappingProxyType[str, Any]:
    """Every setting's dotted key and its type; a group's own key has the group's dataclass."""
    return MappingProxyType(dict(_keys(JobConfig, "")))


def _keys(schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(schema).items():
        yield prefix + name, kind
        if is_dataclass(kind) and isinstance(kind, type):
            yield from _keys(kind, f"{prefix}{name}.")


def must_be(key: str) -> str | None:
    """`must be a whole number, or null`: the type of a known key in words."""
    key = key.partition("[")[0]
    if key in _BY_HAND:
        return f"must be {_BY_HAND[key]}"
    known = known_keys()
    kind = known.get(key) or known.get(key.rpartition(".")[0])
    if key not in known and get_origin(kind) is dict:
        kind = get_args(kind)[1]
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = [_WORDS[o] for option in options if (o := get_origin(option) or option) in _WORDS]
    if not words:
        return None
    return f"must be {words[0]}" + (", or null" if NoneType in options else "")


def is_group(key: str) -> bool:
    """Whether a key names a group of settings, one of whose files is chosen by name."""
    return is_dataclass(known_keys().get(key))


def shape(key: str) -> type | None:
    """dict or list, for a key that holds that and nothing else; else None."""
    if key in _BY_HAND:
        return None
    origin = get_origin(known_keys().get(key))
    return origin if origin in (dict, list) else None


def no_such_key(key: str, value: Any = None) -> str:
    """The line for a key that does not exist, with the nearest one that does."""
    what = key if value is None else f"{key}={value}"
    near = nearest_key(key)
    group = key.rpartition(".")[0]
    others = f"there are: {', '.join(_siblings(key))}" if is_group(group) else "`ember --cfg job` shows all"
    hint = f"did you mean {near}?" if near else others
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
