"""Paged attention on the CPU: one compiled kernel reads K/V in place through the block tables.

A query's result is the same to the bit whatever else is in the batch, however its prompt was cut into chunks, and
whatever the block size: its positions are taken in tiles of 64 from position 0 on, and within a tile every score is
summed over head_dim, and every output over positions, in order. So it is with an int8, float16 or bfloat16 pool too: a
token's K/V are rounded alone, once, as they are written, and every query reads them rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ember.attention import cpu_kernel
from ember.attention.base import AttentionMetadata
from ember.attention.query_tiles import QueryTiles
from ember.cache.kv_pool import KVLayer
from ember.kernel_cache import patience
from ember.threads import numba_follows_torch

_STORED_AS = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}
"""What the kernel calls pools that numba has no type for."""


ALL = 2**40
"""A window that holds every position."""


class CpuAttention:
    """Computes in float32, over a pool of any dtype. Compiled on first use (and kept on the disk for the next process).

    Args:
        kv_dtype: of the pool.
    """

    def __init__(self, kv_dtype: torch.dtype) -> None:
        self._pools: dict[KVLayer, tuple[np.ndarray, ...]] = {}
        numba_follows_torch()
        with patience("the CPU attention kernel: some ten seconds, once for each kv_dtype"):
            self._share: Any = cpu_kernel.warm_up(str(_stored_as(kv_dtype)).removeprefix("torch."))

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Put queries together that share keys, and deal them to the threads."""
        numba_follows_torch()
        self._threads = torch.get_num_threads()
        self._tables = metadata.block_tables.numpy()
        self._slots = metadata.slot_mapping.numpy()
        self._queries = QueryTiles.of(metadata, self._threads)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        if layer not in self._pools:
            self._pools[layer] = tuple(_flat(x) for x in (layer.k, layer.v, layer.k_scale, layer.v_scale))
        keys, values, *scales = self._pools[layer]
        size, heads = layer.shape.block_size, layer.shape.n_kv_head
        if layer.shape.dtype == torch.int8:
            cpu_kernel.store_int8(k.numpy(), v.numpy(), self._slots, keys, values, *scales, size)
        else:
            new = (_as_stored(x.to(layer.shape.dtype)).numpy() for x in (k, v))
            cpu_kernel.store(*new, self._slots, keys, values, size)
        out = torch.empty(q.shape)
        queries = (self._queries if window is None else self._queries.apart()).arrays()
        pool, reach = (*self._pools[layer], self._tables), ALL if window is None else window
        to = out.numpy(), np.float32(scale), heads, size, reach, self._threads
        if cpu_kernel.attend(q.numpy(), *pool, *queries, *to, self._share.address) < self._threads:
            raise MemoryError("attention has no room for its scores")
        return out


def _flat(x: torch.Tensor) -> np.ndarray:
    return _as_stored(x).view(-1).numpy()


def _as_stored(x: torch.Tensor) -> torch.Tensor:
    return x.view(_stored_as(x.dtype))


def _stored_as(dtype: torch.dtype) -> torch.dtype:
    return _STORED_AS.get(dtype, dtype)
