"""An output in the terminal: counts, errors, a few completions, settings, files."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict

from ember.config import JobConfig
from ember.data.manifest import MANIFEST
from ember.data.store import Store, open_store
from ember.data.text import one_line
from ember.errors import UserError
from ember.report.job_report import headline
from ember.report.measures import measure, measures_of
from ember.report.results import JobResults, flat
from ember.report.words import Unit, row_name, setting, written

_COUNTS = (
    *("num_prompt_tokens", "num_output_tokens", "tokens_per_s", "mean_running", "peak_running", "mean_kv_use"),
    *("peak_kv_use", "waste", "num_preemptions", "recomputed_share", "hit_rate", "p50_latency_s", "p95_latency_s"),
)
_ERRORS_A_KIND = 3
_TEXT_LINES = 4
_ALWAYS = ("model.name", "data", "block_size", "pool_size", "scheduler", "seed", "sampling.temperature")


def inspect_output(output: str, *, num_samples: int) -> str:
    """What an output holds, as text for a terminal.

    Raises:
        UserError: it is no output of ember's, or a part can't be read.
    """
    results = JobResults.of(_checked(open_store(output)))
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    blocks = [
        [textwrap.fill(headline(results, measure(results)), width)],
        ["numbers", *_numbers(results)],
        ["finished by", *_reasons(results)],
        ["errors", *_errors(results, width)],
        ["completions", *_samples(results, num_samples, width)],
        ["settings (those that are not the defaults, and the main ones)", *_settings(results, width)],
        ["files", *_files(results.store)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if len(block) > 1 or block is blocks[0])


def _checked(store: Store) -> Store:
    if not store.exists(MANIFEST):
        jobs = [name for name in _names(store) if store.sub(name).exists(MANIFEST)]
        if jobs:
            raise UserError(
                f"{store.shown} holds {len(jobs)} jobs, not one; to compare them: ember report {store.shown}; "
                f"to inspect one: ember inspect {store.shown}/{jobs[0]}"
            )
    return store


def _names(store: Store) -> list[str]:
    try:
        return store.names()
    except NotADirectoryError:
        return []


def _numbers(results: JobResults) -> Iterator[str]:
    values = measure(results)
    expected, missing = results.num_rows_expected, results.num_rows_missing
    rows = f"{written(values['num_rows'], Unit.COUNT)}; {expected:,} expected, {missing:,} missing"
    yield f"  {'rows':<28} {rows}"
    shown = {m.key: m for m in measures_of(results)}
    for m in (shown[key] for key in _COUNTS if key in shown):
        yield f"  {m.label:<28} {written(values[m.key], m.unit)}"


def _reasons(results: JobResults) -> Iterator[str]:
    counts: dict[str, int] = {}
    for reason in results.rows["finish_reason"].to_pylist() if len(results.rows) else []:
        counts[str(reason)] = counts.get(str(reason), 0) + 1
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"  {reason:<12} {count:,}"


def _errors(results: JobResults, width: int) -> Iterator[str]:
    for kind, rows in results.errors().items():
        yield f"  {len(rows):,} {kind}"
        for row in rows[:_ERRORS_A_KIND]:
            line = f"{row_name(row)}: {one_line(row['error'], 400)}"
            yield from textwrap.wrap(line, width, initial_indent="    ", subsequent_indent="      ")


def _samples(results: JobResults, count: int, width: int) -> Iterator[str]:
    for row in results.samples(count):
        yield f"  {row_name(row)}: {row['num_output_tokens']} tokens, {row['finish_reason']}"
        yield f"    prompt      {_fitted(row['prompt'] or '(token ids)', width - 16, end=True)}"
        for number, line in enumerate(_lines(row["completion"] or "", width - 16)):
            yield f"    {'completion' if number == 0 else '':<11} {line}"


def _lines(text: str, width: int) -> list[str]:
    """The text in a few lines, safe on a terminal."""
    lines = textwrap.wrap(one_line(text, len(text)), width)
    return (
        lines if len(lines) <= _TEXT_LINES else [*lines[: _TEXT_LINES - 1], f"{lines[_TEXT_LINES - 1][: width - 2]} …"]
    )


def _fitted(text: str, width: int, *, end: bool = False) -> str:
    """One line, of a long text the beginning or the end."""
    plain = one_line(text, len(text))
    if len(plain) <= width:
        return plain
    return f"… {plain[-(width - 2) :]}" if end else f"{plain[: width - 2]} …"


def _settings(results: JobResults, width: int) -> Iterator[str]:
    defaults = flat(asdict(JobConfig(data="-")))
    for key, value in results.settings.items():
        if key != "output" and (key in _ALWAYS or key not in defaults or defaults[key] != value):
            yield f"  {key:<26} {_fitted(setting(value), width - 30)}"


def _files(store: Store) -> Iterator[str]:
    for name in store.names():
        if name.startswith("."):
            continue
        parts = [part for part in store.sub(name).names() if not part.startswith(".")] if "." not in name else []
        span = parts[:1] if len(parts) < 2 else [f"{len(parts):,} files, {parts[0]} to {parts[-1]}"]
        yield f"  {name}" + (f"/  {span[0]}" if span else "")
