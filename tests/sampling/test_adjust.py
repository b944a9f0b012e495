"""Masks, biases and penalties against transformers' logits processors and plain numpy; and that rows stay apart."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ember.core.sampler import Sampler
from ember.core.sequence import Sequence
from ember.errors import RequestError
from ember.sampling.adjust import adjust
from ember.sampling_params import SamplingParams

VOCAB = 40
INF = math.inf


def row(prompt=(1, 2, 3), output=(), *, bad_words=(), constraint=None, stop_ids=(), **params):
    """A sequence with some output so far."""
    chosen = SamplingParams(**params)
    sequence = Sequence(0, list(prompt), chosen, 0, 99, bad_words=list(bad_words), constraint=constraint)
    sequence.stop_ids = frozenset(stop_ids)
    sequence.token_ids += output
    return sequence


def logits_of(seed=0, rows=1):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits, *sequences):
    changed, failed = adjust(logits, list(sequences), list(range(len(sequences))))
    assert not failed
    return changed


def random_tokens(random_, count):
    return [random_.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 2.0, 100.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    """Prompt and output count alike, once each; a negative logit must be multiplied, or it would rise."""
    random_ = random.Random(1)
    prompt, output = random_tokens(random_, 9), random_tokens(random_, 7)
    logits = logits_of(1)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits)
    assert torch.equal(adjusted(logits, row(prompt, output, repetition_penalty=penalty)), theirs)


@pytest.mark.parametrize("frequency", [-2.0, 0.0, 0.3, 2.0])
@pytest.mark.parametrize("presence", [-1.5, 0.0, 0.7])
@pytest.mark.parametrize("repetition", [1.0, 1.2])
def test_frequency_and_presence_penalties_by_hand(frequency, presence, repetition):
    """OpenAI's formula over the output alone: a prompt token that counts would be penalised from the first step on."""
    random_ = random.Random(2)
    prompt, output = random_tokens(random_, 12), random_tokens(random_, 30)
    logits = logits_of(2)
    params = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
    ours = adjusted(logits, row(prompt, output, **params))
    expected = logits[0].numpy().astype(np.float64)
    for token in set(prompt + output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token in set(output):
        expected[token] -= frequency * output.count(token) + presence
    np.testing.assert_allclose(ours[0].numpy(), expected, rtol=0, atol=1e-5)
    untouched = sorted(set(range(VOCAB)) - set(prompt + output))
    assert torch.equal(ours[0, untouched], logits[0, untouched])


def test_bad_words_are_those_of_transformers():
    """A word of several tokens bans its last one only after the others; one that is not begun bans nothing."""
    words = [[7], [3, 4], [5, 6, 8], [9, 9, 9], [2, 11]]
    for output in ([], [3], [5, 6], [6, 5], [1, 9, 9], [9], [30, 5, 6], [2]):
        logits = logits_of(3)
        theirs = NoBadWordsLogitsProcessor([list(w) for w in words])(torch.tensor([[38, *output]]), logits)
        assert torch.equal(adjusted(logits, row([38], output, bad_words=words)), theirs), output


def test_a_bad_word_that_the_prompt_begins_is_not_one():
    """As in vLLM: words are those of the output."""
    logits = logits_of(4)
    assert torch.equal(adjusted(logits, row([38, 3], [], bad_words=[[3, 4]])), logits)


def test_min_tokens_is_that_of_transformers():
    logits = logits_of(5)
    for output in ([], [1], [1, 1], [1, 1, 1]):
        ids = torch.tensor([[5, *output]])
        theirs = MinNewTokensLengthLogitsProcessor(1, 2, [6, 8], device="cpu")(ids, logits)
        assert torch.equal(adjusted(logits, row([5], output, min_tokens=2, stop_ids=[6, 8])), theirs)


def test_logit_bias_is_that_of_transformers():
    biases = {3: 2.5, 0: -100.0, 39: 100.0}
    theirs = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    logits = logits_of(6)
    ours = adjusted(logits, row(logit_bias=biases))
    assert torch.allclose(ours, theirs(torch.tensor([[1]]), logits), rtol=0, atol=1e-6)


def test_allowed_token_ids_are_the_only_ones():
    logits = logits_of(7)
    ours = adjusted(logits, row(allowed_token_ids=[4, 2, 4]))
    assert torch.equal(ours[0, [2, 4]], logits[0, [2, 4]])
    assert ours[0].isinf().sum() == VOCAB - 2


def test_a_bias_comes_before_the_penalties():
    """vLLM's order: the repetition penalty multiplies what the bias has changed."""
    logits = torch.full((1, VOCAB), 1.0)
    ours = adjusted(logits, row([5], [5], logit_bias={5: 3.0}, repetition_penalty=2.0, presence_penalty=0.5))
    assert ours[0, 5] == 4.0 / 2.0 - 0.5


class Only:
    """Allows one token, or fails."""

    def __init__(self, token):
        self.token = token

    def allowed(self, output):
        if self.token is None:
            raise RequestError("structured_output", "can't tell")
        return np.arange(VOCAB) == self.token


def test_a_constraint_leaves_what_it_allows():
    logits = logits_of(9)
    ours = adjusted(logits, row(constraint=Only(7)))
    assert ours[0].isfinite().nonzero().tolist() == [[7]]
    assert ours[0, 7] == logits[0, 7]


def test_a_constraint_that_fails_costs_its_row_only():
    logits = logits_of(10, rows=3)
    rows = [row(), row(constraint=Only(None)), row(constraint=Only(3))]
    tokens = Sampler().sample(logits, rows).tokens
    assert tokens[0] == int(logits[0].argmax())
    assert isinstance(tokens[1], RequestError)
    assert tokens[1].kind == "structured_output"
    assert tokens[2] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_no_token_left_says_so(temperature):
    """All masked: an argmax of -inf is token 0, which nobody allowed."""
    logits = logits_of(11, rows=2)
    banned = row(allowed_token_ids=[3], bad_words=[[3]], temperature=temperature)
    tokens = Sampler().sample(logits, [banned, row()]).tokens
    assert isinstance(tokens[0], RequestError)
    assert tokens[0].kind == "no_token_left"
    assert tokens[1] == int(logits[1].argmax())


def test_the_given_logits_stay_as_they_are():
    """A batch that fails is sampled again row by row: penalties applied twice would change the tokens."""
    logits = logits_of(12, rows=2)
    before = logits.clone()
    Sampler().sample(logits, [row(output=[5, 5], frequency_penalty=2.0), row(logit_bias={1: 9.0}, logprobs=2)])
    assert torch.equal(logits, before)


def random_sequence(random_):
    params = {
        "repetition_penalty": random_.choice([1.0, 1.0, 0.7, 1.4]),
        "frequency_penalty": random_.choice([0.0, 0.0, 0.5, -0.5]),
        "presence_penalty": random_.choice([0.0, 0.0, 0.5, -0.5]),
        "logit_bias": random_.choice([{}, {3: 4.0, 5: -9.0}]),
        "allowed_token_ids": random_.choice([None, None, list(range(0, VOCAB, 2))]),
        "min_tokens": random_.choice([0, 0, 5]),
        "temperature": random_.choice([0.0, 1.0]),
        "logprobs": random_.choice([None, 0, 3]),
    }
    words = random_.choice([[], [[1], [2, 4]]])
    return row(
        random_tokens(random_, random_.randint(1, 9)),
        random_tokens(random_, random_.randint(0, 9)),
        bad_words=words,
        stop_ids=[8],
        **params,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 12))
def test_a_row_depends_on_itself_alone(seed, batch):
    """A neighbour's counts or masks must not reach over, to the bit, nor may the place in the batch matter."""
    random_ = random.Random(seed)
    sequences = [random_sequence(random_) for _ in range(batch)]
    logits = logits_of(seed, rows=batch)
    together = Sampler().sample(logits, sequences)
    for i, sequence in enumerate(sequences):
        alone = Sampler().sample(logits[i : i + 1], [sequence])
        assert alone.tokens == [together.tokens[i]]
        assert alone.logprobs.get(0) == together.logprobs.get(i)
