"""Speculation over a fake network: the same tokens as without, whatever was proposed, and only as much as pays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.core.sequence import FinishReason
from ember.speculation.ngram import NgramIndex
from ember.speculation.proposer import NgramProposer
from tests.fakes import POLICIES, FakeRunner, looping_token, make_engine, make_sequence, run_engine

MAX_LEN = 60


def tokens_without(sequence, count):
    """What plain decoding makes of a prompt."""
    tokens = list(sequence.token_ids[: sequence.num_prompt_tokens])
    for _ in range(count):
        tokens.append(looping_token(tokens))
    return tokens[sequence.num_prompt_tokens :]


def speculating(*, num_tokens=4, shortest=1, longest=3, block_size=4, best=looping_token, **engine):
    """An engine that proposes, over a network that repeats itself."""
    proposer = NgramProposer(num_tokens, shortest, longest)
    return make_engine(runner=FakeRunner(block_size, best), block_size=block_size, proposer=proposer, **engine)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40), grown=st.integers(0, 40), most=st.integers(1, 9))
def test_the_index_finds_what_a_search_finds(tokens, grown, most):
    """An n-gram that grew into the index late, or was overwritten by an older one, gives another continuation."""
    index = NgramIndex(2, 3)
    index.continuation(tokens[:grown] or tokens[:1], 1)
    assert index.continuation(tokens, most) == searched(tokens, most)


def searched(tokens, most):
    for n in (3, 2):
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) >= n and tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(most):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 7),
    spare=st.integers(0, 20),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    num_tokens=st.integers(1, 9),
)
def test_any_proposal_gives_the_same_tokens(policy, seed, block_size, spare, budget, seqs, num_tokens):
    """K/V of a rejected token read, a token kept after a rejected one, blocks of proposals lost, budgets exceeded."""
    random_ = random.Random(seed)
    engine = speculating(
        num_tokens=num_tokens,
        policy=policy,
        num_blocks=-(-MAX_LEN // block_size) + spare,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
    )
    sequences = []
    for i in range(random_.randint(1, 6)):
        prompt_len = random_.randint(1, 20)
        sequences.append(make_sequence(i, prompt_len, random_.randint(1, MAX_LEN - prompt_len)))
        engine.add(sequences[-1])
    while engine.num_unfinished:
        stats = engine.step().stats
        engine.scheduler.blocks.check_integrity()
        check_step(engine, stats, budget)
    assert engine.scheduler.blocks.num_used == 0
    for sequence in sequences:
        assert sequence.output_token_ids == tokens_without(sequence, sequence.max_tokens)


def check_step(engine, stats, budget):
    assert sum(count for _, _, count in engine.runner.steps[-1]) <= budget
    assert 0 <= stats.num_accepted_tokens <= stats.num_proposed_tokens
    assert 0 < stats.kv_utilization <= 1
    for sequence in engine.scheduler.running:
        held = len(engine.scheduler.blocks.block_table(sequence.request_id))
        assert held == engine.scheduler.blocks.blocks_for(sequence.num_computed_tokens)


def test_fewer_steps_and_true_counts():
    """Proposed and accepted tokens are counted once each, and every accepted one saves a step of a lone request."""
    sequence = make_sequence(1, 6, 50)
    engine = speculating()
    engine.add(sequence)
    steps = [out.stats for out in run_engine(engine)]
    accepted, proposed = (sum(getattr(s, f"num_{kind}_tokens") for s in steps) for kind in ("accepted", "proposed"))
    assert len(steps) == 50 - accepted
    assert 10 < accepted < proposed
    assert sum(s.num_decode_tokens for s in steps) == 49 + proposed - accepted


@pytest.mark.parametrize("kind", ["max_tokens", "stop_id", "stop_string"])
def test_no_token_is_kept_after_the_end(kind):
    """Several tokens a step pass one by one: what was accepted behind a stop must not come out."""
    text = tokens_without(make_sequence(1, 6, 50), 50)
    for at in range(1, 50):
        params = {"stop_token_ids": [text[at]]} if kind == "stop_id" else {}
        sequence = make_sequence(1, 6, at + 1 if kind == "max_tokens" else 50, **params)
        seen = []

        def on_token(_, token, seen=seen, at=at):
            seen.append(token)
            return "halt" if kind == "stop_string" and len(seen) == at + 1 else None

        engine = speculating()
        engine.add(sequence)
        events = [event for out in run_engine(engine, on_token) for event in out.tokens]
        end = text.index(text[at]) if kind == "stop_id" else at
        assert sequence.output_token_ids == seen == [event.token_id for event in events] == text[: end + 1]
        assert [e.finish_reason is not None for e in events] == [False] * end + [True]
        assert sequence.finish_reason is (FinishReason.LENGTH if kind == "max_tokens" else FinishReason.STOP)


def test_min_tokens_masks_also_what_is_proposed():
    """A stop id among proposed tokens, before min_tokens, is one that plain decoding could not draw."""
    text = tokens_without(make_sequence(1, 6, 50), 50)
    for stop in {text[8], text[20], text[30]}:
        plain, proposed = (make_sequence(1, 6, 50, stop_token_ids=[stop], min_tokens=25) for _ in range(2))
        for sequence, engine in ((plain, make_engine(runner=FakeRunner(4, looping_token))), (proposed, speculating())):
            engine.add(sequence)
            run_engine(engine)
        assert proposed.output_token_ids == plain.output_token_ids
        assert proposed.stop_reason == plain.stop_reason
        assert stop not in proposed.output_token_ids[:25]


def test_speculation_never_preempts():
    """Blocks for proposed tokens that another sequence then lacks: speculation would cost recomputation."""
    counts = []
    for proposer in (None, NgramProposer(8, 1, 3)):
        engine = make_engine("mixed", num_blocks=20, runner=FakeRunner(4, looping_token), proposer=proposer)
        sequences = [make_sequence(i, 6, 14) for i in range(4)]
        for sequence in sequences:
            engine.add(sequence)
        run_engine(engine)
        counts.append(sum(s.num_preemptions for s in sequences))
    assert counts == [0, 0]


def test_proposals_are_given_up_before_memory_runs_out():
    """A step too large only for its proposed tokens must not cost a row."""

    class SmallMachine(FakeRunner):
        def execute(self, scheduled):
            if sum(s.num_new_tokens for s in scheduled) > 6:
                raise MemoryError
            return super().execute(scheduled)

    proposer = NgramProposer(8, 1, 3)
    engine = make_engine(runner=SmallMachine(4, looping_token), proposer=proposer)
    sequences = [make_sequence(i, 3, 40) for i in range(2)]
    for sequence in sequences:
        engine.add(sequence)
    steps = run_engine(engine)
    assert all(s.output_token_ids == tokens_without(s, 40) for s in sequences)
    assert sum(out.stats.num_accepted_tokens for out in steps) > 0


def proposals(best, *, count, out=200):
    """Proposed and accepted tokens, and output tokens, of `count` requests that run together."""
    engine = speculating(best=best, num_tokens=8, num_blocks=8000, max_num_seqs=count, max_num_batched_tokens=9 * count)
    for i in range(count):
        engine.add(make_sequence(i, 6, out))
    steps = [step.stats for step in run_engine(engine)]
    return sum(s.num_proposed_tokens for s in steps), sum(s.num_accepted_tokens for s in steps), count * out


def coin(context):
    """One of three tokens, no telling which: every n-gram comes again soon, and goes on otherwise."""
    return random.Random(len(context)).randrange(3)


def test_where_little_is_accepted_little_is_proposed():
    """N-grams that come again but go on otherwise: proposing must stop, and be tried ever more rarely."""
    proposed, accepted, total = proposals(coin, count=32)
    assert 0 < accepted < 0.5 * proposed
    assert proposed < 0.05 * total


def test_where_it_always_pays_nearly_all_is_proposed():
    """The watch must not throttle a loop."""
    proposed, accepted, total = proposals(lambda context: context[-3], count=4)
    assert accepted > 0.8 * total
    assert accepted > 0.9 * proposed


def test_it_comes_back_when_the_text_begins_to_repeat():
    """Off for good after a bad start would lose the repetitive rest."""
    proposed, accepted, _ = proposals(lambda c: coin(c) if len(c) < 100 else c[-3], count=8, out=300)
    assert accepted > 0.6 * 8 * 200
    assert accepted > 0.7 * proposed
