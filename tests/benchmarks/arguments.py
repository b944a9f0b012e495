"""Options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Seq

from tests.benchmarks.models import RANDOM, RANDOM_GPT2, network_of
from tests.benchmarks.workloads import Request, every, fitted, load

QUICK = 8
"""`--quick` runs every eighth request, once."""


def add_common(parser: argparse.ArgumentParser, *, repeat: int = 3, every: int = 1) -> None:
    """`--model`, `--repeat`, `--every`, `--quick`."""
    parser.add_argument(
        "--model", default=RANDOM_GPT2, help=f"{', '.join(RANDOM)} (random weights), a folder or preset"
    )
    parser.add_argument(
        "--repeat", type=int, default=repeat, help="runs of each; the median is shown (default: %(default)s)"
    )
    parser.add_argument("--every", type=int, default=every, metavar="N", help="only every N-th request")
    parser.add_argument("--quick", action="store_true", help=f"--every {QUICK} --repeat 1: a look, not a measurement")


def requests_of(workload: str, options: argparse.Namespace) -> list[Request]:
    """The requests of a workload as the options and the model want them."""
    return chosen(load(workload), options)


def chosen(requests: Seq[Request], options: argparse.Namespace) -> list[Request]:
    """Those of the requests that the options want, as the model can take them."""
    network = network_of(options.model)
    some = every(requests, max(QUICK, options.every) if options.quick else options.every)
    return fitted(some, vocab_size=network.vocab_size, max_len=network.max_position)


def repeats(options: argparse.Namespace) -> int:
    """How often each is run."""
    return 1 if options.quick else int(options.repeat)
