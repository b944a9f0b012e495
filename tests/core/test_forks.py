"""Samples of one prompt: its K/V is computed once and shared, and no sample notices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.core.sequence import FinishReason, Sequence
from ember.sampling_params import SamplingParams
from tests.fakes import POLICIES, FakeRunner, make_engine, run_engine

MAX_LEN = 16
PARAMS = SamplingParams(temperature=20.0)


def family(first_id, prompt, max_tokens, num_samples, *, parent_id=0):
    """The samples of a prompt, which need not be as long as each other; the first leads."""
    leader, *children = (
        Sequence(first_id + i, list(prompt), PARAMS, 7, max_tokens + i % 2, i, parent_id) for i in range(num_samples)
    )
    leader.children = children
    return leader


def alone(prompt, max_tokens, sample_index):
    """What a sample is when it is the only one, in a roomy pool."""
    engine = make_engine()
    sequence = Sequence(0, list(prompt), PARAMS, 7, max_tokens + sample_index % 2, sample_index, 0)
    engine.add(sequence)
    run_engine(engine)
    return sequence.output_token_ids


def prompt_of(number, length):
    return [(7 * number + 3 * i) % 100 for i in range(length)]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    block_size=st.integers(1, 5),
    spare=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    budget=st.one_of(st.integers(1, 5), st.just(64)),
    prefix_cache=st.booleans(),
    rows=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4),
    given_up=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 19)), max_size=3),
    plans_ahead=st.booleans(),
)
def test_a_sample_is_the_same_in_any_company(
    policy, block_size, spare, max_num_seqs, budget, prefix_cache, rows, given_up, plans_ahead
):
    """A block counted free while shared, K/V of one sample under another's, a fork that waits for ever or twice."""
    engine = make_engine(
        policy,
        num_blocks=-(-MAX_LEN // block_size) + spare,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_cache=prefix_cache,
        plans_ahead=plans_ahead,
    )
    samples = []
    for number, (length, max_tokens, num_samples) in enumerate(rows):
        leader = family(len(samples), prompt_of(number, length), min(max_tokens, MAX_LEN - length - 1), num_samples)
        samples += leader.family
        engine.add(leader)
    step, gone = 0, set()
    while engine.num_unfinished:
        for when, request_id in given_up:
            live = request_id < len(samples) and samples[request_id].finish_reason is None
            if when == step and live and request_id not in gone:
                gone.add(request_id)
                engine.abort(request_id)
        engine.step()
        assert len(engine.scheduler.running) <= max_num_seqs
        engine.scheduler.blocks.check_integrity()
        step += 1
        assert step < 3000, "the engine does not come to an end"
    assert engine.scheduler.blocks.num_used == 0
    for sequence in samples:
        if sequence.request_id not in gone:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            expected = alone(prompt, sequence.max_tokens - sequence.sample_index % 2, sequence.sample_index)
            assert sequence.output_token_ids == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [7, 8])
def test_a_prompt_is_computed_once_and_held_once(policy, length):
    """n prompts computed, or n times the prompt's blocks, for n samples; a copy where the last block is full."""
    engine = make_engine(policy, block_size=4, prefix_cache=False)
    engine.add(family(0, prompt_of(0, length), 3, 8))
    first = engine.step()
    assert first.stats.num_prefill_tokens == length
    assert [(event.request_id, event.sample_index) for event in first.tokens] == [(0, i) for i in range(8)]
    assert engine.scheduler.blocks.num_used == 2
    second = engine.step()
    assert second.stats.blocks_used == (2 + 8 if length == 8 else 1 + 8)
    assert second.stats.num_decode_tokens == 8
    assert second.stats.kv_tokens == (8 + 8 if length == 8 else 4 + 8 * 4)
    assert sum(out.stats.num_prefill_tokens for out in run_engine(engine)) == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_more_samples_than_places_run_in_turns(prefix_cache):
    """n above max_num_seqs: a row that never runs, or that runs all at once."""
    engine = make_engine(max_num_seqs=3, prefix_cache=prefix_cache)
    leader = family(0, prompt_of(0, 9), 2, 8)
    samples = leader.family
    engine.add(leader)
    outs = run_engine(engine)
    assert max(out.stats.num_running for out in outs) == 3
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in samples)
    assert not prefix_cache or sum(out.stats.num_prefill_tokens for out in outs) <= 9 + 5


def test_samples_count_towards_max_num_seqs_before_they_are_forked():
    """A row admitted beside a long prompt takes the places of that prompt's samples, which then recompute it."""
    engine = make_engine("mixed", max_num_seqs=4, max_num_batched_tokens=8)
    engine.add(family(0, prompt_of(0, 12), 3, 4))
    engine.add(family(10, prompt_of(1, 3), 3, 1, parent_id=1))
    outs = run_engine(engine)
    assert outs[0].stats.num_running == 1
    assert outs[1].stats.num_prefill_tokens == 4
    assert outs[2].stats.num_running == 4
    assert sum(out.stats.num_recomputed_tokens for out in outs) == 0


def test_the_others_go_on_when_the_first_one_fails():
    """The samples of a prompt lost, or waiting for ever, because the one that led them could not be sampled."""
    engine = make_engine()
    leader = family(0, prompt_of(0, 5), 3, 3)
    samples = leader.family
    sample = engine.sampler.sample

    def failing(logits, sequences):
        if leader in sequences:
            raise ValueError("no luck")
        return sample(logits, sequences)

    engine.sampler.sample = failing
    engine.add(leader)
    run_engine(engine)
    assert [s.finish_reason for s in samples] == ["error", "length", "length"]
    assert samples[2].output_token_ids == alone(prompt_of(0, 5), 3, 2)


def test_the_others_take_over_when_the_first_one_is_given_up_early():
    """Children of a sequence that is no longer there: neither in line nor running."""
    engine = make_engine(max_num_batched_tokens=4)
    leader = family(0, prompt_of(0, 10), 3, 3)
    samples = leader.family
    engine.add(leader)
    engine.step()
    engine.abort(0)
    engine.abort(2)
    run_engine(engine)
    assert samples[1].output_token_ids == alone(prompt_of(0, 10), 3, 1)
    assert engine.scheduler.blocks.num_used == 0


def test_a_fork_copies_nothing_while_it_reads():
    """Copies made for all samples at once, also for the last owner of a block."""
    runner = FakeRunner(4)
    engine = make_engine(runner=runner)
    copies = []
    execute = runner.execute
    runner.execute = lambda scheduled: (copies.extend(c for s in scheduled for c in s.copies), execute(scheduled))[1]
    engine.add(family(0, prompt_of(0, 6), 3, 4))
    run_engine(engine)
    assert len(copies) == 3
