"""ember against other engines: the same weights, workload, threads and machine, taking turns in one run.

    python -m tests.benchmarks.peers --install openvino --install vllm
    python -m tests.benchmarks.peers --repeat 3
    python -m tests.benchmarks.peers --workload w3 --repeat 5 --peer "ember fp16 weights" --peer "llama.cpp q8_0"
    python -m tests.benchmarks.peers --model llama-random --every 4 --repeat 3 --peer openvino --peer vllm

Each engine runs in a process and environment of its own, loads once, warms up, and then takes turns with the others, so
that whatever else the machine does hits all alike. `ember is` is ember's speed over the peer's: the median of the
rounds. `same` counts the requests whose tokens are all as ember's. Each run's seconds go to stderr as they come. Every
round begins with an empty prefix cache, but for "openvino prefix cache", which can't be told to: take `--repeat 1`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.benchmarks.arguments import add_common, repeats, requests_of
from tests.benchmarks.models import cache_folder, model_path
from tests.benchmarks.peers.catalogue import DEFAULT, EMBER, PEERS, VENVS
from tests.benchmarks.peers.process import Answer, PeerError, PeerProcess, install, write_workload
from tests.benchmarks.runs import check_lengths
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import NAMES, Request


def main(argv: list[str] | None = None) -> None:
    """A row a peer."""
    options = _options(argv)
    for name in options.install:
        install(name, options.venvs)
    if options.install:
        return
    with tempfile.TemporaryDirectory() as folder:
        _compare(options, Path(folder))


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, repeat=1)
    parser.add_argument("--workload", default="w1", choices=NAMES)
    parser.add_argument("--peer", action="append", choices=PEERS, help="may be given more than once; default: float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--venvs", type=Path, default=cache_folder() / "peers", help="the peers' environments")
    parser.add_argument("--install", action="append", default=[], choices=VENVS, help="only make an environment")
    return parser.parse_args(argv)


def _compare(options: argparse.Namespace, folder: Path) -> None:
    requests = requests_of(options.workload, options)
    workload = write_workload(requests, folder / "workload.json")
    entrants = [Entrant(name) for name in dict.fromkeys([EMBER, *(options.peer or DEFAULT)])]
    try:
        for entrant in entrants:
            entrant.start(options)
        for _ in range(repeats(options)):
            for entrant in entrants:
                entrant.run(workload, requests)
    finally:
        for entrant in entrants:
            entrant.close()
    _show(options, requests, entrants)


@dataclass(slots=True)
class Entrant:
    """A peer in this comparison: its process and answers, or the problem that took it out."""

    name: str
    process: PeerProcess | None = None
    answers: list[Answer] = field(default_factory=list)
    problem: str | None = None

    def start(self, options: argparse.Namespace) -> None:
        """Load it."""
        log = cache_folder() / f"{self.name.replace(' ', '-')}.log"
        shared = {"model": model_path(options.model), "cache": str(cache_folder()), "threads": options.threads}
        try:
            self.process = PeerProcess(PEERS[self.name], options.venvs, log, shared)
        except PeerError as error:
            self.problem = str(error)

    def run(self, workload: Path, requests: Seq[Request]) -> None:
        """One round, unless it is out; a wrong number of tokens puts it out."""
        if self.process is None or self.problem is not None:
            return
        try:
            answer = self.process.run(workload)
            check_lengths(requests, answer.tokens)
            self.answers.append(answer)
            print(f"{self.name}: {answer.seconds:.1f} s", file=sys.stderr, flush=True)
        except (PeerError, RuntimeError) as error:
            self.problem = str(error)

    def close(self) -> None:
        """End its process."""
        if self.process is not None:
            self.process.close()


def _show(options: argparse.Namespace, requests: Seq[Request], entrants: Seq[Entrant]) -> None:
    total = sum(request.out for request in requests)
    rounds = f"{options.threads} threads, {repeats(options)} rounds"
    print(f"{options.workload}: {len(requests)} requests, {total:,} output tokens; {rounds}")
    table = Table("engine                    ", "tok/s", "    min..max", "ember is", "same", "version ")
    ember = entrants[0]
    for entrant in entrants:
        if entrant.problem is not None or not entrant.answers:
            table.add(entrant.name, f"out: {entrant.problem}")
            continue
        rates = sorted(total / answer.seconds for answer in entrant.answers)
        extremes = f"{rates[0]:.1f}..{rates[-1]:.1f}"
        version = entrant.process.version if entrant.process else ""
        table.add(entrant.name, f"{statistics.median(rates):.1f}", extremes, *_against(ember, entrant), version)


def _against(ember: Entrant, other: Entrant) -> tuple[str, str]:
    """Ember's speed as a multiple of the other's, and how many requests got the same tokens."""
    if ember.problem is not None or not ember.answers:
        return "-", "-"
    pairs = list(zip(ember.answers, other.answers, strict=True))
    ratio = statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)
    first, second = pairs[0]
    same = sum(a == b for a, b in zip(first.tokens, second.tokens, strict=True))
    return f"{ratio:.2f}x", f"{same}/{len(first.tokens)}"


if __name__ == "__main__":
    main()
