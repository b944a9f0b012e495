"""The report of whatever a folder holds: one job, or a sweep."""

from __future__ import annotations

from ember.data.manifest import MANIFEST
from ember.data.store import open_store
from ember.report.job_report import report_job
from ember.report.sweep_report import report_sweep


def report(place: str, *, sort: str | None = None, to: str | None = None) -> str:
    """Write the report of an output or a sweep; returns what to print.

    Raises:
        UserError: it is neither, or something can't be read; JobError: it can't be written.
    """
    if sort is None and open_store(place).exists(MANIFEST):
        return report_job(place, to)
    return report_sweep(place, sort=sort or "tokens_per_s", to=to)
