"""The compiled part of `CpuAttention` (numba).

Nothing is summed across vector lanes and no sum is reordered, so the compiler's choice of vector or scalar code, which
follows the block size and the length of a run, can't change a bit:

    scores   lane = slot        s[t] += q[d] * k[d, t]      for d in order       keys lie as [head_dim, slot]
    output   lane = dimension   o[d] += w[j] * v[j, d]      for j in order       values lie as [slot, head_dim]

The softmax is computed online, a tile of positions at a time (Milakov and Gimelshein, arXiv:1805.02867); exp is the
Cephes polynomial, so that it becomes vector code. Indices are unsigned: numba then leaves out its check for negative
ones, which would keep the loops from becoming vector code. `contract` allows fused multiply-add, and nothing else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

U = np.uint64
F = np.float32
TILE = 64
"""Positions in a tile of keys, counted from position 0 of the sequence."""

_LOG2E, _LN2_HIGH, _LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)
_C0, _C1, _C2 = F(1.9875691500e-4), F(1.3981999507e-3), F(8.3334519073e-3)
_C3, _C4, _C5 = F(4.1665795894e-2), F(1.6666665459e-1), F(5.0000001201e-1)
_LOWEST, _HALF, _ONE, _ZERO = F(-87.0), F(0.5), F(1.0), F(0.0)
_BIAS, _MANTISSA = np.int32(127), np.int32(23)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _add_scores(s: Any, q: Any, k: Any, dim: Any, stride: Any, run: Any) -> None:
    """s[t] += q . k[:, t] for a run of slots within a block; k[d * stride + t]."""
    d = U(0)
    while d + U(4) <= dim:
        q0, q1, q2, q3 = q[d], q[d + U(1)], q[d + U(2)], q[d + U(3)]
        k0 = d * stride
        k1 = k0 + stride
        k2 = k1 + stride
        k3 = k2 + stride
        for t in range(run):
            s[t] = s[t] + q0 * k[k0 + t] + q1 * k[k1 + t] + q2 * k[k2 + t] + q3 * k[k3 + t]
        d += U(4)
    while d < dim:
        q0, k0 = q[d], d * stride
        for t in range(run):
            s[t] = s[t] + q0 * k[k0 + t]
        d += U(1)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _add_values(o: Any, w: Any, v: Any, dim: Any, run: Any) -> None:
    """o[d] += w . v[:, d] for a run of slots within a block; v[t * dim + d]."""
    t = U(0)
    while t + U(4) <= run:
        w0, w1, w2, w3 = w[t], w[t + U(1)], w[t + U(2)], w[t + U(3)]
        v0 = t * dim
        v1 = v0 + dim
        v2 = v1 + dim
        v3 = v2 + dim
        for d in range(dim):
            o[d] = o[d] + w0 * v[v0 + d] + w1 * v[v1 + d] + w2 * v[v2 + d] + w3 * v[v3 + d]
        t += U(4)
    while t < run:
        w0, v0 = w[t], t * dim
        for d in range(dim):
            o[d] = o[d] + w0 * v[v0 + d]
        t += U(1)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _exp(s: Any, bits: Any, power: Any, count: Any, top: Any) -> None:
    """s[j] = exp(s[j] - top), top being the largest; `bits` is the int32 view of `power`."""
    for j in range(count):
        x = max(s[j] - top, _LOWEST)
        n = math.floor(x * _LOG2E + _HALF)
        r = x - n * _LN2_HIGH
        r = r - n * _LN2_LOW
        y = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
        s[j] = y * (r * r) + r + _ONE
        bits[j] = (np.int32(n) + _BIAS) << _MANTISSA
    for j in range(count):
        s[j] = s[j] * power[j]


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _softmax_step(s: Any, bits: Any, power: Any, count: Any, o: Any, top: Any, total: Any) -> Any:
    """Turn a tile's scores into weights; rescale what came before to the new largest score."""
    largest = top
    for j in range(count):
        largest = max(largest, s[j])
    if largest > top:
        if total > _ZERO:
            shrink = F(math.exp(top - largest))
            total = total * shrink
            for d in range(len(o)):
                o[d] = o[d] * shrink
        top = largest
    _exp(s, bits, power, U(count), top)
    for j in range(count):
        total = total + s[j]
    return top, total


@njit(parallel=True, cache=True, fastmath={"contract"}, error_model="numpy")
def attend(q: Any, keys: Any, values: Any, tables: Any, tiles: Any, out: Any, scale: float) -> None:
    """Attention of every tile of queries, through the block tables.

    Args:
        q, out: [T, n_head, head_dim] float32.
        keys, values: a layer's pool (see `KVLayer`).
        tables: [S, max_blocks] int32.
        tiles: [n, 4] int64, see `cpu._tiles`.
        scale: factor on the scores.
    """
    dim, size, kv_heads = keys.shape[2], keys.shape[3], keys.shape[1]
    group = q.shape[1] // kv_heads
    k, v = keys.reshape(-1), values.reshape(-1)
    for item in prange(tiles.shape[0] * kv_heads):
        seq, first, count, position = tiles[item // kv_heads]
        head = item % kv_heads
        rows = count * group
        queries = np.empty((rows, dim), np.float32)
        o = np.zeros((rows, dim), np.float32)
        top, total = np.full(rows, F(-np.inf)), np.zeros(rows, np.float32)
        s, power = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
        bits = power.view(np.int32)
        for r in range(rows):
            queries[r] = q[first + r // group, head * group + r % group] * F(scale)
        for begin in range(0, position + count, TILE):
            for r in range(rows):
                seen = min(TILE, position + r // group + 1 - begin)
                if seen <= 0:
                    continue
                s[:seen] = _ZERO
                j = 0
                while j < seen:
                    slot = (begin + j) % size
                    run = min(seen - j, size - slot)
                    base = (np.int64(tables[seq, (begin + j) // size]) * kv_heads + head) * dim * size
                    _add_scores(s[j:], queries[r], k[base + slot :], U(dim), U(size), U(run))
                    j += run
                top[r], total[r] = _softmax_step(s, bits, power, seen, o[r], top[r], total[r])
                j = 0
                while j < seen:
                    slot = (begin + j) % size
                    run = min(seen - j, size - slot)
                    base = (np.int64(tables[seq, (begin + j) // size]) * kv_heads + head) * dim * size
                    _add_values(o[r], s[j:], v[base + slot * dim :], U(dim), U(run))
                    j += run
        for r in range(rows):
            out[first + r // group, head * group + r % group] = o[r] / total[r]


@njit(parallel=True, cache=True)
def store(k: Any, v: Any, slots: Any, keys: Any, values: Any) -> None:
    """Write new K/V [T, n_kv_head, head_dim] to flat slots [T] of a layer's pool."""
    size = keys.shape[3]
    for t in prange(len(slots)):
        block, offset = slots[t] // size, slots[t] % size
        for head in range(k.shape[1]):
            for d in range(k.shape[2]):
                keys[block, head, d, offset] = k[t, head, d]
                values[block, head, offset, d] = v[t, head, d]


def warm_up() -> None:
    """Compile, or load what an earlier process compiled."""
    x = np.zeros((1, 1, 8), np.float32)
    keys, values = np.zeros((1, 1, 8, 4), np.float32), np.zeros((1, 1, 4, 8), np.float32)
    store(x, x, np.zeros(1, np.int64), keys, values)
    tile = np.array([[0, 0, 1, 0]], np.int64)
    attend(x, keys, values, np.zeros((1, 1), np.int32), tile, np.empty_like(x), 1.0)
