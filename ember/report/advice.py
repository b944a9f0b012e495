"""A sweep in sentences: the answer first, then why, what it costs, and how far the numbers can be trusted."""

from __future__ import annotations

from collections.abc import Iterator

from ember.report.pool_advice import asks_for_a_pool, pool_advice, smallest_pool
from ember.report.ranking import NEAR, Ranking, label_of, on_the_clock, rankings, written_value
from ember.report.same_tokens import Apart, Comparison, Difference
from ember.report.sweep import Sweep, SweepJob, in_order
from ember.report.words import seconds, setting

SHORT_S = 5.0
"""Jobs that work less than these seconds are measured badly: warming up, and whatever else runs, weighs too much."""
_MOST_KEYS = 2
_MOST_GROUPS = 4
_ABOUT = 0.01
"""Numbers of steps that differ by less than this share are about the same work."""
_REASONS = (
    *("tokens_per_s", "mean_running", "mean_kv_use", "num_preemptions", "recomputed_share", "waste", "hit_rate"),
    *("num_steps", "p95_latency_s"),
)
_COSTS = ("p95_latency_s", "p95_ttft_s", "p99_step_s", "waste", "num_preemptions")


def advice(sweep: Sweep) -> Iterator[str]:
    """The sentences, the answer first."""
    found = rankings(sweep)
    if not found:
        yield "There is nothing to compare: fewer than two jobs of the same rows have this number."
        return
    for ranking in found[:_MOST_GROUPS]:
        yield from _answer(ranking)
    if len(found) > _MOST_GROUPS:
        yield f"The same for {len(found) - _MOST_GROUPS} more groups of jobs: see the table."
    yield from _cautions(found)
    for ranking in found if len(found) == 1 else ():
        yield _costs(ranking, chosen(ranking))
        yield from _ratios(ranking)


def recommended(sweep: Sweep) -> list[SweepJob]:
    """The jobs that the sentences name first."""
    return [chosen(ranking) for ranking in rankings(sweep)[:_MOST_GROUPS]]


def chosen(ranking: Ranking) -> SweepJob:
    """The job that the sentences recommend."""
    return smallest_pool(ranking) if asks_for_a_pool(ranking) else ranking.best


def _answer(ranking: Ranking) -> Iterator[str]:
    if asks_for_a_pool(ranking):
        yield from pool_advice(ranking)
        return
    yield _gain(ranking)
    if on_the_clock(ranking.sort) and (doubt := _doubt(ranking)):
        yield doubt
    if reasons := list(_against(ranking)):
        yield f"Against {ranking.label(ranking.last)}: {'; '.join(reasons)}."


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


def _cautions(found: list[Ranking]) -> Iterator[str]:
    """Why a number that hangs on the clock may say little."""
    if not on_the_clock(found[0].sort):
        return
    times = [job.values["duration_s"] for ranking in found for job in ranking.jobs]
    short = [value for value in times if value is not None and value < SHORT_S]
    if short:
        yield (
            f"Caution: {len(short)} of {len(times)} jobs worked less than {SHORT_S:g} s, the shortest "
            f"{seconds(min(short))}: too short to tell settings apart. Give them more rows."
        )
    known = [ranking.noise for ranking in found if ranking.noise is not None]
    if known:
        warning = "Caution: " if max(known) > NEAR else ""
        yield (
            f"{warning}Jobs that did the same work, step by step, differ by up to {max(known):.1%}: "
            "so much of any difference is noise."
        )


def _doubt(ranking: Ranking) -> str | None:
    """Why a gain may be none: the engine did as much for the last as for the best."""
    one, other = ranking.best.values["num_steps"], ranking.last.values["num_steps"]
    if not one or not other or abs(one - other) > _ABOUT * other or ranking.apart(ranking.last) <= ranking.tolerance:
        return None
    return (
        f"Caution: best and last took {_as_many(one, other)} for the same tokens. So either a step itself takes "
        "longer, or something else on the machine slowed one of them: run both again to know."
    )


def _as_many(one: float, other: float) -> str:
    return f"the same {one:,.0f} steps" if one == other else f"about as many steps, {one:,.0f} and {other:,.0f},"


def _gain(ranking: Ranking) -> str:
    best, last = ranking.best, ranking.last
    place = f" with {ranking.common}" if ranking.common else ""
    text = f"Best{place}: {ranking.label(best)}, {label_of(ranking.sort)} {ranking.written(best)}"
    near = ranking.near()
    if len(near) == len(ranking.jobs) and on_the_clock(ranking.sort):
        return f"{text}; but all jobs are within {ranking.tolerance:.0%} of it, which one run each can't tell apart."
    if len(ranking.jobs) > 2:
        second = ranking.jobs[1]
        text += f", against {ranking.written(second)} of the next ({ranking.label(second)}) and"
        end = f"of the last ({ranking.label(last)})"
    else:
        text, end = f"{text}, against", f"of {ranking.label(last)}"
    text += f" {ranking.written(last)} {end}{_times(best.value(ranking.sort), last.value(ranking.sort))}."
    if len(near) > 1 and on_the_clock(ranking.sort):
        text += f" {len(near) - 1} more within {ranking.tolerance:.0%} of it: one run each can't tell them apart."
    return text


def _against(ranking: Ranking) -> Iterator[str]:
    """The numbers that differ most between the best job and the last, and so may say why."""
    for key in _REASONS:
        one, other = ranking.best.values[key], ranking.last.values[key]
        if key == ranking.sort or (on_the_clock(key) and on_the_clock(ranking.sort)):
            continue
        if one is not None and other is not None and abs(one - other) > NEAR * max(abs(one), abs(other)):
            yield f"{label_of(key)} {written_value(key, one)} rather than {written_value(key, other)}"


def _costs(ranking: Ranking, job: SweepJob) -> str:
    parts = []
    pools = {other.pool_tokens for other in ranking.jobs if other.pool_tokens is not None}
    if job.pool_tokens is not None and not asks_for_a_pool(ranking):
        least = f" (the smallest tried: {min(pools):,.0f})" if len(pools) > 1 else ""
        parts.append(f"a pool of {job.pool_tokens:,.0f} tokens{least}")
    for key in _COSTS:
        value = job.values[key]
        known = [other for other in ranking.jobs if other.values[key] is not None]
        if key == ranking.sort or not value:
            continue
        least_job = min(known, key=lambda other: other.values[key] or 0.0)
        low = least_job.values[key] or 0.0
        lowest = f" (the lowest: {written_value(key, low)} with {ranking.label(least_job)})"
        parts.append(f"{label_of(key)} {written_value(key, value)}{lowest if value - low > NEAR * value else ''}")
    return f"What {ranking.label(job)} costs: {'; '.join(parts)}."


def _ratios(ranking: Ranking) -> Iterator[str]:
    """For a setting that had two values, what the best job's gives over the other, beside each value of the rest."""
    for key in ranking.keys:
        rest = [other for other in ranking.keys if other != key]
        first = setting(ranking.best.settings.get(key))
        others = list(dict.fromkeys(setting(job.settings.get(key)) for job in ranking.jobs))
        others.remove(first)
        if len(others) != 1 or not 1 <= len(rest) <= _MOST_KEYS:
            continue
        numbers = {(setting(j.settings.get(key)), j.label(rest)): ranking.at_best[j.name] for j in ranking.jobs}
        labels = dict.fromkeys(job.label(rest) for job in in_order(ranking.jobs, rest))
        ratios = [
            f"{one / other:.2f} with {label}"
            for label in labels
            if (one := numbers.get((first, label))) and (other := numbers.get((others[0], label)))
        ]
        if ratios:
            yield f"{label_of(ranking.sort)}, {key}={first} over {others[0]}: {', '.join(ratios)}."


def _differs(found: Difference) -> str:
    sample = f" (sample {found.sample_index})" if found.sample_index else ""
    ends = [f"{tokens[found.position : found.position + 4]}" for tokens in found.tokens]
    return (
        f"Tokens differ: first in row {found.row_index}{sample}, from output token {found.position} on: "
        f"{ends[0]} in {found.one.name}, {ends[1]} in {found.other.name}."
    )


def _times(one: float | None, other: float | None) -> str:
    high, low = max(one or 0.0, other or 0.0), min(one or 0.0, other or 0.0)
    return f", a factor of {high / low:.2f}" if low > 0 else ""
