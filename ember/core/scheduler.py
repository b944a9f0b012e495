"""Who runs in the next step: queues, admission, the token budget, preemption.

Tokens are counted, not phases: a step gives each sequence some of the tokens that are not computed yet. Sequences
run in order of arrival, and `running` followed by `waiting` is always in that order: the youngest is preempted
first and returns to the front of the line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ember.cache.block_manager import BlockManager
from ember.core.batch import ScheduledSequence, SchedulerOutput
from ember.core.sequence import Sequence, SequenceStatus
from ember.core.speculation import NgramProposer


class Scheduler:
    """Owns the waiting and running queues; asks the block manager for room.

    Policies:
        prefill_first: a step computes whole prompts if any can start, else one token of every running sequence.
        mixed: running sequences first, then chunks of prompts up to the budget.
        static: a batch of up to `max_num_seqs` runs to its end before the next starts.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        policy: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        proposer: NgramProposer | None = None,
    ) -> None:
        self.blocks = blocks
        self.proposer = proposer
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._batch_open = True

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the line."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is not SequenceStatus.FINISHED:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.blocks.free(sequence.request_id)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens within the budget; empty only when there is nothing to do."""
        out = SchedulerOutput()
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
        return out

    def settle(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Learn from a step that is done, and give back the blocks of proposed tokens that were not kept."""
        for s in scheduled:
            if self.proposer is not None and s.proposed and s.sequence.status is SequenceStatus.RUNNING:
                self.proposer.learn(s.sequence, len(s.proposed), s.num_accepted)
                self.blocks.shrink(s.sequence.request_id, s.sequence.num_computed_tokens)

    def _speculate(self, proposer: NgramProposer, out: SchedulerOutput) -> None:
        """Add proposed tokens to the decodes, within what the rest of the step leaves of the budget and the pool."""
        for s in [s for s in out.scheduled if s.samples and s.num_new_tokens == 1]:
            end, sequence = s.start + 1, s.sequence
            room = (len(s.block_table) + self.blocks.num_free) * self.blocks.block_size - end
            left = sequence.max_tokens - sequence.num_output_tokens - 1
            most = min(self.max_num_batched_tokens - out.num_tokens, left, room)
            tokens = proposer.propose(sequence, most, len(self.running))
            if tokens and self.blocks.grow(sequence.request_id, end + len(tokens)):
                s.propose(tokens)
                out.num_tokens += len(tokens)

    def _run(self, sequences: Iterable[Sequence], out: SchedulerOutput) -> None:
        for sequence in list(sequences):
            budget = self.max_num_batched_tokens - out.num_tokens
            if budget == 0:
                return
            if sequence.status is SequenceStatus.RUNNING:  # not preempted for an older one just now
                self._schedule(sequence, min(sequence.num_uncomputed_tokens, budget), out)

    def _schedule(self, sequence: Sequence, num_new_tokens: int, out: SchedulerOutput) -> None:
        """Give a running sequence its tokens, preempting younger ones (or in the end itself) for room."""
        start = sequence.num_computed_tokens
        while not self.blocks.grow(sequence.request_id, start + num_new_tokens):
            victim = self.running[-1]
            self._preempt(victim, out)
            if victim is sequence:
                return
        table = self.blocks.block_table(sequence.request_id)
        samples = start + num_new_tokens == sequence.num_tokens
        out.add(ScheduledSequence(sequence, start, num_new_tokens, table, samples, int(samples)))

    def _admit(self, out: SchedulerOutput) -> None:
        if not self.running and self.waiting and self.waiting[0].status is SequenceStatus.WAITING:
            self._batch_open = True
        while self.waiting and self._has_room(self.waiting[0], out):
            sequence = self.waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            out.admitted.append(sequence)
            budget = self.max_num_batched_tokens - out.num_tokens
            self._schedule(sequence, min(sequence.num_uncomputed_tokens, budget), out)

    def _has_room(self, sequence: Sequence, out: SchedulerOutput) -> bool:
        """Whether a waiting sequence may start now.

        Its tokens must fit with one block to spare for each running sequence, and nothing was preempted in this
        step: else it would soon be thrown out again, its prefill wasted. Alone it always fits.
        """
        budget = self.max_num_batched_tokens - out.num_tokens
        if budget <= 0 or len(self.running) >= self.max_num_seqs or out.preempted:
            return False
        if self.policy == "static" and not self._batch_open and sequence.status is SequenceStatus.WAITING:
            return False
        if self.policy != "mixed" and out.scheduled and sequence.num_uncomputed_tokens > budget:
            return False
        needed = self.blocks.blocks_for(sequence.num_tokens)
        return not self.running or needed + len(self.running) <= self.blocks.num_free

    def _preempt(self, sequence: Sequence, out: SchedulerOutput) -> None:
        """Give up a sequence's K/V, keep its tokens, put it back to the front of the line."""
        self.running.remove(sequence)
        self.blocks.free(sequence.request_id)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.waiting.appendleft(sequence)
        out.preempted.append(sequence)
