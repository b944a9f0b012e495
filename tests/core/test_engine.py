"""The engine over a fake network: how requests end, what a step says of itself, and that batching changes no token."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.cache.prefix_cache import strong_digest
from ember.core.sequence import FinishReason, SequenceStatus
from tests.fakes import EOS, POLICIES, continuation, make_engine, make_sequence, run_engine


def run_one(sequence, on_token=None, **settings):
    engine = make_engine(**settings)
    engine.add(sequence)
    outs = run_engine(engine, on_token)
    assert engine.scheduler.blocks.num_used == 0
    return outs


def expected(sequence, count):
    return continuation(sequence.token_ids[: sequence.num_prompt_tokens], count)


def ends(sequence):
    return sequence.finish_reason, sequence.stop_reason, sequence.num_output_tokens


def test_max_tokens_ends_with_length():
    """One token more or less than asked for."""
    sequence = make_sequence(1, 5, 7)
    run_one(sequence)
    assert ends(sequence) == (FinishReason.LENGTH, None, 7)
    assert sequence.output_token_ids == expected(sequence, 7)


def test_a_stop_id_ends_and_is_kept_and_named():
    """The completing token belongs to the output, and stop_reason says which it was."""
    sequence = make_sequence(2, 5, 20)
    third = expected(sequence, 3)[2]
    stopping = make_sequence(2, 5, 20, stop_token_ids=[third])
    run_one(stopping)
    assert ends(stopping) == (FinishReason.STOP, third, 3)
    assert stopping.output_token_ids[-1] == third


def test_eos_has_no_stop_reason():
    """EOS is a stop without a reason to name; one that is in stop_token_ids too is named."""
    third = expected(make_sequence(2, 5, 20), 3)[2]
    sequence = make_sequence(2, 5, 20, stop_ids=[third])
    run_one(sequence)
    assert ends(sequence) == (FinishReason.STOP, None, 3)
    both = make_sequence(2, 5, 20, stop_ids=[third], stop_token_ids=[third])
    run_one(both)
    assert ends(both) == (FinishReason.STOP, third, 3)


def test_a_stop_on_the_last_token_is_a_stop():
    """A stop id that comes exactly at max_tokens is a stop, not a length."""
    third = expected(make_sequence(2, 5, 3), 3)[2]
    sequence = make_sequence(2, 5, 3, stop_token_ids=[third])
    run_one(sequence)
    assert ends(sequence) == (FinishReason.STOP, third, 3)


@pytest.mark.parametrize("min_tokens", [1, 3, 4, 6])
def test_min_tokens_masks_what_would_end(min_tokens):
    """Before min_tokens the stop id is not drawn at all: the next best token is (in the fake, the id above it)."""
    stop = expected(make_sequence(2, 5, 20), 3)[2]
    sequence = make_sequence(2, 5, 20, stop_token_ids=[stop], min_tokens=min_tokens)
    run_one(sequence)
    assert stop not in sequence.output_token_ids[:min_tokens]
    if min_tokens < 3:
        assert ends(sequence) == (FinishReason.STOP, stop, 3)
    else:
        assert sequence.output_token_ids[2] == (stop + 1) % (EOS + 1)
        assert sequence.num_output_tokens >= min_tokens


def test_the_token_at_min_tokens_plus_one_may_stop():
    """min_tokens=2 must allow a stop id as the third token, and forbid it as the second."""
    tokens = expected(make_sequence(2, 5, 20), 3)
    third = make_sequence(2, 5, 20, stop_token_ids=[tokens[2]], min_tokens=2)
    run_one(third)
    assert third.num_output_tokens == 3
    second = make_sequence(2, 5, 20, stop_token_ids=[tokens[1]], min_tokens=2)
    run_one(second)
    assert second.output_token_ids[1] != tokens[1]


def test_a_stop_string_ends_through_on_token():
    """Whoever knows the text ends the request; the engine keeps the token and names the string."""
    seen = []

    def on_token(request_id, token):
        seen.append((request_id, token))
        return "halt" if len(seen) == 4 else None

    sequence = make_sequence(3, 5, 20)
    run_one(sequence, on_token)
    assert ends(sequence) == (FinishReason.STOP, "halt", 4)
    assert seen == [(3, token) for token in sequence.output_token_ids]


def test_a_stop_id_wins_over_a_stop_string():
    """Both at once: one reason, always the same."""
    third = expected(make_sequence(2, 5, 20), 3)[2]
    sequence = make_sequence(2, 5, 20, stop_token_ids=[third])
    run_one(sequence, lambda _, token: "halt" if token == third else None)
    assert sequence.stop_reason == third


def test_events_are_in_scheduling_order_and_close_with_the_reason():
    """The stream of a step: one event a sampled token, finish_reason on the last one only."""
    engine = make_engine()
    sequences = [make_sequence(i, 3 + i, 2 + i) for i in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    events = [event for out in run_engine(engine) for event in out.tokens]
    for sequence in sequences:
        own = [event for event in events if event.request_id == sequence.request_id]
        assert [event.token_id for event in own] == sequence.output_token_ids
        assert [event.finish_reason for event in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason is FinishReason.LENGTH
    assert [event.request_id for event in events[:4]] == [0, 1, 2, 3]


def test_a_chunk_that_samples_nothing_gives_no_token():
    """A step with only parts of prompts must not draw tokens from half a prompt."""
    engine = make_engine("mixed", max_num_batched_tokens=3)
    engine.add(make_sequence(0, 8, 1))
    outs = run_engine(engine)
    assert [len(out.tokens) for out in outs] == [0, 0, 1]
    assert [out.stats.num_prefill_tokens for out in outs] == [3, 3, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_abort_frees_blocks_wherever_the_request_is(policy):
    """An abort of a running or waiting request must give back its blocks and harm no other."""
    engine = make_engine(policy, max_num_seqs=2)
    sequences = [make_sequence(i, 6, 6) for i in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    engine.step()
    assert engine.abort(0) is sequences[0]
    assert engine.abort(3) is sequences[3]
    assert (engine.num_unfinished, engine.num_waiting) == (2, 1)
    engine.scheduler.blocks.check_integrity()
    run_engine(engine)
    assert engine.scheduler.blocks.num_used == 0
    assert [s.finish_reason for s in sequences] == [None, FinishReason.LENGTH, FinishReason.LENGTH, None]
    assert sequences[2].output_token_ids == expected(sequences[2], 6)


def test_abort_waiting_leaves_the_running():
    """A first Ctrl-C gives up what has not started and lets the rest finish."""
    engine = make_engine(max_num_seqs=1)
    for i in range(3):
        engine.add(make_sequence(i, 3, 3))
    engine.step()
    assert [s.request_id for s in engine.abort_waiting()] == [1, 2]
    assert engine.num_unfinished == 1
    run_engine(engine)


def test_a_request_may_come_back_under_its_id():
    """An id is free again once its request is finished or aborted."""
    engine = make_engine()
    for _ in range(2):
        sequence = make_sequence(5, 4, 3)
        engine.add(sequence)
        run_engine(engine)
        assert sequence.output_token_ids == expected(sequence, 3)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_continuous_batching_keeps_the_batch_full(policy):
    """A finished sequence's place must be taken in the next step while anyone waits."""
    engine = make_engine(policy, num_blocks=200, max_num_seqs=4, max_num_batched_tokens=200)
    for i in range(20):
        engine.add(make_sequence(i, 2 + i % 5, 1 + i % 7))
    for out in run_engine(engine):
        assert out.stats.num_running == 4 or out.stats.num_waiting == 0


def test_static_batching_does_not():
    """The baseline leaves places empty; were they filled, the comparison would show nothing."""
    engine = make_engine("static", num_blocks=200, max_num_seqs=4, max_num_batched_tokens=200)
    for i in range(12):
        engine.add(make_sequence(i, 3, 2 + i % 7))
    assert any(out.stats.num_running < 4 and out.stats.num_waiting for out in run_engine(engine))


def test_a_long_prompt_is_prefilled_beside_decodes():
    """mixed: running requests get their token in every step of another one's prefill."""
    engine = make_engine("mixed", max_num_batched_tokens=4)
    engine.add(make_sequence(0, 2, 12))
    engine.step()
    engine.add(make_sequence(1, 20, 2))
    for _ in range(6):
        assert [event.request_id for event in engine.step().tokens] == [0]


def run_randomly(engine, sequences, random_):
    """Requests that join at random moments; checks every step's statistics. Returns them."""
    waiting, steps = list(sequences), []
    while waiting or engine.num_unfinished:
        while waiting and (random_.random() < 0.4 or not engine.num_unfinished):
            engine.add(waiting.pop(0))
        before = len(engine.runner.steps)
        stats = engine.step().stats
        scheduled = engine.runner.steps[before]
        check_stats(engine, stats, scheduled)
        steps.append(stats)
        engine.scheduler.blocks.check_integrity()
    return steps


def check_stats(engine, stats, scheduled):
    """What one step says of itself, from what the runner saw."""
    blocks = engine.scheduler.blocks
    assert stats.step == len(engine.runner.steps) - 1
    assert stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.blocks_total == blocks.num_blocks
    assert 0 < stats.kv_utilization <= 1
    assert stats.kv_utilization == stats.kv_tokens / (stats.blocks_used * blocks.block_size)
    assert 0 < stats.num_running <= engine.scheduler.max_num_seqs
    counted = stats.num_prefill_tokens + stats.num_decode_tokens + stats.num_recomputed_tokens
    assert counted == sum(count for _, _, count in scheduled)
    assert len(scheduled) <= stats.num_running
    assert stats.kv_tokens >= max(start + count for _, start, count in scheduled)
    assert stats.num_prefill_seqs <= len(scheduled)
    assert stats.duration_s >= 0


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 7),
    spare=st.integers(0, 20),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    shared=st.sampled_from([0, 0, 5, 15]),
    digest=st.sampled_from([strong_digest, lambda data: bytes([sum(data) % 2])]),
    plans_ahead=st.booleans(),
)
def test_any_schedule_gives_the_same_tokens_and_true_statistics(
    policy, seed, block_size, spare, budget, seqs, shared, digest, plans_ahead
):
    """Blocks mixed up, K/V of other tokens reused, positions off by one: the fake network reads its slots."""
    random_ = random.Random(seed)
    engine = make_engine(
        policy,
        num_blocks=-(-16 // block_size) + spare,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        digest=digest,
        plans_ahead=plans_ahead,
    )
    sequences = []
    for i in range(random_.randint(1, 9)):
        prompt_len = random_.randint(1, 15)
        sequences.append(make_sequence(i, prompt_len, random_.randint(1, 16 - prompt_len), shared=shared))
    steps = run_randomly(engine, sequences, random_)
    for sequence in sequences:
        assert sequence.output_token_ids == expected(sequence, sequence.max_tokens)
    check_totals(steps, sequences)


def check_totals(steps, sequences):
    """Every prompt token is a prefill token once, every output token but a request's last a decode token once.

    Or it is found; by one that was preempted, also output that it had computed, or that others did.
    """
    prompts = sum(s.num_prompt_tokens for s in sequences)
    decoded = sum(s.num_output_tokens - 1 for s in sequences)
    found, cached = sum(s.prefix_hit_tokens for s in steps), sum(s.num_cached_tokens for s in sequences)
    prefill, decode = sum(s.num_prefill_tokens for s in steps), sum(s.num_decode_tokens for s in steps)
    decode -= sum(s.num_proposed_tokens - s.num_accepted_tokens for s in steps)
    assert cached <= found
    assert prompts - found <= prefill <= prompts - cached
    assert prompts + decoded - found <= prefill + decode <= prompts + decoded - cached
    if not any(s.num_preemptions for s in sequences):
        assert (prefill, decode, cached) == (prompts - found, decoded, found)
    assert sum(s.num_preempted for s in steps) == sum(s.num_preemptions for s in sequences)
    assert sum(s.num_finished for s in steps) == len(sequences)
    assert bool(sum(s.num_recomputed_tokens for s in steps)) <= bool(sum(s.num_preempted for s in steps))


def test_preemption_shows_in_the_statistics():
    """Recomputed tokens are what preemption costs; counted as prefill they would hide it."""
    engine = make_engine("mixed", num_blocks=5, block_size=4)
    sequences = [make_sequence(0, 7, 10), make_sequence(1, 6, 10)]
    for sequence in sequences:
        engine.add(sequence)
    steps = [out.stats for out in run_engine(engine)]
    check_totals(steps, sequences)
    assert sequences[0].num_preemptions == 0
    assert sequences[1].num_preemptions > 0
    assert sum(s.num_recomputed_tokens for s in steps) > 0


def test_kv_tokens_counts_the_slots_of_the_step():
    """Counted after the finished are freed, or before the new tokens, the use of the cache would be too low."""
    engine = make_engine(block_size=4)
    engine.add(make_sequence(0, 6, 2))
    outs = run_engine(engine)
    assert [(o.stats.kv_tokens, o.stats.blocks_used) for o in outs] == [(6, 2), (7, 2)]
    assert outs[0].stats.kv_utilization == 6 / 8


def test_times_are_in_order():
    """Queue time, first token and end are moments of one clock, set once; a preemption must not move them."""
    engine = make_engine("mixed", num_blocks=5, block_size=4)
    sequences = [make_sequence(i, 6, 10) for i in range(3)]
    for sequence in sequences:
        engine.add(sequence)
    first = None
    while engine.num_unfinished:
        engine.step()
        first = first or (sequences[1].admitted_s, sequences[1].first_token_s)
    assert sequences[1].num_preemptions
    for s in sequences:
        assert s.arrival_s <= s.admitted_s <= s.first_token_s <= s.finished_s
        assert s.status is SequenceStatus.FINISHED
    assert first == (sequences[1].admitted_s, sequences[1].first_token_s)


def test_step_times_add_up():
    """start_s grows, and the parts of a step lie within it."""
    engine = make_engine()
    engine.add(make_sequence(0, 3, 5))
    steps = [out.stats for out in run_engine(engine)]
    assert [s.step for s in steps] == list(range(5))
    for before, after in itertools.pairwise(steps):
        assert after.start_s >= before.start_s + before.duration_s
    for s in steps:
        assert 0 <= s.schedule_s + s.model_s + s.sample_s <= s.duration_s


def test_what_failed_is_not_found():
    """A prompt that memory did not suffice for: its blocks hold nothing, but would be found as if computed."""
    engine = make_engine(block_size=4)
    execute = engine.runner.execute

    def failing(scheduled):
        if any(s.sequence.request_id == 0 for s in scheduled):
            raise MemoryError
        return execute(scheduled)

    engine.runner.execute = failing
    engine.add(make_sequence(0, 9, 3, shared=9))
    run_engine(engine)
    second = make_sequence(1, 9, 3, shared=9)
    engine.add(second)
    run_engine(engine)
    assert second.num_cached_tokens == 0
    assert second.output_token_ids == expected(second, 3)
