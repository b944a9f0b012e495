"""What the columns of a job's output are called and which Arrow types they have: pure rules, no files.

The output's schema must be known before its first row is written. Names come from `output_names`. A JSONL column's
type follows from the *kinds* of value in it, bits that a scan collects with `|` and `type_of_kinds` turns into one type
that holds every one of them exactly. A Parquet column keeps its own type unless the files disagree; then it takes part
in the same rules through `kinds_of_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ember.data.text import RowError, encodable, json_text

FIXED_COLUMNS = (
    "row_index",
    "id",
    "sample_index",
    "num_samples",
    "prompt",
    "completion",
    "prompt_token_ids",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "error",
    "seed",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "num_preemptions",
    "cumulative_logprob",
    "logprobs",
    "prompt_logprobs",
    "queue_s",
    "ttft_s",
    "latency_s",
)
"""The columns that every completions file has, in their order; input columns follow."""

BOOL, INT, WIDE_INT, HUGE_INT, FLOAT, TEXT, OTHER = (1 << bit for bit in range(7))
"""Kinds of value, as bits: WIDE_INT comes with INT for whole numbers that a float64 may not hold exactly, HUGE_INT for
those outside int64. OTHER has no common type with anything: it is written as JSON text."""

Converter = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's Arrow type, and what turns a value (never None) into that type or raises RowError."""

    arrow: pa.DataType
    convert: Converter


def output_names(names: Iterable[str]) -> dict[str, str]:
    """The output name of each input column, by input name.

    A name that a fixed column or another input column has (case ignored, because Spark and DuckDB ignore it) becomes
    `input_<name>`, then `input_<name>_2` and so on. Of input columns that differ only by case, the first keeps its
    name; a column whose name is free never loses it to a renamed one.
    """
    taken = {name.casefold() for name in FIXED_COLUMNS}
    named: dict[str, str] = {}
    clashing = []
    order = list(dict.fromkeys(names))
    for name in order:
        clean = encodable(name)
        if clean.casefold() in taken:
            clashing.append(name)
            continue
        taken.add(clean.casefold())
        named[name] = clean
    for name in clashing:
        named[name] = _free_name(f"input_{encodable(name)}", taken)
        taken.add(named[name].casefold())
    return {name: named[name] for name in order}


def _free_name(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate.casefold() in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def kinds_of_value(value: Any) -> int:
    """The kinds of one JSON value; null has none."""
    if isinstance(value, str):
        return TEXT
    if value is None:
        return 0
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return _kinds_of_int(value)
    return FLOAT if isinstance(value, float) else OTHER


def _kinds_of_int(value: int) -> int:
    if -(2**53) <= value <= 2**53:
        return INT
    return INT | WIDE_INT if -(2**63) <= value < 2**63 else INT | WIDE_INT | HUGE_INT


def kinds_of_type(arrow: pa.DataType) -> int:
    """The kinds that values of an Arrow type have; of whole numbers, the widest that the type allows."""
    if pa.types.is_null(arrow):
        return 0
    if pa.types.is_boolean(arrow):
        return BOOL
    if pa.types.is_integer(arrow):
        wide = WIDE_INT if arrow.bit_width == 64 else 0
        return INT | wide | (HUGE_INT if pa.types.is_uint64(arrow) else 0)
    if pa.types.is_floating(arrow):
        return FLOAT
    text = pa.types.is_string(arrow) or pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow)
    return TEXT if text else OTHER


def type_of_kinds(kinds: int) -> ColumnType:
    """The narrowest type that holds every value of `kinds` exactly, else JSON text in a string column.

    Only nulls make a string column.
    """
    if kinds == BOOL:
        return ColumnType(pa.bool_(), _to_bool)
    if kinds in (INT, INT | WIDE_INT):
        return ColumnType(pa.int64(), _to_int)
    if kinds in (FLOAT, FLOAT | INT):
        return ColumnType(pa.float64(), _to_float)
    if kinds in (0, TEXT):
        return ColumnType(pa.string(), _to_text)
    return ColumnType(pa.string(), json_text)


def kept_type(arrow: pa.DataType) -> ColumnType:
    """A Parquet column's own type, its values as Arrow gave them."""
    return ColumnType(arrow, _keep)


def plain_type(arrow: pa.DataType) -> pa.DataType:
    """`arrow` with dictionaries decoded to their value type and extension types to their storage, at every depth."""
    if pa.types.is_dictionary(arrow):
        return plain_type(arrow.value_type)
    if isinstance(arrow, pa.BaseExtensionType):
        return plain_type(arrow.storage_type)
    if pa.types.is_struct(arrow):
        return pa.struct([_plain_field(arrow.field(i)) for i in range(arrow.num_fields)])
    if pa.types.is_map(arrow):
        return pa.map_(_plain_field(arrow.key_field), _plain_field(arrow.item_field), arrow.keys_sorted)
    return _plain_list(arrow)


def _plain_list(arrow: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(arrow):
        return pa.list_(_plain_field(arrow.value_field), arrow.list_size)
    if pa.types.is_large_list(arrow):
        return pa.large_list(_plain_field(arrow.value_field))
    return pa.list_(_plain_field(arrow.value_field)) if pa.types.is_list(arrow) else arrow


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, plain_type(field.type), field.nullable)


def _keep(value: Any) -> Any:
    return value


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise RowError("not true or false, as the column is")
    return value


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise RowError("not a whole number of 64 bits, as the column is")
    return value


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError("not a number, as the column is")
    return float(value)


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("not text, as the column is")
    return encodable(value)
