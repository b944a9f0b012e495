"""The K/V tensors of all blocks, and how many blocks the memory holds.

    k of one layer: [num_blocks, n_kv_head, head_dim, block_size]      v: [num_blocks, n_kv_head, block_size, head_dim]
                         |                               |
              block_table[p // block_size]        p % block_size       for the token at position p

A head's slots of a block lie together: attention reads one straight run of memory a head. Keys are stored the other way
round, so that scores of neighbouring slots are neighbouring lanes, each summed over head_dim in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ember.config import PoolSize
from ember.errors import ConfigError, UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Shape of the K/V of one block."""

    n_layer: int
    n_kv_head: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of `block_size` tokens over all layers."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim * self.block_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer of the pool: `k` [num_blocks, n_kv_head, head_dim, block_size], `v` with the last two swapped."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.k.shape[3]

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store new K/V, each [T, n_kv_head, head_dim], at flat slot numbers [T] (block * block_size + offset)."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self.k[blocks, :, :, offsets] = k
        self.v[blocks, :, offsets] = v

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at flat slot numbers of any shape [...], each [..., n_kv_head, head_dim]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return self.k[blocks, :, :, offsets], self.v[blocks, :, offsets]


class KVPool:
    """All layers' K/V. Zeroed pages are only claimed from the system as blocks are first written."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        heads, dim, slots = shape.n_kv_head, shape.head_dim, shape.block_size
        self.layers = [
            KVLayer(
                torch.zeros(num_blocks, heads, dim, slots, dtype=shape.dtype, device=device),
                torch.zeros(num_blocks, heads, slots, dim, dtype=shape.dtype, device=device),
            )
            for _ in range(shape.n_layer)
        ]


def num_blocks_for(
    pool_size: str, shape: KVShape, *, max_model_len: int, max_num_seqs: int, free_bytes: int, total_bytes: int
) -> int:
    """Blocks in the pool: as asked for, or for `auto` what `max_num_seqs` full sequences need within `free_bytes`.

    Tokens and bytes are rounded down to whole blocks.

    Raises:
        UserError: the pool can't hold one sequence of `max_model_len` tokens, so some row could wait for ever; or it
            is larger than the device's whole memory.
    """
    size = PoolSize.parse(pool_size)
    needed = -(-max_model_len // shape.block_size)
    if size.blocks is not None:
        blocks = size.blocks
    elif size.tokens is not None:
        blocks = size.tokens // shape.block_size
    elif size.bytes is not None:
        blocks = size.bytes // shape.bytes_per_block
    else:
        blocks = min(max_num_seqs * needed, free_bytes // shape.bytes_per_block)
    if blocks < needed and shape.block_size > max_model_len:
        held = f"holds {blocks} blocks of that size, each larger than max_model_len={max_model_len}"
        raise ConfigError("block_size", shape.block_size, f"pool_size={pool_size} {held}; set {max_model_len} or less")
    if blocks < needed:
        raise UserError(
            f"pool_size={pool_size}: {blocks} blocks of block_size={shape.block_size} hold "
            f"{blocks * shape.block_size} tokens, but one sequence of max_model_len={max_model_len} tokens needs "
            f"{needed} blocks; set pool_size={needed} or more, or a smaller max_model_len"
        )
    if blocks * shape.bytes_per_block > total_bytes:
        raise UserError(
            f"pool_size={pool_size}: {blocks} blocks take {blocks * shape.bytes_per_block:,} bytes, but the device has "
            f"{total_bytes:,}; set a smaller pool_size, or auto"
        )
    return blocks
