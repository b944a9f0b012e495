"""y = activation(x W^T + b), with a row's result independent, to the bit, of the rows beside it.

On a CPU in float32 the weight is packed once for oneDNN, whose kernel gives a row the same bits at every height of the
matrix and every number of threads; the activation follows row by row (see `row_kernel`: faster than oneDNN's own, and
PyTorch's over a whole matrix would not keep the bits). Elsewhere PyTorch's own linear is used, which is exact within
the dtype's rounding only. Weights of 8 and 16 bits are in `quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import gelu, linear, relu

if TYPE_CHECKING:
    from ember.model.row_kernel import Finish

PACK_ROWS = 256
"""Matrix height that the packing is made for. Never 1: that picks another kernel, with other bits."""

_HEIGHTS = (1, 2, 3, 7, 16, 33, 64, 100, 256, 300)

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
}


class Linear(Protocol):
    """A linear layer with weight [out, in], bias [out] or none, and one of the activations of GPT-2's MLP."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""


def has_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch has the packed linear there."""
    if device.type != "cpu" or dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


@cache
def packed_rows_hold() -> bool:
    """Whether on this processor a row has the same bits at every height of the matrix; tried, not assumed."""
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(_HEIGHTS[-1], 3072, generator=rng), torch.randn(96, 3072, generator=rng)
    layer = PackedLinear(weight, None, "none")
    whole = layer(x)
    return all(torch.equal(layer(x[-height:].clone()), whole[-height:]) for height in _HEIGHTS)


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none", form: str = "auto"
) -> Linear:
    """The layer whose weight is kept as `form` says: `auto` (in its dtype), `int8` or `fp16`."""
    if form == "auto":
        if has_packed(weight.device, weight.dtype):
            return PackedLinear(weight, bias, activation)
        return PlainLinear(weight, bias, activation)
    from ember.model.quantized import Fp16Linear, Int8Linear

    low = Int8Linear if form == "int8" else Fp16Linear
    return low(weight, bias, activation)


class PackedLinear:
    """oneDNN's linear on a weight packed for it: a CPU in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        self.packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._finish = None if activation == "none" else _finish(bias, len(weight), activation)
        self._bias = bias if self._finish is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self._bias, "none", [], "")
        return y if self._finish is None else self._finish(y)


def _finish(bias: torch.Tensor | None, width: int, activation: str) -> Finish:
    from ember.model.row_kernel import Finish  # with numba, which a plan does without

    return Finish(bias, width, activation)


class PlainLinear:
    """PyTorch's own linear: any device and dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        self._weight, self._bias, self._activation = weight, bias, _ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        return self._activation(linear(x, self._weight, self._bias))
