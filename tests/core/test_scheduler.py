"""The scheduler against its promises, under random work: order, limits, no starvation, what each policy is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ember.cache.block_manager import BlockManager
from ember.cache.prefix_cache import PrefixCache
from ember.core.batch import SchedulerOutput
from ember.core.scheduler import Scheduler
from ember.core.sequence import SequenceStatus
from tests.fakes import POLICIES, advance, make_sequence

MAX_LEN = 12


def make_scheduler(
    policy, *, num_blocks=32, block_size=2, max_num_seqs=4, budget=16, prefix_cache=True, prefill_share=1.0
):
    blocks = BlockManager(num_blocks, block_size, PrefixCache(block_size) if prefix_cache else None)
    return Scheduler(
        blocks,
        policy=policy,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefill_share=prefill_share,
    )


def step(scheduler):
    """One step as the engine does it; returns the plan."""
    plan = scheduler.schedule()
    for sequence in advance(plan):
        scheduler.finish(sequence)
    return plan


def is_decode(scheduled):
    """Whether a share is the plain next token of a sequence: neither of its prompt nor computed before."""
    sequence, start = scheduled.sequence, scheduled.start
    return scheduled.num_new_tokens == 1 and start >= max(sequence.num_prompt_tokens, sequence.max_computed_tokens)


def shares(plan):
    return [(s.sequence.request_id, s.start, s.num_new_tokens) for s in plan.scheduled]


def ids(sequences):
    return [s.request_id for s in sequences]


@pytest.mark.parametrize("policy", POLICIES)
def test_with_reservations_as_many_run_as_the_pool_holds_of_them(policy):
    """Nothing grows then, so a block left free for growth would only make the baseline look worse than it is."""
    blocks = BlockManager(24, 2, reserved_tokens=MAX_LEN)
    scheduler = Scheduler(blocks, policy=policy, max_num_seqs=8, max_num_batched_tokens=50)
    for i in range(6):
        scheduler.add(make_sequence(i, prompt_len=3, max_tokens=5))
    plan = step(scheduler)
    assert (ids(plan.admitted), blocks.num_used) == ([0, 1, 2, 3], 24)
    preempted = []
    while scheduler.running or scheduler.waiting:
        preempted += step(scheduler).preempted
        blocks.check_integrity()
    assert not preempted


class SchedulerMachine(RuleBasedStateMachine):
    """Guards against everything that a history of arrivals, steps and aborts could break."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        block_size=st.integers(1, 5),
        spare_blocks=st.integers(0, 8),
        max_num_seqs=st.integers(1, 4),
        budget=st.one_of(st.integers(1, 6), st.just(50)),
        prefix_cache=st.booleans(),
    )
    def start(self, policy, block_size, spare_blocks, max_num_seqs, budget, prefix_cache):
        """The pool holds one sequence of MAX_LEN tokens and little more."""
        self.scheduler = make_scheduler(
            policy,
            num_blocks=-(-MAX_LEN // block_size) + spare_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=budget,
            prefix_cache=prefix_cache,
        )
        self.live = {}
        self.count = 0
        self.batch, self.batch_closed = set(), False

    @rule(prompt_len=st.integers(1, MAX_LEN - 1), max_tokens=st.integers(1, MAX_LEN), shared=st.integers(0, MAX_LEN))
    def add(self, prompt_len, max_tokens, shared):
        sequence = make_sequence(self.count, prompt_len, min(max_tokens, MAX_LEN - prompt_len), shared=shared)
        self.count += 1
        self.live[sequence.request_id] = sequence
        self.scheduler.add(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        """A request given up, wherever it is, leaves no trace."""
        self._leave(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    @rule()
    def step(self):
        """Limits, order, tables and progress of one step."""
        tables = {i: list(self.scheduler.blocks.block_table(i)) for i in ids(self.scheduler.running)}
        oldest = self.scheduler.running[:1]
        new = {i for i, s in self.live.items() if s.status is SequenceStatus.WAITING}
        plan = self.scheduler.schedule()
        self._check_limits(plan)
        self._check_order(plan, oldest)
        self._check_line(plan)
        self._check_static(plan, new)
        self._check_shares(plan, tables)
        for sequence in advance(plan):
            self._leave(sequence)

    def _leave(self, sequence):
        del self.live[sequence.request_id]
        self.batch.discard(sequence.request_id)
        self.scheduler.finish(sequence)

    def _check_limits(self, plan):
        assert plan.num_tokens == sum(s.num_new_tokens for s in plan.scheduled)
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        assert bool(plan.scheduled) == bool(self.live), "a step must do something while there is something to do"

    def _check_order(self, plan, oldest):
        scheduled = ids(s.sequence for s in plan.scheduled)
        assert len(scheduled) == len(set(scheduled))
        assert not set(scheduled) & set(ids(plan.preempted))
        assert not set(ids(oldest)) & set(ids(plan.preempted)), "the oldest running sequence was preempted"
        for sequence in plan.preempted:
            assert sequence.num_computed_tokens == 0

    def _check_line(self, plan):
        """Nobody passes another in line, but one that waits for what someone is computing right now."""
        last = max(ids(plan.admitted), default=-1)
        for sequence in (s for s in self.scheduler.waiting if s.request_id < last):
            assert self.scheduler.blocks.lookup(sequence.request_id, sequence.token_ids).pending

    def _check_shares(self, plan, tables):
        blocks = self.scheduler.blocks
        found = sum(s.start for s in plan.scheduled if s.sequence in plan.admitted)
        assert plan.prefix_hit_tokens == found
        for s in plan.scheduled:
            sequence = s.sequence
            assert s.start == sequence.num_computed_tokens
            assert s.copies == [], "nothing is written where others read"
            written = s.block_table[s.start // blocks.block_size :]
            assert all(blocks._ref_counts[block] == 1 for block in written)
            assert 0 < s.num_new_tokens <= sequence.num_uncomputed_tokens
            assert s.samples == (s.start + s.num_new_tokens == sequence.num_tokens)
            old = tables.get(sequence.request_id, [])
            assert list(s.block_table[: len(old)]) == old, "a block table is append-only"

    def _check_static(self, plan, new):
        """A batch is closed once it decodes, until its last member is gone."""
        if self.scheduler.policy != "static":
            return
        first_time = new & set(ids(plan.admitted))
        if not self.batch:
            self.batch_closed = False
        assert not (self.batch_closed and first_time), "a new sequence joined a running batch"
        self.batch |= first_time
        self.batch_closed |= any(s.sequence.num_output_tokens for s in plan.scheduled)

    @invariant()
    def order_and_blocks(self):
        """running and waiting are in order of arrival, all are there, and each holds the blocks of its tokens only."""
        if not hasattr(self, "scheduler"):
            return
        running, blocks = self.scheduler.running, self.scheduler.blocks
        blocks.check_integrity()
        waiting = self.scheduler.waiting
        assert all(ids(line) == sorted(ids(line)) for line in (running, waiting))
        assert sorted(ids(running) + ids(waiting)) == sorted(self.live)
        held = [list(blocks.block_table(i)) for i in ids(running)]
        assert [len(table) for table in held] == [blocks.blocks_for(s.num_computed_tokens) for s in running]
        assert len({block for table in held for block in table}) == blocks.num_used

    def teardown(self):
        """Whatever was done before, the rest comes to an end."""
        if hasattr(self, "scheduler"):
            drain(self.scheduler, list(self.live.values()))


def drain(scheduler, sequences):
    """Run to the end within a bound that no fair schedule needs; returns the number of steps."""
    total = sum(s.num_prompt_tokens + s.max_tokens for s in sequences)
    for done in range(total * (len(sequences) + 1) + 1):
        if not scheduler.running and not scheduler.waiting:
            assert scheduler.blocks.num_used == 0
            return done
        step(scheduler)
    raise AssertionError(f"{len(sequences)} sequences of {total} tokens do not come to an end")


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 6),
    budget=st.integers(1, 30),
    seqs=st.integers(1, 8),
    shared=st.integers(0, 11),
)
def test_nothing_starves(policy, seed, block_size, budget, seqs, shared):
    """A pool that barely holds one sequence must not lead to sequences that preempt each other for ever."""
    random_ = random.Random(seed)
    scheduler = make_scheduler(
        policy, num_blocks=-(-MAX_LEN // block_size), block_size=block_size, max_num_seqs=seqs, budget=budget
    )
    sequences = []
    for request_id in range(random_.randint(1, 10)):
        prompt_len = random_.randint(1, MAX_LEN - 1)
        max_tokens = random_.randint(1, MAX_LEN - prompt_len)
        sequences.append(make_sequence(request_id, prompt_len, max_tokens, shared=shared))
        scheduler.add(sequences[-1])
    drain(scheduler, sequences)
    assert all(s.num_output_tokens == s.max_tokens for s in sequences)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_full_pool_sequence_runs_alone(policy):
    """A sequence that needs every block must be admitted though nothing is left to spare."""
    scheduler = make_scheduler(policy, num_blocks=6)
    full = make_sequence(0, MAX_LEN - 1, 1)
    scheduler.add(full)
    assert shares(step(scheduler)) == [(0, 0, 11)]
    assert full.num_output_tokens == 1


def fill(scheduler, *requests):
    """Add requests of (prompt length, max_tokens)."""
    added = [make_sequence(i, *request) for i, request in enumerate(requests)]
    for sequence in added:
        scheduler.add(sequence)
    return added


def test_prefill_first_takes_whole_prompts_then_decodes():
    """The textbook policy: prompts that fit the budget whole, then one token of each."""
    scheduler = make_scheduler("prefill_first", budget=10)
    fill(scheduler, (4, 3), (5, 3), (3, 3))
    assert shares(step(scheduler)) == [(0, 0, 4), (1, 0, 5)]
    assert shares(step(scheduler)) == [(2, 0, 3)]
    assert shares(step(scheduler)) == [(0, 4, 1), (1, 5, 1), (2, 3, 1)]


def test_prefill_first_chunks_only_what_exceeds_the_budget():
    """A prompt longer than the budget would wait for ever if only whole prompts could start."""
    scheduler = make_scheduler("prefill_first", budget=4)
    fill(scheduler, (10, 2))
    assert [shares(step(scheduler)) for _ in range(4)] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 2)], [(0, 10, 1)]]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(1, 11), st.integers(1, 8)), min_size=1, max_size=8),
    budget=st.integers(1, 12),
    spare=st.integers(0, 12),
)
def test_prefill_first_never_mixes(requests, budget, spare):
    """A prompt's chunk in a decode step (its last token alone, say) makes the textbook policy another one."""
    scheduler = make_scheduler("prefill_first", num_blocks=10 + spare, budget=budget)
    fill(scheduler, *requests)
    while scheduler.running or scheduler.waiting:
        plan = scheduler.schedule()
        assert len({is_decode(s) for s in plan.scheduled}) == 1, shares(plan)
        for sequence in advance(plan):
            scheduler.finish(sequence)


def test_mixed_decodes_first_and_fills_the_budget_with_chunks():
    """Decodes must not wait for prompts, and the budget left must not be wasted."""
    scheduler = make_scheduler("mixed", budget=6)
    fill(scheduler, (3, 4), (9, 2))
    assert shares(step(scheduler)) == [(0, 0, 3), (1, 0, 3)]
    assert shares(step(scheduler)) == [(0, 3, 1), (1, 3, 5)]
    assert shares(step(scheduler)) == [(0, 4, 1), (1, 8, 1)]
    assert shares(step(scheduler)) == [(0, 5, 1), (1, 9, 1)]


def test_static_runs_a_batch_to_its_end():
    """The baseline must not fill the place of a finished sequence, else it is no baseline."""
    scheduler = make_scheduler("static", max_num_seqs=2)
    fill(scheduler, (2, 2), (2, 4), (2, 2))
    ran = [[i for i, _, _ in shares(step(scheduler))] for _ in range(6)]
    assert ran == [[0, 1], [0, 1], [1], [1], [2], [2]]


def test_static_opens_a_new_batch_after_an_abort():
    """A batch that was aborted to its last member must let the next one in."""
    scheduler = make_scheduler("static", max_num_seqs=1)
    first, _ = fill(scheduler, (2, 5), (2, 1))
    step(scheduler)
    step(scheduler)
    scheduler.finish(first)
    assert shares(step(scheduler)) == [(1, 0, 2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_youngest_is_preempted_and_comes_back_first(policy):
    """Preempting an older one, or queueing the preempted behind new arrivals, would starve it."""
    scheduler = make_scheduler(policy, num_blocks=8, block_size=2, max_num_seqs=2)
    fill(scheduler, (6, 6), (2, 9), (2, 2))
    preempted = []
    while not preempted:
        preempted = step(scheduler).preempted
    assert ids(preempted) == [1]
    assert ids(scheduler.waiting) == [1, 2]
    assert preempted[0].num_preemptions == 1
    assert preempted[0].status is SequenceStatus.PREEMPTED
    assert preempted[0].num_output_tokens > 0, "its tokens are kept"


@pytest.mark.parametrize("policy", POLICIES)
def test_admission_leaves_a_block_to_spare_for_each_running(policy):
    """Filled to the last block, the next decode step would throw the newcomer out again, its prefill wasted."""
    scheduler = make_scheduler(policy, num_blocks=6, block_size=2)
    fill(scheduler, (4, 2), (4, 2), (3, 1))
    assert [i for i, _, _ in shares(step(scheduler))] == [0, 1]
    scheduler = make_scheduler(policy, num_blocks=6, block_size=2)
    fill(scheduler, (4, 2), (7, 2), (2, 1))
    assert [i for i, _, _ in shares(step(scheduler))] == [0], "nor may one pass another in line"


def test_nothing_is_admitted_where_something_was_preempted():
    """Admitting into the blocks that a preemption freed would throw a prefill away at once."""
    scheduler = make_scheduler("mixed", num_blocks=6, block_size=2, max_num_seqs=4)
    fill(scheduler, (4, 6), (4, 6), (1, 1))
    for _ in range(30):
        plan = step(scheduler)
        assert not (plan.preempted and plan.admitted)


def test_finish_takes_a_sequence_from_wherever_it_is():
    """An abort of a waiting, running or preempted sequence must leave neither an entry nor a block behind."""
    scheduler = make_scheduler("mixed", num_blocks=8, block_size=2, max_num_seqs=2)
    sequences = fill(scheduler, (6, 6), (2, 9), (2, 2))
    while sequences[1].status is not SequenceStatus.PREEMPTED:
        step(scheduler)
    for sequence in sequences[::-1]:
        scheduler.finish(sequence)
        scheduler.finish(sequence)  # twice is harmless
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.blocks.num_used == 0


def test_an_idle_scheduler_schedules_nothing():
    """schedule() with nothing to do must come back empty, not fail."""
    for policy in POLICIES:
        assert shares(make_scheduler(policy).schedule()) == []


def run_until_decoding(scheduler):
    """Shares of each step until one only decodes."""
    plans = []
    while True:
        plan = scheduler.schedule()
        if all(is_decode(s) for s in plan.scheduled):
            return plans
        plans.append(shares(plan))
        advance(plan)


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_wait_for_the_prefix_that_another_computes(policy):
    """Admitted together before any is cached, equal prefixes would all be computed; others need not wait."""
    scheduler = make_scheduler(policy, budget=100, max_num_seqs=9)
    for i in range(4):
        scheduler.add(make_sequence(i, 9, 3, shared=6))
    scheduler.add(make_sequence(4, 5, 3))
    first, second = run_until_decoding(scheduler)
    assert first == [(0, 0, 9), (4, 0, 5)]
    own = [(1, 6, 3), (2, 6, 3), (3, 6, 3)]
    assert second == ([(0, 9, 1), (4, 5, 1), *own] if policy == "mixed" else own)
    assert [s.num_cached_tokens for s in scheduler.running] == [0, 6, 6, 6, 0]


def test_rows_wait_through_the_chunks_of_a_long_prefix():
    """The first chunk's blocks are there before the rest: a row that starts then computes the rest a second time."""
    scheduler = make_scheduler("mixed", budget=4, max_num_seqs=9)
    for i in range(2):
        scheduler.add(make_sequence(i, 11, 3, shared=10))
    assert run_until_decoding(scheduler) == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 3)], [(0, 11, 1), (1, 10, 1)]]


def test_the_budget_is_counted_after_the_hit():
    """A token count from before the hit was known: rows would be kept out of a step that they fit."""
    scheduler = make_scheduler("prefill_first", budget=10, max_num_seqs=9)
    for i in range(6):
        scheduler.add(make_sequence(i, 10, 2, shared=8))
    assert run_until_decoding(scheduler) == [[(0, 0, 10)], [(i, 8, 2) for i in range(1, 6)]]


def test_room_is_counted_after_the_hit():
    """Shared blocks counted again for each row would keep rows out of a pool that holds them."""
    scheduler = make_scheduler("prefill_first", num_blocks=4 + 1 + 5 + 5, budget=100, max_num_seqs=9)
    for i in range(6):
        scheduler.add(make_sequence(i, 10, 1, shared=8))
    step(scheduler)
    assert [s.request_id for s in scheduler.schedule().admitted] == [1, 2, 3, 4, 5]


def test_a_row_whose_leader_is_gone_computes_the_prefix_itself():
    """An abort of the one that computes must not leave the others waiting."""
    scheduler = make_scheduler("mixed", budget=4, max_num_seqs=9)
    sequences = [make_sequence(i, 11, 1, shared=10) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert shares(step(scheduler)) == [(0, 0, 4)]
    scheduler.finish(sequences[0])
    assert shares(step(scheduler)) == [(1, 4, 4)]


@pytest.mark.parametrize("length", [7, 8, 9])
def test_recompute_after_preemption_hits_the_cache(length):
    """K/V that are still there would be computed again; at a block's edge a token would be lost or counted twice."""
    scheduler = make_scheduler("prefill_first", num_blocks=16)
    sequence = make_sequence(0, length, 3)
    scheduler.add(sequence)
    step(scheduler)
    for _ in range(2):
        scheduler._publish(sequence)
        scheduler._preempt(sequence, SchedulerOutput())
        tokens = sequence.num_tokens
        found = min((tokens - 1) // 2 * 2, sequence.max_computed_tokens // 2 * 2)
        assert shares(step(scheduler)) == [(0, found, tokens - found)]
    assert sequence.num_output_tokens == 3
    assert sequence.num_cached_tokens == 0, "what it computed itself is no saving"


def test_the_victim_is_the_one_that_loses_least():
    """The youngest may have the longest prompt; what others hold too it would find again."""
    scheduler = make_scheduler("mixed", num_blocks=20, budget=100, max_num_seqs=9)
    for i, (length, shared) in enumerate([(11, 10), (3, 0), (8, 0), (11, 10)]):
        scheduler.add(make_sequence(i, length, 30, shared=shared))
    for _ in range(2):
        step(scheduler)
    costs = {s.request_id: scheduler._cost_of_preempting(s) for s in scheduler.running}
    assert costs == {0: 2, 1: 4, 2: 9, 3: 1}
    assert [scheduler._victim(s).request_id for s in scheduler.running] == [3, 3, 3, 3]
    scheduler.finish(scheduler.running[3])
    assert [scheduler._victim(s).request_id for s in scheduler.running] == [1, 1, 2]


def test_who_holds_nothing_of_its_own_is_the_last_victim():
    """Preempting it gives no room, and its own work is lost for nothing; where all share, the youngest must do."""
    scheduler = make_scheduler("mixed", num_blocks=30, budget=100, max_num_seqs=9)
    first, second, other = fill(scheduler, (5, 30), (9, 30), (9, 30))
    step(scheduler)
    third = make_sequence(3, 9, 30)
    third.num_computed_tokens = 9
    scheduler.blocks.fork(1, 3)
    scheduler.running.append(third)
    assert scheduler._victim(first) is other
    scheduler.finish(other)
    assert scheduler._victim(first) is third
    scheduler.blocks.free(3)
    assert scheduler._cost_of_preempting(second) == 9


def test_prefill_share_bounds_what_prompts_take_beside_decodes():
    """Long prompts that fill each step make every running row wait for them."""
    scheduler = make_scheduler("mixed", budget=16, prefill_share=0.25)
    fill(scheduler, (3, 9), (9, 2))
    assert shares(step(scheduler)) == [(0, 0, 3), (1, 0, 1)]
    assert shares(step(scheduler)) == [(0, 3, 1), (1, 1, 4)]
    assert shares(step(scheduler)) == [(0, 4, 1), (1, 5, 4)]


def test_a_prefill_takes_no_decode_s_place():
    """A row that waited for a prefix is older than those that passed it: its prompt must not stop their decodes."""
    scheduler = make_scheduler("mixed", num_blocks=64, budget=8, max_num_seqs=9)
    for i, (length, shared) in enumerate([(5, 4), (20, 4), (2, 0)]):
        scheduler.add(make_sequence(i, length, 9, shared=shared))
    assert shares(step(scheduler)) == [(0, 0, 5), (2, 0, 2)]
    assert shares(step(scheduler)) == [(0, 5, 1), (2, 2, 1), (1, 4, 6)]
    assert shares(step(scheduler)) == [(0, 6, 1), (1, 10, 6), (2, 3, 1)]


def test_a_tiny_share_still_moves():
    """A share of less than a token would let prompts wait for ever."""
    scheduler = make_scheduler("mixed", budget=4, prefill_share=0.01)
    fill(scheduler, (3, 2))
    assert [shares(step(scheduler)) for _ in range(3)] == [[(0, 0, 1)], [(0, 1, 1)], [(0, 2, 1)]]


def test_a_preempted_row_gets_behind_an_older_one_that_waits():
    """Put before it, whoever passed a row that waited for a prefix would keep that place for ever."""
    scheduler = make_scheduler("mixed", budget=8, max_num_seqs=9)
    for i, (length, shared) in enumerate([(5, 4), (20, 4), (2, 0)]):
        scheduler.add(make_sequence(i, length, 9, shared=shared))
    assert [i for i, _, _ in shares(step(scheduler))] == [0, 2]
    scheduler._preempt(scheduler.running[1], SchedulerOutput())
    assert ids(scheduler.waiting) == [1, 2]
