"""What rows go through between the linears of a Llama, compiled for a CPU in float32 (numba).

A row's result depends on the row alone, to the bit: every operation is rounded by itself (no fused multiply-add is left
to the compiler), a sum has eight lanes that are added in a fixed order, and there is no call into a library. exp is the
Cephes polynomial.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import extending, njit, prange, types

from ember.kernel_cache import ensure_kernel_cache, patience
from ember.model.packed_matrix import flat
from ember.threads import numba_follows_torch

ensure_kernel_cache()

_PARALLEL_FROM = 1 << 16  # elements; below, waking a thread costs more than it saves
F = np.float32
intrinsic: Any = extending.intrinsic
_ZERO, _ONE, _MOST, _ROUNDER, _BIAS = F(0), F(1), F(87), F(12582912), np.int32(127)
_LOG2E, _LN2_HIGH, _LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)
_C0, _C1, _C2 = F(1.9875691500e-4), F(1.3981999507e-3), F(8.3334519073e-3)
_C3, _C4, _C5 = F(4.1665795894e-2), F(1.6666665459e-1), F(5.0000001201e-1)


@intrinsic
def _bits(typing: Any, x: Any) -> Any:
    """The float32 x as an int32 of the same bits."""
    return types.int32(types.float32), lambda context, builder, signature, values: builder.bitcast(
        values[0], ir.IntType(32)
    )


@intrinsic
def _float(typing: Any, x: Any) -> Any:
    """The int32 x as a float32 of the same bits."""
    return types.float32(types.int32), lambda context, builder, signature, values: builder.bitcast(
        values[0], ir.FloatType()
    )


@njit(error_model="numpy")
def _exp(x: Any) -> Any:
    """exp of x, taken as at most 87 from 0."""
    x = min(max(x, -_MOST), _MOST)
    shifted = x * _LOG2E + _ROUNDER
    n = shifted - _ROUNDER
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    return (p * (r * r) + r + _ONE) * _float(np.int32((_bits(shifted) + _BIAS) << np.int32(23)))


@njit(error_model="numpy")
def _norm(x: Any, out: Any, weight: Any, eps: Any) -> None:
    """out = x / sqrt(mean of squares + eps) * weight; out may be x."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = _ZERO
    end = len(x) // 8 * 8
    for d in range(0, end, 8):
        s0 += x[d] * x[d]
        s1 += x[d + 1] * x[d + 1]
        s2 += x[d + 2] * x[d + 2]
        s3 += x[d + 3] * x[d + 3]
        s4 += x[d + 4] * x[d + 4]
        s5 += x[d + 5] * x[d + 5]
        s6 += x[d + 6] * x[d + 6]
        s7 += x[d + 7] * x[d + 7]
    for d in range(end, len(x)):
        s0 += x[d] * x[d]
    mean = (((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))) / F(len(x))
    factor = _ONE / np.sqrt(mean + eps)
    for d in range(len(x)):
        out[d] = x[d] * factor * weight[d]


@njit(error_model="numpy")
def _turn(x: Any, heads: Any, cos: Any, sin: Any) -> None:
    """Turn the pairs d, d + D/2 of the first heads of a row."""
    half = len(cos)
    for h in range(heads):
        a, b = x[2 * h * half : (2 * h + 1) * half], x[(2 * h + 1) * half : (2 * h + 2) * half]
        for d in range(half):
            first, second = a[d], b[d]
            a[d] = first * cos[d] - second * sin[d]
            b[d] = second * cos[d] + first * sin[d]


@njit(error_model="numpy")
def _gate(x: Any, out: Any, linear: Any, cubic: Any) -> None:
    """out = g * sigmoid(linear * g + cubic * g^3) * u, where x is g, then u."""
    n = len(out)
    g, u = x[:n], x[n:]
    for d in range(n):
        v = g[d]
        out[d] = v / (_ONE + _exp(-(linear * v + cubic * v * v * v))) * u[d]


@njit(cache=True)
def norm_few(x: Any, stride: Any, out: Any, weight: Any, eps: Any) -> None:
    """Normalise each row of x into out [R, D]. Rows of x, here and below, lie `stride` numbers apart."""
    for m in range(len(out)):
        _norm(x[m * stride : m * stride + out.shape[1]], out[m], weight, eps)


@njit(parallel=True, cache=True)
def norm_many(x: Any, stride: Any, out: Any, weight: Any, eps: Any) -> None:
    """As `norm_few`, by all threads."""
    for m in prange(len(out)):
        _norm(x[m * stride : m * stride + out.shape[1]], out[m], weight, eps)


@njit(cache=True)
def turn_few(x: Any, stride: Any, heads: Any, cos: Any, sin: Any) -> None:
    """Turn the first heads of each row of x by cos and sin [T, D/2]."""
    for m in range(len(cos)):
        _turn(x[m * stride :], heads, cos[m], sin[m])


@njit(parallel=True, cache=True)
def turn_many(x: Any, stride: Any, heads: Any, cos: Any, sin: Any) -> None:
    """As `turn_few`, by all threads."""
    for m in prange(len(cos)):
        _turn(x[m * stride :], heads, cos[m], sin[m])


@njit(cache=True)
def gate_few(x: Any, stride: Any, out: Any, linear: Any, cubic: Any) -> None:
    """Each row [2 * I] of x to a row of out [T, I]."""
    for m in range(len(out)):
        _gate(x[m * stride : m * stride + 2 * out.shape[1]], out[m], linear, cubic)


@njit(parallel=True, cache=True)
def gate_many(x: Any, stride: Any, out: Any, linear: Any, cubic: Any) -> None:
    """As `gate_few`, by all threads."""
    for m in prange(len(out)):
        _gate(x[m * stride : m * stride + 2 * out.shape[1]], out[m], linear, cubic)


def run(few: Any, many: Any, x: torch.Tensor, *others: Any) -> None:
    """Call the one of the two that is faster for so many rows of x [T, n], which are runs of memory."""
    arrays = [item.numpy() if isinstance(item, torch.Tensor) else item for item in (flat(x), x.stride(0), *others)]
    if x.numel() < _PARALLEL_FROM:
        few(*arrays)
    else:
        numba_follows_torch()
        many(*arrays)


def warm_up() -> None:
    """Compile, or load what an earlier process compiled: not within the first step."""
    numba_follows_torch()
    x, rows = np.zeros(8, np.float32), np.zeros((1, 4), np.float32)
    with patience("what lies between the matrices of a Llama: a few seconds, once"):
        for norm in (norm_few, norm_many):
            norm(x, 8, rows, x[:4], _ONE)
        for turn in (turn_few, turn_many):
            turn(x, 8, 1, rows, rows)
        for gate in (gate_few, gate_many):
            gate(x, 8, rows, _ONE, _ZERO)
