"""Whether the jobs of a sweep gave identical tokens: settings of cache and batch must not change one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ember.report.results import completion_parts
from ember.report.sweep import SweepJob

KEYS = ("row_index", "sample_index")
Rows = dict[tuple[int, int], list[int]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row, by number, in which two jobs differ; `position` is that of the first other token."""

    row_index: int
    sample_index: int
    position: int
    one: SweepJob
    other: SweepJob
    tokens: tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Jobs of one fingerprint, which are to give the same rows.

    Attributes:
        jobs: compared with the first of them.
        num_rows: rows of the first job.
        num_compared: the least number of rows that a job shares with it.
        difference: None if all tokens are the same.
    """

    jobs: list[SweepJob]
    num_rows: int
    num_compared: int
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Apart:
    """Two jobs of different fingerprints, whose tokens may differ: in how many of the rows that both have.

    Attributes:
        first_row: the first by number; None if all are the same.
    """

    one: SweepJob
    other: SweepJob
    num_compared: int
    num_different: int
    first_row: int | None


def compare_tokens(jobs: Sequence[SweepJob]) -> list[Comparison]:
    """The comparisons, one for every fingerprint that several jobs with rows have.

    Raises:
        UserError: a part can't be read.
    """
    return [_compare(group) for group in same_results(_begun(jobs)) if len(group) > 1]


def between_groups(jobs: Sequence[SweepJob]) -> list[Apart]:
    """How the first job of each further fingerprint differs from the first job of all.

    Raises:
        UserError: a part can't be read.
    """
    firsts = [group[0] for group in same_results(_begun(jobs))]
    if len(firsts) < 2:
        return []
    first, *others = firsts
    rows = _by_row(_tokens(first))
    return [_apart(first, rows, other, _by_row(_tokens(other))) for other in others]


def result_keys(jobs: Sequence[SweepJob]) -> list[str]:
    """What varies among the jobs and may change tokens."""
    return sorted({key for job in jobs for key in jobs[0].manifest.changed(job.manifest.fingerprint)})


def same_results(jobs: Sequence[SweepJob]) -> list[list[SweepJob]]:
    """The jobs by fingerprint: those of one group are to give the same rows."""
    groups: dict[str, list[SweepJob]] = {}
    for job in jobs:
        groups.setdefault(json.dumps(job.manifest.fingerprint, sort_keys=True), []).append(job)
    return list(groups.values())


def _begun(jobs: Sequence[SweepJob]) -> list[SweepJob]:
    """Those that have rows to compare."""
    return [job for job in jobs if job.values["num_rows"]]


def _apart(one: SweepJob, ones: Rows, other: SweepJob, others: Rows) -> Apart:
    common = {row for row, _ in ones.keys() & others.keys()}
    different = {key[0] for key in ones.keys() & others.keys() if ones[key] != others[key]}
    return Apart(one, other, len(common), len(different), min(different, default=None))


def _compare(jobs: list[SweepJob]) -> Comparison:
    first = _tokens(jobs[0])
    compared, difference = len(first), None
    for job in jobs[1:]:
        other = _tokens(job)
        if other.equals(first):
            continue
        count, found = _first_difference(jobs[0], _by_row(first), job, _by_row(other))
        compared, difference = min(compared, count), difference or found
    return Comparison(jobs, len(first), compared, difference)


def _first_difference(one: SweepJob, ones: Rows, other: SweepJob, others: Rows) -> tuple[int, Difference | None]:
    """How many rows both have, and the first in which they differ."""
    common = sorted(ones.keys() & others.keys())
    for key in common:
        if ones[key] != others[key]:
            pairs = enumerate(zip(ones[key], others[key], strict=False))
            shorter = min(len(ones[key]), len(others[key]))
            position = next((i for i, (a, b) in pairs if a != b), shorter)
            return len(common), Difference(*key, position, one, other, (ones[key], others[key]))
    return len(common), None


def _tokens(job: SweepJob) -> pa.Table:
    parts = completion_parts(job.store, job.manifest)
    table = parts.read([*KEYS, "token_ids"])
    return table.sort_by([(key, "ascending") for key in KEYS]).combine_chunks() if len(table) else table


def _by_row(table: pa.Table) -> Rows:
    if not len(table):
        return {}
    columns: list[list[Any]] = [table[name].to_pylist() for name in (*KEYS, "token_ids")]
    return {(row, sample): tokens or [] for row, sample, tokens in zip(*columns, strict=True)}
