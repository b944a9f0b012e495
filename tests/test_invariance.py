"""The contract: nothing that is only a way to run changes one token of any row.

One baseline (a pool without pressure, the default block size) and every other way to run held to it, on the embedded
model, rows greedy and sampled in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ember import LLM, SamplingParams
from ember.core.engine import Engine
from tests.fakes import POLICIES

LENGTHS = [1, 16, 17, 5, 31, 32, 33, 2, 48, 100, 7, 298]
MAX_TOKENS = 24
TEXT = (
    "Fellow citizens of the Senate and of the House of Representatives: in the course of the war, the people of the "
    "United States and the old captain of the ship sailed upon the great seas, and said that the whale was white. "
)


@pytest.fixture(scope="module")
def baseline():
    """(prompts, parameters, tokens of each row) of the plainest way to run: one after another, in a roomy pool."""
    llm = make()
    words = llm.plan.tokenizer.encode(TEXT * 20)
    prompts = [words[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]
    params = [row_params(i) for i in range(len(LENGTHS))]
    alone = [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert len({tuple(output.token_ids) for output in alone}) == len(alone)
    return prompts, params, [output.token_ids for output in alone]


def row_params(i):
    """Greedy, or sampled in one of three ways; every row with a seed of its own."""
    ways = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20},
        {"temperature": 1.0, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
    ]
    return SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=1000 + i, **ways[i % 4])


def make(**settings):
    """An LLM with room for all unless told otherwise."""
    chosen = {"device": "cpu", "dtype": "float32", "max_model_len": 352, "pool_size": "6000tok", **settings}
    return LLM(**chosen)


def run(baseline, rows=None, proposer=None, **settings):
    """Run rows under the settings and hold them to the baseline; returns the outputs and the steps' statistics."""
    prompts, params, expected = baseline
    picked = list(range(len(prompts))) if rows is None else list(rows)
    llm = make(**settings)
    if proposer is not None:
        llm.engine.scheduler.proposer = proposer
    outputs, steps = generate(llm, [prompts[i] for i in picked], [params[i] for i in picked])
    for i, output in zip(picked, outputs, strict=True):
        assert output.token_ids == expected[i], f"row {i} (prompt of {LENGTHS[i]} tokens) differs under {settings}"
    assert llm.engine.scheduler.blocks.num_used == 0
    return outputs, steps


def generate(llm, prompts, params):
    """`generate`, with the statistics of its steps; after each the pool must be in order."""
    steps = []
    step = llm.engine.step

    def recording(on_token=None):
        out = step(on_token)
        steps.append(out.stats)
        llm.engine.scheduler.blocks.check_integrity()
        return out

    llm.engine.step = recording
    return llm.generate(prompts, params), steps


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 64, 1000])
def test_block_sizes(block_size, baseline):
    """Where the K/V lies must not matter; nor may the batch: the baseline ran each row alone."""
    run(baseline, block_size=block_size, pool_size="12000tok")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [64, 2048])
def test_policies_and_budgets(policy, budget, baseline):
    """Chunks, order and company of the tokens must not matter."""
    run(baseline, scheduler=policy, max_num_batched_tokens=budget)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("budget", "rows"), [(1, [0, 3, 5, 7]), (7, [1, 2, 4, 6, 10])])
def test_tiny_budgets(policy, budget, rows, baseline):
    """A prompt computed token by token, over many steps, is the same prompt."""
    _, steps = run(baseline, rows, scheduler=policy, max_num_batched_tokens=budget)
    assert max(s.num_prefill_tokens + s.num_decode_tokens for s in steps) <= budget


@pytest.mark.parametrize("attention", ["reference", "batched", "cpu"])
@pytest.mark.parametrize("block_size", [5, 16])
def test_attention_backends(attention, block_size, baseline):
    """Another backend may round otherwise, but gives the same tokens."""
    run(baseline, attention=attention, block_size=block_size)


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_batch_limits(max_num_seqs, baseline):
    """Rows that join a running batch one by one."""
    _, steps = run(baseline, max_num_seqs=max_num_seqs)
    assert max(s.num_running for s in steps) == max_num_seqs


@pytest.mark.parametrize("block_size", [3, 16])
def test_reservations(block_size, baseline):
    """Tables that are longer than their tokens: the empty blocks must not be read, and nothing is ever preempted."""
    _, steps = run(baseline, reservation="max", block_size=block_size, pool_size="1100tok")
    assert max(s.num_running for s in steps) == 3
    assert not sum(s.num_preempted for s in steps)


def test_order_of_the_rows(baseline):
    """A row brings its own seed: its place in the input must not matter."""
    run(baseline, range(len(LENGTHS))[::-1])


SHORT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10]
"""Rows that fit a context of 80 tokens."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("budget", [9, 2048])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption(policy, block_size, budget, prefix_cache, baseline):
    """K/V given up and found or computed again, in other blocks and other chunks, is the same K/V."""
    blocks = -(-80 // block_size) + 2
    outputs, steps = run(
        baseline,
        SHORT,
        scheduler=policy,
        block_size=block_size,
        max_model_len=80,
        pool_size=blocks,
        max_num_batched_tokens=budget,
        prefix_cache=prefix_cache,
    )
    assert sum(s.num_preempted for s in steps) == sum(output.num_preemptions for output in outputs) > 0
    assert sum(s.num_recomputed_tokens + s.prefix_hit_tokens for s in steps) > 0
    assert prefix_cache or not sum(s.prefix_hit_tokens for s in steps)


def test_preemption_just_after_a_block_began(baseline):
    """A sequence whose last token is alone in its block: recompute must neither skip nor doubly count that token."""
    lengths = []
    prompts, params, expected = baseline
    for block_size in (2, 4, 16):
        llm = make(block_size=block_size, max_model_len=80, pool_size=-(-80 // block_size) + 1)
        schedule = llm.engine.scheduler.schedule

        def recording(schedule=schedule, block_size=block_size):
            plan = schedule()
            lengths.extend(sequence.num_tokens % block_size for sequence in plan.preempted)
            return plan

        llm.engine.scheduler.schedule = recording
        outputs = llm.generate([prompts[i] for i in SHORT], [params[i] for i in SHORT])
        assert [output.token_ids for output in outputs] == [expected[i] for i in SHORT]
    assert 1 in lengths
    assert 0 in lengths


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_barely_over_one_request(policy):
    """64 rows that each need nearly the whole pool must all finish, with every preemption counted."""
    settings = {"block_size": 4, "max_model_len": 64, "scheduler": policy}
    prompts = [[(11 * i + j) % 4000 for j in range(12 + i % 5)] for i in range(64)]
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, top_p=0.95)
    roomy = make(**settings, pool_size=64 * 16).generate(prompts, params)
    outputs, steps = generate(make(**settings, pool_size=17), prompts, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in roomy]
    assert sum(output.num_preemptions for output in roomy) == 0
    assert sum(output.num_preemptions for output in outputs) == sum(s.num_preempted for s in steps) > 0
    assert all(s.blocks_used + s.blocks_cached + s.blocks_free == 17 for s in steps)


class Seer:
    """Proposes what a row will say, but for every so many-th token; so tokens are accepted and rejected everywhere."""

    def __init__(self, tokens, num_tokens, wrong):
        self.tokens, self.num_tokens, self.wrong = tokens, num_tokens, wrong

    def propose(self, sequence, most, num_running):
        at = sequence.num_output_tokens
        right = self.tokens[sequence.request_id][at : at + max(0, min(most, self.num_tokens))]
        return [token + ((at + i) % self.wrong == 0) for i, token in enumerate(right)]

    def learn(self, sequence, num_proposed, num_accepted):
        assert 0 <= num_accepted <= num_proposed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_tokens", "wrong"), [(1, 3), (5, 3), (24, 10)])
def test_speculation(policy, num_tokens, wrong, baseline):
    """A step that verifies several tokens, greedy or sampled: each token kept must be the one drawn in its place."""
    rows = range(len(LENGTHS))
    proposer = Seer(baseline[2], num_tokens, wrong)
    _, steps = run(baseline, rows, proposer, scheduler=policy, max_num_batched_tokens=400)
    assert sum(s.num_proposed_tokens for s in steps) > sum(s.num_accepted_tokens for s in steps) > 50


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_speculation_under_preemption(policy, block_size, prefix_cache, baseline):
    """Blocks of rejected tokens published, kept or lost; K/V of a rejected token read after a recompute."""
    expected = [baseline[2][i] for i in SHORT]
    outputs, steps = run(
        baseline,
        SHORT,
        Seer(expected, 7, 4),
        scheduler=policy,
        block_size=block_size,
        max_model_len=80,
        pool_size=-(-80 // block_size) + 2,
        max_num_batched_tokens=85,
        prefix_cache=prefix_cache,
    )
    assert sum(output.num_preemptions for output in outputs) > 0
    assert sum(s.num_proposed_tokens for s in steps) > sum(s.num_accepted_tokens for s in steps) > 50


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "ngram_min": 1}, {"num_speculative_tokens": 2}], ids=str)
def test_speculative_ngram(settings, baseline):
    """The setting itself, on text that repeats its prompt now and then."""
    _, steps = run(baseline, speculative="ngram", **settings)
    assert sum(s.num_proposed_tokens for s in steps) > sum(s.num_accepted_tokens for s in steps) > 0


@pytest.mark.parametrize("settings", [{}, {"pool_size": "368tok", "max_num_batched_tokens": 64}], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_planning_ahead(policy, settings, baseline, monkeypatch):
    """Steps planned before the last one's tokens are there, as on a GPU."""

    def engine(*parts, plans_ahead):
        assert not plans_ahead, "a CPU computes at once: there is nothing to wait for"
        return Engine(*parts, plans_ahead=True)

    monkeypatch.setattr("ember.entrypoints.llm.Engine", engine)
    _, steps = run(baseline, scheduler=policy, **settings)
    assert bool(settings) == bool(sum(s.num_preempted for s in steps)) or policy == "static"


FRESH = """
import json, sys
from ember import LLM, SamplingParams
prompts = json.loads(sys.argv[1])
params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12)
llm = LLM(device="cpu", dtype="float32", pool_size="2048tok", seed=3)
print(json.dumps([output.token_ids for output in llm.generate(prompts, params)]))
"""


def in_new_process(prompts):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRESH, json.dumps(prompts)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_second_call_is_like_a_first_one():
    """What one `generate` leaves behind (blocks, counters, a random state) must not show in the next."""
    calls = [["Call me", "The sea"], ["In the course of the war", "Call me", "The"]]
    processes = [in_new_process(prompts) for prompts in calls]
    llm = make(pool_size="2048tok", seed=3, max_model_len=None)
    params = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=12)
    here = [[output.token_ids for output in llm.generate(prompts, params)] for prompts in calls]
    there = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert here == there
    assert here[0][0] != here[1][1], "the same prompt in another row has another seed"
