"""Paged attention on the CPU: one compiled kernel reads K/V in place through the block tables.

A query's result is the same to the bit whatever else is in the batch, however its prompt was cut into chunks, and
whatever the block size: its positions are taken in tiles of 64 from position 0 on, and within a tile every score is
summed over head_dim, and every output over positions, in order.
"""

from __future__ import annotations

import logging
import time

import torch

from ember.attention.base import AttentionMetadata
from ember.cache.kv_pool import KVLayer
from ember.threads import numba_follows_torch

QUERY_TILE = 16
"""Most queries that share a pass over their keys: a tile's K/V stays in the cache while they do."""


class CpuAttention:
    """float32 only. Compiled on first use (and kept on the disk for the next process)."""

    def __init__(self) -> None:
        from ember.attention import cpu_kernel

        self._kernel = cpu_kernel
        begin = time.perf_counter()
        numba_follows_torch()
        cpu_kernel.warm_up()
        seconds = time.perf_counter() - begin
        if seconds > 3:
            logging.getLogger(__name__).warning(
                "compiled the CPU attention kernel in %.0f s; it is kept for the next run", seconds
            )

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Cut queries into tiles and deal them to the threads, the dearest first."""
        numba_follows_torch()
        self._tables = metadata.block_tables.numpy()
        self._slots = metadata.slot_mapping.numpy()
        self._tiles = _deal(_tiles(metadata), torch.get_num_threads()).numpy()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q)
        keys, values = layer.k.numpy(), layer.v.numpy()
        self._kernel.store(k.numpy(), v.numpy(), self._slots, keys, values)
        self._kernel.attend(q.numpy(), keys, values, self._tables, self._tiles, out.numpy(), scale)
        return out


def _tiles(meta: AttentionMetadata) -> torch.Tensor:
    """Tiles [n, 4] int64: sequence, first row of q, number of queries, position of the first."""
    starts = meta.query_start_loc.long()
    lengths = starts.diff()
    tiles = (lengths + QUERY_TILE - 1) // QUERY_TILE
    sequence = torch.repeat_interleave(tiles)
    offset = (torch.arange(len(sequence)) - (tiles.cumsum(0) - tiles)[sequence]) * QUERY_TILE
    count = (lengths[sequence] - offset).clamp(max=QUERY_TILE)
    position = (meta.context_lens.long() - lengths)[sequence] + offset
    return torch.stack([sequence, starts[:-1][sequence] + offset, count, position], dim=1)


def _deal(tiles: torch.Tensor, num_threads: int) -> torch.Tensor:
    """Order the tiles so that equal slices of them cost about the same: each thread takes one slice."""
    cost = tiles[:, 2] * (tiles[:, 3] + tiles[:, 2])
    order = cost.argsort(descending=True, stable=True)
    return tiles[torch.cat([order[thread::num_threads] for thread in range(num_threads)])].contiguous()
