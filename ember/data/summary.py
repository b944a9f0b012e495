"""What a job did, in numbers: counted as it runs, written as summary.json, shown at the end.

The numbers have two scopes, and summary.json keeps them apart: rows, tokens and errors are the whole job's, counted in
its parts; steps, times, speeds and cache use are those of one attempt (see `ember.data.attempts`).
"""

from __future__ import annotations

import math
import signal
import textwrap
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import pyarrow as pa

from ember.core.stats import StepStats
from ember.data.row_counts import RowCounts
from ember.data.step_counts import StepCounts

EXIT_CLEAN = 0
EXIT_FAILED = 1
EXIT_ERROR_ROWS = 3
_WIDTH = 80
_CAUSE_WIDTH = 400
"""A cause ends with its remedy: it is not cut to the terminal, which breaks it into lines itself."""


JOB_KEYS = (
    *("status", "exit_code", "num_rows_total", "num_rows_done", "num_samples_done", "num_errors", "num_duplicate_ids"),
    *("errors_by_kind", "first_errors", "finish_reasons", "num_prompt_tokens", "num_output_tokens"),
)
"""Fields that speak of the whole job; the rest speaks of one attempt at it."""
ATTEMPT_KEYS = (
    *("num_steps", "duration_s", "engine_s", "load_s", "tokens_per_s", "peak_kv_utilization", "mean_kv_utilization"),
    *("peak_blocks_used", "blocks_total", "block_size", "num_preemptions", "num_recomputed_tokens", "peak_running"),
    *("num_prefill_tokens", "num_decode_tokens", "recomputed_share"),
    *("prefix_hit_tokens", "prefix_hit_rate", "num_evicted_blocks"),
    *("num_proposed_tokens", "num_accepted_tokens", "acceptance_rate"),
    *("deterministic", "deterministic_why", "settings"),
)


class JobStatus(StrEnum):
    """How a job ended: all rows done; stopped by a signal; given up after an error."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(kw_only=True, slots=True)
class JobSummary:
    """Counts of a job and rates of one attempt at it. Times in seconds, sizes in tokens or blocks, shares from 0 to 1.

    Attributes:
        status: finished, interrupted or failed.
        exit_code: what the process returns: 0 clean, 3 finished with error rows, 130/143 interrupted, 1 failed.
        num_rows_total: rows of the input, after `limit`.
        num_rows_done: input rows written with all samples, error rows too; `num_rows_before` of them by earlier
            attempts. `num_samples_done` counts every sample written, also of rows that lack others.
        num_errors: samples written that are errors: a row with n samples that can't run gives n of them.
        num_duplicate_ids: rows written whose id another row had before them; allowed, as a row's key is its index.
        errors_by_kind: how many error rows of each kind (`bad_row`, `prompt_too_long`, ...).
        first_errors: the first few of each kind: `kind`, `row_index`, `id`, `error`.
        num_prompt_tokens, num_output_tokens: of all rows written, a prompt once for all its samples;
            `num_output_tokens_new` of this attempt's rows.
        duration_s: wall time of the job after loading; `load_s` is the time before, `engine_s` the part of it spent
            in engine steps.
        tokens_per_s: output tokens of this attempt's rows per second of `duration_s`.
        peak_kv_utilization, mean_kv_utilization: live tokens per slot of the used blocks; the mean is over the steps
            that used any.
        num_prefill_tokens, num_decode_tokens: computed of prompts, and of output.
        num_recomputed_tokens: tokens computed a second time after a preemption; `recomputed_share` is their share of
            all that were computed.
        prefix_hit_tokens: tokens that sequences found in the cache as they started; `prefix_hit_rate` is their share of
            those that they would have had to compute else.
        num_evicted_blocks: blocks of the prefix cache that were given up for room.
        num_proposed_tokens, num_accepted_tokens: by speculation; `acceptance_rate` is the share kept, None of none.
        deterministic: whether the bits of logits never depend on the batch; if they may, `deterministic_why` says why.
        settings: the model and the few settings that such numbers depend on.
    """

    status: str
    exit_code: int
    run_id: str
    num_rows_total: int = 0
    num_rows_done: int = 0
    num_samples_done: int = 0
    num_rows_before: int = 0
    num_errors: int = 0
    num_duplicate_ids: int = 0
    errors_by_kind: dict[str, int] = field(default_factory=dict)
    first_errors: list[dict[str, Any]] = field(default_factory=list)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_output_tokens_new: int = 0
    num_steps: int = 0
    duration_s: float = 0.0
    engine_s: float = 0.0
    load_s: float = 0.0
    tokens_per_s: float = 0.0
    peak_kv_utilization: float = 0.0
    mean_kv_utilization: float = 0.0
    peak_blocks_used: int = 0
    blocks_total: int = 0
    block_size: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    recomputed_share: float | None = None
    prefix_hit_tokens: int = 0
    prefix_hit_rate: float | None = None
    num_evicted_blocks: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_rate: float | None = None
    peak_running: int = 0
    deterministic: bool | None = None
    deterministic_why: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def job_numbers(self) -> dict[str, Any]:
        """What is true of the whole job, whichever attempts computed its rows, as plain JSON values."""
        return {key: _plain(getattr(self, key)) for key in JOB_KEYS}

    def attempt_numbers(self) -> dict[str, Any]:
        """What this attempt did, as plain JSON values: an infinite or undefined number becomes null."""
        own = {
            "status": self.status,
            "num_rows": self.num_rows_done - self.num_rows_before,
            "num_output_tokens": self.num_output_tokens_new,
        }
        return own | {key: _plain(getattr(self, key)) for key in ATTEMPT_KEYS}


class SummaryBuilder:
    """Counts rows and steps while the job runs."""

    def __init__(self) -> None:
        self._rows = RowCounts()
        self._rows_before = 0
        self._output_tokens_before = 0
        self._steps = StepCounts()

    @property
    def num_rows_done(self) -> int:
        """Rows counted so far with all their samples."""
        return self._rows.rows

    def add_sample(self, **sample: Any) -> None:
        """Count one sample that was written (see `RowCounts.add_sample`)."""
        self._rows.add_sample(**sample)

    def add_committed(self, keys: pa.Table) -> None:
        """Count the rows of an earlier attempt's part."""
        self._rows.add_part(keys)
        self._rows_before, self._output_tokens_before = self._rows.rows, self._rows.output_tokens

    def recount(self, parts: Iterable[pa.Table]) -> None:
        """Count the rows of all parts instead: after a failure not all that was counted has been written."""
        self._rows = RowCounts()
        for keys in parts:
            self._rows.add_part(keys)

    def add_step(self, stats: StepStats) -> None:
        """Count one engine step."""
        self._steps.add(stats)

    def build(
        self,
        *,
        status: str,
        run_id: str,
        num_rows_total: int,
        duration_s: float,
        load_s: float = 0.0,
        block_size: int = 0,
        signum: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> JobSummary:
        """The summary of everything counted so far.

        Args:
            status: finished, interrupted or failed (see `JobStatus`).
            signum: the signal that interrupted the job; SIGINT if not given.
            duration_s: wall time since loading ended.
        """
        rows = self._rows
        num_errors = rows.errors.total()
        tokens = rows.output_tokens - self._output_tokens_before
        return JobSummary(
            status=JobStatus(status).value,
            exit_code=exit_code(status, num_errors, signum),
            run_id=run_id,
            num_rows_total=num_rows_total,
            num_rows_done=rows.rows,
            num_samples_done=rows.samples,
            num_rows_before=self._rows_before,
            num_errors=num_errors,
            num_duplicate_ids=rows.ids.count,
            errors_by_kind=dict(rows.errors.most_common()),
            first_errors=list(rows.first_errors),
            finish_reasons=dict(rows.finish_reasons.most_common()),
            num_prompt_tokens=rows.prompt_tokens,
            num_output_tokens=rows.output_tokens,
            num_output_tokens_new=tokens,
            duration_s=duration_s,
            load_s=load_s,
            tokens_per_s=tokens / duration_s if duration_s > 0 else 0.0,
            block_size=block_size,
            **self._steps.numbers(),
            settings=dict(settings or {}),
        )


def exit_code(status: str, num_errors: int, signum: int | None = None) -> int:
    """The process's exit code: 0 clean, 3 error rows, 128 + signal interrupted (130, 143), 1 failed."""
    if status == JobStatus.INTERRUPTED:
        return 128 + (signal.SIGINT if signum is None else signum)
    if status == JobStatus.FAILED:
        return EXIT_FAILED
    return EXIT_ERROR_ROWS if num_errors else EXIT_CLEAN


def final_table(summary: JobSummary, output_path: str) -> str:
    """The summary for a terminal: plain text of at most 80 columns, but for causes and the path; no last newline."""
    lines = [f"{summary.status} (exit code {summary.exit_code})"]
    lines += [_line(name, text) for name, text in _facts(summary)]
    lines += _error_lines(summary)
    return "\n".join([*lines, f"  {'results':<12} {output_path}"])


def _facts(s: JobSummary) -> list[tuple[str, str]]:
    resumed = s.num_rows_before > 0
    samples = f" ({s.num_samples_done:,} samples)" if s.num_samples_done != s.num_rows_done else ""
    return [
        ("rows", f"{s.num_rows_done:,} of {s.num_rows_total:,}{samples}, {s.num_errors:,} with an error"),
        *([("resumed", f"{s.num_rows_before:,} rows were there already")] if resumed else []),
        *([("ids", f"{s.num_duplicate_ids:,} rows have an id that occurred before")] if s.num_duplicate_ids else []),
        ("finished by", ", ".join(f"{name} {count:,}" for name, count in s.finish_reasons.items()) or "-"),
        ("tokens", f"{s.num_prompt_tokens:,} prompt, {s.num_output_tokens:,} output"),
        *([("this attempt", f"{s.num_output_tokens_new:,} output tokens; what follows is its own")] if resumed else []),
        ("speed", f"{s.tokens_per_s:,.1f} output tokens/s"),
        *(_engine_facts(s) if s.num_steps else [("time", f"{s.duration_s:,.1f} s + loading {s.load_s:,.1f} s")]),
        *_settings(s.settings),
    ]


def _engine_facts(s: JobSummary) -> list[tuple[str, str]]:
    """What only an engine in this job's own hands can tell."""
    return [
        ("time", f"{s.duration_s:,.1f} s in {s.num_steps:,} steps ({s.engine_s:,.1f} s) + loading {s.load_s:,.1f} s"),
        ("KV blocks", f"at most {s.peak_blocks_used:,} of {s.blocks_total:,} used, block_size {s.block_size}"),
        ("KV slots", f"{s.mean_kv_utilization:.1%} of used blocks filled, at most {s.peak_kv_utilization:.1%}"),
        ("running", f"at most {s.peak_running:,} sequences at once"),
        ("preemptions", _preemptions(s)),
        *([("prefix cache", _prefix_cache(s))] if s.prefix_hit_tokens else []),
        *([] if s.acceptance_rate is None else [("speculation", _speculation(s))]),
    ]


def _preemptions(s: JobSummary) -> str:
    if not s.num_preemptions and not s.num_recomputed_tokens:
        return "none"
    share = f" ({s.recomputed_share:.1%} of all)" if s.recomputed_share else ""
    return f"{s.num_preemptions:,}: {s.num_recomputed_tokens:,} tokens computed again{share}"


def _prefix_cache(s: JobSummary) -> str:
    return f"{s.prefix_hit_tokens:,} tokens found ({s.prefix_hit_rate:.1%}), {s.num_evicted_blocks:,} blocks evicted"


def _speculation(s: JobSummary) -> str:
    return f"{s.num_proposed_tokens:,} tokens proposed, {s.num_accepted_tokens:,} ({s.acceptance_rate:.1%}) accepted"


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """As many `key=value` a line as fit."""
    words = [f"{key}={value}".replace(" ", "\xa0") for key, value in settings.items()]
    lines = textwrap.wrap(" ".join(words), _WIDTH - 15, break_long_words=False, break_on_hyphens=False)
    return [("" if i else "settings", line.replace("\xa0", " ")) for i, line in enumerate(lines)]


def _error_lines(summary: JobSummary) -> list[str]:
    lines = []
    for kind, count in summary.errors_by_kind.items():
        lines.append(_line("error rows", f"{count:,} {kind}"))
        for error in (e for e in summary.first_errors if e["kind"] == kind):
            name = f"row {error['row_index']}" + (f" ({error['id']})" if error["id"] is not None else "")
            lines.append(_fit(f"    {_fit(name, 30)}: {error['error']}", _CAUSE_WIDTH))
    return lines


def _line(name: str, text: str) -> str:
    return _fit(f"  {name:<12} {text}", _WIDTH)


def _fit(text: str, width: int) -> str:
    """Make a text from anywhere safe for one line of a terminal, `width` columns at most (a CJK letter takes two)."""
    indent = len(text) - len(text.lstrip(" "))
    body = "".join(c if c.isprintable() else " " for c in text[indent:])
    if indent + sum(map(_columns, body)) <= width:
        return " " * indent + body
    kept, room = [], width - indent - len("...")
    for char in body:
        room -= _columns(char)
        if room < 0:
            break
        kept.append(char)
    return " " * indent + "".join(kept) + "..."


def _columns(char: str) -> int:
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
