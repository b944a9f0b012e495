"""Paged attention one sequence at a time, as the formula says. Slow for ever: every other backend is held to it."""

from __future__ import annotations

import torch

from ember.attention.base import AttentionMetadata
from ember.cache.kv_pool import KVLayer


class ReferenceAttention:
    """softmax(q k^T * scale + causal mask) v, for each sequence in turn; K/V are read as floats of any dtype."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        """Takes a pool of any dtype."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Keep the step's metadata."""
        self._metadata = metadata

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        meta = self._metadata
        layer.write(k, v, meta.slot_mapping)
        bounds = meta.query_start_loc.tolist()
        out = torch.empty_like(q)
        for s, context_len in enumerate(meta.context_lens.tolist()):
            first, last = bounds[s], bounds[s + 1]
            keys, values = layer.gather(_slots(meta, s, context_len))
            out[first:last] = _attend(q[first:last], keys, values, scale, window)
        return out


def _slots(meta: AttentionMetadata, s: int, context_len: int) -> torch.Tensor:
    position = torch.arange(context_len, device=meta.block_tables.device)
    return meta.block_tables[s, position // meta.block_size].long() * meta.block_size + position % meta.block_size


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Q [n, H, D] over keys, values [c, H_kv, D]; the n queries are the last n of the c positions."""
    n, context_len = q.shape[0], keys.shape[0]
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("nhd,chd->hnc", q.float(), keys) * scale
    seen = torch.ones(n, context_len, dtype=torch.bool, device=q.device).tril(context_len - n)
    if window is not None:
        seen = seen.triu(context_len - n - window + 1)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hnc,chd->nhd", weights, values).to(q.dtype)
