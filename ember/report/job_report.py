"""The report of one job: a page and its pictures, written into the folder `report` of the output."""

from __future__ import annotations

from typing import Any

from ember.data.own_files import PAGE, REPORT
from ember.data.store import Store, cant_write, open_store
from ember.report.drawing import Picture, check_drawing
from ember.report.job_plots import job_pictures
from ember.report.measures import MEASURES, Values, measure, measures_of
from ember.report.page import Page
from ember.report.results import JobResults
from ember.report.words import Unit, row_name, setting, written

SAMPLES = 8
ERRORS_A_KIND = 3
_CHARS = 1200
_NOT_SETTINGS = ("output",)


def report_job(output: str, to: str | None = None) -> str:
    """Write the report of a job, which may still run; returns where the page is.

    Args:
        to: a folder other than `report` in the output.

    Raises:
        UserError: it is no output, a part can't be read, or matplotlib is missing. JobError: it can't be written.
    """
    check_drawing()
    results = JobResults.open(output)
    values = measure(results)
    pictures = job_pictures(results, values)
    return write_report(report_folder(results.store, to), job_page(results, values, pictures), pictures)


def report_folder(store: Store, to: str | None) -> Store:
    """Where a report goes; made if need be.

    Raises:
        JobError: it can't be made.
    """
    folder = store.sub(REPORT) if to is None else open_store(to)
    try:
        folder.make()
    except OSError as error:
        raise cant_write(folder.shown, error) from error
    return folder


def write_report(folder: Store, page: Page, pictures: list[Picture]) -> str:
    """Write a page and its pictures into a folder; returns the page's place."""
    for picture in pictures:
        put(folder, f"{picture.name}.png", picture.png)
    put(folder, PAGE, page.html().encode("utf-8", "backslashreplace"))
    return f"{folder.shown}/{PAGE}"


def put(folder: Store, name: str, data: bytes) -> None:
    """Write one file.

    Raises:
        JobError: it can't be written.
    """
    folder.put_atomically(name, lambda file: file.write(data))


def job_page(results: JobResults, values: Values, pictures: list[Picture]) -> Page:
    """The page of a job."""
    page = Page(f"ember: {results.store.shown}")
    page.text(headline(results, values), "lead")
    page.heading("Over time, and how rows are distributed")
    page.pictures(pictures)
    page.heading("Numbers")
    shown = (m for m in measures_of(results) if len(results.steps) or values[m.key] is not None)
    page.facts((m.label, written(values[m.key], m.unit), m.meaning) for m in shown)
    _attempts(page, results)
    _errors(page, results)
    _samples(page, results)
    page.heading("Settings")
    chosen = {k: v for k, v in results.settings.items() if k not in _NOT_SETTINGS}
    page.table(("key", "value"), ((key, setting(value)) for key, value in chosen.items()), texts=2)
    page.heading("How to compute these numbers again")
    page.text("In DuckDB, with the views rows (completions/*.parquet) and steps (steps/*.parquet) of the output:")
    page.table(("number", "SQL"), ((m.label, m.sql) for m in measures_of(results) if m.sql), texts=2)
    return page


def headline(results: JobResults, values: Values) -> str:
    """The job in two sentences."""
    show = {m.key: written(values[m.key], m.unit) for m in MEASURES}
    status = results.summary.get("status", "unfinished")
    speed = "tokens/s at work" if len(results.steps) else "tokens/s"
    done = (
        f"{results.manifest.facts.get('model', 'model')}, {status}: {show['num_rows']} rows "
        f"({show['num_errors']} with an error), {show['num_output_tokens']} output tokens in {show['duration_s']}: "
        f"{show['tokens_per_s']} {speed}."
    )
    if not len(results.steps):
        return done
    return (
        f"{done} At most {show['peak_running']} sequences at once; the pool was used to "
        f"{show['mean_kv_use']} on average, {show['waste']} of used slots empty; {show['num_preemptions']} preemptions."
    )


def _attempts(page: Page, results: JobResults) -> None:
    attempts = [a for a in results.summary.get("attempts") or [] if isinstance(a, dict)]
    if len(attempts) < 2:
        return
    page.heading("Attempts")
    head = ("attempt", "started", "status", "rows", "output tokens", "time", "tokens/s of this time")
    page.table(head, (_attempt(a) for a in attempts), texts=3)


def _attempt(attempt: dict[str, Any]) -> list[str]:
    units = {"num_rows": Unit.COUNT, "num_output_tokens": Unit.COUNT, "duration_s": Unit.SECONDS}
    units |= {"tokens_per_s": Unit.RATE}
    names = [str(attempt.get(key)) for key in ("run_id", "started_at", "status")]
    return names + [written(attempt.get(key), unit) for key, unit in units.items()]


def _errors(page: Page, results: JobResults) -> None:
    page.heading("Errors")
    errors = results.errors()
    if not errors:
        page.text("None.")
    for kind, rows in errors.items():
        page.text(f"{len(rows):,} {kind}" + (", the first:" if len(rows) > ERRORS_A_KIND else ":"))
        shown = (
            (str(row["row_index"]), setting(row["id"]), str(row["error"])[:_CHARS]) for row in rows[:ERRORS_A_KIND]
        )
        page.table(("row", "id", "error"), shown, texts=3)


def _samples(page: Page, results: JobResults) -> None:
    page.heading("Some completions")
    page.text("The end of the prompt, then, marked, what the model wrote.")
    for row in results.samples(SAMPLES):
        prompt, text = row["prompt"] or "", row["completion"] or ""
        before = prompt if len(prompt) <= _CHARS else f"… {prompt[-_CHARS:]}"
        after = text if len(text) <= _CHARS else f"{text[:_CHARS]} …"
        page.sample(f"{row_name(row)}: {row['num_output_tokens']} tokens, {row['finish_reason']}", before, after)
