"""Sizes a pool by what the largest step leaves, once the weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch

from ember.cache.kv_pool import num_blocks_for
from ember.core.batch import ScheduledSequence
from ember.core.device_memory import PoolMeter
from ember.core.hardware import total_bytes
from ember.core.largest_step import largest_step
from ember.core.sampler import Sampler
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError


class PoolRunner(Protocol):
    """A runner whose pool may still change its size; `ModelRunner` or `ParallelRunner`."""

    def pool_room(
        self, scheduled: list[ScheduledSequence], meter: PoolMeter, then: Callable[[torch.Tensor], object]
    ) -> int:
        """Bytes on all ranks together that a step leaves, with what is done to its logits then."""

    def set_pool(self, num_blocks: int) -> None:
        """Have an empty pool of so many blocks instead."""


def with_measured_pool(plan: EnginePlan, runner: PoolRunner) -> EnginePlan:
    """The plan with the size that its `meter` finds, which the runner's pool has then; without a meter as it is.

    Raises:
        UserError: the step does not fit, or leaves too little for one sequence.
    """
    if plan.meter is None:
        return plan
    config = plan.config
    step = largest_step(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_proposed=0 if config.speculative == "off" else config.num_speculative_tokens,
        block_size=config.block_size,
    )
    try:
        room = runner.pool_room(step, plan.meter, lambda logits: _sample(logits, step))
    except torch.OutOfMemoryError:
        what = "a step of so many tokens takes more than the weights leave of the device's memory; set a smaller number"
        raise ConfigError("max_num_batched_tokens", config.max_num_batched_tokens, what) from None
    num_blocks = num_blocks_for(
        config.pool_size,
        plan.kv_shape,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        free_bytes=room,
        total_bytes=total_bytes(plan.device, config.tensor_parallel_size),
    )
    runner.set_pool(num_blocks)
    tokens = num_blocks * config.block_size
    logging.getLogger(__name__).info("the largest step leaves %s bytes; the pool holds %s tokens", room, tokens)
    return replace(plan, num_blocks=num_blocks, meter=None)


def _sample(logits: torch.Tensor, step: list[ScheduledSequence]) -> None:
    rows = torch.tensor([end - 1 for end in accumulate(s.num_logits for s in step)])
    Sampler().sample(logits[rows.to(logits.device)], [s.sequence for s in step])
