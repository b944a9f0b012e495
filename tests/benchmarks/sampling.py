"""What each way to sample costs beside the network: microseconds a token.

    python -m tests.benchmarks.sampling

The ways take turns in one process. `network` is the rest of a step, a token's share of it.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from ember import LLM, SamplingParams
from ember.config import EngineConfig
from ember.entrypoints.plan import EnginePlan
from tests.benchmarks.arguments import add_common, repeats
from tests.benchmarks.models import model_config
from tests.benchmarks.table import Table

SEQUENCES = 32
OUTPUT = 32
QUICK_OUTPUT = 4
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p, top_k": {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "three penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {i: 1.0 for i in range(100, 200)}},
    "bad_words": {"bad_words": [f"word{i}" for i in range(50)]},
    "logprobs=5": {"logprobs": 5},
    "json_schema": {"json_schema": PERSON},
    "regex": {"regex": r"([A-Z][a-z]+ ){60}"},
}


def main(argv: list[str] | None = None) -> None:
    """A row a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    options = parser.parse_args(argv)
    config = EngineConfig(model=model_config(options.model), max_num_seqs=SEQUENCES, prefix_cache=False)
    llm = LLM.from_plan(EnginePlan.resolve(config))
    count = QUICK_OUTPUT if options.quick else OUTPUT
    _microseconds(llm, WAYS["json_schema"], count)
    rounds = [{way: _microseconds(llm, params, count) for way, params in WAYS.items()} for _ in range(repeats(options))]
    table = Table("way               ", "sampling", "network", "sampling / network")
    for way in WAYS:
        sample, network = (median(found[way][i] for found in rounds) for i in range(2))
        table.add(way, f"{sample:.0f}", f"{network:.0f}", f"{sample / network:.1%}")


def _microseconds(llm: LLM, params: dict[str, Any], count: int) -> tuple[float, float]:
    """Of sampling and of the network for each token of the decode steps."""
    chosen = SamplingParams(**{"max_tokens": count, **params})
    for index in range(SEQUENCES):
        failed = llm.add(index, [index + 1] * 32, chosen)
        assert failed is None, failed
    sample = network = tokens = 0.0
    while llm.engine.num_unfinished:
        stats = llm.step()[1].stats
        if not stats.num_prefill_tokens:
            sample, network, tokens = sample + stats.sample_s, network + stats.model_s, tokens + stats.num_decode_tokens
    return sample / tokens * 1e6, network / tokens * 1e6


if __name__ == "__main__":
    main()
