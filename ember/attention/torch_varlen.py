"""PyTorch's own paged attention (`torch.nn.attention.varlen`: FlashAttention) on CUDA: a peer to measure against.

It reads K/V through the block tables where they lie; its pages are [block, slot, head, dim], as a pool is whose
keys are not interleaved. New K/V are stored by PyTorch's indexing. It has not been run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ember.attention.base import AttentionMetadata
from ember.cache.kv_pool import KVLayer


class TorchVarlenAttention:
    """See `AttentionBackend`. In float16 or bfloat16, over a pool of the same dtype."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._attend: Any = varlen_attn

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Add up the contexts, as the kernel wants them."""
        self._metadata = metadata
        self._context_starts = torch.zeros_like(metadata.query_start_loc)
        self._context_starts[1:] = metadata.context_lens.cumsum(0)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        meta = self._metadata
        layer.write(k, v, meta.slot_mapping)
        out: torch.Tensor = self._attend(
            q,
            layer.k.squeeze(-1).transpose(1, 2),
            layer.v.transpose(1, 2),
            meta.query_start_loc,
            self._context_starts,
            meta.max_query_len,
            meta.max_context_len,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
            seqused_k=meta.context_lens,
            block_table=meta.block_tables,
        )
        return out
