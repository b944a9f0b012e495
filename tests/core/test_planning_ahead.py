"""Steps that are planned while the tokens of the one before are drawn: nobody gets another token for it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.core import sampler as sampler_module
from ember.core.engine import NOT_YET
from ember.core.sequence import FinishReason, Sequence
from ember.sampling_params import SamplingParams
from tests.fakes import POLICIES, FakeRunner, continuation, make_engine, make_sequence, run_engine

ROOM = 16


class Failing(FakeRunner):
    """Has no memory for the requests in `broken`."""

    def __init__(self, block_size, broken):
        super().__init__(block_size)
        self.broken = broken

    def execute(self, scheduled):
        if any(s.sequence.request_id in self.broken for s in scheduled):
            raise MemoryError
        return super().execute(scheduled)


def make_rows(random_, count):
    """Rows that end by length, a stop id or a stop string; with samples, with prompts to score, greedy or drawn."""
    rows, first_id = [], 0
    for number in range(count):
        length = random_.randint(1, 12)
        prompt = [random_.choice([3, 7, 20]) for _ in range(length)]
        longest = random_.randint(1, ROOM - length)
        stops = random_.sample(continuation(prompt, longest), min(longest, random_.randint(0, 2)))
        chosen = {
            "max_tokens": longest,
            "stop_token_ids": stops,
            "temperature": random_.choice([0.0, 0.0, 5.0]),
            "prompt_logprobs": random_.choice([None, None, 0]),
            "logprobs": random_.choice([None, 1]),
        }
        samples = 1 if random_.random() < 0.6 else random_.randint(2, 4)
        params, stop_ids = SamplingParams(**chosen), frozenset(stops)
        family = [
            Sequence(first_id + i, list(prompt), params, 7 + number, longest, i, first_id, stop_ids=stop_ids)
            for i in range(samples)
        ]
        family[0].children = family[1:]
        for member in family[1:]:
            member.prompt_logprobs = family[0].prompt_logprobs
        first_id += samples
        rows.append(family[0])
    return rows


def run(rows, random_, *, broken, gone_at, stop_strings, **chosen):
    """How every request ended; each joins at some step, some are given up."""
    engine = make_engine(runner=Failing(chosen["block_size"], broken), **chosen)
    everyone, waiting, step = [s for row in rows for s in row.family], list(rows), 0

    def on_token(request_id, token):
        return "stop" if (request_id, token % 7) in stop_strings else None

    while waiting or engine.num_unfinished:
        while waiting and (random_.random() < 0.5 or not engine.num_unfinished):
            engine.add(waiting.pop(0))
        for request_id in [i for i, when in gone_at.items() if when == step and i in engine]:
            engine.abort(request_id)
        if engine.num_unfinished:
            engine.step(on_token)
        engine.scheduler.blocks.check_integrity()
        assert not any(NOT_YET in s.token_ids for s in everyone)
        assert len(engine.scheduler.running) <= engine.scheduler.max_num_seqs
        step += 1
        assert step < 3000, "the engine does not come to an end"
    assert engine.scheduler.blocks.num_used == 0
    return {s.request_id: ending(s) for s in everyone}


def ending(s):
    logprobs = [entry.token_ids for entry in s.logprobs]
    return s.output_token_ids, s.finish_reason, s.stop_reason, logprobs, s.error and s.error.kind


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(POLICIES),
    block_size=st.integers(1, 6),
    spare=st.integers(0, 12),
    budget=st.one_of(st.integers(1, 6), st.just(64)),
    seqs=st.integers(1, 6),
    prefix_cache=st.booleans(),
)
def test_every_row_ends_as_without(seed, policy, block_size, spare, budget, seqs, prefix_cache):
    """A row that ended is computed on, one is planned twice, a block of one that ended is copied or found by others."""
    chosen = {
        "policy": policy,
        "block_size": block_size,
        "num_blocks": -(-ROOM // block_size) + spare,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "prefix_cache": prefix_cache,
    }
    random_ = random.Random(seed)
    count = random_.randint(1, 6)
    gone_at = {random_.randrange(12): random_.randrange(15) for _ in range(random_.randint(0, 3))}
    broken = {i for i in range(12) if random_.random() < 0.05}
    stop_strings = {(random_.randrange(12), random_.randrange(7)) for _ in range(6)}
    ways = []
    for plans_ahead in (True, False):
        rows = make_rows(random.Random(seed), count)
        joining = random.Random(seed + 1)
        more = {"broken": broken, "gone_at": gone_at, "stop_strings": stop_strings}
        ways.append(run(rows, joining, **more, plans_ahead=plans_ahead, **chosen))
    for request_id in ways[0].keys() - gone_at.keys():  # those are given up in one step or another
        assert ways[0][request_id] == ways[1][request_id]


def test_planning_is_done_before_the_tokens_are_waited_for(monkeypatch):
    """All the use of it: a plan that is made once they are there leaves the device idle."""
    said = []
    engine = make_engine("mixed", plans_ahead=True)
    schedule, read = engine.scheduler.schedule, sampler_module._read
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: said.append("plan") or schedule())
    monkeypatch.setattr(sampler_module, "_read", lambda numbers: said.append("wait") or read(numbers))
    for i in range(3):
        engine.add(make_sequence(i, 4, 4))
    outs = run_engine(engine)
    assert said == ["plan"] + ["plan", "wait"] * 4
    assert not engine._planned.scheduled, "who ends by length takes no block for a token that nobody computes"
    assert [len(out.tokens) for out in outs] == [3] * 4
    assert [out.stats.num_decode_tokens for out in outs] == [0, 3, 3, 3]


def test_a_row_that_ends_unforeseen_is_left_out():
    """It was planned for the next step; its last token is not computed, and its blocks are free."""
    third = continuation(make_sequence(0, 5).token_ids, 3)[2]
    engine = make_engine("mixed", plans_ahead=True)
    engine.add(make_sequence(0, 5, 9, stop_token_ids=[third]))
    engine.add(make_sequence(1, 5, 5))
    run_engine(engine)
    assert [[request for request, _, _ in step] for step in engine.runner.steps] == [[0, 1]] * 3 + [[1]] * 2


def test_a_plan_of_which_nothing_is_left_is_made_anew():
    """The engine says that it has work, and then does none for ever."""
    third = continuation(make_sequence(0, 5).token_ids, 3)[2]
    engine = make_engine("static", plans_ahead=True, max_num_seqs=1)
    engine.add(make_sequence(0, 5, 9, stop_token_ids=[third]))
    engine.add(make_sequence(1, 5, 2))
    outs = run_engine(engine)
    assert [out.stats.num_running for out in outs] == [1] * 5


def test_sampling_row_by_row_after_a_failure_draws_the_same(monkeypatch):
    """A token that stands for one to come would shift the random numbers, and what penalties count."""
    results = []
    for plans_ahead in (True, False):
        engine, read, calls = make_engine(plans_ahead=plans_ahead), sampler_module._read, []

        def failing(numbers, read=read, calls=calls):
            calls.append(len(numbers[0]))
            if calls.count(2) == 2 and calls[-1] == 2:
                raise RuntimeError("lost")
            return read(numbers)

        with monkeypatch.context() as patch:
            patch.setattr(sampler_module, "_read", failing)
            rows = [make_sequence(i, 4, 6, temperature=9.0, frequency_penalty=0.5, seed=i + 1) for i in range(2)]
            for row in rows:
                engine.add(row)
            run_engine(engine)
        assert 1 in calls
        assert all(row.finish_reason is FinishReason.LENGTH for row in rows)
        results.append([row.output_token_ids for row in rows])
    assert results[0] == results[1]


def test_a_network_without_numbers_ends_its_rows():
    """Rows whose logits are NaN end in the step that has planned them on."""
    engine = make_engine(plans_ahead=True)
    engine.runner.execute = lambda scheduled: torch.full((len(scheduled), 101), torch.nan)
    rows = [make_sequence(i, 4, 4) for i in range(2)]
    for row in rows:
        engine.add(row)
    run_engine(engine)
    assert [row.error.kind for row in rows] == ["bad_logits"] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_proposals_follow_from_tokens_so_nothing_is_planned_ahead(policy):
    """A proposer that is asked for what follows a token that is not there."""

    class Proposer:
        def propose(self, sequence, most, num_running):
            assert NOT_YET not in sequence.token_ids
            return []

    engine = make_engine(policy, proposer=Proposer(), plans_ahead=True)
    assert not engine.plans_ahead
    engine.add(make_sequence(0, 4, 4))
    run_engine(engine)
