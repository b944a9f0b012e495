"""Who runs in the next step: queues, admission, the token budget, preemption.

Tokens are counted, not phases: a step gives each sequence some of the tokens that are not computed yet. Both queues
are in order of arrival. A prefix hit, a chunk and recompute after a preemption are the same thing with other numbers.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from ember.beam_search import Move
from ember.cache.block_manager import BlockManager
from ember.cache.prefix_cache import PrefixHit
from ember.core.batch import ScheduledSequence, SchedulerOutput
from ember.core.sequence import Sequence, SequenceStatus
from ember.core.speculation import Proposer


class Scheduler:
    """Owns the waiting and running queues; asks the block manager for room.

    Policies:
        prefill_first: a step computes whole prompts if any can start, else one token of every running sequence.
        mixed: one token of every running sequence, beside them chunks of prompts up to `prefill_share` of the budget.
        static: a batch of up to `max_num_seqs` runs to its end before the next starts.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        policy: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_share: float = 1.0,
        proposer: Proposer | None = None,
    ) -> None:
        self.blocks = blocks
        self.proposer = proposer
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_share = prefill_share
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        self._batch_open = True
        self._num_added = 0

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence, with its children, at the end of the line."""
        for member in sequence.family:
            member.order = self._num_added
            self._num_added += 1
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks; what it computed others may reuse."""
        if sequence.status is SequenceStatus.RUNNING:
            self._publish(sequence)
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.HELD:
            self.held.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            for leader in (*self.running, *self.held, *self.waiting):
                leader.children = [child for child in leader.children if child is not sequence]
        sequence.status = SequenceStatus.FINISHED
        self.blocks.free(sequence.request_id)
        self._put_back(sequence.children)

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Let the samples run that waited for a prompt which is computed now; returns them.

        They share its blocks. Those beyond `max_num_seqs` get back in line, the first of them as leader of the rest.
        """
        room = max(0, self.max_num_seqs - self._num_taken() + len(leader.children))
        started = leader.children[:room]
        self._put_back(leader.children[room:])
        leader.children = []
        for child in started:
            self.blocks.fork(leader.request_id, child.request_id)
            child.num_computed_tokens = child.max_computed_tokens = leader.num_computed_tokens
            child.num_cached_tokens = child.num_prompt_tokens
            child.admitted_s, child.status = leader.admitted_s, SequenceStatus.RUNNING
            insort(self.running, child, key=_order)
        return started

    def hold(self, beam: Sequence) -> None:
        """Let a beam that is computed wait for the others of its search; it keeps its blocks as long as they can be."""
        self._publish(beam)
        self.running.remove(beam)
        self.held.append(beam)
        beam.status = SequenceStatus.HELD

    def branch(self, beams: list[Sequence], moves: list[Move]) -> None:
        """Let the beams of a search go on, each with a token after those of its parent, whose blocks it shares."""
        for move in moves:
            if move.beam != move.parent:
                self._copy(beams[move.parent], beams[move.beam])
        for move in moves:
            beams[move.beam].token_ids.append(move.token)
            beams[move.beam].children = []
            self._resume(beams[move.beam])

    def _copy(self, parent: Sequence, beam: Sequence) -> None:
        self.blocks.free(beam.request_id)
        if parent.num_computed_tokens:
            self.blocks.fork(parent.request_id, beam.request_id)
        beam.token_ids = list(parent.token_ids)
        beam.num_computed_tokens = parent.num_computed_tokens
        beam.max_computed_tokens = max(beam.max_computed_tokens, parent.num_computed_tokens)

    def _resume(self, beam: Sequence) -> None:
        """Let a beam run on if its K/V is there and a place is free; else it gets back in line."""
        if beam.status is SequenceStatus.HELD:
            self.held.remove(beam)
        if beam.num_computed_tokens and self._num_taken() < self.max_num_seqs:
            beam.status = SequenceStatus.RUNNING
            insort(self.running, beam, key=_order)
        else:
            self._give_up(beam)
            beam.status = SequenceStatus.PREEMPTED
            insort(self.waiting, beam, key=_order)

    def _give_up(self, sequence: Sequence) -> None:
        """Free a sequence's blocks; its tokens stay."""
        self.blocks.free(sequence.request_id)
        sequence.num_preemptions += sequence.num_computed_tokens > 0
        sequence.num_computed_tokens = 0

    def _put_back(self, family: list[Sequence]) -> None:
        if family:
            family[0].children = family[1:]
            insort(self.waiting, family[0], key=_order)

    def _num_taken(self) -> int:
        """Places that running sequences take, or will when their children are forked."""
        return len(self.running) + sum(len(s.children) for s in self.running)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens within the budget; empty only when there is nothing to do."""
        out = SchedulerOutput(max_prefill_tokens=self._max_prefill_tokens())
        evicted = self.blocks.num_evicted
        for sequence in self.running:
            self._publish(sequence)
        self._choose(out)
        out.num_evicted_blocks = self.blocks.num_evicted - evicted
        return out

    def _choose(self, out: SchedulerOutput) -> None:
        if self.policy == "mixed":
            self._run(self.running, out)
            self._admit(out)
        else:
            self._run([s for s in self.running if s.prefilling], out)
            self._admit(out)
            if not out.scheduled:
                self._batch_open = False
                self._run(self.running, out)
        if self.proposer is not None:
            self._speculate(self.proposer, out)

    def _max_prefill_tokens(self) -> int:
        """What of the next step's budget prompts may take: in `mixed` no token that a running sequence decodes."""
        budget = self.max_num_batched_tokens
        if self.policy != "mixed":
            return budget
        decoding = sum(not sequence.prefilling for sequence in self.running)
        return max(1, min(int(budget * self.prefill_share), budget - decoding))

    def _publish(self, sequence: Sequence) -> None:
        self.blocks.publish(sequence.request_id, sequence.token_ids, sequence.num_computed_tokens)

    def settle(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Learn from a step that is done, and give back the blocks of proposed tokens that were not kept."""
        if self.proposer is None:
            return
        for s in (s for s in scheduled if s.sequence.status is SequenceStatus.RUNNING):
            if s.proposed:
                self.proposer.learn(s.sequence, len(s.proposed), s.num_accepted)
            self.blocks.shrink(s.sequence.request_id, s.sequence.num_computed_tokens)

    def _speculate(self, proposer: Proposer, out: SchedulerOutput) -> None:
        """Add proposed tokens to the decodes, within what the rest of the step leaves of the budget and the pool."""
        decodes = [s for s in out.scheduled if s.samples and s.start >= s.sequence.num_prompt_tokens]
        for s in [s for s in decodes if s.sequence.search is None]:
            end, sequence = s.start + s.num_new_tokens, s.sequence
            room = (len(s.block_table) + self.blocks.num_available) * self.blocks.block_size - end
            left = sequence.max_tokens - sequence.num_output_tokens - 1
            most = min(self.max_num_batched_tokens - out.num_tokens, left, room)
            tokens = proposer.propose(sequence, most, len(self.running))
            if tokens and self.blocks.grow(sequence.request_id, end + len(tokens)) is not None:
                s.propose(tokens)
                out.num_tokens += len(tokens)

    def _run(self, sequences: Iterable[Sequence], out: SchedulerOutput) -> None:
        for sequence in list(sequences):
            if sequence.status is SequenceStatus.RUNNING:  # not preempted for an older one just now
                self._schedule(sequence, out)

    def _schedule(self, sequence: Sequence, out: SchedulerOutput) -> None:
        """Give a running sequence its tokens within the budget, preempting others (or in the end itself) for room."""
        start = sequence.num_computed_tokens
        budget = self.max_num_batched_tokens - out.num_tokens
        if sequence.prefilling:
            budget = min(budget, out.max_prefill_tokens - out.num_prefill_tokens)
        num_new_tokens = min(sequence.num_uncomputed_tokens, budget)
        if num_new_tokens == 0:
            return
        while (copies := self.blocks.grow(sequence.request_id, start + num_new_tokens, start)) is None:
            idle = next((beam for beam in self.held if beam.num_computed_tokens), None)
            if idle is not None:
                self._give_up(idle)
                out.preempted.append(idle)
                continue
            victim = self._victim(sequence)
            self._preempt(victim, out)
            if victim is sequence:
                return
        table = self.blocks.block_table(sequence.request_id)
        end = start + num_new_tokens
        samples = end == sequence.num_tokens
        num_logits = max(int(samples), end - sequence.first_unscored(start, end))
        out.add(ScheduledSequence(sequence, start, num_new_tokens, table, samples, num_logits, copies=copies))

    def _victim(self, sequence: Sequence) -> Sequence:
        """Who gives up its blocks for a sequence: of itself and those after it, whoever loses least; then the youngest.

        Never the oldest of all, which so comes to its end; nor one before the sequence, which may be in the step
        already; nor, while others do, one that holds no block of its own: that only makes shared blocks less shared.
        """
        candidates = self.running[self.running.index(sequence) :]
        useful = [s for s in candidates[::-1] if s is not self.running[0] and self.blocks.num_own(s.request_id)]
        return min(useful, key=self._cost_of_preempting, default=candidates[-1])

    def _cost_of_preempting(self, sequence: Sequence) -> int:
        """Tokens that would have to be computed again."""
        return sequence.num_computed_tokens - self.blocks.num_kept_tokens(sequence.request_id)

    def _admit(self, out: SchedulerOutput) -> None:
        """Start sequences in order of arrival while there is room.

        One whose next block another is computing right now steps aside until that block can be reused. It can't
        starve: whoever shares that block is behind it or waits too, and once nobody computes it, nobody passes.
        """
        if not self.running and self.waiting and self.waiting[0].status is SequenceStatus.WAITING:
            self._batch_open = True
        aside: list[Sequence] = []
        while self.waiting and len(aside) < self.max_num_seqs and self._may_start(self.waiting[0], out):
            sequence = self.waiting.popleft()
            hit = self.blocks.lookup(sequence.request_id, sequence.reusable_token_ids)
            if not hit.pending and self._has_room(sequence, hit, out):
                self._start(sequence, hit, out)
                continue
            aside.append(sequence)
            if not hit.pending:
                break
        self.waiting.extendleft(reversed(aside))

    def _start(self, sequence: Sequence, hit: PrefixHit, out: SchedulerOutput) -> None:
        found = self.blocks.reuse(sequence.request_id, sequence.token_ids, hit)
        if sequence.status is SequenceStatus.WAITING:
            sequence.num_cached_tokens = found
        sequence.num_computed_tokens = found
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)
        out.admitted.append(sequence)
        out.prefix_hit_tokens += found
        self._schedule(sequence, out)

    def _may_start(self, sequence: Sequence, out: SchedulerOutput) -> bool:
        """Whether the limits allow a waiting sequence to start now, whatever room it needs.

        Nothing starts in a step that preempted: it would soon be thrown out again, its prefill wasted. So would the
        beams of a search that do not all find a place.
        """
        full = out.num_tokens >= self.max_num_batched_tokens or out.num_prefill_tokens >= out.max_prefill_tokens
        taken, places = self._num_taken(), 1 if sequence.search is None else len(sequence.family)
        if full or out.preempted or taken >= self.max_num_seqs or (taken and taken + places > self.max_num_seqs):
            return False
        return self.policy != "static" or self._batch_open or sequence.status is not SequenceStatus.WAITING

    def _has_room(self, sequence: Sequence, hit: PrefixHit, out: SchedulerOutput) -> bool:
        """Whether what a hit leaves of a sequence fits the pool, with one block to spare for each that then runs.

        Else it would soon be thrown out again. Alone it always fits.
        """
        left = sequence.num_tokens - len(hit.blocks) * self.blocks.block_size
        if self.policy != "mixed" and out.scheduled and left > self.max_num_batched_tokens - out.num_tokens:
            return False
        spare = min(self._num_taken() + len(sequence.children), self.max_num_seqs - 1)
        return not self.running or self.blocks.has_room(hit, sequence.num_tokens, spare)

    def _preempt(self, sequence: Sequence, out: SchedulerOutput) -> None:
        """Give up a sequence's K/V, keep its tokens, put it back to its place in the line."""
        self.running.remove(sequence)
        self._give_up(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        insort(self.waiting, sequence, key=_order)
        out.preempted.append(sequence)


def _order(sequence: Sequence) -> int:
    return sequence.order
