"""Log-probabilities in OpenAI's two forms, for completions and for chats, from the structs of a row's `logprobs`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

Position = list[dict[str, Any]]
"""The token that stands there first, then the likeliest others."""


def completion_logprobs(positions: list[Position]) -> dict[str, Any]:
    """The `logprobs` of a choice of `/v1/completions`.

    `top_logprobs` has the token itself too, as OpenAI's has. Tokens that are pieces of a character have the same text,
    U+FFFD, so that of those only the likeliest is in it.
    """
    own = [position[0] for position in positions]
    tokens = [entry["token"] for entry in own]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in own],
        "top_logprobs": [_best_by_text(position) for position in positions],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
    }


def chat_logprobs(positions: list[Position]) -> dict[str, Any]:
    """The `logprobs` of a choice of `/v1/chat/completions`; the token itself is in `top_logprobs` where it ranks so."""
    content = []
    for position in positions:
        best = sorted((e for e in position if e["rank"] <= len(position)), key=lambda entry: int(entry["rank"]))
        content.append({**_chat_entry(position[0]), "top_logprobs": [_chat_entry(entry) for entry in best]})
    return {"content": content}


def _best_by_text(position: Position) -> dict[str, float]:
    best: dict[str, float] = {}
    for entry in position:
        best[entry["token"]] = max(entry["logprob"], best.get(entry["token"], entry["logprob"]))
    return best


def _chat_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Bytes are null where the text does not show them."""
    token = entry["token"]
    return {
        "token": token,
        "logprob": entry["logprob"],
        "bytes": None if "\ufffd" in token else list(token.encode()),
    }
