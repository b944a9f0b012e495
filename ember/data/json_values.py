"""Arrow values as JSON values and back, without losing a bit.

Whole numbers stay exact, floats are written so that they read back the same (NaN and infinities, which JSON lacks, as
the texts `NaN`, `Infinity`, `-Infinity`), bytes are base64 text, dates and times ISO 8601 text (an instant of a time
zone in UTC, with a Z), durations whole numbers in their own unit, decimals text, lists and structs nested, maps lists
of `{"key", "value"}`. Null is null.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_UNITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_Convert = Callable[[Any], Any]


def to_json_values(array: pa.Array) -> list[Any]:
    """The values of an array of any type that a completions column has, as JSON values."""
    arrow = array.type
    if pa.types.is_struct(arrow):
        return _structs(array)
    if pa.types.is_map(arrow):
        pairs = pa.struct([("key", arrow.key_type), ("value", arrow.item_type)])
        return to_json_values(array.cast(pa.list_(pairs)))
    if _is_list(arrow):
        return _lists(array)
    if _is_integer_time(arrow):
        array = array.cast(pa.int64() if arrow.bit_width == 64 else pa.int32())
    convert = _encoder(arrow)
    values = array.to_pylist()
    return values if convert is None else [None if value is None else convert(value) for value in values]


def from_json_values(values: list[Any], arrow: pa.DataType) -> pa.Array:
    """The array of type `arrow` that `to_json_values` made `values` of.

    Raises:
        ValueError, TypeError, ArrowException: they are not of that type.
    """
    return pa.array([_decoded(value, arrow) for value in values], type=arrow)


def _structs(array: pa.StructArray) -> list[Any]:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    columns = [to_json_values(child) for child in array.flatten()]
    rows = zip(*columns, strict=True) if columns else ((),) * len(array)
    valid = array.is_valid().to_pylist()
    return [dict(zip(names, row, strict=True)) if ok else None for row, ok in zip(rows, valid, strict=True)]


def _lists(array: pa.ListArray) -> list[Any]:
    if pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type))
    values = to_json_values(array.flatten())
    result: list[Any] = []
    start = 0
    for length in pc.list_value_length(array).to_pylist():
        result.append(None if length is None else values[start : start + length])
        start += length or 0
    return result


def _is_list(arrow: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(kind(arrow) for kind in kinds)


def _is_binary(arrow: pa.DataType) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(kind(arrow) for kind in kinds)


def _is_integer_time(arrow: pa.DataType) -> bool:
    """Types that are whole numbers of a unit within; so they are taken, since Python has no nanoseconds."""
    return bool(pa.types.is_temporal(arrow)) and not pa.types.is_interval(arrow)


def _encoder(arrow: pa.DataType) -> _Convert | None:
    if pa.types.is_floating(arrow):
        return _float_to_json
    if _is_binary(arrow):
        return lambda value: base64.b64encode(value).decode()
    if pa.types.is_timestamp(arrow):
        return lambda value: _timestamp_to_json(value, _UNITS[arrow.unit], arrow.tz is not None)
    if pa.types.is_time(arrow):
        return lambda value: _time_to_json(value, _UNITS[arrow.unit])
    if pa.types.is_date(arrow):
        return lambda value: _date_to_json(value, arrow)
    plain = _is_number_or_text(arrow) or pa.types.is_duration(arrow) or pa.types.is_null(arrow)
    return None if plain else str


def _is_number_or_text(arrow: pa.DataType) -> bool:
    kinds = (
        *(pa.types.is_integer, pa.types.is_boolean, pa.types.is_string),
        *(pa.types.is_large_string, pa.types.is_string_view),
    )
    return any(kind(arrow) for kind in kinds)


def _float_to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _timestamp_to_json(value: int, digits: int, zoned: bool) -> str | int:
    """ISO 8601; a year that Python has no date for stays the whole number."""
    seconds, fraction = divmod(value, 10**digits)
    try:
        text = (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
    except OverflowError:
        return value
    return text + _fraction(fraction, digits) + ("Z" if zoned else "")


def _time_to_json(value: int, digits: int) -> str:
    seconds, fraction = divmod(value, 10**digits)
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}{_fraction(fraction, digits)}"


def _date_to_json(value: int, arrow: pa.DataType) -> str | int:
    days = value // 86_400_000 if pa.types.is_date64(arrow) else value
    try:
        return date.fromordinal(_EPOCH_ORDINAL + days).isoformat()
    except (ValueError, OverflowError):
        return value


def _fraction(fraction: int, digits: int) -> str:
    return f".{fraction:0{digits}d}" if digits and fraction else ""


def _decoded(value: Any, arrow: pa.DataType) -> Any:
    """A value that Arrow takes for the type."""
    if value is None:
        return None
    if pa.types.is_struct(arrow):
        return {field.name: _decoded(value[field.name], field.type) for field in _fields(arrow)}
    if pa.types.is_map(arrow):
        return [(_decoded(i["key"], arrow.key_type), _decoded(i["value"], arrow.item_type)) for i in value]
    if _is_list(arrow):
        return [_decoded(item, arrow.value_type) for item in value]
    if pa.types.is_floating(arrow) or pa.types.is_decimal(arrow):
        return float(value) if pa.types.is_floating(arrow) else Decimal(value)
    if _is_binary(arrow):
        return base64.b64decode(value, validate=True)
    if isinstance(value, str) and _is_integer_time(arrow):
        return _time_number(value, arrow)
    return value


def _fields(arrow: pa.StructType) -> list[pa.Field]:
    return [arrow.field(i) for i in range(arrow.num_fields)]


def _time_number(text: str, arrow: pa.DataType) -> int:
    if pa.types.is_date(arrow):
        days = date.fromisoformat(text).toordinal() - _EPOCH_ORDINAL
        return days * 86_400_000 if pa.types.is_date64(arrow) else days
    digits = _UNITS[str(arrow.unit)]
    whole, _, fraction = text.removesuffix("Z").partition(".")
    if pa.types.is_time(arrow):
        whole = f"1970-01-01T{whole}"
    seconds = (datetime.fromisoformat(whole).replace(tzinfo=UTC) - _EPOCH) // timedelta(seconds=1)
    return int(seconds * 10**digits + int((fraction or "0").ljust(digits, "0")))
