"""What continuous batching gains over static batches, by how much output lengths differ.

    python -m tests.benchmarks.continuous_vs_static

Same model, requests, batch limit and pool; only the policy differs. A static batch takes `max_num_seqs` requests and
runs until its longest ends. In `static`, ember's policy, what ended before leaves its place empty and costs nothing
more. In `padded`, as where a batch is one tensor (transformers' generate), every place is computed until the batch
ends, and tokens past a request's own are thrown away; only outputs are padded here, not prompts. `time` is how much
longer either takes than continuous batching (`scheduler: prefill_first`), `steps` how many more steps. Where a step
costs the same at every batch size, `static` loses as much time as steps; on a CPU, where a smaller batch is a cheaper
step, less. `batch` is the mean number of running sequences.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

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


def padded(requests: Sequence[Request], batch: int, max_len: int) -> list[Request]:
    """The requests as places of padded batches: each runs as long as its batch's longest, if `max_len` lets it."""
    longest = [max(r.out for r in requests[i - i % batch :][:batch]) for i in range(len(requests))]
    return [replace(r, out=min(out, max_len - len(r.prompt))) for r, out in zip(requests, longest, strict=True)]


def main(argv: list[str] | None = None) -> None:
    """A row a spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, repeat=1)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    names = (*SPREADS, SHAREGPT)
    parser.add_argument("--lengths", action="append", choices=names, help="may be given more than once; default: all")
    options = parser.parse_args(argv)
    policies = ("prefill_first", "static")
    benches = [Bench(options.model, scheduler=name, max_num_seqs=options.max_num_seqs) for name in policies]
    print(f"{options.model}, {options.requests} requests, max_num_seqs={options.max_num_seqs}")
    ratios = ("time", "steps")
    table = Table("output lengths       ", "tok/s", "batch", "static tok/s", "batch", *ratios, "padded tok/s", *ratios)
    for name in options.lengths or names:
        requests = chosen(requests_of_spread(name, options.requests), options)
        table.add(name, *_compared(*benches, requests, options))


def _compared(continuous: Bench, static: Bench, requests: list[Request], options: argparse.Namespace) -> list[str]:
    """The three ways take turns; medians."""
    total = sum(request.out for request in requests)
    alike = padded(requests, options.max_num_seqs, static.llm.plan.max_model_len)
    ways = ((continuous, requests), (static, requests), (static, alike))
    for bench, _ in ways[:2]:
        bench.warm_up(requests)
    rounds = [[bench.run(work) for bench, work in ways] for _ in range(repeats(options))]
    first, second, third = (median_run(runs) for runs in zip(*rounds, strict=True))
    cells = [f"{total / first.seconds:.1f}", _mean_batch(first), f"{total / second.seconds:.1f}", _mean_batch(second)]
    return [*cells, *_against(first, second), f"{total / third.seconds:.1f}", *_against(first, third)]


def _against(continuous: Run, other: Run) -> tuple[str, str]:
    """Time and steps of another way over those of continuous batching."""
    return f"{other.seconds / continuous.seconds:.2f}x", f"{len(other.steps) / len(continuous.steps):.2f}x"


def _mean_batch(run: Run) -> str:
    return f"{statistics.mean(step.num_running for step in run.steps):.1f}"


if __name__ == "__main__":
    main()
