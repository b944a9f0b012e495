"""Continuous batching: requests come in at any time, every step computes some tokens of some of them.

The engine knows token ids only. Text, stop strings and files are for those above it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Protocol

import torch

from ember.core.batch import ScheduledSequence, SchedulerOutput, StepOutput, TokenEvent
from ember.core.sampler import Sampler, SamplerOutput
from ember.core.scheduler import Scheduler
from ember.core.sequence import FinishReason, Sequence, SequenceStatus
from ember.core.stats import StepStats
from ember.errors import RequestError
from ember.sampling.logprobs import token_logprobs
from ember.transfer import upload

OnToken = Callable[[int, int], str | None]
"""Told of (request_id, token_id); a string it returns is the stop string that ends the request."""

Failures = dict[Sequence, RequestError]

NOT_YET = -1
"""Stands for a token that is drawn at this moment. Planning counts tokens, it does not look at the last one."""


class Runner(Protocol):
    """What computes a step; the model runner, or a fake in tests."""

    def execute(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        """Logits [sum of num_logits, vocab_size] of the last `num_logits` new tokens of each, in order."""


class Engine:
    """Ties scheduler, model runner and sampler together, a step at a time.

    With `plans_ahead` a step is planned while the device computes the one before it, as if no token drawn there would
    end its sequence; those that it did end are left out then. Who runs in which step changes no token.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, sampler: Sampler, *, plans_ahead: bool = False) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.sampler = sampler
        self.plans_ahead = plans_ahead and scheduler.proposer is None  # proposals follow from the tokens
        self._planned: SchedulerOutput | None = None
        self._sequences: dict[int, Sequence] = {}
        self._num_steps = 0
        self._born_s = perf_counter()

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Requests that are in line, preempted ones included."""
        return len(self.scheduler.waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a request in line, with its children: other samples of the same prompt.

        It must fit: 0 < prompt <= max_model_len, max_tokens within the rest.
        """
        for member in sequence.family:
            member.arrival_s = perf_counter()
            self._sequences[member.request_id] = member
        self.scheduler.add(sequence)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._sequences

    def abort_waiting(self) -> list[Sequence]:
        """Take out all requests that have not started (or were preempted); returns them."""
        waiting = [member for s in self.scheduler.waiting for member in s.family]
        return [self.abort(s.request_id) for s in waiting]

    def abort(self, request_id: int) -> Sequence:
        """Take a request out unfinished and free its blocks."""
        sequence = self._sequences.pop(request_id)
        self.scheduler.finish(sequence)
        return sequence

    def abort_all(self) -> None:
        """Take all requests out."""
        for request_id in list(self._sequences):
            self.abort(request_id)

    def step(self, on_token: OnToken | None = None) -> StepOutput:
        """Schedule, compute, sample; finished sequences leave and free their blocks."""
        begin = perf_counter()
        plan = self._plan()
        scheduled = perf_counter()
        for sequence in plan.admitted:
            sequence.admitted_s = scheduled if sequence.admitted_s is None else sequence.admitted_s
        logits, failed = self._compute(plan.scheduled)
        computed = perf_counter()
        stats = self._stats(plan)
        _advance(s for s in plan.scheduled if s.sequence not in failed)
        out = StepOutput([], [], stats)
        for sequence, error in failed.items():
            self._take(sequence, error, out, on_token)
        computed_ones = [s for s in plan.scheduled if s.sequence not in failed]
        for sequence in _score(logits, computed_ones):
            self._take(sequence, None, out, on_token)
        self._draw(logits, computed_ones, out, on_token)
        self.scheduler.settle(plan.scheduled)
        stats.num_accepted_tokens = sum(s.num_accepted for s in plan.scheduled)
        stats.num_finished = len(out.finished)
        stats.start_s, stats.duration_s = begin - self._born_s, perf_counter() - begin
        stats.schedule_s, stats.model_s = stats.schedule_s + scheduled - begin, computed - scheduled
        return out

    def _plan(self) -> SchedulerOutput:
        """What was planned ahead, less what has ended since; if there is nothing, the step is planned now."""
        planned, self._planned = self._planned, None
        if planned is None:
            return self.scheduler.schedule()
        planned.scheduled = [s for s in planned.scheduled if s.sequence.status is SequenceStatus.RUNNING]
        if planned.scheduled:
            return planned
        plan = self.scheduler.schedule()
        plan.preempted += planned.preempted
        return plan

    def _plan_ahead(self, drawing: list[Sequence], stats: StepStats) -> None:
        """Plan the next step while tokens are drawn; all is counted as it will be when they are there."""
        begin = perf_counter()
        going = [s for s in drawing if s.num_output_tokens + 1 < s.max_tokens]
        for sequence in going:
            sequence.token_ids.append(NOT_YET)
        try:
            self._planned = self.scheduler.schedule()
        finally:
            for sequence in going:
                sequence.token_ids.pop()
        took = perf_counter() - begin
        stats.schedule_s += took
        stats.sample_s -= took

    def _compute(self, scheduled: list[ScheduledSequence]) -> tuple[torch.Tensor, Failures]:
        """The step's logits. A step that runs out of memory is done in halves; what fails alone is named."""
        try:
            return self.runner.execute(scheduled), {}
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            if any(s.proposed for s in scheduled):
                for s in scheduled:
                    s.withdraw()
                return self._compute(scheduled)
            if len(scheduled) == 1:
                reason = RequestError("out_of_memory", f"not enough memory for {scheduled[0].num_new_tokens} tokens")
                return torch.empty(0), {scheduled[0].sequence: reason}
        middle = len(scheduled) // 2
        first, second = self._compute(scheduled[:middle]), self._compute(scheduled[middle:])
        halves = [logits for logits, _ in (first, second) if len(logits)]
        return torch.cat(halves) if halves else torch.empty(0), first[1] | second[1]

    def _sample(
        self, logits: torch.Tensor, sequences: list[Sequence], meanwhile: Callable[[], None] | None
    ) -> list[int | RequestError]:
        """One token or error a sequence. If sampling the batch fails, each row is tried alone, to lose only its own."""
        try:
            out = self.sampler.sample(logits, sequences, *([] if meanwhile is None else [meanwhile]))
        except Exception:
            logging.getLogger(__name__).warning("sampling a batch failed; trying row by row", exc_info=True)
            alone = [self._sample_alone(logits[i : i + 1], s) for i, s in enumerate(sequences)]
            logprobs = {i: entry for i, one in enumerate(alone) for entry in one.logprobs.values()}
            out = SamplerOutput([token for one in alone for token in one.tokens], logprobs)
        for i, entry in out.logprobs.items():
            sequences[i].logprobs.append(entry)
        return out.tokens

    def _sample_alone(self, logits: torch.Tensor, sequence: Sequence) -> SamplerOutput:
        try:
            return self.sampler.sample(logits, [sequence])
        except Exception as error:
            return SamplerOutput([RequestError("sampling_failed", f"{type(error).__name__}: {error}")])

    def _draw(
        self, logits: torch.Tensor, scheduled: list[ScheduledSequence], out: StepOutput, on_token: OnToken | None
    ) -> None:
        """Draw the next token of each sequence that samples, and while it is the one that was proposed, the next.

        Every draw finds its sequence as plain decoding would have it: exact whatever the sampler looks at.
        """
        first = _first_rows(scheduled)
        self._search(logits, [(s.sequence, row) for s, row in first if s.sequence.search is not None], out)
        plain = [(s, row) for s, row in first if s.sequence.search is None]
        drawing = [drawer for s, row in plain for drawer in self._with_children(s, row)]
        for ahead in itertools.count():
            if not drawing:
                return
            begin = perf_counter()
            rows = [row + ahead for _, row in drawing]
            sequences = [s.sequence for s, _ in drawing]
            meanwhile = partial(self._plan_ahead, sequences, out.stats) if self.plans_ahead else None
            tokens = self._sample(_rows(logits, rows), sequences, meanwhile)
            out.stats.sample_s += perf_counter() - begin
            for (s, _), token in zip(drawing, tokens, strict=True):
                self._take(s.sequence, token, out, on_token)
            drawing = [(s, row) for (s, row), token in zip(drawing, tokens, strict=True) if _accept(s, ahead, token)]

    def _with_children(self, leader: ScheduledSequence, row: int) -> list[tuple[ScheduledSequence, int]]:
        """A sequence, and those forked from it, which draw their first token from the same logits."""
        children = self.scheduler.fork(leader.sequence) if leader.sequence.children else []
        forked = [ScheduledSequence(s, leader.start, 0, leader.block_table, True, 0) for s in children]
        return [(s, row) for s in (leader, *forked)]

    def _search(self, logits: torch.Tensor, offers: list[tuple[Sequence, int]], out: StepOutput) -> None:
        """Show searches the logits after their beams; those that have seen all of them go on by a token, or end."""
        for beam, row in offers:
            search = beam.search
            if search is None or beam.status is not SequenceStatus.RUNNING:
                continue
            self.scheduler.hold(beam)
            if not search.offer(beam.sample_index, logits[row]):
                self._end(beam.beams, RequestError("bad_logits", "the network's logits are not finite numbers"), out)
            elif search.complete:
                out.num_beam_tokens += len(beam.beams)
                if moves := search.advance():
                    self.scheduler.branch(beam.beams, moves)
                else:
                    self._end(beam.beams, None, out)

    def _end(self, beams: list[Sequence], error: RequestError | None, out: StepOutput) -> None:
        """Finish a search: its beams take over its hypotheses, the best first."""
        now = perf_counter()
        for beam in beams:
            beam.take_hypothesis(error)
            beam.admitted_s, beam.first_token_s, beam.finished_s = beams[0].admitted_s, now, now
            self.abort(beam.request_id)
            out.finished.append(beam)

    def _take(
        self, sequence: Sequence, token: int | RequestError | None, out: StepOutput, on_token: OnToken | None
    ) -> None:
        """Append a token, or note an error, and finish the sequence if it has ended; None: it was to be scored only."""
        now = perf_counter()
        if isinstance(token, RequestError) and sequence.search is not None:
            self._end(sequence.beams, token, out)
            return
        if isinstance(token, RequestError):
            sequence.finish_reason, sequence.error = FinishReason.ERROR, token
        elif token is None:
            sequence.finish_reason = FinishReason.LENGTH
        else:
            sequence.token_ids.append(token)
            sequence.first_token_s = now if sequence.first_token_s is None else sequence.first_token_s
            _judge(sequence, token, on_token(sequence.request_id, token) if on_token else None)
            out.tokens.append(TokenEvent(sequence.parent_id, sequence.sample_index, token, sequence.finish_reason))
        if sequence.finish_reason is not None:
            sequence.finished_s = now
            self.abort(sequence.request_id)
            out.finished.append(sequence)

    def _stats(self, plan: SchedulerOutput) -> StepStats:
        """Count the step while its sequences still hold their blocks."""
        blocks, running = self.scheduler.blocks, self.scheduler.running
        holders = [s for s in (*running, *self.scheduler.held) if s.num_computed_tokens]
        counts = {s.request_id: s.num_computed_tokens for s in holders}
        counts.update((s.sequence.request_id, s.start + s.num_new_tokens) for s in plan.scheduled)
        live = blocks.live_tokens(counts)
        stats = StepStats(
            step=self._num_steps,
            num_running=len(running),
            num_waiting=len(self.scheduler.waiting),
            num_preempted=len(plan.preempted),
            blocks_total=blocks.num_blocks,
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_cached,
            blocks_free=blocks.num_free,
            kv_tokens=live,
            kv_utilization=live / (blocks.num_used * blocks.block_size) if blocks.num_used else 0.0,
            prefix_hit_tokens=plan.prefix_hit_tokens,
            num_evicted_blocks=plan.num_evicted_blocks,
        )
        for scheduled in plan.scheduled:
            _count(scheduled, stats)
        self._num_steps += 1
        return stats


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _first_rows(scheduled: list[ScheduledSequence]) -> list[tuple[ScheduledSequence, int]]:
    """Those that draw a token, with the row of the step's logits that the next one is drawn from."""
    ends = itertools.accumulate(s.num_logits for s in scheduled)
    rows = [(s, end - len(s.proposed) - 1) for end, s in zip(ends, scheduled, strict=True) if s.samples]
    return [(s, row) for s, row in rows if s.sequence.max_tokens > 0]


@torch.inference_mode()
def _score(logits: torch.Tensor, scheduled: list[ScheduledSequence]) -> list[Sequence]:
    """Take log-probabilities of the prompt tokens that follow those of this step; returns who wants nothing more."""
    ends = itertools.accumulate(s.num_logits for s in scheduled)
    for s, row in zip(scheduled, ends, strict=True):
        sequence, end = s.sequence, s.start + s.num_new_tokens
        first = sequence.first_unscored(s.start, end)
        if first < end and sequence.params.prompt_logprobs is not None:
            tokens = sequence.token_ids[first + 1 : min(end + 1, sequence.num_prompt_tokens)]
            rows = logits[row - s.num_logits :][: len(tokens)]
            sequence.prompt_logprobs += token_logprobs(rows, tokens, [sequence.params.prompt_logprobs] * len(tokens))
    return [s.sequence for s in scheduled if s.samples and s.sequence.max_tokens == 0]


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if rows == list(range(len(logits))) else logits[upload(rows, torch.long, logits.device)]


def _accept(scheduled: ScheduledSequence, ahead: int, token: int | RequestError) -> bool:
    """Whether the token drawn at that place is the proposed one, so that its K/V and logits are those of the text."""
    sequence = scheduled.sequence
    if scheduled.proposed[ahead : ahead + 1] != [token] or sequence.finish_reason is not None:
        return False
    scheduled.num_accepted += 1
    _set_computed(sequence, sequence.num_computed_tokens + 1)
    return True


def _count(scheduled: ScheduledSequence, stats: StepStats) -> None:
    """Split new tokens: recomputed (computed before), prefill (of the prompt), decode (all others)."""
    sequence, start, end = scheduled.sequence, scheduled.start, scheduled.start + scheduled.num_new_tokens
    recomputed = max(0, min(end, sequence.max_computed_tokens) - start)
    prefill = max(0, min(end, sequence.num_prompt_tokens) - start - recomputed)
    stats.num_recomputed_tokens += recomputed
    stats.num_prefill_tokens += prefill
    stats.num_decode_tokens += end - start - recomputed - prefill
    stats.num_prefill_seqs += prefill > 0
    stats.num_proposed_tokens += len(scheduled.proposed)


def _advance(scheduled: Iterable[ScheduledSequence]) -> None:
    """Count what is computed, but for proposed tokens: those are counted when they are accepted."""
    for s in scheduled:
        _set_computed(s.sequence, s.start + s.num_new_tokens - len(s.proposed))


def _set_computed(sequence: Sequence, num_tokens: int) -> None:
    sequence.num_computed_tokens = num_tokens
    sequence.max_computed_tokens = max(sequence.max_computed_tokens, num_tokens)


def _judge(sequence: Sequence, token: int, stop_string: str | None) -> None:
    """Set the finish reason if this token ends the sequence."""
    params = sequence.params
    if token in sequence.stop_ids and sequence.num_output_tokens > params.min_tokens:
        sequence.finish_reason = FinishReason.STOP
        sequence.stop_reason = token if token in params.stop_token_ids else None
    elif stop_string is not None:
        sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop_string
    elif sequence.num_output_tokens >= sequence.max_tokens:
        sequence.finish_reason = FinishReason.LENGTH
