"""What the engine itself costs a step: everything but the network, which is replaced by constant logits.

    python -m tests.benchmarks.overhead

Microseconds a step, by number of running sequences. `attention` is the backend's preparation of a step; `sample` is
greedy and reads a row of logits as wide as the model's vocabulary for each sequence.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tests.benchmarks.arguments import add_common, repeats
from tests.benchmarks.models import network_of
from tests.benchmarks.runs import SPLIT_NAMES, Bench, Run, median_run
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import Request

SEQUENCES = (1, 64, 128, 512)
STEPS = 256
"""Steps a run; quick ones have fewer."""
QUICK_STEPS = 16


class ConstantNetwork:
    """Computes nothing: the same logits for every row."""

    def __init__(self, vocab_size: int, most_rows: int) -> None:
        self._logits = torch.zeros(most_rows, vocab_size)
        self._logits[:, vocab_size // 2] = 1.0

    def forward(self, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        """Hidden states of width 1."""
        return torch.zeros(len(input_ids), 1)

    def logits(self, hidden: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
        """One row a row."""
        return self._logits[: len(hidden)]


def main(argv: list[str] | None = None) -> None:
    """A row a number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--sequences", type=int, action="append", help="may be given more than once")
    options = parser.parse_args(argv)
    names = [name for name in SPLIT_NAMES if name != "network"]
    table = Table("sequences", "steps/s", "µs a step", *names)
    for count in options.sequences or SEQUENCES:
        table.add(count, *_cells(measured(count, options), names))


def measured(count: int, options: argparse.Namespace) -> Run:
    """The median run of `count` sequences that start with one token and all decode to the end."""
    bench = Bench(options.model, max_num_seqs=count)
    bench.replace_network(ConstantNetwork(network_of(options.model).vocab_size, count))
    requests = [Request([index], QUICK_STEPS if options.quick else STEPS) for index in range(count)]
    bench.warm_up(requests)
    return median_run([bench.run(requests) for _ in range(repeats(options))])


def _cells(run: Run, names: list[str]) -> list[str]:
    def micros(seconds: float) -> str:
        return f"{seconds / len(run.steps) * 1e6:.0f}"

    return [f"{len(run.steps) / run.seconds:.0f}", micros(run.seconds), *(micros(getattr(run.split, n)) for n in names)]


if __name__ == "__main__":
    main()
