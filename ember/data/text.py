"""Text that is safe to keep and to print.

JSON can spell strings that UTF-8 cannot (a lone surrogate such as `"\\ud800"`), objects nested deeper than Python's
stack, and numbers longer than it converts. What is kept goes through `encodable`, what is printed through `one_line`,
and what is parsed through `parse_json`, so that none of this reaches a writer or breaks a message over lines. A URL may
carry credentials: what is kept or printed of one goes through `without_credentials`.
"""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time
from typing import Any

import pyarrow as pa

from ember.checks import MAX_DEPTH, too_deep

_USER_INFO = re.compile(r"(?<=://)[^/\s]*@")
_WEB_QUERY = re.compile(r"(https?://[^?#]*)[?#].*", re.DOTALL)
_QUERY = re.compile(r"\?[^=]*=.*", re.DOTALL)
_URL_IN_TEXT = re.compile(r"[\w+.:-]*://[^\s'\"<>]*")
_QUERY_IN_TEXT = re.compile(r"\?[^\s'\"<>]*=[^\s'\"<>]*")


class RowError(ValueError):
    """Why one row cannot run. It becomes the row's `error` and never leaves the reader."""


def one_line(text: str, limit: int = 120) -> str:
    """`text` cut to `limit` characters, with line breaks and whatever else is not printable escaped."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_credentials(path: str) -> str:
    """A URL's scheme, host and path: without a user and password, and without a query, which may be a signature.

    A local path is as it was. Outside http(s) a `?` without a later `=` is no query but part of a glob.
    """
    if "://" not in path:
        return path
    return _QUERY.sub("", _WEB_QUERY.sub(r"\1", _USER_INFO.sub("", path)))


def redacted(text: str) -> str:
    """A message from elsewhere, on one line, with every URL in it cut down to scheme, host and path."""
    text = _URL_IN_TEXT.sub(lambda url: without_credentials(url[0]), text)
    return one_line(_QUERY_IN_TEXT.sub("", text))


def is_encodable(text: str) -> bool:
    """Whether `text` can be written as UTF-8: it holds no lone surrogate."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_json_encodable(value: Any) -> bool:
    """Whether every string within `value` can be written as UTF-8."""
    return is_encodable(_ENCODER.encode(value))


def encodable(text: str) -> str:
    r"""`text` with each lone surrogate as its JSON escape (`\ud800`), so that it can be written and nothing is lost."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def json_text(value: Any) -> str:
    """`value` as JSON text in UTF-8; what JSON has no form for (times, decimals, bytes) becomes text."""
    return encodable(_ENCODER.encode(value))


def plain_text(value: Any) -> str:
    """`value` as text without quotes: strings, times and decimals as they are, everything else as JSON text."""
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, (bool, int, float, dict, list, tuple)):
        return json_text(value)
    form = _json_form(value)
    return encodable(form) if isinstance(form, str) else json_text(form)


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
    if text.count("[") + text.count("{") > MAX_DEPTH and too_deep(value):
        raise RowError(f"JSON is nested more than {MAX_DEPTH} deep")
    return value


def _json_form(value: Any) -> Any:
    """Something nearer to JSON for a value that has no form there; text in the end."""
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return _scalar_form(value) if isinstance(value, pa.Scalar) else str(value)


def _scalar_form(scalar: pa.Scalar) -> Any:
    """An Arrow scalar that Python can't hold: its members if it has any, else Arrow's own spelling."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar)):
        return list(scalar.values)
    if isinstance(scalar, pa.StructScalar):
        return {name: scalar[name] for name in scalar}
    try:
        return scalar.cast(pa.string()).as_py()
    except (pa.ArrowException, ValueError):
        return str(getattr(scalar, "value", type(scalar).__name__))


_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, default=_json_form)
"""Made once: `json.dumps` with options makes one a call. Parsed values hold no cycles."""
