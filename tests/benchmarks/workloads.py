"""What the benchmarks compute: lists of requests, each a prompt of token ids and a number of output tokens.

    python -m tests.benchmarks.workloads

w1  128 prompts of 16..512 tokens (log-normal), 16..256 output tokens (uniform): the main one
w2  64 prompts that share a prefix of 256 tokens, 32 of their own, 64 output tokens
w3  one prompt of 32 tokens, 128 output tokens: batch 1
sharegpt  random ids with prompt and answer lengths of real conversations (in GPT-2 tokens) that fit the context
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.table import Table

FOLDER = Path(__file__).parent / "workloads"
NAMES = ("w1", "w2", "w3", "sharegpt")
VOCAB_SIZE = 49_000
"""All token ids are below; the ids of special tokens of common models are above."""
SHAREGPT_REQUESTS = 64
SHAREGPT_SHORTEST = 4
"""Shorter prompts are hardly conversations."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and how many output tokens it gets (EOS is ignored)."""

    prompt: list[int]
    out: int
    temperature: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens."""
        return len(self.prompt) + self.out


def load(name: str) -> list[Request]:
    """A workload by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in NAMES:
        raise ValueError(f"workload {name}: there are {', '.join(NAMES)}")
    if name == "sharegpt":
        return sharegpt(SHAREGPT_REQUESTS)
    rows = json.loads((FOLDER / f"{name}.json").read_text())
    return [Request(row["prompt"], row["out"]) for row in rows]


def sharegpt(count: int, *, max_len: int = 1024, seed: int = 0) -> list[Request]:
    """`count` requests of random ids, their lengths drawn from conversations of at most `max_len` tokens."""
    rng = random.Random(seed)
    lengths = [(p, o) for p, o in sharegpt_lengths() if p >= SHAREGPT_SHORTEST and p + o <= max_len]
    return [Request(random_ids(rng, p), o) for p, o in rng.sample(lengths, count)]


def sharegpt_lengths() -> list[tuple[int, int]]:
    """3,000 pairs of prompt and answer length."""
    return [(p, o) for p, o in json.loads((FOLDER / "sharegpt_lengths.json").read_text())]


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Token ids that any large vocabulary has."""
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def every(requests: Seq[Request], step: int) -> list[Request]:
    """Every `step`-th request: the same mix in a fraction of the time."""
    return list(requests[::step])


def fitted(requests: Seq[Request], *, vocab_size: int, max_len: int) -> list[Request]:
    """The requests as a smaller model can take them: ids folded into its vocabulary, too long ones cut to its context.

    A request that is too long keeps its shape: prompt and output shrink by the same factor.
    """
    return [_shrunk(replace(r, prompt=[t % vocab_size for t in r.prompt]), max_len) for r in requests]


def _shrunk(request: Request, max_len: int) -> Request:
    if request.num_tokens <= max_len:
        return request
    out = max(1, request.out * max_len // request.num_tokens)
    return replace(request, prompt=request.prompt[: max_len - out], out=out)


def main() -> None:
    """A row a workload."""
    table = Table("workload ", "requests", "prompt tokens", "median", "max", "output tokens", "median", "max")
    for name in NAMES:
        requests = load(name)
        prompts, outs = [len(r.prompt) for r in requests], [r.out for r in requests]
        columns = [f(x) for x in (prompts, outs) for f in (sum, statistics.median, max)]
        table.add(name, len(requests), *(f"{x:,.0f}" for x in columns))


if __name__ == "__main__":
    main()
