"""The sampler against a plain one, in Python floats, of the same definition; and its edges."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ember.core import sampler as sampler_module
from ember.core.random_stream import row_seed, uniform
from ember.core.sampler import CPU_TILE, TOP_P_CANDIDATES, Sampler
from ember.core.sequence import Sequence
from ember.errors import RequestError
from ember.sampling_params import SamplingParams

INF = math.inf
LAST = 1.0 - 2.0**-53


def row(seed=0, num_output=0, sample_index=0, **params):
    """A sequence with `num_output` output tokens so far."""
    params.setdefault("temperature", 1.0)
    sequence = Sequence(0, [1, 2, 3], SamplingParams(**params), seed, 99, sample_index)
    sequence.token_ids += [0] * num_output
    return sequence


def draw(logits, sequences):
    """Sample; the caller's logits stay as they are."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return Sampler().sample(logits, sequences).tokens


def kept_weights(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Weight of each token, 0 where dropped: temperature, then top-k, min-p, and top-p over what is left."""
    best = max(logits)
    scores = [(x - best) / temperature for x in logits]
    if 0 < top_k < len(logits):
        kth = sorted(scores, reverse=True)[top_k - 1]
        scores = [s if s >= kth else -INF for s in scores]
    weights = [w if w >= min_p else 0.0 for w in map(math.exp, scores)]
    if top_p < 1.0:
        goal, reached = top_p * sum(weights), 0.0
        for floor in sorted(weights, reverse=True):
            reached += floor
            if reached >= goal:
                break
        weights = [w if w >= floor else 0.0 for w in weights]
    return weights


def token_at(weights, u):
    """Inverse transform sampling in order of token id."""
    reached, share = 0.0, u * sum(weights)
    for token, weight in enumerate(weights):
        reached += weight
        if reached > share:
            return token
    return max(token for token, weight in enumerate(weights) if weight)


def middles(weights, narrowest=1e-5):
    """Token -> the uniform in the middle of its share, for shares that float32 can't blur away."""
    total, reached, found = sum(weights), 0.0, {}
    for token, weight in enumerate(weights):
        if weight / total > narrowest:
            found[token] = (reached + weight / 2) / total
        reached += weight
    return found


def with_uniforms(monkeypatch, numbers):
    """Let the row with seed i draw numbers[i]."""
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, sample, position: numbers[seed])


def check_kept(monkeypatch, logits, **params):
    """Every token that should be kept is drawn at its share, and the first and last ones at the ends."""
    weights = kept_weights(logits, **params)
    places = middles(weights)
    kept = [token for token, weight in enumerate(weights) if weight]
    numbers = [*places.values(), 0.0, LAST]
    with_uniforms(monkeypatch, numbers)
    drawn = draw([logits] * len(numbers), [row(i, **params) for i in range(len(numbers))])
    assert drawn == [*places, kept[0], kept[-1]]


def random_params(random_, vocab):
    return {
        "temperature": random_.choice([0.3, 0.7, 1.0, 1.0, 1.5, 4.0]),
        "top_k": random_.choice([0, 0, 1, 2, 5, vocab // 2, vocab - 1, vocab, vocab + 3]),
        "top_p": random_.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.99]),
        "min_p": random_.choice([0.0, 0.0, 0.01, 0.1, 0.5, 1.0]),
    }


def random_logits(random_, vocab, spread=2.0):
    return [float32(random_.gauss(0.0, spread)) for _ in range(vocab)]


def float32(x):
    """The float32 next to x, so that both samplers start from the same numbers."""
    return float(torch.tensor(x, dtype=torch.float32))


@pytest.mark.parametrize("seed", range(60))
def test_the_same_tokens_are_kept_and_drawn(seed, monkeypatch):
    """A wrong order of the filters, a threshold off by one or a wrong renormalisation moves some token's share."""
    random_ = random.Random(seed)
    vocab = random_.choice([2, 3, 10, 40])
    check_kept(monkeypatch, random_logits(random_, vocab), **random_params(random_, vocab))


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.95, 0.999])
@pytest.mark.parametrize("top_k", [0, 700])
def test_top_p_beyond_the_first_candidates(top_p, top_k, monkeypatch):
    """On a flat distribution the likeliest 256 don't reach top_p: what lies beyond them must count too."""
    random_ = random.Random(7)
    logits = [float32(-i * 1e-3) for i in range(900)]
    random_.shuffle(logits)
    assert sum(map(bool, kept_weights(logits, top_p=top_p, top_k=top_k))) > TOP_P_CANDIDATES * (top_p > 0.4)
    check_kept(monkeypatch, logits, top_p=top_p, top_k=top_k)


def test_top_p_ending_exactly_at_the_candidates(monkeypatch):
    """256 tokens of equal weight and a tail: the last candidate is the one that reaches the goal."""
    logits = [0.0] * TOP_P_CANDIDATES + [-1.0] * 10
    total = TOP_P_CANDIDATES + 10 * math.exp(-1.0)
    check_kept(monkeypatch, logits, top_p=(TOP_P_CANDIDATES - 0.5) / total)


def test_rows_with_and_without_a_long_tail_in_one_batch():
    """Only the rows that need more candidates get them; their floors must not land on other rows."""
    random_ = random.Random(3)
    flat = [float32(-i * 1e-3) for i in range(600)]
    peaked = [float32(-float(i)) for i in range(600)]
    logits = [flat, peaked, flat, peaked]
    for rows in logits:
        random_.shuffle(rows)
    sequences = [row(i, top_p=0.9) for i in range(4)]
    together = draw(logits, sequences)
    assert together == [draw([one], [s])[0] for one, s in zip(logits, sequences, strict=True)]
    weights = [kept_weights(one, top_p=0.9) for one in logits]
    assert together == [token_at(w, uniform(i, 0, 0)) for i, w in enumerate(weights)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 12), vocab=st.sampled_from([2, 17, 300]))
def test_a_row_depends_on_itself_alone(seed, batch, vocab):
    """A neighbour's top_k, top_p, temperature or seed must not reach over; nor may the place in the batch matter."""
    random_ = random.Random(seed)
    logits = [random_logits(random_, vocab) for _ in range(batch)]
    sequences = [
        row(row_seed(seed, i), random_.randint(0, 9), random_.randint(0, 2), **random_params(random_, vocab))
        for i in range(batch)
    ]
    sequences[0].params.temperature = random_.choice([0.0, 1.0])
    alone = [draw([one], [s])[0] for one, s in zip(logits, sequences, strict=True)]
    assert draw(logits, sequences) == alone
    order = random_.sample(range(batch), batch)
    assert draw([logits[i] for i in order], [sequences[i] for i in order]) == [alone[i] for i in order]


def test_a_batch_of_several_tiles_draws_each_row_as_alone():
    """A tile's tokens given to other rows, or the last, shorter tile left out; greedy rows lie between."""
    count = 2 * CPU_TILE + 3
    logits = torch.randn(count, 300, generator=torch.Generator().manual_seed(2)) * 2
    rows = [row(seed=i, temperature=0.0 if i % 5 == 0 else 1.0, top_p=0.9 if i % 2 else 1.0) for i in range(count)]
    together = draw(logits, rows)
    assert together == [draw(logits[i : i + 1], [rows[i]])[0] for i in range(count)]
    assert len(set(together)) > count // 2


def test_the_uniform_is_that_of_seed_sample_and_position():
    """A position off by one, or a forgotten sample index, would break every recorded row."""
    random_ = random.Random(1)
    logits = random_logits(random_, 50)
    cases = [(seed, sample, position) for seed in (0, 9) for sample in (0, 2) for position in (0, 1, 5)]
    sequences = [row(seed, position, sample) for seed, sample, position in cases]
    weights = kept_weights(logits)
    assert draw([logits] * len(cases), sequences) == [token_at(weights, uniform(*case)) for case in cases]


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 0.7}])
def test_frequencies_follow_the_probabilities(params):
    """A biased draw would be seen in the counts (fixed seeds; a bound that chance passes once in 10,000)."""
    logits = [1.5, -0.5, 0.0, 2.0, 0.5, -1.0, 1.0, 0.2]
    weights = kept_weights(logits, **params)
    count = 4000
    drawn = draw([logits] * count, [row(row_seed(5, i), **params) for i in range(count)])
    chi_square = 0.0
    for token, weight in enumerate(weights):
        expected = count * weight / sum(weights)
        assert expected or token not in drawn
        if expected:
            chi_square += (drawn.count(token) - expected) ** 2 / expected
    assert chi_square < 30.0


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-300, 9.9e-6])
def test_a_tiny_temperature_is_greedy(temperature, monkeypatch):
    """Dividing by it would overflow to NaN and draw token 0 or none; greedy draws no random number at all."""
    with_uniforms(monkeypatch, {})
    assert draw([[1.0, 3.0, 2.0], [80.0, -80.0, 0.0]], [row(temperature=temperature)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e6, 1e30, 1e38, 1e39, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_an_extreme_temperature_draws_a_token_that_can_be_drawn(temperature, filters):
    """inf - inf, 0 / 0 and their like: NaN weights give an id beyond the vocabulary, or a masked one."""
    logits = [5.0, -INF, 4.0, 1e4, -1e4, -INF]
    drawn = draw([logits] * 50, [row(i, temperature=temperature, **filters) for i in range(50)])
    assert set(drawn) <= {0, 2, 3, 4}
    if temperature <= 1e-3:
        assert set(drawn) == {3}


def test_top_k_beyond_the_vocabulary_is_off(monkeypatch):
    """top_k=50 on a vocabulary of 4 must not fail, nor cut anything."""
    for top_k in (4, 5, 50, 2**40):
        check_kept(monkeypatch, [0.5, 0.1, -0.3, 0.2], top_k=top_k)


def test_different_top_k_in_one_batch():
    """Each row has its own k; the largest of the batch must not be everyone's."""
    logits = [[float(i) / 10 for i in range(20)]] * 300
    sequences = [row(i, top_k=1 + i % 3) for i in range(300)]
    drawn = draw(logits, sequences)
    for k in (1, 2, 3):
        assert set(drawn[k - 1 :: 3]) == set(range(20 - k, 20))


def test_top_p_of_one_is_off():
    """Rounding in the cumulative sum must not cut the tail when nothing is to be cut."""
    random_ = random.Random(2)
    logits = random_logits(random_, 500, spread=4.0)
    sequences = [row(i, temperature=2.0) for i in range(64)]
    nearly = [row(i, temperature=2.0, top_p=1.0 - 1e-16) for i in range(64)]
    assert draw([logits] * 64, sequences) == draw([logits] * 64, nearly)


def test_a_tiny_top_p_keeps_the_best():
    """The smallest set is never empty."""
    for top_p in (1e-300, 1e-9, 5e-324):
        assert draw([[0.0, 2.0, 1.0]] * 20, [row(i, top_p=top_p) for i in range(20)]) == [1] * 20


def test_min_p_of_one_keeps_the_best():
    """The likeliest token is always as likely as itself, whatever the rounding."""
    for temperature in (0.1, 0.7, 3.0):
        sequences = [row(i, min_p=1.0, temperature=temperature) for i in range(20)]
        assert draw([[0.3, 0.1, 0.7]] * 20, sequences) == [2] * 20


def test_ties_are_treated_alike(monkeypatch):
    """Which of two equal tokens is cut must not hang on how a sort orders them: both stay."""
    logits = [1.0, 0.0, 1.0, 0.0, 0.0, -1.0]
    check_kept(monkeypatch, logits, top_k=3)
    check_kept(monkeypatch, logits, top_k=1)
    check_kept(monkeypatch, logits, top_p=0.8)
    check_kept(monkeypatch, [2.0] * 7, top_k=2)
    check_kept(monkeypatch, [2.0] * 7, top_p=0.3)


def test_greedy_ties_take_the_lowest_id():
    """The same token whatever the batch size or vocabulary, or a row's text would hang on its neighbours."""
    for vocab in (2, 33, 4096):
        logits = torch.zeros(9, vocab)
        logits[:, vocab // 2 :] = 1.0
        assert draw(logits, [row(temperature=0.0)] * 9) == [vocab // 2] * 9
        assert draw(logits[:1], [row(temperature=0.0)]) == [vocab // 2]


def test_masked_logits_are_never_drawn(monkeypatch):
    """A token of -inf has no share, not even at the ends of the range of uniforms."""
    logits = [-INF, 0.0, -INF, 1.0, -INF]
    for params in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 1}):
        check_kept(monkeypatch, logits, **params)


def test_min_tokens_masks_the_stop_ids_of_its_row_only():
    """EOS is not drawn before min_tokens, neither greedily nor sampled; other rows may draw it."""
    logits = [[0.0, 9.0, 1.0]] * 4
    sequences = [row(temperature=0.0, min_tokens=2), row(top_k=1, min_tokens=2), row(temperature=0.0), row(top_k=1)]
    for s in sequences:
        s.stop_ids = frozenset({1})
    assert draw(logits, sequences) == [2, 2, 1, 1]
    for s in sequences:
        s.token_ids += [0, 0]
    assert draw(logits, sequences) == [1, 1, 1, 1]


@pytest.mark.parametrize("broken", [[math.nan, 1.0, 2.0, 3.0], [0.0, INF, 1.0, INF], [-INF] * 4], ids=str)
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_a_row_without_numbers_costs_itself_alone(broken, filters):
    """All rows are drawn together: its token would be none of the vocabulary, and its neighbours lost with it."""
    good = [2.0, 1.5, 1.0, 1.9]
    first, failed, last = draw([good, broken, good], [row(i, **filters) for i in range(3)])
    assert [first, last] == draw([good, good], [row(0, **filters), row(2, **filters)])
    assert isinstance(failed, RequestError)
    assert failed.kind == "bad_logits"


def test_nobody_samples():
    """A step of chunks only brings no rows: no tokens, no error."""
    assert Sampler().sample(torch.empty(0, 5), []).tokens == []
