"""What continuous batching gains over static batches, by how much output lengths differ.

    python -m tests.benchmarks.continuous_vs_static

Same model, requests, batch limit and pool; only the policy differs. A static batch runs until its longest request ends,
and what ended before leaves its place empty. `time` is the static policy's time over the continuous one's (`scheduler:
prefill_first`), `steps` the same of steps: where a step costs the same at every batch size the two are equal, and on a
CPU, where a small batch is a cheaper step, the time gains less. `batch` is the mean number of running sequences.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any

from tests.benchmarks.arguments import add_common, chosen, repeats
from tests.benchmarks.runs import Bench, Run, median_run
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import Request, random_ids, sharegpt

PROMPT = 32
MEAN = 64
"""Prompt tokens and mean output tokens of the requests with made-up lengths."""

SPREADS: dict[str, Callable[[random.Random], int]] = {
    "all equal": lambda rng: MEAN,
    "uniform, within 50%": lambda rng: rng.randint(MEAN // 2, MEAN * 3 // 2),
    "uniform, within 100%": lambda rng: rng.randint(1, 2 * MEAN - 1),
    "exponential": lambda rng: min(8 * MEAN, 1 + int(rng.expovariate(1 / MEAN))),
    "one in 8 is long": lambda rng: 4 * MEAN if rng.random() < 1 / 8 else MEAN * 4 // 7,
}
SHAREGPT = "ShareGPT-like"


def requests_of_spread(name: str, count: int) -> list[Request]:
    """`count` requests whose output lengths are spread that way."""
    if name == SHAREGPT:
        return sharegpt(count)
    rng = random.Random(0)
    return [Request(random_ids(rng, PROMPT), SPREADS[name](rng)) for _ in range(count)]


def main(argv: list[str] | None = None) -> None:
    """A row a spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, repeat=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    options = parser.parse_args(argv)
    names = ("prefill_first", "static")
    benches = {n: Bench(options.model, scheduler=n, max_num_seqs=options.max_num_seqs) for n in names}
    print(f"{options.model}, {options.requests} requests, max_num_seqs={options.max_num_seqs}")
    table = Table("output lengths       ", "tok/s", "batch", "static tok/s", "batch", "time", "steps")
    for spread in (*SPREADS, SHAREGPT):
        requests = chosen(requests_of_spread(spread, options.requests), options)
        table.add(spread, *_compared(benches, requests, repeats(options)))


def _compared(benches: dict[str, Bench], requests: list[Request], rounds: int) -> list[Any]:
    """The two policies take turns; medians."""
    runs: dict[str, list[Run]] = {name: [] for name in benches}
    for bench in benches.values():
        bench.warm_up(requests)
    for _ in range(rounds):
        for name, bench in benches.items():
            runs[name].append(bench.run(requests))
    continuous, static = (median_run(r) for r in runs.values())
    cells = [f"{x:.1f}" for run in (continuous, static) for x in (run.rate, _mean_batch(run))]
    return [*cells, f"{static.seconds / continuous.seconds:.2f}x", f"{len(static.steps) / len(continuous.steps):.2f}x"]


def _mean_batch(run: Run) -> float:
    return statistics.mean(step.num_running for step in run.steps)


if __name__ == "__main__":
    main()
