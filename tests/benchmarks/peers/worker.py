"""How a peer's process is driven: it loads once, then runs a workload each time it is told to.

It is run by the peer's own Python, so it imports nothing but the standard library. The driver starts
`python run_PEER.py '{"model": FOLDER, "cache": FOLDER, ...}'` and reads lines of JSON: first `{"ready": VERSION}`, then
for each line on stdin, the path of a workload, `{"seconds": ..., "tokens": [[...], ...]}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

Requests = list[dict[str, Any]]
"""Each `{"prompt": token ids, "out": number of output tokens}`."""
Run = Callable[[Requests], list[list[int]]]
"""Output tokens of each request, in order."""

WARM_UP = 8


def serve(load: Callable[[dict[str, Any]], tuple[str, Run]]) -> None:
    """Answer on the real stdout; whatever the peer's libraries print there goes to stderr instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    version, run = load(json.loads(sys.argv[1]))

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer({"ready": version})
    for line in sys.stdin:
        with open(line.strip(), encoding="utf-8") as file:
            requests = json.load(file)
        run([{"prompt": r["prompt"][:32], "out": 4} for r in requests[:WARM_UP]])
        begin = perf_counter()
        tokens = run(requests)
        answer({"seconds": perf_counter() - begin, "tokens": [[int(t) for t in row] for row in tokens]})


def by_output(requests: Requests, batch: int) -> list[list[int]]:
    """Indices in batches of like output length, for engines whose batches run to their longest."""
    order = sorted(range(len(requests)), key=lambda i: (requests[i]["out"], len(requests[i]["prompt"])))
    return [order[i : i + batch] for i in range(0, len(order), batch)]
