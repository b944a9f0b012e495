"""Linear layers with weights of 8 bits on a CPU, a row's result independent, to the bit, of the rows beside it.

A scale for each output channel of the weight, and one for each row of x, which is rounded to 16 bits or as many as
leave room for the sums (W8A16), or to 8 bits (W8A8). The sums are whole numbers and exact, so that nothing a processor
can or cannot do, and no order, changes them: a row is the same on every machine.

    y = sum of round(x / s) * round(w / t) * t * s + b        s = max|x| / levels a row, t = max|w| / 127 a channel
"""

from __future__ import annotations

import numpy as np
import torch

from ember.errors import ConfigError
from ember.huge_pages import zeros
from ember.model import linear_kernel as kernel
from ember.model.linear import has_packed
from ember.model.packed_matrix import Triple, fill, padded
from ember.model.processor import quad_instruction

_READING = 8  # see `fill`
_LARGEST_SUM = 2**31 - 1
_CHUNK = 256  # rows looked at at a time


def check_weights(form: str, device: torch.device, dtype: torch.dtype) -> None:
    """See that `int8`, `w8a8` or `fp16` weights run there.

    Raises:
        ConfigError: another device or dtype, or a processor without what it takes.
    """
    if device.type != "cpu" or dtype != torch.float32:
        found = f"{device.type} in {str(dtype).removeprefix('torch.')}"
        raise ConfigError("weights", form, f"runs on a CPU in float32, not on {found}; use auto")
    if form == "fp16" and not has_packed(device, dtype):
        raise ConfigError("weights", form, "needs a processor with a fused multiply-add; use auto")


class Int8Linear:
    """A linear layer with weight [out, in] in 8 bits, bias [out] or none, and one of the activations.

    Args:
        bits: 16 or 8, of x. With 8 the sums of four products are one instruction where the processor has it.

    Attributes:
        levels: x is rounded to so many.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, bits: int = 16) -> None:
        self._out, self._in = weight.shape
        scales = channel_scales(weight)
        quads = bits == 8 and quad_instruction(kernel.LANES) is not None
        self._data, self._starts = _pack(weight, scales, 4 if quads else 2)
        self._scales, self._bias = (padded(row, self._out) for row in (scales, bias))
        self._activation = kernel.ACTIVATIONS[activation]
        self.levels = np.float32(levels(self._in, bits))
        self._depth = _even(-(-self._in // -(-self._in // kernel.INT8_DEPTH)))
        kernel.warm_up_multiply(self._data.dtype.name)

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] to [T, out]; `more` [T, out] is added last."""
        return fill(self._run, x, more, self._out, _READING)

    def _run(self, addresses: Triple, strides: Triple, height: int, cuts: tuple[int, int]) -> None:
        shape = (*strides, self._out, self._in, self._depth)
        ends = (self._data, self._starts, self._scales, self._bias)
        kernel.multiply_int8(*ends, addresses, shape, self.levels, self._activation, height, cuts)


def levels(inner: int, bits: int = 16) -> int:
    """What the numbers of a row of x are rounded to, at most: the largest sum of products fits in 32 bits."""
    return min((1 << (bits - 1)) - 1, _LARGEST_SUM // (kernel.LEVELS * inner))


def channel_scales(weight: torch.Tensor) -> torch.Tensor:
    """t of each row of the weight [out, in]."""
    largest = torch.empty(len(weight))  # one piece, made first: small ones in between would leave holes in the heap
    for begin in range(0, len(weight), _CHUNK):
        largest[begin : begin + _CHUNK] = torch.linalg.vector_norm(weight[begin : begin + _CHUNK], torch.inf, 1)
    return largest.clamp_min_(torch.finfo(torch.float32).tiny).div_(kernel.LEVELS)


def rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """round(w / t) of some rows of the weight [n, in], int8."""
    return (rows / scales[:, None]).round().clamp(-kernel.LEVELS, kernel.LEVELS).to(torch.int8)


def _pack(weight: torch.Tensor, scales: torch.Tensor, together: int) -> tuple[np.ndarray, np.ndarray]:
    """The weight, flat, as `linear_kernel` has it in pairs or quads, and what its sums begin with.

    A panel at a time, so that next to nothing lies in memory twice.
    """
    (rows, inner), width = weight.shape, kernel.WIDTH
    panels = zeros((-(-rows // width), _even(inner) // together, width, together), torch.int8)
    starts = torch.zeros(len(panels), width, dtype=torch.int32)
    for panel, to in enumerate(panels):
        part = slice(panel * width, (panel + 1) * width)
        numbers = rounded(weight[part], scales[part])
        whole = torch.zeros(width, _even(inner), dtype=torch.int8)
        whole[: len(numbers), :inner] = numbers
        to.copy_(whole.view(width, -1, together).transpose(0, 1))
        if together == 4:
            starts[panel] = whole.sum(1, dtype=torch.int32) * -kernel.SHIFT
    flat = panels.view(-1)
    return (flat if together == 2 else flat.view(torch.int32)).numpy(), starts.view(-1).numpy()


def _even(k: int) -> int:
    return -(-k // kernel.INT8_UNROLL) * kernel.INT8_UNROLL
