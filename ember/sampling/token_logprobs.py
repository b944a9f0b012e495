"""The log-probabilities kept of one position."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """The token that stands there first, then the likeliest others by rank: parallel lists; `ranks` count from 1."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
