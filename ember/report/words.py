"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from ember.data.text import one_line

UNKNOWN = "–"


class Unit(Enum):
    """What a number counts, and so how it is written."""

    COUNT = "count"
    DECIMAL = "decimal"
    RATE = "rate"
    SHARE = "share"
    SECONDS = "seconds"


def written(value: float | None, unit: Unit) -> str:
    """`12,345`, `1,902.4`, `96.3%`, `2.41 s`; a dash where nothing is known."""
    if value is None:
        return UNKNOWN
    match unit:
        case Unit.COUNT:
            return f"{value:,.0f}"
        case Unit.SHARE:
            return f"{value:.1%}"
        case Unit.SECONDS:
            return seconds(value)
        case _:
            return f"{value:,.1f}"


def seconds(value: float) -> str:
    """`0.31 ms`, `12.4 ms`, `2.41 s`, `31.2 s`, `12 min 05 s`, `3 h 02 min`."""
    if value < 1.0:
        return f"{value * 1000:.3g} ms" if value else "0 s"
    if value < 120:
        return f"{value:.3g} s"
    value = round(value)
    if value < 7200:
        return f"{value // 60:.0f} min {value % 60:02.0f} s"
    return f"{value // 3600:.0f} h {value % 3600 // 60:02.0f} min"


def size(num_bytes: float) -> str:
    """`12.4 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def row_name(row: Mapping[str, Any]) -> str:
    """`row 12 (HumanEval/12), sample 3`."""
    name = f"row {row['row_index']}" + (f" ({row['id']})" if row["id"] is not None else "")
    return name + (f", sample {row['sample_index']}" if row["sample_index"] else "")


def setting(value: Any) -> str:
    """A setting's value as it is written in YAML, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return one_line(str(value), 400)
