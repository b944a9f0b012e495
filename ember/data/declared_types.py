"""The setting `schema`: types that a job declares for columns that pass through, and what fits them.

A type is written as Arrow prints it (`list<struct<at: timestamp[us, tz=UTC], tags: map<string, int8>>>`), or `json`. A
value either fits and keeps its meaning to the last bit, or costs its row: nothing is rounded, cut, parsed from text or
dropped, but for float32 and float16, which are asked for by who wants them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa

from ember.data.columns import ColumnType, Converter
from ember.data.text import RowError, encodable, is_encodable, json_text, one_line
from ember.errors import ConfigError

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*|\d+|[<>\[\](),:=]|\"[^\"]*\"|[+\-/]|$)")
_TIMESTAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?\s?(Z|z|[+-]\d\d:?\d\d)?", re.ASCII
)
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d{1,4})?", re.ASCII)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FORMS = (
    "int8..int64, uint8..uint64, float32, float64, bool, string, binary, date32, timestamp[s|ms|us|ns(, tz=ZONE)], "
    "decimal128(digits, scale), list<T>, large_list<T>, map<string, T>, struct<name: T, ...>, json"
)


class _Misfit(Exception):
    """A value that a type can't hold."""


class _Malformed(Exception):
    """No type is spelled like this."""


def declared_type(name: str, text: str) -> ColumnType:
    """The column type that `schema` declares for the column `name`.

    Its converter takes a value from JSON or from Parquet (never None) and raises RowError, with the value and the type.

    Raises:
        ConfigError: `text` is no type; names `schema.<name>` and what there is.
    """
    try:
        found = _Parser(text).whole()
    except (_Malformed, pa.ArrowException, ValueError) as error:
        raise ConfigError(f"schema.{one_line(name, 60)}", one_line(text, 60), f"{error}; types are {_FORMS}") from None
    return ColumnType(found.arrow, _checked(found.convert, text))


def _checked(convert: Converter, text: str) -> Converter:
    def checked(value: Any) -> Any:
        try:
            return convert(value)
        except _Misfit:
            raise RowError(f"{one_line(json_text(value), 80)}, which is no {text}") from None

    return checked


class _Parser:
    """Reads one type from its text, by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def whole(self) -> ColumnType:
        found = self._type()
        if self._peek():
            raise _Malformed(f"unexpected {self._peek()!r}")
        return found

    def _peek(self) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise _Malformed(f"unexpected {self._text[self._at :].strip()[:1]!r}")
        return match[1]

    def _next(self, wanted: str | None = None) -> str:
        token = self._peek()
        if wanted is not None and token != wanted:
            raise _Malformed(f"expected {wanted!r}, found {token!r}" if token else f"{wanted!r} is missing at the end")
        match = _TOKEN.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return token

    def _type(self) -> ColumnType:
        name = self._next()
        if name in ("list", "large_list"):
            return self._list(pa.list_ if name == "list" else pa.large_list)
        if name == "map":
            return self._map()
        if name == "struct":
            return self._struct()
        if name == "timestamp":
            return self._timestamp()
        if name == "decimal128":
            return self._decimal()
        if name not in _PLAIN:
            raise _Malformed(f"unknown type {name!r}" if name else "a type is missing")
        return _PLAIN[name]

    def _list(self, make: Callable[[pa.DataType], pa.DataType]) -> ColumnType:
        self._next("<")
        item = self._type()
        self._next(">")
        return ColumnType(make(item.arrow), lambda value: _to_list(value, item.convert))

    def _map(self) -> ColumnType:
        self._next("<")
        self._next("string")
        self._next(",")
        item = self._type()
        self._next(">")
        return ColumnType(pa.map_(pa.string(), item.arrow), lambda value: _to_map(value, item.convert))

    def _struct(self) -> ColumnType:
        self._next("<")
        members: dict[str, ColumnType] = {}
        while True:
            name = self._next().strip('"')
            self._next(":")
            if name in members:
                raise _Malformed(f"two members named {name!r}")
            members[name] = self._type()
            if self._peek() != ",":
                break
            self._next(",")
        self._next(">")
        arrow = pa.struct([pa.field(name, member.arrow) for name, member in members.items()])
        return ColumnType(arrow, lambda value: _to_struct(value, members))

    def _timestamp(self) -> ColumnType:
        self._next("[")
        unit = self._next()
        if unit not in _PER_SECOND:
            raise _Malformed(f"unknown unit {unit!r}")
        zone = None
        if self._peek() == ",":
            self._next(",")
            self._next("tz")
            self._next("=")
            zone = self._zone()
        self._next("]")
        arrow = pa.timestamp(unit, zone)
        return ColumnType(arrow, lambda value: _to_timestamp(value, arrow))

    def _zone(self) -> str:
        end = self._text.find("]", self._at)
        zone = self._text[self._at : end].strip()
        self._at = max(end, self._at)
        if not re.fullmatch(r"[+-]\d\d:\d\d", zone):
            try:
                ZoneInfo(zone)
            except (KeyError, ValueError, OSError):
                raise _Malformed(f"unknown time zone {zone!r}") from None
        return zone

    def _decimal(self) -> ColumnType:
        self._next("(")
        digits = self._number()
        self._next(",")
        scale = self._number()
        self._next(")")
        if scale > digits:
            raise _Malformed("scale is more than digits")
        return ColumnType(pa.decimal128(digits, scale), lambda value: _to_decimal(value, digits, scale))

    def _number(self) -> int:
        token = self._next()
        if not token.isdecimal():
            raise _Malformed(f"expected a number, found {token!r}")
        return int(token)


def _to_int(value: Any, low: int, high: int) -> int:
    """Whole numbers in range; 3.0 is 3, as JSON has one kind of number only."""
    if isinstance(value, float) and abs(value) <= 2**53 and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _Misfit
    return value


def _to_float64(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Misfit
    try:
        number = float(value)
    except OverflowError:
        raise _Misfit from None
    if isinstance(value, int) and number != value:  # compared exactly
        raise _Misfit
    return number


def _to_short_float(value: Any, arrow: pa.DataType) -> float:
    """The nearest value of a shorter float; a whole number must be exact, a finite one stays finite."""
    number = _to_float64(value)
    short: float = pa.scalar(number, pa.float64()).cast(arrow, safe=False).as_py()
    if (isinstance(value, int) and short != value) or (math.isinf(short) and not math.isinf(number)):
        raise _Misfit
    return short


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Misfit
    return value


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Misfit
    return encodable(value)


def _to_bytes(value: Any) -> bytes:
    """Bytes of a Parquet file; of text, its UTF-8."""
    if isinstance(value, str) and is_encodable(value):
        return value.encode()
    if not isinstance(value, bytes):
        raise _Misfit
    return value


def _to_date(value: Any) -> date:
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII):
        raise _Misfit
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise _Misfit from None


@dataclass(frozen=True, slots=True)
class _Moment:
    """Nanoseconds since 1970, by the clock of UTC if `zoned`, else by one that nobody knows."""

    nanoseconds: int
    zoned: bool


def _to_timestamp(value: Any, arrow: pa.DataType) -> pa.Scalar:
    """ISO 8601 text with an offset if the type has a zone and without one if not, or a timestamp from Parquet."""
    moment = _moment(value)
    count, rest = divmod(moment.nanoseconds, 10**9 // _PER_SECOND[arrow.unit])
    if rest or moment.zoned != (arrow.tz is not None) or not -(2**63) <= count < 2**63:
        raise _Misfit
    return pa.scalar(count, pa.int64()).cast(arrow)


def _moment(value: Any) -> _Moment:
    if isinstance(value, pa.TimestampScalar):
        return _Moment(value.value * (10**9 // _PER_SECOND[value.type.unit]), value.type.tz is not None)
    if isinstance(value, datetime):
        zoned = value.tzinfo is not None
        passed = (value if zoned else value.replace(tzinfo=UTC)) - _EPOCH
        return _Moment(passed // timedelta(microseconds=1) * 1000, zoned)
    if not isinstance(value, str) or (match := _TIMESTAMP.fullmatch(value)) is None:
        raise _Misfit
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    try:
        whole = datetime(year, month, day, hour, minute, second, tzinfo=UTC) - _EPOCH
    except ValueError:
        raise _Misfit from None
    seconds = whole // timedelta(seconds=1) - _offset_s(match[8])
    return _Moment(seconds * 10**9 + int((match[7] or "").ljust(9, "0")), match[8] is not None)


def _offset_s(text: str | None) -> int:
    if text is None or text in "Zz":
        return 0
    hours, minutes = int(text[1:3]), int(text[-2:])
    if hours > 23 or minutes > 59:
        raise _Misfit
    return (hours * 3600 + minutes * 60) * (-1 if text[0] == "-" else 1)


def _to_decimal(value: Any, digits: int, scale: int) -> Decimal:
    """A number, or a number's text, which spells any of them exactly."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise _Misfit
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise _Misfit
    number = Decimal(repr(value) if isinstance(value, float) else value)
    if not number.is_finite() or (number and abs(number.adjusted()) > 100):
        raise _Misfit
    units = Fraction(number) * 10**scale if number else Fraction(0)
    if units.denominator != 1 or abs(units.numerator) >= 10**digits:
        raise _Misfit
    return Decimal((units.numerator < 0, tuple(map(int, str(abs(units.numerator)))), -scale))


def _to_list(value: Any, convert: Converter) -> list[Any]:
    if not isinstance(value, list):
        raise _Misfit
    return [None if item is None else convert(item) for item in value]


def _to_map(value: Any, convert: Converter) -> list[tuple[str, Any]]:
    """An object, or a map of a Parquet file (pairs)."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise _Misfit
    return [(_to_text(key), None if item is None else convert(item)) for key, item in pairs]


def _to_struct(value: Any, members: dict[str, ColumnType]) -> dict[str, Any]:
    """An object; a member that it lacks is null, one that the type lacks is a misfit."""
    if not isinstance(value, dict) or not value.keys() <= members.keys():
        raise _Misfit
    return {k: None if (item := value.get(k)) is None else member.convert(item) for k, member in members.items()}


def _int_type(arrow: pa.DataType, low: int, high: int) -> ColumnType:
    return ColumnType(arrow, lambda value: _to_int(value, low, high))


_PLAIN: dict[str, ColumnType] = {
    **{f"int{n}": _int_type(getattr(pa, f"int{n}")(), -(2 ** (n - 1)), 2 ** (n - 1) - 1) for n in (8, 16, 32, 64)},
    **{f"uint{n}": _int_type(getattr(pa, f"uint{n}")(), 0, 2**n - 1) for n in (8, 16, 32, 64)},
    "float16": ColumnType(pa.float16(), lambda value: _to_short_float(value, pa.float16())),
    "float32": ColumnType(pa.float32(), lambda value: _to_short_float(value, pa.float32())),
    "float64": ColumnType(pa.float64(), _to_float64),
    "bool": ColumnType(pa.bool_(), _to_bool),
    "string": ColumnType(pa.string(), _to_text),
    "binary": ColumnType(pa.binary(), _to_bytes),
    "date32": ColumnType(pa.date32(), _to_date),
    "json": ColumnType(pa.string(), json_text),
}
"""The types without parameters, by name; never changed."""
