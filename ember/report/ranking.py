"""Jobs that computed the same rows, best first by one number, and how much of their differences is noise.

Each job ran once, beside whatever else the machine did. Two jobs whose settings differ in nothing but the pool, and
which took the same steps, did the same work: what they differ by in time is noise, and the faster one says more of what
the settings can do. So a job counts with the best number of those that did its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ember.report.measures import BY_KEY
from ember.report.same_tokens import same_results
from ember.report.sweep import POOL, Sweep, SweepJob
from ember.report.words import UNKNOWN, Unit, setting, written

NEAR = 0.05
"""Jobs whose times differ by less than this share are taken as equal: one run each is no better measured."""
_WORK = ("num_steps", "num_prompt_tokens", "num_output_tokens", "num_recomputed_tokens", "mean_running", "hit_rate")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Two or more jobs whose tokens are to be the same and that all have the number.

    Attributes:
        jobs: the best first.
        keys: the settings that vary among them.
        common: what of the sweep's varied settings they share, as text; may be empty.
        sort: the number.
        at_best: each job's number, or the best one of the jobs that did the same work.
        noise: the largest share by which jobs that did the same work differ; None if no two did, or no clock matters.
    """

    jobs: list[SweepJob]
    keys: list[str]
    common: str
    sort: str
    at_best: dict[str, float]
    noise: float | None

    @staticmethod
    def of(jobs: Sequence[SweepJob], keys: list[str], common: str, sort: str) -> Ranking:
        """Rank jobs that are in order already."""
        at_best = {job.name: job.value(sort) or 0.0 for job in jobs}
        noise: float | None = None
        if on_the_clock(sort):
            for equals in _same_work(jobs, [key for key in keys if key != "pool_size"]):
                best, last = (job.value(sort) or 0.0 for job in (equals[0], equals[-1]))
                at_best |= dict.fromkeys((job.name for job in equals), best)
                noise = max(noise or 0.0, _apart(best, last)) if len(equals) > 1 else noise
        return Ranking(list(jobs), keys, common, sort, at_best, noise)

    @property
    def best(self) -> SweepJob:
        """The first."""
        return self.jobs[0]

    @property
    def last(self) -> SweepJob:
        """The last."""
        return self.jobs[-1]

    @property
    def tolerance(self) -> float:
        """The share below which differences say nothing: of counts, which come out the same every time, none."""
        return max(NEAR, self.noise or 0.0) if on_the_clock(self.sort) else 0.0

    def apart(self, job: SweepJob) -> float:
        """How far a job is from the best, as a share of the larger number."""
        return _apart(self.at_best[self.best.name], self.at_best[job.name])

    def near(self) -> list[SweepJob]:
        """Those that can't be told from the best, the best itself among them."""
        return [job for job in self.jobs if self.apart(job) <= self.tolerance]

    def label(self, job: SweepJob) -> str:
        """What sets a job apart from the others here."""
        return job.label(self.keys)

    def written(self, job: SweepJob) -> str:
        """The job's own number."""
        return written_value(self.sort, job.value(self.sort))


def rankings(sweep: Sweep) -> list[Ranking]:
    """The sweep's jobs as one ranking for each set of results: speeds of different rows are not compared."""
    known = [job for job in sweep.jobs if job.value(sweep.sort) is not None]
    groups = same_results(known)
    outer = [key for key in sweep.keys if all(len({setting(j.settings.get(key)) for j in g}) == 1 for g in groups)]
    outer = outer if len(groups) > 1 else []  # may be empty for several too: other data, say, is no setting
    inner = [key for key in sweep.keys if key not in outer]
    return [
        Ranking.of(group, inner, group[0].label(outer) if outer else "", sweep.sort)
        for group in groups
        if len(group) > 1
    ]


def on_the_clock(key: str) -> bool:
    """Whether a number of the table comes out differently every time."""
    return key != POOL and BY_KEY[key].hangs_on_the_clock


def label_of(key: str) -> str:
    """A number's name for people."""
    return "pool tokens" if key == POOL else BY_KEY[key].label


def written_value(key: str, value: float | None) -> str:
    """A number of the table as people read it."""
    return UNKNOWN if value is None else written(value, Unit.COUNT if key == POOL else BY_KEY[key].unit)


def _same_work(jobs: Sequence[SweepJob], keys: Sequence[str]) -> list[list[SweepJob]]:
    """The jobs by what they did and by the settings that a step's time may depend on."""
    groups: dict[tuple[object, ...], list[SweepJob]] = {}
    for job in jobs:
        alone = job.name if job.values["num_steps"] is None else ""
        groups.setdefault((alone, job.label(keys) if keys else "", *map(job.values.get, _WORK)), []).append(job)
    return list(groups.values())


def _apart(one: float, other: float) -> float:
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)
