"""Log-probabilities of tokens against plain sorting, and that which tokens are listed follows from the row alone."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ember.sampling import logprobs as logprobs_module
from ember.sampling.logprobs import token_logprobs


def by_hand(row, token, count):
    """(token ids, log-probabilities, ranks) in Python floats; of equals the lower id first."""
    total = math.log(sum(math.exp(x) for x in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    listed = [token, *(t for t in order[:count] if t != token)]
    return listed, [row[t] - total for t in listed], [order.index(t) + 1 for t in listed]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 30, -1])
def test_against_plain_sorting(count):
    """The token itself is there even if it is unlikely, and not twice if it is likely; ties go by id."""
    random_ = random.Random(count)
    logits = torch.tensor([[float(random_.randint(-3, 3)) for _ in range(30)] for _ in range(40)])
    logits[3, :] = 0.0
    logits[4, ::2] = -0.0
    tokens = [random_.randrange(30) for _ in range(40)]
    for row, token, found in zip(logits.tolist(), tokens, token_logprobs(logits, tokens, [count] * 40), strict=True):
        ids, logprobs, ranks = by_hand(row, token, 30 if count < 0 else count)
        assert (found.token_ids, found.ranks) == (ids, ranks)
        assert found.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_rows_with_different_counts_keep_their_own():
    """The largest count of a batch must not be everyone's."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    worst = logits.argmin(dim=-1).tolist()
    assert [len(found.token_ids) for found in token_logprobs(logits, worst, [0, 7, 2, -1])] == [1, 8, 3, 50]


def test_the_same_bits_alone_and_in_a_batch():
    """A vectorised exp over the whole matrix treats its last elements another way: rows would hang on their place."""
    logits = torch.randn(9, 101, generator=torch.Generator().manual_seed(1)) * 5
    tokens = list(range(9))
    together = token_logprobs(logits, tokens, [4] * 9)
    assert together == [token_logprobs(logits[i : i + 1], [i], [4])[0] for i in range(9)]


def test_they_are_those_of_a_plain_softmax():
    logits = torch.randn(5, 400, generator=torch.Generator().manual_seed(2)) * 4
    tokens = [3, 99, 0, 399, 7]
    expected = logits.double().log_softmax(-1)[range(5), tokens].tolist()
    assert [f.logprobs[0] for f in token_logprobs(logits, tokens, [1] * 5)] == pytest.approx(expected, abs=1e-5)


def test_many_rows_are_taken_in_tiles(monkeypatch):
    """A prompt's logits would need ten times their own memory at once; the last tile is shorter."""
    logits = torch.randn(11, 20, generator=torch.Generator().manual_seed(3))
    tokens, counts = [i % 20 for i in range(11)], [i % 4 - 1 for i in range(11)]
    at_once = token_logprobs(logits, tokens, counts)
    monkeypatch.setattr(logprobs_module, "TILE", 60)
    assert token_logprobs(logits, tokens, counts) == at_once
