"""A job without its network: the real scheduler and block manager over rows of given lengths, step by step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ember.cache.block_manager import BlockManager
from ember.cache.prefix_cache import PrefixCache
from ember.core.batch import SchedulerOutput
from ember.core.scheduler import Scheduler
from ember.core.sequence import Sequence
from ember.entrypoints.plan import EnginePlan
from ember.planning.rows import RowCost
from ember.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What a step costs by, and what it holds: new tokens of prompts (computed again, too) and of outputs, live tokens,
    output tokens that it gave, sequences, blocks.
    """

    prefill_tokens: int
    decode_tokens: int
    kv_tokens: int
    num_sampled: int
    num_running: int
    num_preempted: int
    blocks_used: int


def simulate(plan: EnginePlan, rows: Seq[RowCost], *, stop_rate: float = 0.0) -> list[SimulatedStep]:
    """The steps of a job with these rows.

    Args:
        stop_rate: how likely each output token is to end its row before `max_tokens`.
    """
    config = plan.config
    reserved = plan.max_model_len if config.reservation == "max" else 0
    prefixes = PrefixCache(config.block_size, b"plan") if config.prefix_cache else None
    blocks = BlockManager(plan.num_blocks, config.block_size, prefixes, reserved)
    scheduler = Scheduler(
        blocks,
        policy=config.scheduler,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    left = _sequences(rows, stop_rate)
    steps: list[SimulatedStep] = []
    while True:
        while len(scheduler.waiting) < config.max_num_seqs and (sequence := next(left, None)) is not None:
            scheduler.add(sequence)
        if not scheduler.running and not scheduler.waiting:
            return steps
        plan_of_step = scheduler.schedule()
        steps.append(_counted(plan_of_step, scheduler, blocks))
        _advance(plan_of_step, scheduler)


def _sequences(rows: Seq[RowCost], stop_rate: float) -> Iterator[Sequence]:
    chance = random.Random(0)
    params = SamplingParams()
    number = 0
    for row in rows:
        for _ in range(row.num_samples):
            length = _length(row.max_tokens, stop_rate, chance)
            if length > 0:
                yield Sequence(number, list(row.prompt), params, 0, length)
                number += 1


def _length(max_tokens: int, stop_rate: float, chance: random.Random) -> int:
    """Output tokens of a row that may stop after each of them."""
    if stop_rate <= 0.0 or max_tokens == 0:
        return max_tokens
    return min(max_tokens, 1 + int(chance.expovariate(stop_rate)))


def _counted(plan: SchedulerOutput, scheduler: Scheduler, blocks: BlockManager) -> SimulatedStep:
    decodes = [s for s in plan.scheduled if s.num_new_tokens == 1 and s.start >= s.sequence.num_prompt_tokens]
    return SimulatedStep(
        prefill_tokens=plan.num_tokens - len(decodes),
        decode_tokens=len(decodes),
        kv_tokens=sum(s.start + s.num_new_tokens for s in plan.scheduled),
        num_sampled=sum(s.samples for s in plan.scheduled),
        num_running=len(scheduler.running),
        num_preempted=len(plan.preempted),
        blocks_used=blocks.num_used,
    )


def _advance(plan: SchedulerOutput, scheduler: Scheduler) -> None:
    """What the engine does after a step; the output's tokens are never looked at."""
    for s in plan.scheduled:
        sequence = s.sequence
        sequence.num_computed_tokens = s.start + s.num_new_tokens
        sequence.max_computed_tokens = max(sequence.max_computed_tokens, sequence.num_computed_tokens)
        if s.samples:
            sequence.token_ids.append(0)
            if sequence.num_output_tokens >= sequence.max_tokens:
                scheduler.finish(sequence)
