"""What an attention backend is given, what it must do, and the backends by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from ember.cache.kv_pool import KVLayer


@dataclass(slots=True)
class AttentionMetadata:
    """Where the packed batch's tokens belong. S sequences bring T new tokens, packed one after another.

    Attributes:
        slot_mapping: [T] int64, the flat pool slot of each new token.
        query_start_loc: [S + 1] int32, sequence s owns tokens query_start_loc[s] .. query_start_loc[s + 1].
        context_lens: [S] int32, tokens of each sequence in the pool once this step's are written.
        block_tables: [S, max_blocks] int32, padded with 0.
        block_size: slots in a block.
        max_query_len, max_context_len: the largest of a sequence, so that nobody has to ask the device.
    """

    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    max_query_len: int
    max_context_len: int


class AttentionBackend(Protocol):
    """Paged attention. `prepare` runs once a step, `forward` once a layer."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Work out whatever all layers share."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """Write K/V at `slot_mapping`, then attend causally through the block tables.

        Args:
            q: [T, n_head, head_dim].
            k, v: [T, n_kv_head, head_dim] of the new tokens.
            layer: the pool's tensors of this layer.
            scale: factor on the scores.
            window: tokens that a query sees, itself the last of them; None: all before it.

        Returns:
            [T, n_head, head_dim]. Every query reads K/V as the pool stores it, its own step's too.
        """


_BACKENDS = {
    "reference": ("ember.attention.reference", "ReferenceAttention"),
    "cpu": ("ember.attention.cpu", "CpuAttention"),
    "batched": ("ember.attention.batched", "BatchedAttention"),
    "triton": ("ember.attention.triton", "TritonAttention"),
    "torch_varlen": ("ember.attention.torch_varlen", "TorchVarlenAttention"),
}


def make_backend(name: str, kv_dtype: torch.dtype) -> AttentionBackend:
    """The backend of that name, for a pool of that dtype; its module is imported only now."""
    module, cls = _BACKENDS[name]
    factory: Callable[[torch.dtype], AttentionBackend] = getattr(import_module(module), cls)
    return factory(kv_dtype)
