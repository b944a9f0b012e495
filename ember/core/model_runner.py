"""Runs the network on what the scheduler chose: plain data in, logits out.

Owns the weights, the K/V tensors and the attention backend. The step is one packed batch:

    input_ids        t0 t1 t2 | t0 | t0 | t0 t1        T tokens of S sequences, no padding
    query_start_loc  0          3    4    5       7
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate

import torch

from ember.attention.base import AttentionBackend, AttentionMetadata
from ember.cache.kv_pool import KVPool
from ember.core.batch import ModelInput, ScheduledSequence
from ember.core.decode_graphs import DecodeGraphs
from ember.core.device_memory import PoolMeter
from ember.model.network import Network
from ember.transfer import upload_together


class ModelRunner:
    """`execute` computes a step's K/V and gives the logits that the step asks for."""

    def __init__(
        self,
        model: Network,
        pool: KVPool,
        attention: AttentionBackend,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention
        self.device = device
        self.graphs = graphs

    def execute(self, scheduled: list[ScheduledSequence]) -> torch.Tensor:
        """Logits [sum of num_logits, vocab_size] float32: of the last `num_logits` new tokens of each, in order.

        Of a sequence that takes its best token and asks for nothing else, all but the largest may be -inf.
        """
        return self.run(self.pack(scheduled))

    def pack(self, scheduled: list[ScheduledSequence]) -> ModelInput:
        """The step as tensors."""
        return _pack(scheduled, self.pool.shape.block_size)

    def pool_room(
        self, scheduled: list[ScheduledSequence], meter: PoolMeter, then: Callable[[torch.Tensor], object]
    ) -> int:
        """Bytes that a step leaves for a pool, with what is done to its logits then."""
        return meter.room(self.device, lambda: then(self.execute(scheduled)))

    def set_pool(self, num_blocks: int) -> None:
        """Have an empty pool of so many blocks instead."""
        self.pool = KVPool(self.pool.shape, num_blocks, self.device)
        if self.graphs is not None:
            self.graphs.forget()

    @torch.inference_mode()
    def run(self, step: ModelInput) -> torch.Tensor:
        """Logits [R, vocab_size] float32 of the rows that the step asks for."""
        for source, destination in step.copies:
            self.pool.copy_block(source, destination)
        step = step if self.graphs is None else self.graphs.padded(step)
        host = [step.input_ids, step.positions, step.rows, step.slot_mapping]
        host += [step.query_start_loc, step.context_lens, step.block_tables]
        input_ids, positions, rows, slots, starts, contexts, tables = upload_together(host, self.device)
        metadata = AttentionMetadata(
            slot_mapping=slots,
            query_start_loc=starts,
            context_lens=contexts,
            block_tables=tables,
            block_size=self.pool.shape.block_size,
            max_query_len=int(step.query_start_loc.diff().max()),
            max_context_len=int(step.context_lens.max()),
        )
        if self.graphs is None:
            hidden = self._forward(input_ids, positions, metadata)
        else:
            hidden = self.graphs.run(input_ids, positions, metadata, self._forward)
        return self.model.logits(hidden[rows], step.best_only)

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        self.attention.prepare(metadata)
        return self.model.forward(input_ids, positions, self.pool.layers, self.attention)


def _pack(scheduled: list[ScheduledSequence], block_size: int) -> ModelInput:
    counts = [s.num_new_tokens for s in scheduled]
    bounds = torch.tensor([0, *accumulate(counts)])
    starts = torch.tensor([s.start for s in scheduled])
    ids = [t for s in scheduled for t in (*s.sequence.token_ids[s.start : s.start + s.num_new_tokens], *s.proposed)]
    tables = _pad_tables([s.block_table for s in scheduled])
    sequence = torch.repeat_interleave(torch.tensor(counts))
    positions = torch.arange(len(ids)) - bounds[sequence] + starts[sequence]
    slots = tables[sequence, positions // block_size].long() * block_size + positions % block_size
    rows = [
        row for end, s in zip(bounds[1:].tolist(), scheduled, strict=True) for row in range(end - s.num_logits, end)
    ]
    best_only = [s.sequence.takes_best_only for s in scheduled for _ in range(s.num_logits)]
    return ModelInput(
        copies=[copy for s in scheduled for copy in s.copies],
        input_ids=torch.tensor(ids),
        positions=positions,
        slot_mapping=slots,
        query_start_loc=bounds.int(),
        context_lens=(starts + bounds.diff()).int(),
        block_tables=tables,
        rows=torch.tensor(rows, dtype=torch.long),
        best_only=torch.tensor(best_only, dtype=torch.bool),
    )


def _pad_tables(tables: list[array[int]]) -> torch.Tensor:
    """Block tables [S, longest] int32, padded with 0."""
    width = max(len(table) for table in tables)
    rows = b"".join(table.tobytes().ljust(width * 4, b"\0") for table in tables)
    return torch.frombuffer(bytearray(rows), dtype=torch.int32).view(len(tables), width)
