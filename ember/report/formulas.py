"""How a number of a job follows from its rows and steps, in Python and, for whoever wants to check, in DuckDB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ember.report.columns import Columns, Numbers, mean, peak, quantile, ratio

Value = float | None


@dataclass(frozen=True, slots=True)
class Formula:
    """One number, said twice.

    Attributes:
        of: computes it from rows and steps; None where nothing is known.
        sql: the same over the views `rows` (completions) and `steps`; empty where no query tells it.
    """

    of: Callable[[Columns, Columns], Value]
    sql: str


def count(table: str) -> Formula:
    """Rows of a table."""
    return Formula(lambda *tables: float(len(_of(tables, table))), f"select count(*) from {table}")


def total(table: str, column: str) -> Formula:
    """A column's sum."""
    return Formula(lambda *tables: _of(tables, table).sum(column), f"select sum({column}) from {table}")


def average(column: str) -> Formula:
    """A column's mean over steps."""
    return Formula(lambda rows, steps: mean(steps[column]), f"select avg({column}) from steps")


def most(column: str) -> Formula:
    """A column's largest value of all steps."""
    return Formula(lambda rows, steps: peak(steps[column]), f"select max({column}) from steps")


def quantile_of(table: str, column: str, percent: int) -> Formula:
    """A column's percentile, between two values in proportion."""
    sql = f"select quantile_cont({column}, {percent / 100}) from {table}"
    return Formula(lambda *tables: quantile(_of(tables, table).known(column), percent / 100), sql)


def errors() -> Formula:
    """Rows that could not run."""

    def of(rows: Columns, steps: Columns) -> Value:
        return float(sum(r == "error" for r in rows.table["finish_reason"].to_pylist()) if len(rows) else 0)

    return Formula(of, "select count(*) from rows where finish_reason = 'error'")


def span() -> Formula:
    """Seconds from the first step to the last."""
    return Formula(lambda rows, steps: work_s(steps), f"select {_SPAN}")


def speed() -> Formula:
    """Output tokens per second of `span`."""
    return Formula(
        lambda rows, steps: ratio(rows.sum("num_output_tokens"), work_s(steps)),
        f"select (select sum(num_output_tokens) from rows) / {_SPAN}",
    )


def pool_use(*, at_most: bool) -> Formula:
    """Used blocks of all blocks: the mean over steps, or the most."""
    measured, name = (peak, "max") if at_most else (mean, "avg")
    return Formula(
        lambda rows, steps: measured(_pool_use(steps)), f"select {name}(blocks_used / blocks_total) from steps"
    )


def waste() -> Formula:
    """Empty slots of used blocks, mean over the steps that used any."""

    def of(rows: Columns, steps: Columns) -> Value:
        filled = mean(steps["kv_utilization"][steps["blocks_used"] > 0])
        return None if filled is None else 1.0 - filled

    return Formula(of, "select 1 - (select avg(kv_utilization) from steps where blocks_used > 0)")


def recomputed() -> Formula:
    """Tokens computed again, of all computed."""
    parts = ("num_prefill_tokens", "num_decode_tokens", "num_recomputed_tokens")
    return Formula(
        lambda rows, steps: ratio(steps.sum(parts[-1]), sum(map(steps.sum, parts))),
        f"select sum({parts[-1]}) / sum({' + '.join(parts)}) from steps",
    )


def hits() -> Formula:
    """Prompt tokens from the prefix cache, of all of rows that ran."""

    def ran(rows: Columns, name: str) -> float:
        return float(rows[name][~np.isnan(rows["latency_s"])].sum()) if len(rows) else 0.0

    return Formula(
        lambda rows, steps: ratio(ran(rows, "num_cached_tokens"), ran(rows, "num_prompt_tokens")),
        "select sum(num_cached_tokens) / sum(num_prompt_tokens) from rows where latency_s is not null",
    )


def work_s(steps: Columns) -> float:
    """Seconds from the first step's start to the last one's end, added up over attempts and shards."""
    if not len(steps):
        return 0.0
    runs = np.unique(np.asarray(steps.table["run_id"].to_pylist(), dtype=object).astype(str), return_inverse=True)[1]
    start, end = steps["start_s"], steps["start_s"] + steps["duration_s"]
    return float(sum(end[runs == run].max() - start[runs == run].min() for run in range(int(runs.max()) + 1)))


_SPAN = "(select sum(s) from (select max(start_s + duration_s) - min(start_s) s from steps group by run_id))"


def _of(tables: tuple[Columns, ...], name: str) -> Columns:
    return tables[("rows", "steps").index(name)]


def _pool_use(steps: Columns) -> Numbers:
    blocks = steps["blocks_total"]
    return np.divide(steps["blocks_used"], blocks, out=np.zeros_like(blocks), where=blocks > 0)
