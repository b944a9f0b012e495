"""Log-probabilities as a result has them: by token id, with the token's text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ember.model.decoder import TokenBytes
from ember.sampling.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one position, under the network's own distribution.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest; of equals the lower id comes first.
        decoded_token: its text; a piece of a character is U+FFFD.
    """

    logprob: float
    rank: int
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""Token id -> log-probability: the token that stands there first, then the likeliest others by rank."""


def by_token(entry: TokenLogprobs, tokenizer: TokenBytes) -> PositionLogprobs:
    """One position's, with texts."""
    texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in entry.token_ids]
    rows = zip(entry.token_ids, entry.logprobs, entry.ranks, texts, strict=True)
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in rows}


def as_rows(positions: Iterable[PositionLogprobs | None] | None) -> list[Any] | None:
    """A column's value: for each position a list of its tokens as structs."""
    if positions is None:
        return None
    return [None if position is None else [_struct(*item) for item in position.items()] for position in positions]


def _struct(token: int, entry: Logprob) -> dict[str, Any]:
    return {"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
