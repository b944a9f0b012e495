"""Checks of single values, shared by all settings: each returns the value or names key, value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

from ember.errors import ConfigError

MOST = 2**63 - 1
"""The largest whole number anywhere: what a 64-bit integer holds."""
MAX_DEPTH = 200
"""Deepest nesting of a JSON value that is read: fixed, so that the caller's own stack depth never decides."""


def whole(key: str, value: Any, allowed: str, *, low: int = 0, high: int = MOST) -> int:
    """`value` as a whole number in `low .. high`; 3.0 is 3, true is none.

    Raises:
        ConfigError: `allowed` is what it says of a wrong type or a number below `low`.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(key, value, allowed)
    if value > high:
        raise ConfigError(key, value, f"too large; the most is {high}")
    return value


def at_least(key: str, value: Any, low: int, *, high: int = MOST) -> int:
    """`value` as a whole number in `low .. high`.

    Raises:
        ConfigError: it is none.
    """
    return whole(key, value, f"must be a whole number >= {low}", low=low, high=high)


def real(
    key: str, value: Any, allowed: str, *, low: float = 0.0, high: float = math.inf, open_low: bool = False
) -> float:
    """`value` as a finite float in `low .. high`, without `low` itself where `open_low`; true is none.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(key, value, allowed)
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError(key, f"{str(value)[:20]}...", f"too large; {allowed}") from None
    if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
        raise ConfigError(key, value, allowed)
    return number


def one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Nothing, if `value` is one of `allowed`.

    Raises:
        ConfigError: it is not.
    """
    if value not in allowed:
        raise ConfigError(key, value, f"must be one of {', '.join(allowed)}")


def boolean(key: str, value: Any) -> None:
    """Nothing, if `value` is true or false; 1 and 0 are neither.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, bool):
        raise ConfigError(key, value, "must be true or false")


def text_list(key: str, value: Any, allowed: str) -> list[str]:
    """`value` as a list of texts, none empty; null is an empty list.

    Raises:
        ConfigError: it is something else.
    """
    strings = [] if value is None else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError(key, value, allowed)
    return list(strings)


def token_ids(key: str, value: Any) -> list[int]:
    """`value` as a list of token ids; null is an empty list.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ConfigError(key, value, "must be a list of token ids")
    return [whole(key, token, "must be a list of token ids (whole numbers >= 0)") for token in value]


def too_deep(value: Any) -> bool:
    """Whether a JSON value is nested more than `MAX_DEPTH` deep; found without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for parent in level if isinstance(parent, (dict, list)) for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def json_kind(value: Any) -> str:
    """What a value is, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
