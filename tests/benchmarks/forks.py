"""What several samples of a prompt cost beside as many rows of their own: K/V, prompt tokens computed, time.

    python -m tests.benchmarks.forks

Prompts of 256 tokens, 32 output tokens, temperature 1; each sample alone in a row of its own, without and with the
prefix cache, then all samples of a prompt in one row, and for comparison one sample a prompt. They run by turns.
`blocks` are the most that were used at once, `per prompt` the tokens that these hold for each prompt, `prefill` the
prompt tokens that were computed. The tokens must be the same in all, else the benchmark fails.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from time import perf_counter

from ember.entrypoints.llm import LLM
from ember.sampling_params import SamplingParams
from tests.benchmarks.arguments import QUICK, add_common, repeats
from tests.benchmarks.models import network_of
from tests.benchmarks.runs import Bench
from tests.benchmarks.table import Table

PROMPTS = 16
PROMPT = 256
OUT = 32
POOL = "65536tok"

Tokens = dict[tuple[int, int], list[int]]
"""By prompt and sample."""


@dataclass(frozen=True, slots=True)
class Way:
    """How samples become requests."""

    name: str
    num_samples: int
    own_rows: bool
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """What one run took."""

    seconds: float
    tokens: Tokens
    num_blocks: int
    num_prefill_tokens: int

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.tokens.values())) / self.seconds


def main(argv: list[str] | None = None) -> None:
    """A row each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt (default: %(default)s)")
    options = parser.parse_args(argv)
    n = options.samples
    ways = [
        Way(f"{n} rows, no cache", n, True, False),
        Way(f"{n} rows", n, True, True),
        Way(f"n={n}", n, False, True),
        Way("n=1", 1, False, True),
    ]
    llms = {on: Bench(options.model, prefix_cache=on, pool_size=POOL).llm for on in (True, False)}
    prompts = _prompts(PROMPTS // QUICK if options.quick else PROMPTS, network_of(options.model).vocab_size)
    taken: dict[Way, list[Taken]] = {way: [] for way in ways}
    for _ in range(repeats(options)):
        for way in ways:
            taken[way].append(_run(llms[way.prefix_cache], prompts, way))
    _show(ways, taken, len(prompts), llms[True].plan.config.block_size)


def _prompts(count: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size - 1) for _ in range(PROMPT)] for _ in range(count)]


def _run(llm: LLM, prompts: list[list[int]], way: Way) -> Taken:
    llm.reset_prefix_cache()
    begin = perf_counter()
    every = frozenset(range(way.num_samples))
    for i, prompt in enumerate(prompts):
        params = SamplingParams(n=way.num_samples, temperature=1.0, max_tokens=OUT, ignore_eos=True, seed=i)
        if not way.own_rows:
            llm.add(i, prompt, params)
            continue
        for j in every:  # sample j alone, in a request of its own
            llm.add(i * way.num_samples + j, prompt, params, samples_done=every - {j})
    tokens, blocks, prefill = {}, 0, 0
    while llm.engine.num_unfinished:
        outputs, step = llm.step()
        for output in outputs:
            row = output.request_id // way.num_samples if way.own_rows else output.request_id
            tokens.update({(row, sample.index): sample.token_ids for sample in output.outputs})
        blocks, prefill = max(blocks, step.stats.blocks_used), prefill + step.stats.num_prefill_tokens
    return Taken(perf_counter() - begin, tokens, blocks, prefill)


def _show(ways: list[Way], taken: dict[Way, list[Taken]], num_prompts: int, block_size: int) -> None:
    table = Table("samples          ", "blocks", "per prompt", "prefill", "tok/s", "ratio")
    first = _median(taken[ways[0]])
    for way in ways:
        run = _median(taken[way])
        assert all(tokens == first.tokens[key] for key, tokens in run.tokens.items()), f"{way.name}: other tokens"
        held = run.num_blocks * block_size / num_prompts
        ratio = run.rate / first.rate
        table.add(
            way.name,
            f"{run.num_blocks:,}",
            f"{held:,.0f}",
            f"{run.num_prefill_tokens:,}",
            f"{run.rate:,.1f}",
            f"{ratio:.2f}x",
        )


def _median(runs: list[Taken]) -> Taken:
    return sorted(runs, key=lambda run: run.rate)[(len(runs) - 1) // 2]


if __name__ == "__main__":
    main()
