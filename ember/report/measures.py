"""The numbers of a job, each with the words and the SQL that say what it is: one list for page, terminal and tables.

All of them follow from the Parquet files alone, so that anyone can compute them again; save for the speed of a job
whose engine is elsewhere and leaves no steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ember.report import formulas
from ember.report.columns import Columns
from ember.report.formulas import Formula, Value
from ember.report.results import JobResults
from ember.report.words import Unit

Values = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a job.

    Attributes:
        key: its name in tables and for `--sort`.
        label: its name for people.
        unit: how it is written.
        more_is_better: None where neither is.
        formula: how it is computed.
        meaning: what it is, in a sentence.
    """

    key: str
    label: str
    unit: Unit
    more_is_better: bool | None
    formula: Formula
    meaning: str

    @property
    def sql(self) -> str:
        """The same in DuckDB; may be empty."""
        return self.formula.sql

    @property
    def hangs_on_the_clock(self) -> bool:
        """Whether two runs of one job differ in it."""
        return self.unit in (Unit.RATE, Unit.SECONDS)


def measure(results: JobResults) -> Values:
    """All measures of a job by key."""
    rows, steps = Columns(results.rows), Columns(results.steps)
    values = {m.key: m.formula.of(rows, steps) for m in MEASURES}
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


def _quantiles(table: str, name: str, label: str, meaning: str, *percents: int) -> list[Measure]:
    titles = {50: "median", 95: "95th percentile", 99: "99th percentile"}
    return [
        Measure(
            f"p{percent}_{name}",
            f"{label}, {title}",
            Unit.SECONDS,
            False,
            formulas.quantile_of(table, "duration_s" if name == "step_s" else name, percent),
            meaning,
        )
        for percent, title in titles.items()
        if percent in percents
    ]


MEASURES: tuple[Measure, ...] = (
    Measure(
        "tokens_per_s",
        "output tokens/s at work",
        Unit.RATE,
        True,
        formulas.speed(),
        "output tokens of all rows per second from the first step to the last, of each attempt and shard; the "
        "`speed` that a job prints is lower: it also counts the time before and after; without steps it is that speed",
    ),
    Measure(
        "duration_s",
        "time",
        Unit.SECONDS,
        False,
        formulas.span(),
        "from the first step to the last, added up over attempts and shards; without loading the model",
    ),
    Measure("num_rows", "rows", Unit.COUNT, None, formulas.count("rows"), "rows in the completions, one a sample"),
    Measure("num_errors", "error rows", Unit.COUNT, False, formulas.errors(), "rows that could not run"),
    Measure(
        "num_prompt_tokens",
        "prompt tokens",
        Unit.COUNT,
        None,
        formulas.total("rows", "num_prompt_tokens"),
        "of all rows",
    ),
    Measure(
        "num_output_tokens",
        "output tokens",
        Unit.COUNT,
        None,
        formulas.total("rows", "num_output_tokens"),
        "of all rows",
    ),
    Measure("num_steps", "steps", Unit.COUNT, None, formulas.count("steps"), "engine steps"),
    Measure(
        "mean_running",
        "sequences at once, mean",
        Unit.DECIMAL,
        True,
        formulas.average("num_running"),
        "running sequences, mean over steps",
    ),
    Measure(
        "peak_running",
        "sequences at once, most",
        Unit.COUNT,
        True,
        formulas.most("num_running"),
        "the most sequences that ran in one step",
    ),
    Measure(
        "mean_kv_use",
        "pool used, mean",
        Unit.SHARE,
        None,
        formulas.pool_use(at_most=False),
        "blocks that running sequences hold, of all blocks; mean over steps",
    ),
    Measure(
        "peak_kv_use",
        "pool used, most",
        Unit.SHARE,
        None,
        formulas.pool_use(at_most=True),
        "the most blocks that running sequences held in one step, of all blocks",
    ),
    Measure(
        "waste",
        "KV waste",
        Unit.SHARE,
        False,
        formulas.waste(),
        "slots in used blocks that hold no token; mean over the steps that used any",
    ),
    Measure(
        "num_preemptions",
        "preemptions",
        Unit.COUNT,
        False,
        formulas.total("steps", "num_preempted"),
        "times a running sequence gave up its blocks to others",
    ),
    Measure(
        "num_recomputed_tokens",
        "tokens recomputed",
        Unit.COUNT,
        False,
        formulas.total("steps", "num_recomputed_tokens"),
        "tokens computed a second time after a preemption",
    ),
    Measure(
        "recomputed_share",
        "work done again",
        Unit.SHARE,
        False,
        formulas.recomputed(),
        "tokens recomputed, of all tokens computed",
    ),
    Measure(
        "hit_rate",
        "prefix hits",
        Unit.SHARE,
        True,
        formulas.hits(),
        "prompt tokens whose K/V came from the prefix cache, of all prompt tokens of rows that ran",
    ),
    *_quantiles(
        "rows", "queue_s", "wait in line", "seconds from entering the engine to the first step with it", 50, 95
    ),
    *_quantiles(
        "rows", "ttft_s", "time to first token", "seconds from entering the engine to the first output token", 50, 95
    ),
    *_quantiles("rows", "latency_s", "latency", "seconds from entering the engine to the last output token", 50, 95),
    *_quantiles("steps", "step_s", "time of a step", "what a running row waits for its next token", 50, 95, 99),
)
BY_KEY = {m.key: m for m in MEASURES}
OF_STEPS = (
    *("num_steps", "mean_running", "peak_running", "mean_kv_use", "peak_kv_use", "waste", "num_preemptions"),
    *("num_recomputed_tokens", "recomputed_share", "hit_rate", "p50_step_s", "p95_step_s", "p99_step_s"),
)
"""What only the engine's steps, or its cache, can tell."""
_OF_SUMMARY = {
    "tokens_per_s": replace(
        BY_KEY["tokens_per_s"],
        label="output tokens/s",
        meaning="output tokens per second of `time`, by summary.json, as the job printed it",
        formula=replace(BY_KEY["tokens_per_s"].formula, sql=""),
    ),
    "duration_s": replace(
        BY_KEY["duration_s"],
        meaning="by summary.json, after loading, added up over attempts",
        formula=replace(BY_KEY["duration_s"].formula, sql=""),
    ),
}
