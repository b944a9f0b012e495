"""The contract where prompts share their beginning: whatever is found, shared, copied or guessed changes nothing.

Rows of one template, greedy and sampled, with several samples each, under pools that force preemption and eviction.
"""

from __future__ import annotations

import pytest

from ember import SamplingParams
from tests.fakes import POLICIES
from tests.test_invariance import TEXT, generate, make

OWN = [1, 17, 4, 16, 31, 2, 15, 33]
"""Tokens of each row after the template of 32."""
TEMPLATE = 32
MAX_TOKENS = 14
MODEL_LEN = 96


@pytest.fixture(scope="module")
def rows():
    """(prompts, parameters, tokens of each row's samples) without a cache, one row and sample after another."""
    llm = make(prefix_cache=False, max_model_len=MODEL_LEN, max_num_seqs=1)
    words = llm.plan.tokenizer.encode(TEXT * 9)
    prompts = [words[:TEMPLATE] + words[5 * i : 5 * i + own] for i, own in enumerate(OWN)]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=i, n=1 + i % 3, temperature=0.9 * (i % 3 > 0))
        for i in range(len(OWN))
    ]
    return prompts, params, tokens_of(llm.generate(prompts, params))


def tokens_of(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def check(rows, *, calls=1, **settings):
    """Run the rows so often on one LLM, hold each run to the baseline; returns outputs and steps of the last."""
    prompts, params, expected = rows
    llm = make(max_model_len=MODEL_LEN, **settings)
    for _ in range(calls):
        outputs, steps = generate(llm, prompts, params)
        assert tokens_of(outputs) == expected
        assert llm.engine.scheduler.blocks.num_used == 0
    return outputs, steps


def total(steps, name):
    return sum(getattr(step, name) for step in steps)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_a_template_is_computed_once(policy, block_size, rows):
    """K/V of another row's place, or a first token drawn from a block that was found whole."""
    outputs, steps = check(rows, scheduler=policy, block_size=block_size)
    shared = TEMPLATE // block_size * block_size
    assert total(steps, "num_prefill_tokens") <= TEMPLATE + sum(OWN) + (TEMPLATE - shared) * len(OWN)
    assert [output.num_cached_tokens >= shared for output in outputs].count(False) == 1


@pytest.mark.parametrize("block_size", [3, 16])
def test_a_second_run_finds_the_first(block_size, rows):
    """Stale K/V, and a prompt of whole blocks that is found whole: its last token must be computed all the same."""
    outputs, steps = check(rows, calls=2, block_size=block_size)
    assert total(steps, "num_prefill_tokens") <= block_size * len(OWN)
    for output in outputs:
        assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // block_size * block_size


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_all_together_under_pressure(policy, block_size, speculative, rows):
    """Hits, forks, guesses, preemption and eviction at once: a shared block evicted, written or counted free."""
    _, steps = check(
        rows,
        calls=2,
        scheduler=policy,
        block_size=block_size,
        pool_size=-(-MODEL_LEN // block_size) + 1,
        max_num_batched_tokens=40,
        speculative=speculative,
    )
    assert total(steps, "num_preempted") > 0
    assert total(steps, "num_evicted_blocks") > 0
    assert total(steps, "prefix_hit_tokens") > 0
