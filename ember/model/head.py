"""The LM head: hidden states to logits, of all tokens or, for rows that take the best one, of those that may be it."""

from __future__ import annotations

from typing import Protocol

import torch

from ember.model.linear import Linear, PackedLinear
from ember.model.processor import pair_instruction, vector_lanes
from ember.model.ranks import Ranks

_FROM = 1 << 22
"""Numbers in a head's weight; the product with a smaller one is too cheap to save anything of it."""


class Head(Protocol):
    """An LM head."""

    def __call__(self, x: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] of x [R, C]; of the rows of `best_only` [R] all that are not the largest may be -inf."""


class WholeHead:
    """All logits of every row."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
        """See `Head`."""
        return self._linear(x)


def make_head(own: Linear, weight: torch.Tensor, ranks: Ranks) -> Head:
    """The head whose own part, of this weight [V, C], is that linear; screened where that can be and pays."""
    pays = weight.numel() >= _FROM and pair_instruction(vector_lanes()) is not None
    if pays and ranks.size == 1 and isinstance(own, PackedLinear):
        from ember.model.screened_head import ScreenedHead  # with numba, which a plan does without

        return ScreenedHead(own, weight)
    return WholeHead(ranks.head(own))
