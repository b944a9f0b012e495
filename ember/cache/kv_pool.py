"""The K/V tensors of all blocks, and how many blocks the memory holds.

    v of one layer: [num_blocks, n_kv_head, block_size, width]      width: head_dim, rounded up to a multiple of 8
                         |                      |
              block_table[p // block_size]   p % block_size         for the token at position p
    k of one layer: [num_blocks, n_kv_head, block_size / lanes, width, lanes]

A head's slots of a block lie together: attention reads one straight run of memory a head. Keys lie the other way round
within groups of 8 slots (`lanes`; 1 where the block size is no multiple of 8, or a kernel that is not ours wants them
plain), so that the scores of 8 neighbouring slots are the lanes of a vector, each summed over head_dim in the same
order. In int8 and fp8 (e4m3), every head's key and value of a slot has a scale of its own: its largest number is 127 of
them, or 448.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ember.config import PoolSize
from ember.errors import ConfigError, UserError
from ember.huge_pages import zeros

LANES = 8
"""Numbers in a vector of the CPU kernel."""

FP8 = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa, up to 448 (Micikevicius et al., arXiv:2209.05433)."""

LARGEST: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, FP8: 448.0})
"""The dtypes that are stored with scales, and the number that a vector's largest becomes."""


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of a pool that a setting names."""
    dtype: torch.dtype = FP8 if name == "fp8" else getattr(torch, name)
    return dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Shape of the K/V of one block; `dtype` is what is stored."""

    n_layer: int
    n_kv_head: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    interleaved: bool = True

    @property
    def width(self) -> int:
        """Numbers a slot holds a head: head_dim, padded to whole vectors."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def lanes(self) -> int:
        """Slots whose keys lie interleaved."""
        return LANES if self.interleaved and self.block_size % LANES == 0 else 1

    @property
    def scaled(self) -> bool:
        """Whether every vector has a scale."""
        return self.dtype in LARGEST

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of `block_size` tokens over all layers, scales too."""
        slot = self.width * self.dtype.itemsize + (torch.float32.itemsize if self.scaled else 0)
        return 2 * self.n_layer * self.n_kv_head * self.block_size * slot


class KVLayer:
    """One layer of the pool.

    Attributes:
        k: [num_blocks, n_kv_head, block_size / lanes, width, lanes].
        v: [num_blocks, n_kv_head, block_size, width].
        k_scale, v_scale: [num_blocks, n_kv_head, block_size] float32 in int8 and fp8, else empty.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        heads, slots, width, lanes = shape.n_kv_head, shape.block_size, shape.width, shape.lanes
        self.k = _zeros((num_blocks, heads, slots // lanes, width, lanes), shape.dtype, device)
        self.v = _zeros((num_blocks, heads, slots, width), shape.dtype, device)
        scales = (num_blocks if shape.scaled else 0, heads, slots)
        self.k_scale, self.v_scale = (torch.zeros(scales, device=device) for _ in range(2))

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store new K/V, each [T, n_kv_head, head_dim], at flat slot numbers [T] (block * block_size + offset)."""
        blocks, offsets, dim = slots // self.shape.block_size, slots % self.shape.block_size, self.shape.head_dim
        if self.shape.scaled:
            k, self.k_scale[blocks, :, offsets] = quantise(k, self.shape.dtype)
            v, self.v_scale[blocks, :, offsets] = quantise(v, self.shape.dtype)
        lanes = self.shape.lanes
        self.k[blocks, :, offsets // lanes, :dim, offsets % lanes] = k.to(self.shape.dtype)
        self.v[blocks, :, offsets, :dim] = v.to(self.shape.dtype)

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at flat slot numbers of any shape [...], each [..., n_kv_head, head_dim]; int8 and fp8 as float32."""
        blocks, offsets, dim = slots // self.shape.block_size, slots % self.shape.block_size, self.shape.head_dim
        lanes = self.shape.lanes
        k, v = self.k[blocks, :, offsets // lanes, :dim, offsets % lanes], self.v[blocks, :, offsets, :dim]
        if self.shape.scaled:
            k = k.float() * self.k_scale[blocks, :, offsets][..., None]
            v = v.float() * self.v_scale[blocks, :, offsets][..., None]
        return k, v

    def copy_block(self, source: int, destination: int) -> None:
        """Overwrite a block with another one."""
        for tensor in (self.k, self.v, self.k_scale, self.v_scale):
            if len(tensor):  # scales may be empty
                tensor[destination] = tensor[source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., n] as int8 or fp8 and a scale [...] each: x is about stored * scale."""
    scale = x.float().abs().amax(-1) / LARGEST[dtype]
    steps = x.float() / scale[..., None].where(scale[..., None] > 0, 1.0)
    return (steps.round() if dtype == torch.int8 else steps).to(dtype), scale


class KVPool:
    """All layers' K/V. Zeroed pages are only claimed from the system as blocks are first written."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.layers = [KVLayer(shape, num_blocks, device) for _ in range(shape.n_layer)]

    def copy_block(self, source: int, destination: int) -> None:
        """Overwrite a block with another one, in all layers."""
        for layer in self.layers:
            layer.copy_block(source, destination)


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
