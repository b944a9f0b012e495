"""Whole layers of a rank's own parts: what a network needs of the other ranks (see `Ranks`)."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ember.model.embedding import Embedding
from ember.model.linear import Linear
from ember.parallel.cut import Joining, Share
from ember.parallel.group import Group


class TensorParallel:
    """The ranks of a group, as the network of one of them knows them."""

    def __init__(self, group: Group, joining: Joining, vocab_size: int) -> None:
        self._group, self._joining, self._vocab_size = group, joining, vocab_size

    @property
    def size(self) -> int:
        """See `Ranks.size`."""
        return self._group.share.size

    def embedding(self, own: Embedding) -> Embedding:
        """See `Ranks.embedding`."""
        return SharedEmbedding(own, self._group, self._vocab_size)

    def joined(self, own: Linear) -> Linear:
        """See `Ranks.joined`."""
        return GatheringLinear(own, self._group) if self._joining is Joining.GATHER else AddingLinear(own, self._group)

    def head(self, own: Linear) -> Linear:
        """See `Ranks.head`."""
        return SharedHead(own, self._group, self._vocab_size)


class GatheringLinear:
    """Each rank computes its outputs of all inputs: every output is one sum in one order, on whatever rank."""

    def __init__(self, own: Linear, group: Group) -> None:
        self._own, self._group = own, group

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in / size] to [T, out]; `more` [T, out] is added last."""
        group = self._group
        y = self._own(group.gather(x), None if more is None else group.share.of(more, dim=1))
        return group.gather(y)


class AddingLinear:
    """Each rank computes its inputs' part of all outputs; the parts are added up."""

    def __init__(self, own: Linear, group: Group) -> None:
        self._own, self._group = own, group

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in / size] to [T, out]; `more` [T, out] is added last."""
        y = self._group.add(self._own(x))
        return y if more is None else more + y


class SharedEmbedding:
    """Each rank holds some rows; for other tokens it gives -0.0, which added to any number leaves its bits."""

    def __init__(self, own: Embedding, group: Group, vocab_size: int) -> None:
        self._own, self._group = own, group
        self._first, self._end = group.share.bounds(vocab_size)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] to [T, C]."""
        rows = self._own((ids - self._first).clamp(0, self._end - self._first - 1))
        elsewhere = (ids < self._first) | (ids >= self._end)
        return self._group.add(rows.masked_fill(elsewhere[:, None], -0.0))


class SharedHead:
    """Each rank computes the logits of its tokens; rank 0 gets all."""

    def __init__(self, own: Linear, group: Group, vocab_size: int) -> None:
        self._own, self._group, self._vocab_size = own, group, vocab_size
        bounds = [Share(rank, group.share.size).bounds(vocab_size) for rank in range(group.share.size)]
        self._widths = [end - first for first, end in bounds]

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[R, C] to [R, V] on rank 0, elsewhere of no use; nothing is added."""
        assert more is None
        if not len(x):
            return x.new_empty(0, self._vocab_size)
        own, widest = self._own(x), max(self._widths)
        parts = self._group.gather_at_first(pad(own, (0, widest - own.shape[1])))  # messages are of one size
        return torch.cat([part[:, :width] for part, width in zip(parts, self._widths, strict=False)], dim=1)
