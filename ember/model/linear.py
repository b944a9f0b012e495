"""y = activation(x W^T + b) + more, with a row's result independent, to the bit, of the rows beside it.

On a CPU in float32 the weight is packed once for the compiled kernel (see `linear_kernel`), which holds the promise by
construction and reads a weight from front to back, once for all rows. Elsewhere PyTorch's own linear is used, which is
exact within the dtype's rounding only. 8-bit products are in `quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch.nn.functional import gelu, linear, relu

from ember.model.processor import has_fused_multiply_add

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
}


_CHUNK = 256  # rows of a weight looked at at a time


class Linear(Protocol):
    """A linear layer with weight [out, in], bias [out] or none, and one of the activations of GPT-2's MLP."""

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] to [T, out]; `more` [T, out] is added last."""


def has_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel runs there."""
    return device.type == "cpu" and dtype == torch.float32 and has_fused_multiply_add()


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none", form: str = "auto"
) -> Linear:
    """The layer whose weight is kept as `form` says: `auto` (exactly), `int8`, `w8a8` or `fp16`."""
    if form in ("int8", "w8a8"):
        from ember.model.quantized import Int8Linear

        return Int8Linear(weight, bias, activation, bits=8 if form == "w8a8" else 16)
    if form == "fp16":
        return PackedLinear(weight, bias, activation, torch.float16)
    if has_packed(weight.device, weight.dtype):
        return PackedLinear(weight, bias, activation, narrowest(weight))
    return PlainLinear(weight, bias, activation)


def narrowest(weight: torch.Tensor) -> torch.dtype:
    """16 bits if all numbers of a float32 weight fit: then half is read, and every product is the same to the bit."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(rows.to(dtype).float(), rows) for rows in torch.split(weight, _CHUNK)):
            return dtype
    return torch.float32


class PackedLinear:
    """The compiled kernel's linear: a CPU in float32, the weight kept in `dtype`: float32, float16 or bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, dtype: torch.dtype) -> None:
        from ember.model.linear_kernel import ACTIVATIONS  # with numba, which a plan does without
        from ember.model.packed_matrix import PackedMatrix, padded

        self.matrix = PackedMatrix(weight, dtype)
        self._bias = padded(bias, len(weight))
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] to [T, out]; `more` [T, out] is added last."""
        return self.matrix.multiply(x, self._bias, self._activation, more)


class PlainLinear:
    """PyTorch's own linear: any device and dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        self._weight, self._bias, self._activation = weight, bias, _ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] to [T, out]; `more` [T, out] is added last."""
        y = self._activation(linear(x, self._weight, self._bias))
        return y if more is None else more + y
