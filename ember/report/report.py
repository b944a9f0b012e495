"""The report of whatever a folder holds: one job, or a sweep."""

from __future__ import annotations

import sys
import traceback

from ember.data.manifest import MANIFEST
from ember.data.store import open_store
from ember.errors import UserError
from ember.report.drawing import check_drawing
from ember.report.job_report import report_job
from ember.report.sweep import check_sort
from ember.report.sweep_report import report_sweep


def report(place: str, *, sort: str | None = None, to: str | None = None) -> str:
    """Write the report of an output or a sweep; returns what to print.

    Raises:
        UserError: it is neither, or something can't be read; JobError: it can't be written.
    """
    if sort is None and open_store(place).exists(MANIFEST):
        return report_job(place, to)
    return report_sweep(place, sort=sort, to=to)


def check_report(wanted: bool, sort: str | None) -> None:
    """Nothing, if the report that a job asks for can be made once it is done.

    Args:
        sort: its `report_sort`.

    Raises:
        UserError: matplotlib is not installed, or `sort` is no number of a report.
    """
    if sort is not None:
        check_sort("report_sort=", sort)
    if wanted:
        check_drawing()


def report_at_the_end(place: str) -> None:
    """Write the report of a job or sweep that has just finished, and say where; its results outlive any failure."""
    try:
        *said, page = report(place).splitlines()
        for answer in said[:1]:  # of a sweep
            print(f"  {'answer':<12} {answer}")
        print(f"  {'report':<12} {page}", flush=True)
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        print(f"warning: there is no report ({error}); to try again: ember report {place}", file=sys.stderr)
