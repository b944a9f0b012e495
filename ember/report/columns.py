"""Columns of a table as arrays of numbers, and the few sums that reports are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """A table whose columns are float64 arrays; one that it lacks is empty, a null is NaN."""

    table: pa.Table

    def __getitem__(self, name: str) -> Numbers:
        if name not in self.table.schema.names:
            return np.empty(0)
        return np.asarray(self.table[name].cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def known(self, name: str) -> Numbers:
        """A column without its nulls."""
        values = self[name]
        return values[~np.isnan(values)]

    def sum(self, name: str) -> float:
        """Of a column's known values."""
        return float(self.known(name).sum())


def ratio(part: float, whole: float) -> float | None:
    """`part / whole`, or None if there is no whole."""
    return part / whole if whole else None


def quantile(values: Numbers, share: float) -> float | None:
    """With linear interpolation, as DuckDB's `quantile_cont`; None of no values."""
    return float(np.quantile(values, share)) if len(values) else None


def peak(values: Numbers) -> float | None:
    """The largest; None of no values."""
    return float(values.max()) if len(values) else None


def mean(values: Numbers) -> float | None:
    """None of no values."""
    return float(values.mean()) if len(values) else None
