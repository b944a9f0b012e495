"""Who computes a network: this process alone, or several ranks that share its heads, its MLPs and its vocabulary."""

from __future__ import annotations

from typing import Protocol

from ember.model.embedding import Embedding
from ember.model.linear import Linear


class Ranks(Protocol):
    """Makes whole layers of one rank's own parts, where a layer needs the other ranks'."""

    @property
    def size(self) -> int:
        """How many ranks there are: each has its share of heads and of an MLP's inner width."""

    def embedding(self, own: Embedding) -> Embedding:
        """The embedding of all tokens, of this rank's rows of it: ids [T] to [T, C]."""

    def joined(self, own: Linear) -> Linear:
        """A layer that every rank feeds with its share, and that gives all to each: [T, in/size] to [T, out]."""

    def head(self, own: Linear) -> Linear:
        """The LM head: [R, C] to [R, V], of this rank's rows of it; all of V on rank 0 only."""


class Alone:
    """One rank, whose parts are the whole."""

    size = 1

    def embedding(self, own: Embedding) -> Embedding:
        """See `Ranks.embedding`."""
        return own

    def joined(self, own: Linear) -> Linear:
        """See `Ranks.joined`."""
        return own

    def head(self, own: Linear) -> Linear:
        """See `Ranks.head`."""
        return own


ALONE = Alone()
