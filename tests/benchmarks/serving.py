"""The server under load: streams of 1, 8 and 64 clients beside the same requests offline, by turns in one run.

    python -m tests.benchmarks.serving

Each client sends its next request when its last one has ended. `tok/s` are output tokens a second, `ratio` that over
offline with as many sequences at once; `cpu` is the processor time of the server over that of offline, `client` that of
the clients, which share the machine with it and take what it could have. `ttft` is the time to the first token, `tpot`
a request's mean time for each further one, in milliseconds at the 50th and 99th percentile. Every token must be the
offline one, else the benchmark fails. With `--whole` answers come in one piece.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from time import process_time

from tests.benchmarks.arguments import add_common, repeats, requests_of
from tests.benchmarks.load_client import Load, load
from tests.benchmarks.models import model_path
from tests.benchmarks.runs import Bench
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import NAMES, Request

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = (1, 8, 64)
SERVE = "import sys; from ember.entrypoints.serve import main; sys.exit(main(sys.argv[1:]))"
READY = re.compile(r"serving on (http://\S+)")


@dataclass(frozen=True, slots=True)
class Server:
    """A server in a process of its own."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Seconds of processor time that it has taken; nan where the system has no /proc."""
        stat = Path(f"/proc/{self.pid}/stat")
        if not stat.exists():
            return float("nan")
        after_name = stat.read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(model: str, *settings: str) -> Iterator[Server]:
    """A server that is ready."""
    words = [f"model.path={model_path(model)}", "port=0", *settings]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if ready := READY.search(line):
                yield Server(ready[1], process.pid)
                return
        raise RuntimeError("".join(said))
    finally:
        process.terminate()
        process.communicate()


@dataclass(frozen=True, slots=True)
class Turn:
    """Offline and the server, one after the other: tokens a second, and seconds of processor time."""

    offline: float
    offline_cpu_s: float
    online: Load
    server_cpu_s: float
    client_cpu_s: float

    @property
    def ratio(self) -> float:
        """The server's speed over the offline one."""
        return self.online.rate / self.offline

    @staticmethod
    def take(bench: Bench, server: Server, requests: Seq[Request], clients: int, *, stream: bool) -> Turn:
        """Run both.

        Raises:
            RuntimeError: they differ in a token.
        """
        begin = process_time()
        offline = bench.run(requests)
        offline_end, server_begin = process_time(), server.cpu_s()
        online = asyncio.run(load(server.url, requests, clients, stream=stream))
        client_cpu_s, server_cpu_s = process_time() - offline_end, server.cpu_s() - server_begin
        if [timing.tokens for timing in online.timings] != offline.tokens:
            raise RuntimeError("the server's tokens are not the offline ones")
        return Turn(offline.rate, offline_end - begin, online, server_cpu_s, client_cpu_s)


def main(argv: list[str] | None = None) -> None:
    """A row a number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--workload", choices=NAMES, default="w1")
    parser.add_argument("--clients", type=int, action="append", help="may be given more than once (default: 1, 8, 64)")
    parser.add_argument("--whole", action="store_true", help="answers in one piece")
    options = parser.parse_args(argv)
    requests = requests_of(options.workload, options)
    print(f"{options.model}, {len(requests)} requests of {options.workload}")
    table = Table("clients", "tok/s", "offline", "ratio", "cpu", "client", "ttft 50", "ttft 99", "tpot 50", "tpot 99")
    for clients in options.clients or CLIENTS:
        _row(table, clients, requests[: max(8, 4 * clients)], options)


def _row(table: Table, clients: int, requests: Seq[Request], options: argparse.Namespace) -> None:
    settings, stream = {"max_num_seqs": clients, "prefix_cache": False}, not options.whole
    bench = Bench(options.model, **settings)
    bench.warm_up(requests)
    with serving(options.model, *(f"{key}={value}" for key, value in settings.items())) as server:
        asyncio.run(load(server.url, [Request(r.prompt[:32], 4) for r in requests[:8]], clients, stream=stream))
        turns = [Turn.take(bench, server, requests, clients, stream=stream) for _ in range(repeats(options))]
    turn = sorted(turns, key=lambda turn: turn.ratio)[(len(turns) - 1) // 2]
    shares = [f"{seconds / turn.offline_cpu_s:.2f}" for seconds in (turn.server_cpu_s, turn.client_cpu_s)]
    times = [f"{1000 * at:,.1f}" for key in ("ttft", "tpot") for at in _percentiles(turn.online, key)]
    table.add(clients, f"{turn.online.rate:,.1f}", f"{turn.offline:,.1f}", f"{turn.ratio:.3f}", *shares, *times)


def _percentiles(online: Load, key: str) -> tuple[float, float]:
    values = [getattr(timing, key) for timing in online.timings]
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return cuts[49], cuts[98]


if __name__ == "__main__":
    main()
