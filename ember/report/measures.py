"""The numbers of a job, each with the words and the SQL that say what it is: one list for page, terminal and tables.

All of them follow from the Parquet files alone, so that anyone can compute them again; save for the speed of a job
whose engine is elsewhere and leaves no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ember.report.columns import Columns, Numbers, mean, peak, quantile, ratio
from ember.report.results import JobResults
from ember.report.words import Unit

Value = float | None
Values = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a job.

    Attributes:
        key: its name in tables and for `--sort`.
        label: its name for people.
        unit: how it is written.
        meaning: what it is, in a sentence.
        of: computes it from rows and steps; None where nothing is known.
        more_is_better: None where neither is.
        sql: the same in DuckDB, over the views `rows` (completions) and `steps`; empty where it takes several lines.
    """

    key: str
    label: str
    unit: Unit
    meaning: str
    of: Callable[[Columns, Columns], Value]
    more_is_better: bool | None
    sql: str = ""


def measure(results: JobResults) -> Values:
    """All measures of a job by key."""
    rows, steps = Columns(results.rows), Columns(results.steps)
    values = {m.key: m.of(rows, steps) for m in MEASURES}
    return values if len(steps) else values | _without_steps(results.summary)


def measures_of(results: JobResults) -> list[Measure]:
    """Those that say something of this job: with no steps, none of the engine, and the speed by its summary."""
    if len(results.steps):
        return list(MEASURES)
    return [_OF_SUMMARY.get(m.key, m) for m in MEASURES if m.key not in OF_STEPS]


def _without_steps(summary: Mapping[str, Any]) -> Values:
    """What differs for a job whose engine, elsewhere, left no steps."""
    total = summary.get("total")
    known = total if isinstance(total, dict) else {}
    return dict.fromkeys(OF_STEPS) | {key: known.get(key) or None for key in _OF_SUMMARY}


def work_s(steps: Columns) -> float:
    """Seconds from the first step's start to the last one's end, added up over attempts and shards."""
    if not len(steps):
        return 0.0
    runs = np.unique(np.asarray(steps.table["run_id"].to_pylist(), dtype=object).astype(str), return_inverse=True)[1]
    start, end = steps["start_s"], steps["start_s"] + steps["duration_s"]
    return float(sum(end[runs == run].max() - start[runs == run].min() for run in range(int(runs.max()) + 1)))


def _kv_use(steps: Columns) -> Numbers:
    total = steps["blocks_total"]
    return np.divide(steps["blocks_used"], total, out=np.zeros_like(total), where=total > 0)


def _utilization(steps: Columns) -> Numbers:
    return steps["kv_utilization"][steps["blocks_used"] > 0]


def _waste(steps: Columns) -> Value:
    filled = mean(_utilization(steps))
    return None if filled is None else 1.0 - filled


def _ran(rows: Columns, name: str) -> float:
    """A column's sum over the rows that ran."""
    return float(rows[name][~np.isnan(rows["latency_s"])].sum()) if len(rows) else 0.0


def _at(share: float, name: str) -> Callable[[Columns, Columns], Value]:
    return lambda rows, steps: quantile(rows.known(name), share)


def _total(table: str, name: str) -> Callable[[Columns, Columns], Value]:
    return lambda rows, steps: (rows if table == "rows" else steps).sum(name)


_SPAN = "(select sum(s) from (select max(start_s + duration_s) - min(start_s) s from steps group by run_id))"
_FILLED = "(select avg(kv_utilization) from steps where blocks_used > 0)"


def _quantiles(name: str, label: str, meaning: str) -> list[Measure]:
    return [
        Measure(
            key=f"p{percent}_{name}",
            label=f"{label}, {'median' if percent == 50 else f'{percent}th percentile'}",
            unit=Unit.SECONDS,
            meaning=meaning,
            of=_at(percent / 100, name),
            more_is_better=False,
            sql=f"select quantile_cont({name}, {percent / 100}) from rows",
        )
        for percent in (50, 95)
    ]


MEASURES: tuple[Measure, ...] = (
    Measure(
        key="tokens_per_s",
        label="output tokens/s at work",
        unit=Unit.RATE,
        meaning="output tokens of all rows per second from the first step to the last, of each attempt and shard; the "
        "`speed` that a job prints is lower: it also counts the time before and after; without steps it is that speed",
        of=lambda rows, steps: ratio(rows.sum("num_output_tokens"), work_s(steps)),
        more_is_better=True,
        sql=f"select (select sum(num_output_tokens) from rows) / {_SPAN}",
    ),
    Measure(
        key="duration_s",
        label="time",
        unit=Unit.SECONDS,
        meaning="from the first step to the last, added up over attempts and shards; without loading the model",
        of=lambda rows, steps: work_s(steps),
        more_is_better=False,
        sql=f"select {_SPAN}",
    ),
    Measure(
        key="num_rows",
        label="rows",
        unit=Unit.COUNT,
        meaning="rows in the completions, one a sample",
        of=lambda rows, steps: float(len(rows)),
        more_is_better=None,
        sql="select count(*) from rows",
    ),
    Measure(
        key="num_errors",
        label="error rows",
        unit=Unit.COUNT,
        meaning="rows that could not run",
        of=lambda rows, steps: float(sum(r == "error" for r in rows.table["finish_reason"].to_pylist()) if rows else 0),
        more_is_better=False,
        sql="select count(*) from rows where finish_reason = 'error'",
    ),
    Measure(
        key="num_prompt_tokens",
        label="prompt tokens",
        unit=Unit.COUNT,
        meaning="of all rows",
        of=_total("rows", "num_prompt_tokens"),
        more_is_better=None,
        sql="select sum(num_prompt_tokens) from rows",
    ),
    Measure(
        key="num_output_tokens",
        label="output tokens",
        unit=Unit.COUNT,
        meaning="of all rows",
        of=_total("rows", "num_output_tokens"),
        more_is_better=None,
        sql="select sum(num_output_tokens) from rows",
    ),
    Measure(
        key="num_steps",
        label="steps",
        unit=Unit.COUNT,
        meaning="engine steps",
        of=lambda rows, steps: float(len(steps)),
        more_is_better=None,
        sql="select count(*) from steps",
    ),
    Measure(
        key="mean_running",
        label="sequences at once, mean",
        unit=Unit.DECIMAL,
        meaning="running sequences, mean over steps",
        of=lambda rows, steps: mean(steps["num_running"]),
        more_is_better=True,
        sql="select avg(num_running) from steps",
    ),
    Measure(
        key="peak_running",
        label="sequences at once, most",
        unit=Unit.COUNT,
        meaning="the most sequences that ran in one step",
        of=lambda rows, steps: peak(steps["num_running"]),
        more_is_better=True,
        sql="select max(num_running) from steps",
    ),
    Measure(
        key="mean_kv_use",
        label="pool used, mean",
        unit=Unit.SHARE,
        meaning="blocks that running sequences hold, of all blocks; mean over steps",
        of=lambda rows, steps: mean(_kv_use(steps)),
        more_is_better=None,
        sql="select avg(blocks_used / blocks_total) from steps",
    ),
    Measure(
        key="peak_kv_use",
        label="pool used, most",
        unit=Unit.SHARE,
        meaning="the most blocks that running sequences held in one step, of all blocks",
        of=lambda rows, steps: peak(_kv_use(steps)),
        more_is_better=None,
        sql="select max(blocks_used / blocks_total) from steps",
    ),
    Measure(
        key="waste",
        label="KV waste",
        unit=Unit.SHARE,
        meaning="slots in used blocks that hold no token; mean over the steps that used any",
        of=lambda rows, steps: _waste(steps),
        more_is_better=False,
        sql=f"select 1 - {_FILLED}",
    ),
    Measure(
        key="num_preemptions",
        label="preemptions",
        unit=Unit.COUNT,
        meaning="times a running sequence gave up its blocks to others",
        of=_total("steps", "num_preempted"),
        more_is_better=False,
        sql="select sum(num_preempted) from steps",
    ),
    Measure(
        key="num_recomputed_tokens",
        label="tokens recomputed",
        unit=Unit.COUNT,
        meaning="tokens computed a second time after a preemption",
        of=_total("steps", "num_recomputed_tokens"),
        more_is_better=False,
        sql="select sum(num_recomputed_tokens) from steps",
    ),
    Measure(
        key="hit_rate",
        label="prefix hits",
        unit=Unit.SHARE,
        meaning="prompt tokens whose K/V came from the prefix cache, of all prompt tokens of rows that ran",
        of=lambda rows, steps: ratio(_ran(rows, "num_cached_tokens"), _ran(rows, "num_prompt_tokens")),
        more_is_better=True,
        sql="select sum(num_cached_tokens) / sum(num_prompt_tokens) from rows where latency_s is not null",
    ),
    *_quantiles("queue_s", "wait in line", "seconds from entering the engine to the first step with it"),
    *_quantiles("ttft_s", "time to first token", "seconds from entering the engine to the first output token"),
    *_quantiles("latency_s", "latency", "seconds from entering the engine to the last output token"),
)
BY_KEY = {m.key: m for m in MEASURES}
OF_STEPS = (
    *("num_steps", "mean_running", "peak_running", "mean_kv_use", "peak_kv_use", "waste", "num_preemptions"),
    *("num_recomputed_tokens", "hit_rate"),
)
"""What only the engine's steps, or its cache, can tell."""
_OF_SUMMARY = {
    "tokens_per_s": replace(
        BY_KEY["tokens_per_s"],
        label="output tokens/s",
        meaning="output tokens per second of `time`, by summary.json, as the job printed it",
        sql="",
    ),
    "duration_s": replace(
        BY_KEY["duration_s"], meaning="by summary.json, after loading, added up over attempts", sql=""
    ),
}
