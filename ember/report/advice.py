"""A sweep in sentences: the best setting, what it gains, why, what it costs, and a cheaper one nearly as good."""

from __future__ import annotations

from collections.abc import Iterator

from ember.report.measures import BY_KEY
from ember.report.same_tokens import Apart, Comparison, Difference
from ember.report.sweep import POOL, Sweep, SweepJob, in_order
from ember.report.words import UNKNOWN, Unit, seconds, setting, written

NEAR = 0.05
"""Jobs whose numbers differ by less than this share are taken as equal: one run each is no better measured."""
SHORT_S = 5.0
"""Jobs that work less than these seconds are measured badly: warming up, and whatever else runs, weighs too much."""
_MOST_KEYS = 2
_MOST_GROUPS = 4
_WORK = ("num_steps", "num_prompt_tokens", "num_output_tokens")
_REASONS = ("mean_running", "mean_kv_use", "num_preemptions", "num_recomputed_tokens", "waste", "hit_rate", "num_steps")
_COSTS = ("p95_latency_s", "p95_ttft_s", "waste", "num_preemptions")


def advice(sweep: Sweep) -> Iterator[str]:
    """The sentences, the answer first."""
    ranked = [job for job in sweep.jobs if job.value(sweep.sort) is not None]
    if len(ranked) < 2:
        yield "There is nothing to compare: fewer than two jobs have this number."
        return
    best, worst = ranked[0], ranked[-1]
    yield _gain(sweep, ranked)
    yield from _cautions(sweep, ranked)
    if reasons := list(_against(best, worst)):
        yield f"Against the last, {worst.label(sweep.keys)}: {'; '.join(reasons)}."
    yield _costs(sweep, ranked)
    if cheaper := _cheaper(sweep, ranked):
        yield cheaper
    yield from _ratios(sweep, best)


def unfinished(sweep: Sweep) -> Iterator[str]:
    """Which jobs are not in the table, or in it with a part of their rows."""
    if sweep.absent:
        names = ", ".join(f"{name} ({end})" for name, end in sweep.absent.items())
        yield f"{len(sweep.absent)} of {len(sweep.jobs) + len(sweep.absent)} jobs left no results: {names}."
    partial = [f"{job.name} ({job.status})" for job in sweep.jobs if job.status != "finished"]
    if partial:
        yield f"{len(partial)} of the {len(sweep.jobs)} jobs in the table did not finish: {', '.join(partial)}."


def same_tokens(comparisons: list[Comparison], keys: list[str], between: list[Apart]) -> Iterator[tuple[str, bool]]:
    """What the comparison of tokens found, each sentence with whether it is as it should be."""
    if keys:
        yield (
            f"Jobs that differ in {', '.join(keys)}, which may change tokens, are not compared with each other: "
            "a difference is no error.",
            True,
        )
    if between:
        shown = [_apart(one) for one in between[:_MOST_GROUPS]]
        more = f"; and {len(between) - len(shown)} more" if len(between) > len(shown) else ""
        yield f"For information, tokens against {between[0].one.name}: {'; '.join(shown)}{more}.", True
    for comparison in comparisons:
        if comparison.difference is not None:
            yield _differs(comparison.difference), False
    alike = [comparison for comparison in comparisons if comparison.difference is None]
    if alike:
        yield _identical(alike), True


def _identical(groups: list[Comparison]) -> str:
    rows = min(group.num_compared for group in groups)
    some = "" if all(group.num_compared == group.num_rows for group in groups) else " that they have so far"
    if len(groups) == 1:
        return f"All {len(groups[0].jobs)} jobs gave identical tokens in all {rows:,} rows{some}."
    jobs = sum(len(group.jobs) for group in groups)
    return f"Within each of {len(groups)} groups, {jobs} jobs in all, tokens are identical in all {rows:,} rows{some}."


def _apart(found: Apart) -> str:
    if found.first_row is None:
        return f"the same in all {found.num_compared:,} rows in {found.other.name}"
    return (
        f"others in {found.num_different:,} of {found.num_compared:,} rows, the first row {found.first_row}, "
        f"in {found.other.name}"
    )


def _cautions(sweep: Sweep, ranked: list[SweepJob]) -> Iterator[str]:
    """Why a number that hangs on the clock may say little."""
    if sweep.sort == POOL or BY_KEY[sweep.sort].unit not in (Unit.RATE, Unit.SECONDS):
        return
    times = [job.values["duration_s"] for job in ranked if job.values["duration_s"] is not None]
    short = [value for value in times if value < SHORT_S]
    if short:
        yield (
            f"Caution: {len(short)} of {len(ranked)} jobs worked less than {SHORT_S:g} s, the shortest "
            f"{seconds(min(short))}: too short to tell settings apart. Give them more rows."
        )
    best, worst = ranked[0], ranked[-1]
    same_work = best.values["num_steps"] and all(best.values[key] == worst.values[key] for key in _WORK)
    if same_work and _share(sweep, best, worst) > NEAR:
        yield (
            "Caution: best and last took the same number of steps for the same tokens. So either a step itself takes "
            "longer, or something else on the machine slowed one of them: run both again to know."
        )


def _gain(sweep: Sweep, ranked: list[SweepJob]) -> str:
    best, second, worst = ranked[0], ranked[1], ranked[-1]
    first, next_one, last = (_written(sweep.sort, job.value(sweep.sort)) for job in (best, second, worst))
    text = f"Best: {best.label(sweep.keys)}, {_label(sweep.sort)} {first}"
    near = [job for job in ranked[1:] if _share(sweep, best, job) <= NEAR]
    if len(near) == len(ranked) - 1:
        return f"{text}; but all jobs are within {NEAR:.0%} of each other, which one run each can't tell apart."
    text += f", against {next_one} of the next ({second.label(sweep.keys)}) and" if len(ranked) > 2 else ", against"
    times = _times(best.value(sweep.sort), worst.value(sweep.sort))
    text += f" {last} of the last ({worst.label(sweep.keys)}){times}."
    if near:
        text += f" {len(near)} more within {NEAR:.0%} of it: one run each can't tell them apart."
    return text


def _against(best: SweepJob, worst: SweepJob) -> Iterator[str]:
    """The numbers that differ most between two jobs, and so may say why."""
    for key in _REASONS:
        one, other = best.values[key], worst.values[key]
        if one is not None and other is not None and abs(one - other) > NEAR * max(abs(one), abs(other)):
            yield f"{_label(key)} {_written(key, one)} rather than {_written(key, other)}"


def _costs(sweep: Sweep, ranked: list[SweepJob]) -> str:
    best = ranked[0]
    parts = []
    pools = {job.pool_tokens for job in ranked if job.pool_tokens is not None}
    if best.pool_tokens is not None:
        least = f" (the smallest tried: {min(pools):,.0f})" if len(pools) > 1 else ""
        parts.append(f"a pool of {best.pool_tokens:,.0f} tokens{least}")
    for key in _COSTS:
        known = [job for job in ranked if job.values[key] is not None]
        if key == sweep.sort or not known or best.values[key] is None:
            continue
        least_job = min(known, key=lambda job: job.values[key] or 0.0)
        lower = (best.values[key] or 0.0) - (least_job.values[key] or 0.0) > NEAR * (best.values[key] or 0.0)
        other = f" (the lowest: {_written(key, least_job.values[key])})" if lower else ""
        parts.append(f"{_label(key)} {_written(key, best.values[key])}{other}")
    return f"What it costs: {'; '.join(parts)}."


def _cheaper(sweep: Sweep, ranked: list[SweepJob]) -> str | None:
    """The job with the smallest pool that is nearly as good."""
    best = ranked[0]
    if best.pool_tokens is None:
        return None
    near = [job for job in ranked if _share(sweep, best, job) <= NEAR and job.pool_tokens is not None]
    cheap = min(near, key=lambda job: (job.pool_tokens, _share(sweep, best, job)))
    if (cheap.pool_tokens or 0.0) >= best.pool_tokens:
        return None
    return (
        f"The smallest pool within {NEAR:.0%} of the best: {cheap.label(sweep.keys)}, {_label(sweep.sort)} "
        f"{_written(sweep.sort, cheap.value(sweep.sort))} with a pool of {cheap.pool_tokens:,.0f} tokens, "
        f"{(cheap.pool_tokens or 0.0) / best.pool_tokens:.0%} of the best one's."
    )


def _ratios(sweep: Sweep, best: SweepJob) -> Iterator[str]:
    """For a setting that had two values, what the best job's gives over the other, beside each value of the rest."""
    for key in sweep.keys:
        rest = [other for other in sweep.keys if other != key]
        chosen = setting(best.settings.get(key))
        others = [name for name in map(setting, sweep.values_of(key)) if name != chosen]
        if len(others) != 1 or not 1 <= len(rest) <= _MOST_KEYS:
            continue
        numbers = {(setting(j.settings.get(key)), j.label(rest)): j.value(sweep.sort) for j in sweep.jobs}
        labels = dict.fromkeys(job.label(rest) for job in in_order(sweep, rest))
        ratios = [
            f"{one / other:.2f} with {label}"
            for label in labels
            if (one := numbers.get((chosen, label))) and (other := numbers.get((others[0], label)))
        ]
        if ratios:
            yield f"{_label(sweep.sort)}, {key}={chosen} over {others[0]}: {', '.join(ratios)}."


def _differs(found: Difference) -> str:
    sample = f" (sample {found.sample_index})" if found.sample_index else ""
    ends = [f"{tokens[found.position : found.position + 4]}" for tokens in found.tokens]
    return (
        f"Tokens differ: first in row {found.row_index}{sample}, from output token {found.position} on: "
        f"{ends[0]} in {found.one.name}, {ends[1]} in {found.other.name}."
    )


def _share(sweep: Sweep, best: SweepJob, job: SweepJob) -> float:
    """How far a job is from the best, as a share of the larger number."""
    one, other = best.value(sweep.sort) or 0.0, job.value(sweep.sort) or 0.0
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


def _times(one: float | None, other: float | None) -> str:
    high, low = max(one or 0.0, other or 0.0), min(one or 0.0, other or 0.0)
    return f", a factor of {high / low:.2f}" if low > 0 else ""


def _label(key: str) -> str:
    return "pool tokens" if key == POOL else BY_KEY[key].label


def _written(key: str, value: float | None) -> str:
    return UNKNOWN if value is None else written(value, Unit.COUNT if key == POOL else BY_KEY[key].unit)
