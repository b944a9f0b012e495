"""Rows of the token embedding. Where the LM head is packed, they are read out of it: one matrix, held once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn.functional import embedding

from ember.model.linear import Linear, PackedLinear, has_packed, narrowest


class Embedding(Protocol):
    """Rows of a matrix [V, C] by number."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] to [T, C]."""


class PlainEmbedding:
    """Rows of a matrix of its own, on a CPU in 16 bits where all its float32 numbers fit."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._dtype = weight.dtype
        self._weight = weight.to(narrowest(weight)) if has_packed(weight.device, weight.dtype) else weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] to [T, C]."""
        return embedding(ids, self._weight).to(self._dtype)


class PackedEmbedding:
    """Rows of the matrix that a packed LM head holds, in float32."""

    def __init__(self, head: PackedLinear) -> None:
        self._head = head

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] to [T, C]."""
        return self._head.matrix.rows(ids).float()


def token_embedding(weight: torch.Tensor, head: Linear) -> Embedding:
    """The rows of `weight` [V, C], out of the memory of a head tied to it where that has them to the bit."""
    if isinstance(head, PackedLinear) and head.matrix.holds(weight):
        return PackedEmbedding(head)
    return PlainEmbedding(weight)
