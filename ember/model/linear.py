"""y = activation(x W^T + b), with a row's result independent, to the bit, of the rows beside it.

On a CPU in float32 the weight is packed once for oneDNN, whose kernel gives a row the same bits at every height of the
matrix and every number of threads; the activation runs in its epilogue (an activation over a whole matrix would not
keep the bits: the ends of its vectors move with the shape). Elsewhere PyTorch's own linear is used, which is exact
within the dtype's rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn.functional import gelu, linear, relu

PACK_ROWS = 256
"""Matrix height that the packing is made for. Never 1: that picks another kernel, with other bits."""

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
}
_EPILOGUES = {"none": ("none", ""), "gelu_new": ("gelu", "tanh"), "gelu": ("gelu", "none"), "relu": ("relu", "")}


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this PyTorch and device have the packed linear."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch._C._has_mkldnn:
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


class Linear:
    """A linear layer with weight [out, in], bias [out] or none, and one of the activations of GPT-2's MLP."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none") -> None:
        self._bias, self._activation = bias, activation
        self._packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        if not self._packed:
            return _ACTIVATIONS[self._activation](linear(x, self._weight, self._bias))
        name, algorithm = _EPILOGUES[self._activation]
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, name, [], algorithm)
        return y
