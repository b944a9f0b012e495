"""Runs the network on what the scheduler chose: plain data in, logits out.

Owns the weights, the K/V tensors and the attention backend. The step is one packed batch:

    input_ids        t0 t1 t2 | t0 | t0 | t0 t1        T tokens of S sequences, no padding
    query_start_loc  0          3    4    5       7
"""

from __future__ import annotations

from array import array
from itertools import accumulate

import torch

from ember.attention.base import AttentionBackend, AttentionMetadata
from ember.cache.kv_pool import KVPool
from ember.core.batch import ScheduledSequence
from ember.model.network import Network


class ModelRunner:
    """`execute` computes a step's K/V and gives the logits that the step asks for."""

    def __init__(self, model: Network, pool: KVPool, attention: AttentionBackend, device: torch.device) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention
        self.device = device

    @torch.inference_mode()
    def execute(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        """Logits [sum of num_logits, vocab_size] float32: of the last `num_logits` new tokens of each, in order."""
        block_size = self.pool.shape.block_size
        for source, destination in (copy for s in scheduled for copy in s.copies):
            self.pool.copy_block(source, destination)
        input_ids, positions, metadata = _pack(scheduled, block_size, self.device)
        self.attention.prepare(metadata)
        hidden = self.model.forward(input_ids, positions, self.pool.layers, self.attention)
        ends = accumulate(s.num_new_tokens for s in scheduled)
        rows = [row for end, s in zip(ends, scheduled, strict=True) for row in range(end - s.num_logits, end)]
        return self.model.logits(hidden[torch.tensor(rows, device=self.device, dtype=torch.long)])


def _pack(
    scheduled: list[ScheduledSequence], block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """The packed batch: input_ids [T], positions [T], and where the tokens belong."""
    counts = [s.num_new_tokens for s in scheduled]
    bounds = torch.tensor([0, *accumulate(counts)])
    starts = torch.tensor([s.start for s in scheduled])
    ids = [t for s in scheduled for t in (*s.sequence.token_ids[s.start : s.start + s.num_new_tokens], *s.proposed)]
    tables = _pad_tables([s.block_table for s in scheduled])
    sequence = torch.repeat_interleave(torch.tensor(counts))
    positions = torch.arange(len(ids)) - bounds[sequence] + starts[sequence]
    slots = tables[sequence, positions // block_size].long() * block_size + positions % block_size
    metadata = AttentionMetadata(
        slot_mapping=slots.to(device),
        query_start_loc=bounds.int().to(device),
        context_lens=(starts + bounds.diff()).int().to(device),
        block_tables=tables.to(device),
        block_size=block_size,
    )
    return torch.tensor(ids, device=device), positions.to(device), metadata


def _pad_tables(tables: list[array[int]]) -> torch.Tensor:
    """Block tables [S, longest] int32, padded with 0."""
    width = max(len(table) for table in tables)
    rows = b"".join(table.tobytes().ljust(width * 4, b"\0") for table in tables)
    return torch.frombuffer(bytearray(rows), dtype=torch.int32).view(len(tables), width)
