"""Beam search: which of several continuations of one prompt go on, and with which token. Numbers only, no engine.

The rules are those of transformers' `generate(num_beams=...)`: of all continuations of all beams by one token, the best
`2 * width` are looked at. Those that end (with a stop id, or at the last token that there is room for) and are among
the best `width` become hypotheses, the best `width` of the others the next beams. A hypothesis' score is the sum of its
tokens' log-probabilities over its length to the power of `length_penalty`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

Continuations = list[tuple[int, float]]
"""(token id, log-probability), the best first."""


class Move(NamedTuple):
    """A beam goes on as a copy of its parent, one token longer; a beam that is a parent goes on from itself."""

    beam: int
    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation; `stop_id` is the token that ended it, None at the end of its room."""

    score: float
    logprob: float
    token_ids: list[int]
    stop_id: int | None


@dataclass(slots=True)
class _Beam:
    logprob: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class BeamSearch:
    """One search. Beams have numbers from 0 to `width` - 1; at first there is beam 0 alone, which is empty.

    Args:
        max_tokens: the most tokens of a hypothesis.
        min_tokens: none ends with a stop id before.
        early_stopping: True: end with `width` hypotheses; False: when no beam as it is now has a better score than the
            worst of them; `never`: when none could have, were it to go on at best.
    """

    def __init__(
        self,
        width: int,
        *,
        stop_ids: Collection[int],
        max_tokens: int,
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        self.width = width
        self.hypotheses: list[Hypothesis] = []
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._beams = {0: _Beam()}
        self._ranked = [0]
        self._offers: dict[int, Continuations] = {}
        self._length = 0

    @property
    def complete(self) -> bool:
        """Whether the continuations of all beams are known."""
        return len(self._offers) == len(self._beams)

    def offer(self, beam: int, logits: torch.Tensor) -> bool:
        """Take the logits [vocab_size] after a beam's last token; False if they are not finite numbers."""
        banned = self._stop_ids if self._length < self._min_tokens else frozenset()
        self._offers[beam] = best_continuations(logits, self._num_looked_at, banned)
        return bool(self._offers[beam])

    def advance(self) -> list[Move]:
        """Go on by one token once all beams are in; no moves: the search is over, `hypotheses` has the best first."""
        best = self._best()
        self._length += 1
        last = self._length == self._max_tokens
        ended = [(rank, c) for rank, c in enumerate(best) if last or c[2] in self._stop_ids]
        for rank, (logprob, parent, token) in ended:
            if rank < self.width:
                self._add_hypothesis(logprob, [*self._beams[parent].token_ids, token])
        self.hypotheses = sorted(self.hypotheses, key=lambda h: -h.score)[: self.width]
        going = [c for c in best if c[2] not in self._stop_ids][: self.width]
        self._offers = {}
        if last or not going or self._is_over(going[0][0]):
            return []
        return self._move(going)

    @property
    def _num_looked_at(self) -> int:
        return max(2, 1 + len(self._stop_ids)) * self.width

    def _best(self) -> list[tuple[float, int, int]]:
        """The best continuations of all beams: (log-probability, beam, token)."""
        every = [
            (self._beams[beam].logprob + logprob, beam, token)
            for beam in self._ranked
            for token, logprob in self._offers[beam]
        ]
        return sorted(every, key=lambda c: -c[0])[: self._num_looked_at]

    def _add_hypothesis(self, logprob: float, token_ids: list[int]) -> None:
        stop_id = token_ids[-1] if token_ids[-1] in self._stop_ids else None
        self.hypotheses.append(Hypothesis(self._score(logprob, self._length), logprob, token_ids, stop_id))

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._length_penalty)

    def _is_over(self, best_logprob: float) -> bool:
        if len(self.hypotheses) < self.width:
            return False
        if self._early_stopping is True:
            return True
        far = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if far else self._length
        return self._score(best_logprob, length) <= self.hypotheses[-1].score

    def _move(self, going: list[tuple[float, int, int]]) -> list[Move]:
        """Each parent goes on with its best continuation; the numbers of beams that no one continues take the rest."""
        free = [beam for beam in range(self.width) if beam not in {parent for _, parent, _ in going}]
        kept: set[int] = set()
        moves, beams = [], {}
        for logprob, parent, token in going:
            beam = free.pop(0) if parent in kept else parent
            kept.add(parent)
            moves.append(Move(beam, parent, token))
            beams[beam] = _Beam(logprob, [*self._beams[parent].token_ids, token])
        self._beams, self._ranked = beams, [move.beam for move in moves]
        return moves


def best_continuations(logits: torch.Tensor, count: int, banned: Collection[int] = ()) -> Continuations:
    """The `count` likeliest tokens of logits [vocab_size], of equal ones the lower id first; none if not finite.

    Args:
        banned: tokens that may not come; the others' log-probabilities stay as they are.
    """
    scores = logits.cpu().double().numpy()
    highest = scores.max()
    if not math.isfinite(highest):
        return []
    scores = scores - highest - math.log(np.exp(scores - highest).sum())
    scores[list(banned)] = -math.inf
    count = min(count, len(scores) - len(banned))
    floor = np.partition(scores, -count)[-count]
    tokens = np.flatnonzero(scores >= floor)
    tokens = tokens[np.argsort(-scores[tokens], kind="stable")][:count]
    return [(int(token), float(scores[token])) for token in tokens]
