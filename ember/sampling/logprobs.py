"""Log-probabilities of tokens under the network's own distribution: before penalties, masks, temperature and filters.

(vLLM's `raw_logprobs`.) Of equal logits the lower token id ranks first, as the greedy choice has it, so that which
tokens are listed follows from the row alone.
"""

from __future__ import annotations

import torch

from ember.sampling.token_logprobs import TokenLogprobs

TILE = 2**22
"""Logits looked at together: what is made on the way takes some 10 bytes for each."""


def token_logprobs(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [N, V] its token's log-probability and those of the `counts` (-1: all) likeliest."""
    vocab_size = logits.shape[-1]
    counts = [vocab_size if count < 0 else count for count in counts]
    tile = max(1, TILE // vocab_size)
    pieces = [slice(start, start + tile) for start in range(0, len(tokens), tile)]
    return [entry for piece in pieces for entry in _tile(logits[piece], tokens[piece], counts[piece])]


def _tile(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=-1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    own = zip(tokens, logprobs.gather(1, chosen)[:, 0].tolist(), _ranks(logits, chosen).tolist(), strict=True)
    best = _best(logits, max(counts))
    best_logprobs = logprobs.gather(1, best).tolist()
    rows = zip(own, counts, best.tolist(), best_logprobs, strict=True)
    return [_position(*one, ids[:count], values[:count]) for one, count, ids, values in rows]


def _ranks(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The rank of one token a row, `chosen` [N, 1]; [N]."""
    values = logits.gather(1, chosen)
    ranks = (logits > values).sum(dim=-1) + 1
    tied = ((logits == values).sum(dim=-1) > 1).nonzero()[:, 0].tolist()
    for row in tied:
        ranks[row] += (logits[row, : int(chosen[row])] == values[row]).sum()
    return ranks


def _best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The ids of each row's `count` largest logits in order of rank; [N, count]."""
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    values, ids = logits.topk(count, dim=-1)
    tied = ((logits >= values[:, -1:]).sum(dim=-1) > count).nonzero()[:, 0].tolist()
    for row in tied:  # which of the last equals topk takes is not said
        ids[row] = logits[row].sort(descending=True, stable=True).indices[:count]
    ids = ids.sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _position(token: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]) -> TokenLogprobs:
    others = [i for i, token_id in enumerate(ids) if token_id != token]
    return TokenLogprobs(
        [token, *(ids[i] for i in others)],
        [logprob, *(logprobs[i] for i in others)],
        [rank, *(i + 1 for i in others)],
    )
