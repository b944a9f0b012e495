"""Speculation as the engine knows it.

Proposed tokens are computed in the same step as a sequence's last token, and each is kept only if it is the very token
that is drawn at its position, so nothing but speed depends on them (Leviathan et al., arXiv:2211.17192, for draws that
are a fixed function of the position).
"""

from __future__ import annotations

from typing import Protocol

from ember.core.sequence import Sequence


class Proposer(Protocol):
    """Guesses how sequences go on. Called once a step for each sequence that decodes."""

    def propose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        """At most `most` tokens to follow the sequence's last one, in a step of `num_running` sequences."""

    def learn(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        """Take note of how many of the tokens proposed in a step were kept."""
