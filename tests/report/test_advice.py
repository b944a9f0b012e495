"""What a sweep's page recommends, from made-up numbers: the answer must follow from the study, not from the noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ember.data.store import open_store
from ember.report.advice import advice, recommended
from ember.report.measures import MEASURES
from ember.report.sweep import Sweep, SweepJob, asked_sort, ranked, varied_keys


@dataclass(frozen=True)
class Results:
    """Stands in for a manifest: jobs of other `rows` have other results."""

    fingerprint: dict[str, Any]


def job(
    speed: float, *, steps: int = 100, pool: int = 1024, rows: str = "", waste: float = 0.03, **settings
) -> SweepJob:
    chosen = {"pool_size": f"{pool}tok"} | settings
    values = dict.fromkeys((m.key for m in MEASURES), 1.0)
    values |= {"tokens_per_s": speed, "num_steps": float(steps), "waste": waste, "duration_s": 60.0}
    values |= {"mean_running": 6400.0 / steps, "num_preemptions": 0.0, "recomputed_share": 0.0}
    name = ",".join(f"{key}={value}" for key, value in chosen.items())
    return SweepJob(
        name, open_store("."), Results({"rows": rows}), chosen, values, float(pool), 1024.0 * pool, "finished"
    )


def sweep_of(*jobs: SweepJob, sort: str = "tokens_per_s") -> Sweep:
    return Sweep(open_store("."), ranked(jobs, sort), varied_keys(jobs), sort, {})


def pools(*speeds_and_steps: tuple[float, int]) -> Sweep:
    return sweep_of(*(job(speed, steps=n, pool=512 << i) for i, (speed, n) in enumerate(speeds_and_steps)))


def test_the_smallest_pool_at_95_percent_comes_first() -> None:
    """The page named the fastest pool, which is nearly always the largest: the study asks for the smallest."""
    sweep = pools((300, 400), (600, 200), (970, 110), (1000, 100))
    said = list(advice(sweep))
    assert said[0] == (
        "Smallest pool at 95% of peak speed: pool_size=2048tok, 970.0 output tokens/s at work: 97% of the fastest, "
        "pool_size=4096tok with 1,000.0."
    )
    assert said[1] == (
        "It takes a pool of 2,048 tokens (2.0 MiB), which saves 50% of the memory of the largest tried (4,096 tokens "
        "(4.0 MiB)) and costs 3% of the peak speed."
    )
    assert said[2].startswith(
        "The next smaller, pool_size=1024tok, gives 60% of the peak speed: sequences at once, mean "
    )
    assert [one.settings["pool_size"] for one in recommended(sweep)] == ["2048tok"]


def test_a_pool_that_was_disturbed_counts_as_its_equal() -> None:
    """Two pools with the very same steps differ in time by noise alone: the smaller one will do."""
    sweep = pools((600, 200), (880, 100), (1000, 100))
    said = list(advice(sweep))
    assert said[0].startswith(
        "Smallest pool at 95% of peak speed: pool_size=1024tok, 880.0 output tokens/s at work: the same work"
    )
    assert "Caution: Jobs that did the same work, step by step, differ by up to 12.0%" in " ".join(said)


def test_a_close_call_is_said() -> None:
    said = " ".join(advice(pools((600, 200), (940, 110), (1000, 100))))
    assert "a close call, near 95%, that a second run may decide otherwise: pool_size=1024tok (94.0%)." in said
    assert "It is the largest pool tried: a larger one may be faster still." in said


def test_a_pool_that_was_never_full() -> None:
    """A larger pool was said to be perhaps faster, though the largest tried had never been more than 60% full."""
    sweep = pools((600, 200), (1000, 100))
    largest = sweep.jobs[0]
    largest.values["peak_kv_use"] = 0.6
    said = " ".join(advice(sweep))
    assert "its running rows held 60% of it at most, so that about 614 tokens would do, and more gain nothing." in said
    assert "may be faster still" not in said


def test_the_smallest_tried_may_be_too_large() -> None:
    assert "No smaller pool was tried" in " ".join(advice(pools((990, 110), (1000, 100))))


def test_block_sizes_beside_the_chosen_pool() -> None:
    """A newcomer must see which block size to use with that pool, and whether it matters."""
    speeds = {(4, 1024): 500, (16, 1024): 520, (64, 1024): 300, (4, 4096): 985, (16, 4096): 1000, (64, 4096): 800}
    jobs = [job(s, steps=1000 - i, pool=p, block_size=b) for i, ((b, p), s) in enumerate(speeds.items())]
    said = list(advice(sweep_of(*jobs)))
    assert said[0].startswith("Smallest pool at 95% of peak speed: block_size=16 pool_size=4096tok, 1,000.0")
    assert (
        "block_size with a pool of 4,096 tokens: 16 gives 1,000.0 tokens/s (KV waste 3.0%), 4 gives 985.0 tokens/s "
        "(KV waste 3.0%), 64 gives 800.0 tokens/s (KV waste 3.0%)."
    ) in said


def test_speeds_of_different_rows_are_not_compared() -> None:
    """Of rows of equal and of real lengths, equal ones run faster: that says nothing of the two policies."""
    jobs = [
        job(s, steps=n, rows=r, lengths=r, scheduler=p)
        for s, n, r, p in (
            (900, 100, "equal", "mixed"),
            (890, 100, "equal", "static"),
            (800, 110, "real", "mixed"),
            (500, 200, "real", "static"),
        )
    ]
    said = list(advice(sweep_of(*jobs)))
    assert said[0].startswith(
        "Best with lengths=equal: scheduler=mixed, output tokens/s at work 900.0; but all jobs are within 5%"
    )
    assert said[1].startswith(
        "Best with lengths=real: scheduler=mixed, output tokens/s at work 800.0, against 500.0 of scheduler=static"
    )
    assert "a factor of 1.60" in said[1] and "steps 110 rather than 200" in said[2]
    assert len(recommended(sweep_of(*jobs))) == 2


def test_groups_that_no_setting_tells_apart_are_not_named_after_a_job() -> None:
    """Other data, say: `Best with pool_size=1024tok,block_size=4:` was said of a group of several block sizes."""
    numbers = ((900, "old", 4), (500, "old", 16), (800, "new", 4), (400, "new", 16))
    said = list(advice(sweep_of(*(job(s, rows=r, block_size=b) for s, r, b in numbers))))
    assert [text.split(", against")[0] for text in said if text.startswith("Best")] == [
        "Best: block_size=4, output tokens/s at work 900.0",
        "Best: block_size=4, output tokens/s at work 800.0",
    ]


def test_a_gain_without_fewer_steps_is_doubted() -> None:
    """Rows of equal length take a static batch as many steps: 6% more tokens/s was given as what the policy gains."""
    said = " ".join(advice(sweep_of(job(1230, steps=871, policy="mixed"), job(1158, steps=868, policy="static"))))
    assert "Caution: best and last took about as many steps, 871 and 868, for the same tokens." in said


def test_counts_are_no_noise() -> None:
    """Of a waste of 3.0% and 3.1% the page said that one run each can't tell them apart."""
    sweep = sweep_of(job(900, waste=0.030, block_size=4), job(900, waste=0.031, block_size=8), sort="waste")
    said = " ".join(advice(sweep))
    assert said.startswith("Best: block_size=4, KV waste 3.0%, against 3.1% of block_size=8, a factor of 1.03.")
    assert "tell" not in said and "noise" not in said


@pytest.mark.parametrize(("asked", "sort"), [("waste", "waste"), (None, "tokens_per_s"), ("bogus", "tokens_per_s")])
def test_jobs_may_say_what_decides(asked: str | None, sort: str) -> None:
    assert asked_sort([job(1, report_sort=asked), job(2, report_sort=asked)]) == sort
