"""Plain data handed between scheduler, model runner, sampler and engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import torch

from ember.core.sequence import FinishReason, Sequence
from ember.core.stats import StepStats


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of a step: `num_new_tokens` tokens from position `start` on.

    `samples` says whether the step reaches the sequence's last token, so that a next one is drawn. The network gives
    logits for the last `num_logits` of the new tokens. The last new tokens may be `proposed`: not the sequence's own
    until each is drawn at its position; `num_accepted` of them were.

        token_ids     ... t7 t8 t9 | p10 p11 p12     num_new_tokens 4, start 9
        drawn from                t9  p10 p11 p12    num_logits 4

    `copies` are blocks (source, destination) to copy before anything is written.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    block_table: array[int]
    samples: bool
    num_logits: int
    proposed: list[int] = field(default_factory=list)
    num_accepted: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)

    def propose(self, tokens: list[int]) -> None:
        """Compute these too, and their logits."""
        self.proposed = tokens
        self.num_new_tokens += len(tokens)
        self.num_logits += len(tokens)

    def withdraw(self) -> None:
        """Compute no proposed tokens."""
        self.num_new_tokens -= len(self.proposed)
        self.num_logits -= len(self.proposed)
        self.proposed = []


@dataclass(slots=True)
class SchedulerOutput:
    """What runs in a step, and what the scheduler did to get there.

    `preempted` are sequences put back to wait; `num_tokens` counts the new tokens of all scheduled ones,
    `num_prefill_tokens` those of sequences that don't decode yet, at most `max_prefill_tokens`; `prefix_hit_tokens` are
    tokens that admitted ones found in the pool.
    """

    scheduled: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    max_prefill_tokens: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_evicted_blocks: int = 0

    def add(self, scheduled: ScheduledSequence) -> None:
        """Add one sequence's share."""
        self.scheduled.append(scheduled)
        self.num_tokens += scheduled.num_new_tokens
        if scheduled.sequence.prefilling:
            self.num_prefill_tokens += scheduled.num_new_tokens


@dataclass(slots=True)
class ModelInput:
    """A step as the network sees it: T new tokens of S sequences, packed; everything on the CPU.

    Attributes:
        copies: blocks (source, destination) to copy before anything is written.
        input_ids, positions: [T] int64.
        slot_mapping, query_start_loc, context_lens, block_tables: see `AttentionMetadata`.
        rows: [R] int64, the tokens whose logits are asked for.
        best_only: [R] bool, those of them of whose logits only the largest matters.
    """

    copies: list[tuple[int, int]]
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    best_only: torch.Tensor


@dataclass(slots=True)
class TokenEvent:
    """A token that a request's sample got in this step; `finish_reason` is set on its last one."""

    request_id: int
    sample_index: int
    token_id: int
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class StepOutput:
    """Tokens of one step, each request's in order, the sequences it finished, and its statistics.

    Beams' tokens are no events, as most are not kept: they are only counted.
    """

    tokens: list[TokenEvent]
    finished: list[Sequence]
    stats: StepStats
    num_beam_tokens: int = 0

    @property
    def num_sampled(self) -> int:
        """All tokens, beams' too."""
        return len(self.tokens) + self.num_beam_tokens
