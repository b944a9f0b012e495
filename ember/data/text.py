"""Text that is safe to keep and to print.

JSON can spell strings that UTF-8 cannot (a lone surrogate such as `"\\ud800"`), objects nested deeper than Python's
stack, and numbers longer than it converts. What is kept goes through `encodable`, what is printed through `one_line`,
and what is parsed through `parse_json`, so that none of this reaches a writer or breaks a message over lines.
"""

from __future__ import annotations

import json
from datetime import date, datetime, time
from typing import Any

MAX_DEPTH = 200
"""Deepest nesting of a JSON value that is read: fixed, so that the caller's own stack depth never decides."""


class RowError(ValueError):
    """Why one row cannot run. It becomes the row's `error` and never leaves the reader."""


def one_line(text: str, limit: int = 120) -> str:
    """`text` cut to `limit` characters, with line breaks and whatever else is not printable escaped."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_encodable(text: str) -> bool:
    """Whether `text` can be written as UTF-8: it holds no lone surrogate."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_json_encodable(value: Any) -> bool:
    """Whether every string within `value` can be written as UTF-8."""
    return is_encodable(json.dumps(value, ensure_ascii=False, default=_as_json_string))


def encodable(text: str) -> str:
    r"""`text` with each lone surrogate as its JSON escape (`\ud800`), so that it can be written and nothing is lost."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def json_text(value: Any) -> str:
    """`value` as JSON text in UTF-8; what JSON has no form for (times, decimals, bytes) becomes a string."""
    return encodable(json.dumps(value, ensure_ascii=False, default=_as_json_string))


def plain_text(value: Any) -> str:
    """`value` as text without quotes: strings, times and decimals as they are, everything else as JSON text."""
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, (bool, int, float, dict, list, tuple)):
        return json_text(value)
    return _as_json_string(value)


def parse_json(text: str) -> Any:
    """Read one JSON value.

    Raises:
        RowError: broken JSON, nesting deeper than `MAX_DEPTH`, or a number of too many digits.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(f"broken JSON: {one_line(error.msg)} (character {error.pos + 1})") from None
    except RecursionError:
        raise RowError(f"JSON is nested more than {MAX_DEPTH} deep") from None
    except ValueError:
        raise RowError("a whole number has more digits than can be read (4300)") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _too_deep(value):
        raise RowError(f"JSON is nested more than {MAX_DEPTH} deep")
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for parent in level if isinstance(parent, (dict, list)) for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def _as_json_string(value: Any) -> str:
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
