"""Paged attention on a GPU, in Triton: one kernel for decoding and for prompts, and one that stores new K/V.

    program  (tile of queries, head of keys, split)            rows: count * group queries that share the head
    loop     TILE positions at a time, found through the block table, with an online softmax
             (Milakov and Gimelshein, arXiv:1805.02867; tiled as in FlashAttention-2, arXiv:2307.08691)
    splits   a long context is shared out to several programs, whose parts are joined in order (Flash-Decoding)

Queries that decode come one a sequence, so their tiles hold one token each and their contexts are split; prompts come
in tiles of many tokens and are not. How a context is split follows from its own length, and a tile's size from the
kind of numbers: what is beside a sequence in the batch changes no sum. Which program does what is worked out on the
device, where the metadata lie: nothing waits for them. int8 and fp8 K/V are multiplied by their scales in the kernel: a
score by its key's, a weight by its value's. Products of float32 are three of TF32 each, which lose about as little.
Under `TRITON_INTERPRET=1` all of this runs on a CPU, slowly; so it is tested. On a GPU it has not been run yet.
"""

from __future__ import annotations

import inspect
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


QUERY_ROWS = 64
"""Rows of a tile of a prompt's queries: tokens times query heads that share a head of keys."""
TILE = 64
"""Positions of a turn of the kernel's loop."""
WIDE = 256
"""Bytes of a head's vector; tiles of wider ones are smaller, that they fit in a GPU's shared memory."""
FEWEST_ROWS = 16
"""The least height of a matrix that `tl.dot` takes."""
SPLIT_FROM = 512
"""Positions that a split has at least; whole tiles."""
MOST_SPLITS = 32
STAGES = (2, 3, 4)
"""Tiles in flight, of which the best is kept."""
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


@jit
def _owner(starts, tile, sequences, MOST: tl.constexpr):
    """The sequence that a tile of up to MOST tokens is cut from.

    The tiles of sequence s begin at starts[s] // MOST + s: no two sequences share one, and some are empty.
    """
    low: tl.int32 = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // MOST + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def _tile(starts, contexts, tile, sequences, MOST: tl.constexpr, ALONE: tl.constexpr):
    """Of a tile: its sequence, first row of q, tokens (0: another launch's, or empty), position of the first."""
    sequence = tile if ALONE else _owner(starts, tile, sequences, MOST)
    first = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - first
    offset = 0 if ALONE else (tile - first // MOST - sequence) * MOST
    count = tl.where((length == 1) == ALONE, tl.maximum(tl.minimum(length - offset, MOST), 0), 0)
    return sequence, first + offset, count, tl.load(contexts + sequence) - length + offset


@jit
def _share(position, window, TILE: tl.constexpr, FROM: tl.constexpr, MOST: tl.constexpr):
    """Where the context of the query at a position begins, in whole tiles, and how much of it a split has."""
    begin = tl.maximum(position - window + 1, 0) // TILE * TILE
    return begin, tl.maximum(tl.cdiv(tl.cdiv(position + 1 - begin, TILE), MOST) * TILE, FROM)


# fmt: off
@jit
def _attend(
    q, k, v, k_scale, v_scale, tables, starts, contexts, out, sums,
    scale, window, kv_heads, max_blocks, sequences, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, KIND: tl.constexpr,
    MOST: tl.constexpr, ALONE: tl.constexpr, SPLIT: tl.constexpr, FROM: tl.constexpr, MOST_SPLITS: tl.constexpr,
):
    # fmt: on
    """A split of the attention of a tile of queries, into out [T, n_head, splits, DIM].

    ALONE: of the sequences with one token each, else of the others in tiles of MOST. The only split is the result. Of
    several (SPLIT) each leaves its weighted values, and its largest score and sum of weights in sums [T, n_head,
    splits, 2] float32.
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first, count, position = _tile(starts, contexts, tile, sequences, MOST, ALONE)
    if count == 0:
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    token, query_head, is_dim = rows // GROUP, head * GROUP + rows % GROUP, dims < DIM
    real = token < count
    row = (first + token) * (kv_heads * GROUP) + query_head  # of q seen as [T * n_head, DIM]
    queries = tl.load(q + row[:, None] * DIM + dims[None, :], mask=real[:, None] & is_dim[None, :], other=0.0).to(KIND)
    last_seen = position + token
    best, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, DIMS], tl.float32)
    begin, share = _share(position, window, TILE, FROM, MOST_SPLITS)
    stop = position + count
    if SPLIT:
        begin += split * share
        if begin >= stop and split > 0:
            return
        stop = tl.minimum(begin + share, stop)
    for at in range(begin, stop, TILE):
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
    part = row * splits + split
    if SPLIT:
        tl.store(sums + part * 2, best, mask=real)
        tl.store(sums + part * 2 + 1, total, mask=real)
    else:
        values = values / tl.where(real & (last_seen >= 0), total, 1.0)[:, None]
    at_out = out + part[:, None] * DIM + dims[None, :]
    tl.store(at_out, values.to(out.dtype.element_ty), mask=real[:, None] & is_dim[None, :])


# fmt: off
@jit
def _join(
    parts, sums, starts, contexts, out, window, splits,
    DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr, FROM: tl.constexpr, MOST_SPLITS: tl.constexpr,
):
    # fmt: on
    """Put the splits of a head of a sequence's only token together, in order, and divide by the sum of weights."""
    sequence = tl.program_id(0)
    first, context = tl.load(starts + sequence), tl.load(contexts + sequence)
    if tl.load(starts + sequence + 1) - first != 1:
        return
    begin, share = _share(context - 1, window, TILE, FROM, MOST_SPLITS)
    row, count = first * tl.num_programs(1) + tl.program_id(1), tl.cdiv(context - begin, share)
    dims = tl.arange(0, DIMS)
    best = tl.load(sums + row * splits * 2)
    for split in range(1, count):
        best = tl.maximum(best, tl.load(sums + (row * splits + split) * 2))
    total = 0.0
    values = tl.zeros([DIMS], tl.float32)
    for split in range(count):
        part = row * splits + split
        factor = tl.exp(tl.load(sums + part * 2) - best)
        total += tl.load(sums + part * 2 + 1) * factor
        values += tl.load(parts + part * DIM + dims, mask=dims < DIM, other=0.0) * factor
    result = values / tl.where(context > 0, total, 1.0)
    tl.store(out + row * DIM + dims, result.to(out.dtype.element_ty), mask=dims < DIM)


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
    """One head's keys and values of some tokens into their slots; with scales if there is a largest number to store.

    Tokens whose slot is negative are only there to fill the batch.
    """
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    dims = tl.arange(0, DIMS)
    flat = tl.load(slots + token, mask=token < count, other=-1)
    real = flat >= 0
    kept = real[:, None] & (dims < DIM)[None, :]
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


def _tuned(kernel: Any) -> Any:
    """The kernel, which tries how many tiles to load ahead as it first meets a kind of work, and keeps it on the disk.

    Nothing else is tried: more warps would share out a tile's sums otherwise. The interpreter has nothing to tune.
    """
    if not _compiled():
        return kernel
    options = {"cache_results": True} if "cache_results" in inspect.signature(triton.autotune).parameters else {}
    configs = [triton.Config({}, num_warps=4, num_stages=stages) for stages in STAGES]
    return triton.autotune(configs, ["GROUP", "DIM", "SLOTS", "ROWS", "ALONE", "SPLIT"], **options)(kernel)


class TritonAttention:
    """See `AttentionBackend`. Over a pool of any dtype; sums are in float32.

    Padding is a sequence of one token without context, whose slot is negative: nothing is written or read for it.
    """

    def __init__(self, kv_dtype: torch.dtype) -> None:
        """Kernels are compiled as they are first called, for each kind of pool and shape of tile."""
        self._attend = _tuned(_attend)

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Keep the step's metadata."""
        self._metadata = metadata

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, scale: float, window: int | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        meta = self._metadata
        _write(k, v, layer, meta.slot_mapping)
        q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
        window = EVERYTHING if window is None else window
        if meta.max_query_len > 1:
            self._run(q, layer, scale, window, out, 1, alone=False)
        if meta.max_query_len == 1 or len(meta.context_lens) > 1:
            self._run(q, layer, scale, window, out, _splits(meta.max_context_len), alone=True)
        return out

    def _run(
        self, q: torch.Tensor, layer: KVLayer, scale: float, window: int, out: torch.Tensor, splits: int, *, alone: bool
    ) -> None:
        """Attend from the sequences with one token, or from all others."""
        meta, shape, heads, sequences = self._metadata, layer.shape, q.shape[1], len(self._metadata.context_lens)
        group, dims = heads // shape.n_kv_head, _power_of_two(shape.head_dim)
        shrink = max(1, dims * q.dtype.itemsize // WIDE)
        tile, rows = max(TILE // shrink, TILE // 2), max(QUERY_ROWS // shrink, FEWEST_ROWS)
        most = 1 if alone else max(1, rows // group)
        parts, sums = out, out
        if splits > 1:
            parts = torch.empty(len(q), heads, splits, shape.head_dim, device=q.device)
            sums = torch.empty(len(q), heads, splits, 2, device=q.device)
        cut = {"TILE": tile, "FROM": SPLIT_FROM, "MOST_SPLITS": MOST_SPLITS}
        self._attend[sequences if alone else len(q) // most + sequences, shape.n_kv_head, splits](
            q,
            layer.k,
            layer.v,
            layer.k_scale,
            layer.v_scale,
            meta.block_tables,
            meta.query_start_loc,
            meta.context_lens,
            parts,
            sums,
            scale,
            window,
            shape.n_kv_head,
            meta.block_tables.shape[1],
            sequences,
            splits,
            GROUP=group,
            DIM=shape.head_dim,
            WIDTH=shape.width,
            SLOTS=shape.block_size,
            LANES=shape.lanes,
            SCALED=shape.scaled,
            ROWS=max(FEWEST_ROWS, _power_of_two(most * group)),
            DIMS=dims,
            KIND=_kind(q.dtype),
            MOST=most,
            ALONE=alone,
            SPLIT=splits > 1,
            **cut,
        )
        if splits > 1:
            where = meta.query_start_loc, meta.context_lens
            _join[sequences, heads](parts, sums, *where, out, window, splits, DIM=shape.head_dim, DIMS=dims, **cut)


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


def _compiled() -> bool:
    """Whether kernels are compiled for a GPU: not in the interpreter."""
    return isinstance(_attend, triton.JITFunction)


def _kind(dtype: torch.dtype) -> Any:
    """What is multiplied: numbers as the queries', but float32 in the interpreter, whose products know no bfloat16."""
    return getattr(tl, str(dtype).removeprefix("torch.")) if _compiled() else tl.float32


def _splits(context: int) -> int:
    """The most that a context of so many positions or fewer is split."""
    return max(1, min(MOST_SPLITS, -(-context // SPLIT_FROM)))


def _power_of_two(n: int) -> int:
    return max(FEWEST_ROWS, 1 << (n - 1).bit_length())
