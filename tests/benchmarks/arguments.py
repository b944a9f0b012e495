"""Options that the benchmarks share."""

from __future__ import annotations

import argparse

from tests.benchmarks.models import RANDOM_GPT2, network_of
from tests.benchmarks.workloads import Request, every, fitted, load

QUICK = 8
"""`--quick` runs every eighth request, once."""


def add_common(parser: argparse.ArgumentParser, *, repeat: int = 3) -> None:
    """`--model`, `--repeat`, `--every`, `--quick`."""
    parser.add_argument("--model", default=RANDOM_GPT2, help="a folder or preset (default: random weights)")
    parser.add_argument(
        "--repeat", type=int, default=repeat, help="runs of each; the median is shown (default: %(default)s)"
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th request of a workload")
    parser.add_argument("--quick", action="store_true", help=f"--every {QUICK} --repeat 1: a look, not a measurement")


def requests_of(workload: str, options: argparse.Namespace) -> list[Request]:
    """The requests of a workload as the options and the model want them."""
    network = network_of(options.model)
    requests = every(load(workload), QUICK if options.quick else options.every)
    return fitted(requests, vocab_size=network.vocab_size, max_len=network.max_position)


def repeats(options: argparse.Namespace) -> int:
    """How often each is run."""
    return 1 if options.quick else int(options.repeat)
