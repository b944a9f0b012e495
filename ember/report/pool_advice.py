"""How large a pool to give: the smallest that comes within 5% of the best speed, what it saves and what it costs.

A larger pool is rarely slower, so `the fastest` would always be the largest, or, among those that are large enough, the
one that was disturbed least.
"""

from __future__ import annotations

from collections.abc import Iterator

from ember.report.ranking import NEAR, Ranking, label_of, written_value
from ember.report.sweep import SPEED, SweepJob
from ember.report.words import setting, size

_REASONS = ("mean_running", "num_preemptions", "recomputed_share", "hit_rate")
_BESIDE = ("waste",)
_MARGIN = 0.02
"""A share this near to 95% may come out on the other side in a second run, where no noise is known."""
_MOST_VALUES = 8
_FULL = 0.95
"""The last few blocks of a pool may be too few for any row."""


def asks_for_a_pool(ranking: Ranking) -> bool:
    """Whether the jobs are ranked by speed and differ in the size of their pools."""
    return ranking.sort == SPEED and len({job.pool_tokens for job in ranking.jobs} - {None}) > 1


def smallest_pool(ranking: Ranking) -> SweepJob:
    """The job to copy; of several with as small a pool the fastest."""
    enough = [job for job in ranking.jobs if ranking.apart(job) <= NEAR]
    return min(enough, key=lambda job: (_pool(job), ranking.apart(job)))


def pool_advice(ranking: Ranking) -> Iterator[str]:
    """The sentences, the answer first."""
    chosen = smallest_pool(ranking)
    yield _answer(ranking, chosen)
    yield _saving(ranking, chosen)
    yield from _smaller(ranking, chosen)
    yield from _larger(ranking, chosen)
    if close := _close(ranking, chosen):
        yield close
    yield from _others(ranking, chosen)


def _answer(ranking: Ranking, chosen: SweepJob) -> str:
    place = f" with {ranking.common}" if ranking.common else ""
    text = f"Smallest pool at {1 - NEAR:.0%} of peak speed{place}: {ranking.label(chosen)}, {ranking.written(chosen)} "
    text += label_of(SPEED)
    if chosen is ranking.best:
        return f"{text}, which is the peak."
    same = ranking.at_best[chosen.name] == ranking.at_best[ranking.best.name]
    why = "the same work, step by step, as" if same else f"{1 - ranking.apart(chosen):.0%} of"
    return f"{text}: {why} the fastest, {ranking.label(ranking.best)} with {ranking.written(ranking.best)}."


def _saving(ranking: Ranking, chosen: SweepJob) -> str:
    largest = max(ranking.jobs, key=_pool)
    cost = ranking.apart(chosen)
    costs = f"costs {cost:.0%} of the peak speed" if cost >= 0.005 else "costs no speed"
    if largest.pool_tokens == chosen.pool_tokens:
        return f"It takes a pool of {_memory(chosen)} and {costs}."
    share = 1 - _pool(chosen) / _pool(largest)
    return (
        f"It takes a pool of {_memory(chosen)}, which saves {share:.0%} of the memory of the largest tried "
        f"({_memory(largest)}) and {costs}."
    )


def _smaller(ranking: Ranking, chosen: SweepJob) -> Iterator[str]:
    """What the next smaller pool does, all else the same."""
    keys = [key for key in ranking.keys if key != "pool_size"]
    alike = [job for job in ranking.jobs if job.label(keys) == chosen.label(keys) or not keys]
    smaller = [job for job in alike if _pool(job) < _pool(chosen)]
    if not smaller:
        yield "No smaller pool was tried with these settings: one may do as well."
        return
    next_one = max(smaller, key=_pool)
    why = [
        f"{label_of(key)} {written_value(key, one)} rather than {written_value(key, other)}"
        for key in _REASONS
        if (one := next_one.values[key]) is not None
        and (other := chosen.values[key]) is not None
        and abs(one - other) > NEAR * max(abs(one), abs(other))
    ]
    speed = f"{1 - ranking.apart(next_one):.0%} of the peak speed"
    yield f"The next smaller, {ranking.label(next_one)}, gives {speed}{': ' if why else ''}{'; '.join(why)}."


def _larger(ranking: Ranking, chosen: SweepJob) -> Iterator[str]:
    """Whether there is more to gain, or less to give."""
    used = chosen.values["peak_kv_use"]
    if used is not None and used < _FULL and not chosen.values["num_preemptions"]:
        yield (
            f"It was never full: its running rows held {used:.0%} of it at most, so that about "
            f"{used * _pool(chosen):,.0f} tokens would do, and more gain nothing."
        )
    elif _pool(chosen) == max(map(_pool, ranking.jobs)):
        yield "It is the largest pool tried: a larger one may be faster still."


def _close(ranking: Ranking, chosen: SweepJob) -> str | None:
    """Which jobs would be chosen, or not, if their speed came out a little differently."""
    margin = _MARGIN if ranking.noise is None else ranking.noise
    doubtful = [
        f"{ranking.label(job)} ({1 - ranking.apart(job):.1%})"
        for job in ranking.jobs
        if ranking.apart(job) > 0 and abs(ranking.apart(job) - NEAR) < margin and _pool(job) <= _pool(chosen)
    ]
    if not doubtful:
        return None
    return f"Caution: a close call, near {1 - NEAR:.0%}, that a second run may decide otherwise: {', '.join(doubtful)}."


def _others(ranking: Ranking, chosen: SweepJob) -> Iterator[str]:
    """For every other setting that varied, what its values give, all else as chosen."""
    for key in ranking.keys:
        rest = [other for other in ranking.keys if other not in (key, "pool_size")]
        alike = [job for job in ranking.jobs if job.pool_tokens == chosen.pool_tokens]
        alike = [job for job in alike if not rest or job.label(rest) == chosen.label(rest)]
        if key == "pool_size" or not 1 < len(alike) <= _MOST_VALUES:
            continue
        values = ", ".join(_beside(ranking, key, job) for job in alike)
        low, high = (pick(ranking.at_best[job.name] for job in alike) for pick in (min, max))
        near = (
            f"; within {ranking.tolerance:.0%}, so that any of them will do"
            if high - low <= ranking.tolerance * high
            else ""
        )
        yield f"{key} with a pool of {_pool(chosen):,.0f} tokens: {values}{near}."


def _beside(ranking: Ranking, key: str, job: SweepJob) -> str:
    known = [f"{label_of(name)} {written_value(name, job.values[name])}" for name in _BESIDE if job.values[name]]
    also = f" ({', '.join(known)})" if known else ""
    return f"{setting(job.settings.get(key))} gives {ranking.written(job)} tokens/s{also}"


def _memory(job: SweepJob) -> str:
    """`4,096 tokens (24.0 MiB)`."""
    known = f" ({size(job.pool_bytes)})" if job.pool_bytes else ""
    return f"{_pool(job):,.0f} tokens{known}"


def _pool(job: SweepJob) -> float:
    """Tokens; a job of which nothing is known goes last."""
    return float("inf") if job.pool_tokens is None else job.pool_tokens
