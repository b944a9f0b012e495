"""The jobs of a sweep side by side: which settings varied, and what each job measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ember.data.manifest import MANIFEST, Manifest
from ember.data.own_files import REPORT
from ember.data.store import Store, open_store
from ember.data.sweep_note import read_sweep_note
from ember.errors import UserError
from ember.report.columns import Columns, peak
from ember.report.measures import BY_KEY, MEASURES, Values, measure
from ember.report.results import JobResults
from ember.report.words import setting

_NOT_VARIED = frozenset(("output", "progress", "report", "report_sort", "shard"))
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(tok|KiB|MiB|GiB|TiB)?")
_FACTORS = {None: 1, "tok": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SPEED = "tokens_per_s"
"""What decides, if nothing else is asked for."""
POOL = "pool_tokens"
"""The one column of the table that is no measure: token slots in the pool."""


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep.

    Attributes:
        name: of its folder.
        settings: all, by dotted key.
        values: its measures by key.
        pool_tokens: token slots in its pool; None before the first step. `pool_bytes` is their size, if it is known.
    """

    name: str
    store: Store
    manifest: Manifest
    settings: dict[str, Any]
    values: Values
    pool_tokens: float | None
    pool_bytes: float | None
    status: str

    @staticmethod
    def of(name: str, store: Store) -> SweepJob:
        """Read a job's output, and keep only what a comparison needs."""
        results = JobResults.of(store)
        blocks, size = peak(Columns(results.steps)["blocks_total"]), results.settings.get("block_size")
        pool_tokens = None if blocks is None or size is None else blocks * size
        token_bytes = results.manifest.facts.get("kv_bytes_per_token")
        return SweepJob(
            name=name,
            store=store,
            manifest=results.manifest,
            settings=results.settings,
            values=measure(results),
            pool_tokens=pool_tokens,
            pool_bytes=None if pool_tokens is None or token_bytes is None else pool_tokens * token_bytes,
            status=str(results.summary.get("status", "unfinished")),
        )

    def value(self, key: str) -> float | None:
        """A measure, or `pool_tokens`."""
        return self.pool_tokens if key == POOL else self.values[key]

    def label(self, keys: Iterable[str]) -> str:
        """`block_size=16 pool_size=1024tok`; the folder's name if nothing varied."""
        return " ".join(f"{key}={setting(self.settings.get(key))}" for key in keys) or self.name


@dataclass(frozen=True, slots=True)
class Sweep:
    """All jobs of a sweep.

    Attributes:
        jobs: sorted, best first.
        keys: the settings that varied, those with most values first.
        sort: the measure that `jobs` are sorted by.
        absent: jobs that left no results, by folder, and how they ended as far as it is known.
    """

    store: Store
    jobs: list[SweepJob]
    keys: list[str]
    sort: str
    absent: dict[str, str]

    @staticmethod
    def open(place: str, sort: str | None = None) -> Sweep:
        """Read the jobs in a folder or URL.

        Args:
            sort: None is what the jobs' own `report_sort` asks for.

        Raises:
            UserError: there is none, `sort` is no measure, or a part can't be read.
        """
        if sort is not None:
            check_sort("--sort ", sort)
        store = open_store(place)
        folders = [name for name in store.names() if name != REPORT and not name.startswith((".", "old-"))]
        found = [name for name in folders if store.sub(name).exists(MANIFEST)]
        if not found:
            raise UserError(f"{place} holds no manifest.json, nor do its folders; name the output of a job or sweep")
        jobs = [SweepJob.of(name, store.sub(name)) for name in found]
        bare = [name for name in folders if "=" in name or "." not in name]
        ends = dict.fromkeys(bare, "no results") | read_sweep_note(store)
        absent = {name: end for name, end in ends.items() if name not in found}
        decides = sort or asked_sort(jobs)
        return Sweep(store, ranked(jobs, decides), varied_keys(jobs), decides, absent)

    def values_of(self, key: str) -> list[Any]:
        """The values that a setting had, in order of size."""
        return ordered(job.settings.get(key) for job in self.jobs)

    def table(self) -> pa.Table:
        """A row a job: the settings that varied, then every measure."""
        jobs = self.jobs
        columns: dict[str, list[Any]] = {"job": [job.name for job in jobs], "status": [job.status for job in jobs]}
        columns |= {key: _plain([job.settings.get(key) for job in jobs]) for key in self.keys}
        columns[POOL] = [job.pool_tokens for job in jobs]
        columns |= {m.key: [job.values[m.key] for job in jobs] for m in MEASURES}
        numbers = {POOL, *BY_KEY}
        return pa.table({key: pa.array(c, pa.float64() if key in numbers else None) for key, c in columns.items()})


def check_sort(name: str, sort: str) -> None:
    """Nothing, if `sort` is a number that jobs can be compared by.

    Args:
        name: of the setting, with what stands between it and its value.

    Raises:
        UserError: it is none.
    """
    if sort != POOL and sort not in BY_KEY:
        raise UserError(f"{name}{sort}: no such number; there are: {', '.join((*BY_KEY, POOL))}")


def asked_sort(jobs: Sequence[SweepJob]) -> str:
    """The number by which all jobs ask to be compared; their speed, if they don't agree on one that is known."""
    asked = {job.settings.get("report_sort") for job in jobs}
    (one,) = asked if len(asked) == 1 else (None,)
    return one if one == POOL or one in BY_KEY else SPEED


def ranked(jobs: Sequence[SweepJob], sort: str) -> list[SweepJob]:
    """The best first; where less is better, or neither is, the least. Jobs that lack the number go last."""
    sign = -1.0 if sort != POOL and BY_KEY[sort].more_is_better else 1.0
    return sorted(jobs, key=lambda job: (job.value(sort) is None, sign * (job.value(sort) or 0.0), job.name))


def in_order(jobs: Sequence[SweepJob], keys: Sequence[str]) -> list[SweepJob]:
    """The jobs by the values of these settings."""
    places = {key: list(map(setting, ordered(job.settings.get(key) for job in jobs))) for key in keys}
    return sorted(jobs, key=lambda job: [places[key].index(setting(job.settings.get(key))) for key in keys])


def varied_keys(jobs: Sequence[SweepJob]) -> list[str]:
    """The settings that are not the same in all jobs, those with most values first."""
    keys = dict.fromkeys(key for job in jobs for key in job.settings if key not in _NOT_VARIED)
    counts = {key: len({setting(job.settings.get(key)) for job in jobs}) for key in keys}
    return sorted((key for key in keys if counts[key] > 1), key=lambda key: -counts[key])


def ordered(values: Iterable[Any]) -> list[Any]:
    """Different values: numbers and sizes (`1024tok`, `2GiB`) by size, before all others by name."""
    different = {setting(value): value for value in values}
    return [different[name] for name in sorted(different, key=_order)]


def _order(name: str) -> tuple[int, float, str]:
    match = _SIZE.fullmatch(name)
    return (1, 0.0, name) if match is None else (0, float(match[1]) * _FACTORS[match[2]], name)


def _plain(values: list[Any]) -> list[Any]:
    """Values that a column can hold: as they are if all are of one simple type, else as text."""
    kinds = {type(value) for value in values if value is not None}
    return values if len(kinds) == 1 and kinds <= {int, float, str, bool} else [setting(value) for value in values]
