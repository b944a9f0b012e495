"""Log-probabilities of tokens under the network's own distribution: before penalties, masks, temperature and filters.

(vLLM's `raw_logprobs`.) Of equal logits the lower token id ranks first, as the greedy choice has it, so that which
tokens are listed follows from the row alone.
"""

from __future__ import annotations

import torch

from ember.sampling.token_logprobs import TokenLogprobs

_LOW = 2**32 - 1


TILE = 2**22
"""Logits looked at together: what is made on the way takes some 30 bytes for each."""


def token_logprobs(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [N, V] its token's log-probability and those of the `counts` (-1: all) likeliest."""
    vocab_size = logits.shape[-1]
    counts = [vocab_size if count < 0 else count for count in counts]
    tile = max(1, TILE // vocab_size)
    pieces = [slice(start, start + tile) for start in range(0, len(tokens), tile)]
    return [entry for piece in pieces for entry in _tile(logits[piece], tokens[piece], counts[piece])]


def _tile(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    vocab_size = logits.shape[-1]
    logprobs = logits.log_softmax(dim=-1)
    keys = _sort_keys(logits)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    ranks = (keys > keys.gather(1, chosen)).sum(dim=-1) + 1
    own = zip(tokens, logprobs.gather(1, chosen)[:, 0].tolist(), ranks.tolist(), strict=True)
    best = vocab_size - 1 - (keys.topk(max(counts), dim=-1).values & _LOW)
    best_logprobs = logprobs.gather(1, best).tolist()
    rows = zip(own, counts, best.tolist(), best_logprobs, strict=True)
    return [_position(*one, ids[:count], values[:count]) for one, count, ids, values in rows]


def _sort_keys(logits: torch.Tensor) -> torch.Tensor:
    """Whole numbers in the order of the logits, and where those are equal, of falling token id: no two are equal."""
    bits = (logits.float() + 0.0).view(torch.int32).long()  # + 0.0: -0.0 becomes 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) + torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)


def _position(token: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    others = [i for i, token_id in enumerate(ids) if token_id != token]
    return TokenLogprobs(
        [token, *(ids[i] for i in others)],
        [logprob, *(logprobs[i] for i in others)],
        [rank, *(i + 1 for i in others)],
    )
