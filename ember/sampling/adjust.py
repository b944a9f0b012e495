"""What is done to logits before a token is chosen, greedily too: masks, biases and penalties of single requests.

In vLLM's order: the tokens that may come at all (`TokenConstraint`, `allowed_token_ids`, `bad_words`, `min_tokens`),
`logit_bias`, then the repetition penalty (Keskar et al., CTRL, 2019) over prompt and output, and frequency and presence
penalties over the output. Everything is counted from the tokens themselves, so a preemption can't lose it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ember.core.sequence import Sequence
from ember.errors import RequestError
from ember.transfer import upload, upload_together


def adjust(
    logits: torch.Tensor, sequences: list[Sequence], rows: list[int]
) -> tuple[torch.Tensor, dict[int, RequestError]]:
    """A copy of logits [R, V] with these rows adjusted, each by itself, and the errors of those that can't go on."""
    logits = logits.clone()
    failed: dict[int, RequestError] = {}
    for i in rows:
        try:
            _mask(logits[i], sequences[i])
        except RequestError as error:
            failed[i] = error
    _penalise(logits, [(i, sequences[i]) for i in rows])
    return logits, failed


def _mask(logits: torch.Tensor, sequence: Sequence) -> None:
    """What may not come is set to -inf; biases are added to the rest."""
    params = sequence.params
    if sequence.constraint is not None:
        allowed = sequence.constraint.allowed(sequence.output_token_ids)
        logits.masked_fill_(upload_together([torch.from_numpy(~allowed)], logits.device)[0], -math.inf)
    if params.allowed_token_ids is not None:
        kept = upload(params.allowed_token_ids, torch.long, logits.device)
        values = logits[kept]
        logits.fill_(-math.inf)
        logits[kept] = values
    banned = [word[-1] for word in sequence.bad_words if _about_to_end(word, sequence)]
    if sequence.num_output_tokens < params.min_tokens:
        banned += sequence.stop_ids
    if banned:
        logits.index_fill_(0, upload(banned, torch.long, logits.device), -math.inf)
    if params.logit_bias:
        tokens = upload(list(params.logit_bias), torch.long, logits.device)
        logits.index_add_(0, tokens, upload(list(params.logit_bias.values()), torch.float32, logits.device))


def _about_to_end(word: list[int], sequence: Sequence) -> bool:
    """Whether the output ends with all of the word's tokens but the last."""
    if len(word) > 1 and word[-2] != sequence.token_ids[-1]:
        return False
    start = sequence.num_tokens - len(word) + 1
    begun = start >= sequence.num_prompt_tokens
    return begun and sequence.token_ids[start:] == word[:-1]


def _penalise(logits: torch.Tensor, rows: list[tuple[int, Sequence]]) -> None:
    """The penalties of those rows that have some, in one go."""
    rows = [(i, sequence) for i, sequence in rows if sequence.params.penalises]
    if not rows:
        return
    row, token, count = _token_counts(rows, logits.shape[-1])
    settings = [(p.params.repetition_penalty, p.params.frequency_penalty, p.params.presence_penalty) for _, p in rows]
    places = [torch.tensor([i for i, _ in rows])[row], token, count, torch.tensor(settings).T[:, row].contiguous()]
    i, token, count, chosen = upload_together(places, logits.device)
    repetition, frequency, presence = chosen.unbind()
    at, values = (i, token), logits[i, token]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[at] = values - frequency * count - presence * (count > 0)


def _token_counts(rows: list[tuple[int, Sequence]], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct tokens of each row, prompt included: number of the row in `rows`, token, times it is in the output.

    A penalty of 1 on repetition leaves what stands in the prompt only as it is.
    """
    keys, weights = [], []
    for number, (_, sequence) in enumerate(rows):
        prompt = sequence.num_prompt_tokens
        keys.append(np.array(sequence.token_ids) + number * vocab_size)
        weights.append(np.arange(sequence.num_tokens) >= prompt)
    unique, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    counts = np.bincount(inverse, weights=np.concatenate(weights)).astype(np.float32)
    at = torch.from_numpy(unique)
    return at // vocab_size, at % vocab_size, torch.from_numpy(counts)
