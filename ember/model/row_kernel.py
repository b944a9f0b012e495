"""What a row goes through before and after a matrix (numba): scale, bias, activation.

A row's result depends on the row alone, to the bit. PyTorch's own activations do not promise that: the ends of its
vectors, where other code runs, move with the height of the matrix and the number of threads. Here there is no call
into a library and no sum across lanes, so vector and scalar code round alike; `contract` allows fused multiply-add.
tanh and erf are Eigen's rational approximations, a few units in the last place off.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from ember.kernel_cache import ensure_kernel_cache
from ember.threads import numba_follows_torch

ensure_kernel_cache()

NONE, GELU_TANH, GELU_ERF, RELU = range(4)
ACTIVATIONS: Mapping[str, int] = MappingProxyType({"none": NONE, "gelu_new": GELU_TANH, "gelu": GELU_ERF, "relu": RELU})
LEVELS = 63
"""Largest quantised value: u8 in 1 .. 127 times s8 keeps sums of two products within 16 bits, as AVX2 adds them."""

_PARALLEL_FROM = 1 << 16  # elements; below, waking a thread costs more than it saves
_MAGNITUDE = np.int32(0x7FFFFFFF)
F = np.float32
_ZERO, _HALF, _ONE, _LEVELS, _SMALLEST = F(0), F(0.5), F(1), F(LEVELS), F(1e-30)
_CUBIC, _SQRT_2_BY_PI, _SQRT_HALF = F(0.044715), F(0.7978845608028654), F(0.7071067811865476)
_TANH_END = F(7.90531110763549805)
_T1, _T3, _T5, _T7 = F(4.89352455891786e-03), F(6.37261928875436e-04), F(1.48572235717979e-05), F(5.12229709037114e-08)
_T9, _T11, _T13 = F(-8.60467152213735e-11), F(2.00018790482477e-13), F(-2.76076847742355e-16)
_TD0, _TD2, _TD4, _TD6 = (
    F(4.89352518554385e-03),
    F(2.26843463243900e-03),
    F(1.18534705686654e-04),
    F(1.19825839466702e-06),
)
_ERF_END = F(4)
_E1, _E3, _E5 = F(-1.60960333262415e-02), F(-2.95459980854025e-03), F(-7.34990630326855e-04)
_E7, _E9 = F(-5.69250639462346e-05), F(-2.10102402082508e-06)
_E11, _E13 = F(2.77068142495902e-08), F(-2.72614225801306e-10)
_ED0, _ED2, _ED4 = F(-1.42647390514189e-02), F(-7.37332916720468e-03), F(-1.68282697438203e-03)
_ED6, _ED8 = F(-2.13374055278905e-04), F(-1.45660718464996e-05)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _tanh(x: Any) -> Any:
    x = max(min(x, _TANH_END), -_TANH_END)
    z = x * x
    p = (((((_T13 * z + _T11) * z + _T9) * z + _T7) * z + _T5) * z + _T3) * z + _T1
    return x * p / (((_TD6 * z + _TD4) * z + _TD2) * z + _TD0)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _erf(x: Any) -> Any:
    x = max(min(x, _ERF_END), -_ERF_END)
    z = x * x
    p = (((((_E13 * z + _E11) * z + _E9) * z + _E7) * z + _E5) * z + _E3) * z + _E1
    return x * p / ((((_ED8 * z + _ED6) * z + _ED4) * z + _ED2) * z + _ED0)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _scale_row(x: Any, bits: Any, out: Any) -> Any:
    """out = x * LEVELS / max|x|; returns max|x| / LEVELS. Magnitudes compare alike as floats and as their bits."""
    top = np.int32(0)
    for d in range(len(bits)):
        top = max(top, bits[d] & _MAGNITUDE)
    bits_of_top = np.empty(1, np.int32)
    bits_of_top[0] = top
    largest = bits_of_top.view(np.float32)[0]
    factor = _LEVELS / largest if largest > _SMALLEST else _ZERO
    for d in range(len(x)):
        out[d] = x[d] * factor
    return largest / _LEVELS


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _finish_row(y: Any, scale: Any, bias: Any, activation: Any) -> None:
    """y = activation(y * scale + bias)."""
    if activation == GELU_TANH:
        for n in range(len(y)):
            v = y[n] * scale + bias[n]
            y[n] = _HALF * v * (_ONE + _tanh(_SQRT_2_BY_PI * (v + _CUBIC * v * v * v)))
    elif activation == GELU_ERF:
        for n in range(len(y)):
            v = y[n] * scale + bias[n]
            y[n] = _HALF * v * (_ONE + _erf(v * _SQRT_HALF))
    elif activation == RELU:
        for n in range(len(y)):
            v = y[n] * scale + bias[n]
            y[n] = _ZERO if v < _ZERO else v
    else:
        for n in range(len(y)):
            y[n] = y[n] * scale + bias[n]


@njit(cache=True)
def _scale_few(x: Any, bits: Any, out: Any, scales: Any) -> None:
    for m in range(len(x)):
        scales[m] = _scale_row(x[m], bits[m], out[m])


@njit(parallel=True, cache=True)
def _scale_many(x: Any, bits: Any, out: Any, scales: Any) -> None:
    for m in prange(len(x)):
        scales[m] = _scale_row(x[m], bits[m], out[m])


@njit(cache=True)
def _finish_few(y: Any, scales: Any, bias: Any, activation: Any) -> None:
    for m in range(len(y)):
        _finish_row(y[m], scales[m], bias, activation)


@njit(parallel=True, cache=True)
def _finish_many(y: Any, scales: Any, bias: Any, activation: Any) -> None:
    for m in prange(len(y)):
        _finish_row(y[m], scales[m], bias, activation)


def scale_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row [in] of x [T, in] to -LEVELS .. LEVELS: the scaled rows, and the scales [T] that give them back."""
    x = x.contiguous()
    out, scales = torch.empty_like(x), torch.empty(len(x))
    arrays = x.numpy(), x.view(torch.int32).numpy(), out.numpy(), scales.numpy()
    if x.numel() < _PARALLEL_FROM:
        _scale_few(*arrays)
    else:
        numba_follows_torch()
        _scale_many(*arrays)
    return out, scales


class Finish:
    """The end of a linear layer, in place: activation(y * scales + bias), row by row.

    Args:
        bias: [out], or none.
        width: out.
        activation: none, gelu_new, gelu or relu.
    """

    def __init__(self, bias: torch.Tensor | None, width: int, activation: str) -> None:
        self._bias = torch.zeros(width) if bias is None else bias
        self._activation = ACTIVATIONS[activation]
        warm_up()

    def __call__(self, y: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """y [T, out], scales [T] or none; returns y."""
        scales = torch.ones(len(y)) if scales is None else scales
        arrays = y.numpy(), scales.numpy(), self._bias.numpy(), self._activation
        if y.numel() < _PARALLEL_FROM:
            _finish_few(*arrays)
        else:
            numba_follows_torch()
            _finish_many(*arrays)
        return y


def warm_up() -> None:
    """Compile, or load what an earlier process compiled."""
    numba_follows_torch()
    x, scales = np.zeros((1, 8), np.float32), np.zeros(1, np.float32)
    for scale in (_scale_few, _scale_many):
        scale(x, x.view(np.int32), np.empty_like(x), scales)
    for finish in (_finish_few, _finish_many):
        finish(x, scales, x[0].copy(), NONE)
