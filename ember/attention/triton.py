"""Paged attention on a GPU, in Triton: one kernel for decoding and for prompts, and one that stores new K/V.

    program  (tile of queries, head of keys, split)            rows: count * group queries that share the head
    loop     TILE positions at a time, found through the block table, with an online softmax
             (Milakov and Gimelshein, arXiv:1805.02867; tiled as in FlashAttention-2, arXiv:2307.08691)
    splits   a long context is shared out to several programs, whose parts are joined in order (Flash-Decoding)

Queries that decode come one a sequence, so their tiles hold one token each and their contexts are split; prompts come
in tiles of many tokens and are not. int8 and fp8 K/V are multiplied by their scales in the kernel: a score by its
key's, a weight by its value's. Products of float32 are three of TF32 each, which lose about as little. Under
`TRITON_INTERPRET=1` all of this runs on a CPU, slowly; so it is tested. It has not been timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ember.attention.base import AttentionMetadata
from ember.cache.kv_pool import LARGEST, KVLayer

try:  # an extra, looked for where the setting is resolved
    import triton
    import triton.language as tl

    jit: Any = triton.jit
except ImportError:  # pragma: no cover

    def jit(function: Any) -> Any:
        """Leaves the kernel as it is: without Triton it is never called."""
        return function


TILE = 64
"""Positions of a turn of the kernel's loop."""
QUERY_ROWS = 64
"""Rows of a tile of a prompt's queries: tokens times query heads that share a head of keys."""
FEWEST_ROWS = 16
"""The least height of a matrix that `tl.dot` takes."""
SPLIT_FROM = 512
"""Positions that a split has at least."""
MOST_SPLITS = 32
STORED_TOGETHER = 16
"""Tokens that a program stores."""
EVERYTHING = 2**30
"""A window that holds every position."""


@jit
def _soften(best, scores):
    """A turn of the online softmax: the largest scores so far, what shrinks older sums to them, the new weights."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing yet
    return new_best, tl.exp(best - base), tl.exp(scores - base[:, None])


# fmt: off
@jit
def _attend(
    q, k, v, k_scale, v_scale, tables, tiles, out, sums, scale, window, kv_heads, max_blocks,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    KIND: tl.constexpr,
):
    # fmt: on
    """A split of the attention of a tile of queries, into out [T, n_head, SPLITS, DIM].

    The only split is the result. Of several each leaves its weighted values, and in sums [T, n_head, SPLITS, 2] float32
    its largest score and its sum of weights.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    count, position = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    token, query_head = rows // GROUP, head * GROUP + rows % GROUP
    real = token < count
    row = (first + token) * (kv_heads * GROUP) + query_head  # of q seen as [T * n_head, DIM]
    is_dim = dims < DIM
    queries = tl.load(q + row[:, None] * DIM + dims[None, :], mask=real[:, None] & is_dim[None, :], other=0.0).to(KIND)
    last_seen = position + token
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, DIMS], tl.float32)
    begin = tl.maximum(position - window + 1, 0) // TILE * TILE
    end = position + count
    share = tl.cdiv(tl.cdiv(end - begin, TILE), SPLITS) * TILE
    stop = tl.minimum(begin + (split + 1) * share, end)
    for at in range(begin + split * share, stop, TILE):
        p = at + tl.arange(0, TILE)
        inside = p < stop
        whole = p < tl.cdiv(stop, LANES) * LANES  # keys are read in vectors; what lies beyond stop is never seen
        block = tl.load(tables + sequence * max_blocks + p // SLOTS, mask=whole, other=0).to(tl.int64)
        slot = (block * kv_heads + head) * SLOTS + p % SLOTS
        lane = tl.max_contiguous(slot // LANES * LANES * WIDTH + slot % LANES, LANES)  # TILE is a multiple of LANES
        key_at = tl.multiple_of(lane, LANES)[None, :] + dims[:, None] * LANES
        keys = tl.load(k + key_at, mask=whole[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(queries, keys.to(KIND), input_precision="tf32x3").to(tl.float32) * scale
        if SCALED:
            scores = scores * tl.load(k_scale + slot, mask=inside, other=0.0)[None, :]
        seen = (p[None, :] <= last_seen[:, None]) & (p[None, :] > last_seen[:, None] - window) & inside[None, :]
        best, shrink, weights = _soften(best, tl.where(seen, scores, float("-inf")))
        total = total * shrink + tl.sum(weights, 1)
        if SCALED:
            weights = weights * tl.load(v_scale + slot, mask=inside, other=0.0)[None, :]
        new = tl.load(v + slot[:, None] * WIDTH + dims[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
        values = values * shrink[:, None] + tl.dot(weights.to(KIND), new.to(KIND), input_precision="tf32x3")
    part = row * SPLITS + split
    if SPLITS == 1:
        values = values / tl.where(real, total, 1.0)[:, None]
    else:
        tl.store(sums + part * 2, best, mask=real)
        tl.store(sums + part * 2 + 1, total, mask=real)
    at_out = out + part[:, None] * DIM + dims[None, :]
    tl.store(at_out, values.to(out.dtype.element_ty), mask=real[:, None] & is_dim[None, :])


@jit
def _join(
    parts,
    sums,
    tokens,
    out,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Put the splits of a head of a token together, in order, and divide by the sum of weights."""
    row = tl.load(tokens + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, DIMS)
    best = tl.load(sums + row * SPLITS * 2)
    for split in range(1, SPLITS):
        best = tl.maximum(best, tl.load(sums + (row * SPLITS + split) * 2))
    total = 0.0
    values = tl.zeros([DIMS], tl.float32)
    for split in range(SPLITS):
        part = row * SPLITS + split
        factor = tl.exp(tl.load(sums + part * 2) - best)
        total += tl.load(sums + part * 2 + 1) * factor
        values += tl.load(parts + part * DIM + dims, mask=dims < DIM, other=0.0) * factor
    tl.store(out + row * DIM + dims, (values / total).to(out.dtype.element_ty), mask=dims < DIM)


@jit
def _shrink(x, largest, INTEGERS: tl.constexpr):
    """Rows of x as steps of a scale a row, largest at most, and the scales; rounded to integers or e4m3 (see `FP8`)."""
    scale = tl.max(tl.abs(x), 1) / largest
    steps = x / tl.where(scale > 0, scale, 1.0)[:, None]
    if INTEGERS:
        rounder = 12582912.0  # adding 1.5 * 2^23 leaves no fraction
    else:  # and 1.5 * 2^20 times a number's own power of two, of its mantissa 3 bits
        power = tl.maximum(steps.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
        rounder = (power + (20 << 23) + (1 << 22)).to(tl.float32, bitcast=True)
    return steps + rounder - rounder, scale


# fmt: off
@jit
def _store(
    k, v, slots, to_k, to_v, k_scale, v_scale, k_stride, v_stride, kv_heads, count,
    DIM: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, LARGEST: tl.constexpr,
    DIMS: tl.constexpr, TOKENS: tl.constexpr,
):
    # fmt: on
    """One head's keys and values of some tokens into their slots; with scales if there is a largest number to store."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    dims = tl.arange(0, DIMS)
    real = token < count
    kept = real[:, None] & (dims < DIM)[None, :]
    flat = tl.load(slots + token, mask=real, other=0)
    slot = (flat // SLOTS * kv_heads + head) * SLOTS + flat % SLOTS
    key = tl.load(k + token[:, None] * k_stride + head * DIM + dims[None, :], mask=kept, other=0.0)
    value = tl.load(v + token[:, None] * v_stride + head * DIM + dims[None, :], mask=kept, other=0.0)
    if LARGEST > 0:
        key, key_scale = _shrink(key.to(tl.float32), LARGEST, to_k.dtype.element_ty == tl.int8)
        value, value_scale = _shrink(value.to(tl.float32), LARGEST, to_k.dtype.element_ty == tl.int8)
        tl.store(k_scale + slot, key_scale, mask=real)
        tl.store(v_scale + slot, value_scale, mask=real)
    key_at = (slot // LANES * LANES * WIDTH + slot % LANES)[:, None] + dims[None, :] * LANES
    tl.store(to_k + key_at, key.to(to_k.dtype.element_ty), mask=kept)
    tl.store(to_v + slot[:, None] * WIDTH + dims[None, :], value.to(to_v.dtype.element_ty), mask=kept)


@dataclass(slots=True)
class _Tiles:
    """Tiles of queries, all of one kind.

    Attributes:
        where: [n, 4] int32: sequence, first row of q, tokens, position of the first.
        tokens: int64, the rows of q in them.
        most: tokens of the largest tile.
        splits: programs that a context is shared out to.
    """

    where: torch.Tensor
    tokens: torch.Tensor
    most: int
    splits: int


class TritonAttention:
    """See `AttentionBackend`. Over a pool of any dtype; sums are in float32."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        """Kernels are compiled as they are first called, for each kind of pool and shape of tile."""

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Part the batch into tiles: sequences with one token, and prompts."""
        self._metadata = metadata
        self._kinds: dict[int, list[_Tiles]] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        meta, group = self._metadata, q.shape[1] // k.shape[1]
        _write(k, v, layer, meta.slot_mapping)
        if group not in self._kinds:
            self._kinds[group] = _tiles(meta, group)
        q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for tiles in self._kinds[group]:
            _run(q, layer, meta.block_tables, tiles, scale, window, out)
        return out


def _write(k: torch.Tensor, v: torch.Tensor, layer: KVLayer, slots: torch.Tensor) -> None:
    shape = layer.shape
    k, v = (x if x.stride()[1:] == (shape.head_dim, 1) else x.contiguous() for x in (k, v))
    _store[triton.cdiv(len(slots), STORED_TOGETHER), shape.n_kv_head](
        k,
        v,
        slots,
        layer.k,
        layer.v,
        layer.k_scale,
        layer.v_scale,
        k.stride(0),
        v.stride(0),
        shape.n_kv_head,
        len(slots),
        DIM=shape.head_dim,
        WIDTH=shape.width,
        SLOTS=shape.block_size,
        LANES=shape.lanes,
        LARGEST=LARGEST.get(shape.dtype, 0.0),
        DIMS=_power_of_two(shape.head_dim),
        TOKENS=STORED_TOGETHER,
    )


def _run(
    q: torch.Tensor,
    layer: KVLayer,
    tables: torch.Tensor,
    tiles: _Tiles,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    shape, heads = layer.shape, q.shape[1]
    group, dims = heads // shape.n_kv_head, _power_of_two(shape.head_dim)
    parts, sums = out, out
    if tiles.splits > 1:
        parts = torch.empty(len(q), heads, tiles.splits, shape.head_dim, device=q.device)
        sums = torch.empty(len(q), heads, tiles.splits, 2, device=q.device)
    _attend[len(tiles.where), shape.n_kv_head, tiles.splits](
        q,
        layer.k,
        layer.v,
        layer.k_scale,
        layer.v_scale,
        tables,
        tiles.where,
        parts,
        sums,
        scale,
        EVERYTHING if window is None else window,
        shape.n_kv_head,
        tables.shape[1],
        GROUP=group,
        DIM=shape.head_dim,
        WIDTH=shape.width,
        SLOTS=shape.block_size,
        LANES=shape.lanes,
        SCALED=shape.scaled,
        ROWS=max(FEWEST_ROWS, _power_of_two(tiles.most * group)),
        DIMS=dims,
        TILE=TILE,
        SPLITS=tiles.splits,
        KIND=_kind(q.dtype),
    )
    if tiles.splits > 1:
        _join[len(tiles.tokens), heads](
            parts, sums, tiles.tokens, out, DIM=shape.head_dim, DIMS=dims, SPLITS=tiles.splits
        )


def _tiles(meta: AttentionMetadata, group: int) -> list[_Tiles]:
    """The batch's tiles, those of one token first; the metadata are read on the host."""
    starts, context = meta.query_start_loc.cpu().long(), meta.context_lens.cpu().long()
    lengths = starts.diff()
    alone = lengths == 1
    kinds = [(alone, 1, _splits(int(context[alone].max())) if alone.any() else 1)]
    kinds += [(~alone, max(1, QUERY_ROWS // group), 1)]
    found = []
    for chosen, most, splits in kinds:
        which = chosen.nonzero()[:, 0]
        count = (lengths[which] + most - 1) // most
        sequence = torch.repeat_interleave(which, count)
        offset = (torch.arange(len(sequence)) - torch.repeat_interleave(count.cumsum(0) - count, count)) * most
        size = (lengths[sequence] - offset).clamp(max=most)
        first = starts[:-1][sequence] + offset
        where = torch.stack([sequence, first, size, (context - lengths)[sequence] + offset], 1).int()
        if len(where):
            tokens = torch.cat([torch.arange(int(a), int(a + n)) for a, n in zip(first, size, strict=True)])
            device = meta.block_tables.device
            found.append(_Tiles(where.to(device), tokens.to(device), most, splits))
    return found


def _kind(dtype: torch.dtype) -> Any:
    """What is multiplied: numbers as the queries', but float32 in the interpreter, whose products know no bfloat16."""
    return getattr(tl, str(dtype).removeprefix("torch.")) if isinstance(_attend, triton.JITFunction) else tl.float32


def _splits(context: int) -> int:
    return max(1, min(MOST_SPLITS, context // SPLIT_FROM))


def _power_of_two(n: int) -> int:
    return max(FEWEST_ROWS, 1 << (n - 1).bit_length())
