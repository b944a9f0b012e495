"""The server under load: streams of 1, 8 and 64 clients beside the same requests offline, by turns in one run.

    python -m tests.benchmarks.serving

Each client sends its next request when its last one has ended. `tok/s` are output tokens a second, `ratio` that over
offline with as many sequences at once; `ttft` is the time to the first token, `tpot` a request's mean time for each
further one, in milliseconds at the 50th and 99th percentile. Every token must be the offline one, else the benchmark
fails. The clients share the machine with the server. With `--whole` answers come in one piece.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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
from time import perf_counter

import aiohttp

from tests.benchmarks.arguments import add_common, repeats, requests_of
from tests.benchmarks.models import model_path
from tests.benchmarks.runs import Bench
from tests.benchmarks.table import Table
from tests.benchmarks.workloads import NAMES, Request

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = (1, 8, 64)
SERVE = "import sys; from ember.entrypoints.serve import main; sys.exit(main(sys.argv[1:]))"
READY = re.compile(r"serving on (http://\S+)")


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, seen by its client; seconds."""

    tokens: list[int]
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a number of clients saw."""

    seconds: float
    timings: list[Timing]

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(len(timing.tokens) for timing in self.timings) / self.seconds


@contextmanager
def serving(model: str, *settings: str) -> Iterator[str]:
    """A server in a process of its own; its URL."""
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
                yield ready[1]
                return
        raise RuntimeError("".join(said))
    finally:
        process.terminate()
        process.communicate()


async def load(url: str, requests: Seq[Request], clients: int, *, stream: bool) -> Load:
    """Send all requests, each client one at a time."""
    left = iter(enumerate(requests))
    timings: dict[int, Timing] = {}

    async def client() -> None:
        for index, request in left:
            timings[index] = await _ask(session, url, request, stream=stream)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begin = perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return Load(perf_counter() - begin, [timings[index] for index in range(len(requests))])


async def _ask(session: aiohttp.ClientSession, url: str, request: Request, *, stream: bool) -> Timing:
    sampling = {"max_tokens": request.out, "ignore_eos": True, "temperature": 0}
    body = {"prompt": request.prompt, "return_token_ids": True, "stream": stream, **sampling}
    begin, first, tokens = perf_counter(), 0.0, list[int]()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        if not stream:
            tokens, first = (await answer.json())["choices"][0]["token_ids"], perf_counter()
        else:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or perf_counter()
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    end = perf_counter()
    return Timing(tokens, first - begin, (end - first) / max(1, len(tokens) - 1))


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
    table = Table("clients", "tok/s", "offline", "ratio", "ttft 50", "ttft 99", "tpot 50", "tpot 99")
    for clients in options.clients or CLIENTS:
        _row(table, clients, requests[: max(8, 4 * clients)], options)


def _row(table: Table, clients: int, requests: Seq[Request], options: argparse.Namespace) -> None:
    settings = {"max_num_seqs": clients, "prefix_cache": False}
    bench = Bench(options.model, **settings)
    bench.warm_up(requests)
    ratios: list[tuple[float, float, Load]] = []
    with serving(options.model, *(f"{key}={value}" for key, value in settings.items())) as url:
        asyncio.run(load(url, [Request(r.prompt[:32], 4) for r in requests[:8]], clients, stream=not options.whole))
        for _ in range(repeats(options)):
            offline = bench.run(requests)
            online = asyncio.run(load(url, requests, clients, stream=not options.whole))
            if [timing.tokens for timing in online.timings] != offline.tokens:
                raise RuntimeError("the server's tokens are not the offline ones")
            ratios.append((online.rate / offline.rate, offline.rate, online))
    ratio, offline_rate, online = sorted(ratios, key=lambda item: item[0])[(len(ratios) - 1) // 2]
    times = [f"{1000 * at:,.1f}" for key in ("ttft", "tpot") for at in _percentiles(online, key)]
    table.add(clients, f"{online.rate:,.1f}", f"{offline_rate:,.1f}", f"{ratio:.3f}", *times)


def _percentiles(online: Load, key: str) -> tuple[float, float]:
    values = [getattr(timing, key) for timing in online.timings]
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return cuts[49], cuts[98]


if __name__ == "__main__":
    main()
