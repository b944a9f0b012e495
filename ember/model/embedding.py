"""Rows of the token embedding. Where the LM head is packed, they are read out of it: one matrix, held once.

oneDNN packs a weight [V, C] in panels of 64 rows, each stored as [C, 64] (C and V rounded up). That is its own affair,
so it is looked at: unless every number of the matrix is found where it should lie, the rows are kept apart.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch.nn.functional import embedding

from ember.model.linear import Linear, PackedLinear

PANEL = 64
"""Rows of the matrix in a panel of oneDNN's packed weight."""


class Embedding(Protocol):
    """Rows of a matrix [V, C] by number."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] to [T, C]."""


class PlainEmbedding:
    """Rows of a matrix of its own."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] to [T, C]."""
        return embedding(ids, self._weight)


class PackedEmbedding:
    """Rows of the matrix that a packed LM head holds, to the bit.

    Args:
        panels: [panels, C, 64], a view of the head's memory.
        head: keeps that memory alive.
    """

    def __init__(self, panels: torch.Tensor, head: PackedLinear) -> None:
        self._panels, self._head = panels, head

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] to [T, C]."""
        return self._panels[ids // PANEL, :, ids % PANEL]


def token_embedding(weight: torch.Tensor, head: Linear) -> Embedding:
    """The rows of `weight` [V, C], out of the memory of a head tied to it if they are found there."""
    if isinstance(head, PackedLinear):
        panels = _panels(head.packed, weight.shape[1])
        if panels is not None and _hold(panels, weight):
            return PackedEmbedding(panels, head)
    return PlainEmbedding(weight)


def _panels(packed: torch.Tensor, width: int) -> torch.Tensor | None:
    """The packed memory as [panels, C, 64], or None if it has another shape or can't be reached."""
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("data_ptr", "_nbytes")):
        return None
    size, panels = torch.ops.mkldnn._nbytes(packed) // 4, -(-packed.shape[0] // PANEL)
    padded, rest = divmod(size, panels * PANEL)
    if rest or padded < width:
        return None
    memory = (ctypes.c_float * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(memory, dtype=torch.float32).view(panels, padded, PANEL)[:, :width]


def _hold(panels: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the panels hold the matrix, number by number."""
    for number, panel in enumerate(panels):
        rows = weight[number * PANEL : (number + 1) * PANEL]
        if not torch.equal(panel[:, : len(rows)], rows.T):
            return False
    return True
