"""What the prefix cache saves where prompts share a template, and what it costs where they share nothing.

    python -m tests.benchmarks.prefix

512 prompts of a common template of 256 tokens and 32 tokens of their own; the same with nothing in common; and w2.
Each runs with an empty cache and without one, by turns. `prefill` counts the prompt tokens that were computed, `hits`
is the share that was found, `ratio` the speed over that without the cache, `engine` the share of time outside the
network: scheduling, digests, bookkeeping. The outputs must be the same tokens, else the benchmark fails.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from tests.benchmarks.arguments import add_common, chosen, repeats
from tests.benchmarks.runs import Bench, Run, median_run
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import Request, load, random_ids

PROMPTS = 512
TEMPLATE = 256
OWN = 32
OUT = 16
POOL = "200000tok"
"""Room for all, so that a row of the table with evictions is one of a larger `--model`."""


def workload(name: str) -> list[Request]:
    """The requests of a row."""
    if name == "w2":
        return load(name)
    rng = random.Random(0)
    shared = TEMPLATE if name == "one template" else 0
    template = random_ids(rng, shared)
    return [Request(template + random_ids(rng, TEMPLATE + OWN - shared), OUT) for _ in range(PROMPTS)]


WORKLOADS = ("one template", "nothing shared", "w2")


def main(argv: list[str] | None = None) -> None:
    """Two rows a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="may be given more than once")
    options = parser.parse_args(argv)
    benches = {on: Bench(options.model, prefix_cache=on, pool_size=POOL) for on in (True, False)}
    print(f"{options.model}, default settings")
    table = Table("workload      ", "cache", "prefill", "hits", "evicted", "tok/s", "ratio", "engine")
    for name in options.workload or WORKLOADS:
        for cells in _compared(benches, chosen(workload(name), options), repeats(options)):
            table.add(name, *cells)


def _compared(benches: dict[bool, Bench], requests: list[Request], rounds: int) -> list[list[Any]]:
    runs: dict[bool, list[Run]] = {on: [] for on in benches}
    for bench in benches.values():
        bench.warm_up(requests)
    for _ in range(rounds):
        for on, bench in benches.items():
            runs[on].append(bench.run(requests))
    with_cache, without = median_run(runs[True]), median_run(runs[False])
    assert with_cache.tokens == without.tokens, "the cache changed tokens"
    ratio = with_cache.rate / without.rate
    return [
        ["on", *_cells(with_cache), f"{ratio:.2f}x", _engine(with_cache)],
        ["off", *_cells(without), "", _engine(without)],
    ]


def _cells(run: Run) -> list[str]:
    prefill, hits = (sum(getattr(s, name) for s in run.steps) for name in ("num_prefill_tokens", "prefix_hit_tokens"))
    evicted = sum(s.num_evicted_blocks for s in run.steps)
    return [f"{prefill:,}", f"{hits / (prefill + hits):.1%}", f"{evicted:,}", f"{run.rate:,.1f}"]


def _engine(run: Run) -> str:
    return f"{(run.split.schedule + run.split.bookkeeping) / run.seconds:.2%}"


if __name__ == "__main__":
    main()
