"""The operations of a Llama between its linears, each on rows by themselves: norm, rotary positions, gate.

On a CPU in float32 they are compiled (see `llama_kernel`) and keep a row's bits whatever is beside it. Elsewhere they
are PyTorch's, in float32 where transformers has it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import gelu, silu

GATES: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"silu": (1.0, 0.0), "gelu_new": (1.5957691216057308, 0.07135481627260025)}
)
"""a and b of gates g * sigmoid(a * g + b * g^3). GELU's tanh form has 2 * sqrt(2 / pi) * (g + 0.044715 * g^3) there."""


class RowOps(Protocol):
    """The operations, for a device and dtype. Rows of x are runs of memory, perhaps with gaps between them."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich, arXiv:1910.07467) of rows [R, D] with weight [D]."""

    def rotate(self, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Turn the first heads of x [T, W] in place, by cos and sin [T, D/2] float32."""

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(g) * u [T, I] of x [T, 2 * I], which holds g, then u (Shazeer, arXiv:2002.05202)."""


def make_row_ops(device: torch.device, dtype: torch.dtype) -> RowOps:
    """The fastest there are."""
    return CompiledRows() if device.type == "cpu" and dtype == torch.float32 else PlainRows()


class CompiledRows:
    """On a CPU in float32; a row's bits depend on the row alone."""

    def __init__(self) -> None:
        from ember.model import llama_kernel

        self._kernel: Any = llama_kernel
        llama_kernel.warm_up()

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `RowOps.norm`."""
        out, kernel = x.new_empty(x.shape), self._kernel
        kernel.run(kernel.norm_few, kernel.norm_many, x, out, weight, np.float32(eps))
        return out

    def rotate(self, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See `RowOps.rotate`."""
        self._kernel.run(self._kernel.turn_few, self._kernel.turn_many, x, heads, cos, sin)

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """See `RowOps.gate`."""
        out, kernel = x.new_empty(len(x), x.shape[1] // 2), self._kernel
        kernel.run(kernel.gate_few, kernel.gate_many, x, out, *map(np.float32, GATES[activation]))
        return out


class PlainRows:
    """On any device, in any dtype."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `RowOps.norm`."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return wide.to(x.dtype) * weight

    def rotate(self, x: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See `RowOps.rotate`."""
        pairs = x[:, : heads * 2 * cos.shape[1]].view(len(x), heads, 2, -1)
        a, b = pairs.unbind(2)
        cos, sin = (turn.to(x.dtype)[:, None] for turn in (cos, sin))
        pairs.copy_(torch.stack([a * cos - b * sin, b * cos + a * sin], 2))

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """See `RowOps.gate`."""
        g, u = x.chunk(2, dim=-1)
        return (silu(g) if activation == "silu" else gelu(g, approximate="tanh")) * u
