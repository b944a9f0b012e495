"""The report of a sweep: a page, its pictures, and the table as Parquet and CSV, in its folder `report`."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyarrow.parquet as pq
from pyarrow import csv

from ember.report.advice import advice, recommended, same_tokens, unfinished
from ember.report.drawing import Picture, check_drawing
from ember.report.job_report import put, report_folder, write_report
from ember.report.measures import BY_KEY, MEASURES
from ember.report.page import Page
from ember.report.same_tokens import between_groups, compare_tokens, result_keys
from ember.report.sweep import POOL, Sweep, SweepJob
from ember.report.sweep_plots import sweep_pictures
from ember.report.words import Unit, setting, written

COLUMNS = (
    *("tokens_per_s", "mean_running", "peak_kv_use", "mean_kv_use", "waste", "num_preemptions", "recomputed_share"),
    *("hit_rate", "p50_latency_s", "p95_latency_s", "p99_step_s", "num_steps", "duration_s"),
)
_IF_ANY = ("num_preemptions", "num_recomputed_tokens", "recomputed_share", "hit_rate")
_SHORT = {
    "tokens_per_s": "tokens/s at work",
    "mean_running": "running",
    "peak_kv_use": "peak KV",
    "mean_kv_use": "mean KV",
    "hit_rate": "hits",
    "p50_latency_s": "p50 latency",
    "p95_latency_s": "p95 latency",
    "p99_step_s": "p99 step",
    "recomputed_share": "done again",
    "num_preemptions": "preempted",
    POOL: "pool (tokens)",
}
"""Heads of columns that are narrower than the labels."""


def report_sweep(place: str, *, sort: str | None = None, to: str | None = None) -> str:
    """Compare the jobs of a sweep; returns what to print: the answer, the table, where the page is.

    Args:
        sort: the measure that decides; None is that of the jobs' `report_sort`.
        to: a folder other than `report` in the sweep's.

    Raises:
        UserError: no sweep, no such measure, a part that can't be read, no matplotlib. JobError: it can't be written.
    """
    check_drawing()
    sweep = Sweep.open(place, sort)
    pictures = sweep_pictures(sweep)
    said = list(advice(sweep))
    checks = [(text, False) for text in unfinished(sweep)]
    checks += list(same_tokens(compare_tokens(sweep.jobs), result_keys(sweep.jobs), between_groups(sweep.jobs)))
    folder = report_folder(sweep.store, to)
    table = sweep.table()
    put(folder, "jobs.parquet", _bytes(lambda file: pq.write_table(table, file)))
    put(folder, "jobs.csv", _bytes(lambda file: csv.write_csv(table, file)))
    page = write_report(folder, sweep_page(sweep, said, checks, pictures), pictures)
    lines = [*said, *(text for text, _ in checks), *_in_columns(_head(sweep), _rows(sweep))]
    return "\n".join([*lines, page])


def sweep_page(sweep: Sweep, said: list[str], checks: list[tuple[str, bool]], pictures: list[Picture]) -> Page:
    """The page of a sweep."""
    page = Page(f"ember sweep: {sweep.store.shown}")
    for number, sentence in enumerate(said):
        page.text(sentence, "lead" if number else "answer")
    for sentence, fine in checks:
        page.text(sentence, "good" if fine else "bad")
    some = f" of {len(sweep.jobs) + len(sweep.absent)}" if sweep.absent else ""
    page.heading(f"{len(sweep.jobs)}{some} jobs, sorted by {_head_of(sweep.sort)}")
    if not sweep.keys:
        page.text("No setting varied.")
    best = {sweep.jobs.index(job) for job in recommended(sweep)}
    page.table(_head(sweep), _rows(sweep), texts=len(_head(sweep)) - len(_columns(sweep)), best=best)
    marked = "The marked rows are those named above. " if best else ""
    page.text(f"{marked}The whole table, with every number, is in jobs.parquet and jobs.csv beside this page.")
    page.heading("What the settings did")
    page.pictures(pictures)
    page.heading("What the numbers mean")
    page.table(
        ("number", "meaning", "in DuckDB, over the views rows and steps of a job"),
        ((_head_of(m.key), m.meaning, m.sql) for m in MEASURES),
        texts=3,
    )
    same = {k: v for k, v in sweep.jobs[0].settings.items() if k not in (*sweep.keys, "output")}
    page.heading("Settings that all jobs share")
    page.table(("key", "value"), ((key, setting(value)) for key, value in same.items()), texts=2)
    return page


def _columns(sweep: Sweep) -> list[str]:
    """The numbers in the table; `num_preemptions` and `hit_rate` only where some job has any."""
    keys = dict.fromkeys([sweep.sort, *COLUMNS[:1], POOL, *COLUMNS[1:]])
    known = [key for key in keys if key == sweep.sort or any(job.value(key) is not None for job in sweep.jobs)]
    return [key for key in known if key not in _IF_ANY or any(job.value(key) for job in sweep.jobs)]


def _head(sweep: Sweep) -> list[str]:
    return ["#", *sweep.keys, *(["status"] if _some_unfinished(sweep) else []), *map(_head_of, _columns(sweep))]


def _some_unfinished(sweep: Sweep) -> bool:
    return any(job.status != "finished" for job in sweep.jobs)


def _head_of(key: str) -> str:
    return _SHORT.get(key) or BY_KEY[key].label


def _rows(sweep: Sweep) -> list[list[str]]:
    return [_row(sweep, number, job) for number, job in enumerate(sweep.jobs, 1)]


def _row(sweep: Sweep, number: int, job: SweepJob) -> list[str]:
    units = {POOL: Unit.COUNT} | {m.key: m.unit for m in MEASURES}
    numbers = [written(job.value(key), units[key]) for key in _columns(sweep)]
    texts = [setting(job.settings.get(key)) for key in sweep.keys]
    return [str(number), *texts, *([job.status] if _some_unfinished(sweep) else []), *numbers]


def _in_columns(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]


def _bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()
