"""Overrides as typed, checked before Hydra composes: it takes some mistakes silently and words others its own way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, QuotedString
from hydra.errors import OverrideParseException

from ember.errors import UserError
from ember.launch.keys import FREE, is_group, known_keys, no_such_key


def check_overrides(lines: Iterable[str]) -> None:
    """Nothing, if each line sets an ember setting in a way that means something; Hydra's own keys are Hydra's.

    Raises:
        UserError: one does not; one line with the remedy.
    """
    parser = OverridesParser.create()
    for line in lines:
        try:
            override = parser.parse_overrides([line])[0]
        except OverrideParseException:
            continue  # Hydra says so itself
        except ValueError:  # Python's limit on the digits of a number
            raise UserError(f"{line[:40]}...: the number is too long") from None
        if not override.key_or_group.startswith("hydra"):
            _check(override, line)


def _check(override: Override, line: str) -> None:
    key = override.key_or_group
    if not key:
        raise UserError(f"{line}: a setting is written key=value")
    if override.package is not None:
        raise UserError(f"{line}: a setting has no @ in its name; write {key}=VALUE")
    if override.is_delete():
        _check_deletion(key)
        return
    group = is_group(key)
    if group and override.type is not OverrideType.CHANGE:
        raise UserError(f"{line.partition('=')[0]}: the setting exists; write it without the +")
    if group:
        for value in _values(override):
            _check_choice(key, value, line)
    if known_keys().get(key) is bool and any(_is_number(value) for value in _values(override)):
        raise UserError(f"{line}: must be true or false")


def _check_deletion(key: str) -> None:
    if any(key.startswith(f"{free}.") for free in FREE):
        return
    if key not in known_keys():
        raise UserError(f"~{no_such_key(key)}")
    raise UserError(f"~{key}: a setting can't be taken away; leave it out for its default, or write {key}=VALUE")


def _values(override: Override) -> list[Any]:
    value: Any = override.value()
    return list(value.list) if isinstance(value, ChoiceSweep) else [value]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_choice(group: str, value: Any, line: str) -> None:
    if isinstance(value, dict):
        first = next(iter(value), None)
        one = f"{group}.{first}={value[first]}" if first is not None else f"{group}.KEY=VALUE"
        raise UserError(f"{line}: must be the name of a choice; one setting of it is written {one}")
    if isinstance(value, list):
        raise UserError(f"{line}: must be the name of one choice, not a list; for a sweep, -m {group}=A,B")
    if value is None or isinstance(value, bool) or _is_number(value):
        kind = {bool: "true or false", int: "a number", float: "a number"}.get(type(value), "null")
        raise UserError(f"{line}: must be the name of a choice, not {kind}")
    if value == "" or (isinstance(value, QuotedString) and not value.text):
        raise UserError(f"{line}: must be the name of a choice")
