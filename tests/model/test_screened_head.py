"""The screened LM head gives the whole one's largest logit of every row, bit for bit, and no wrong number beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ember import LLM, SamplingParams
from ember.model import head as head_module
from ember.model import screened_head
from ember.model.head import WholeHead, make_head
from ember.model.linear import PackedLinear, has_packed
from ember.model.ranks import ALONE
from ember.model.screened_head import ScreenedHead
from tests.fakes import prompts_of_many_lengths, random_llama

pytestmark = pytest.mark.skipif(not has_packed(torch.device("cpu"), torch.float32), reason="no fused multiply-add")


def make(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> ScreenedHead:
    return ScreenedHead(PackedLinear(weight, None, "none", dtype), weight)


def check(head: ScreenedHead, x: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
    """Its logits, seen to be right where they are told."""
    mask = torch.ones(len(x), dtype=torch.bool) if best_only is None else best_only
    found, whole = head(x, mask), head(x)
    assert found.shape == whole.shape
    assert torch.equal(found[~mask], whole[~mask])
    assert found.numpy().argmax(1).tolist() == whole.numpy().argmax(1).tolist()
    assert torch.equal(found.amax(1), whole.amax(1))
    told = found > -torch.inf
    assert torch.equal(found[told], whole[told])
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(1, 700),
    inner=st.integers(1, 900),
    rows=st.integers(1, 30),
    spread=st.sampled_from([1e-39, 1e-30, 1e-6, 0.02, 1.0, 1e6, 1e37]),
    lengths=st.sampled_from(["alike", "outliers", "trained"]),
)
def test_the_largest_logit_is_the_whole_heads(seed, vocab_size, inner, rows, spread, lengths):
    """Of any shape and scale; rows of some length in common, as a trained network's, are the hardest to tell apart."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab_size, inner, generator=rng) * spread
    x = torch.randn(rows, inner, generator=rng)
    if lengths == "outliers":
        x[:, :: max(1, inner // 3)] *= 50
    if lengths == "trained":
        weight, x = weight + 3 * spread * torch.randn(inner, generator=rng), x + 1
    check(make(weight), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_form_of_the_heads_weight(dtype):
    rng = torch.Generator().manual_seed(0)
    head = make(torch.randn(3000, 384, generator=rng), dtype)
    found = check(head, torch.randn(40, 384, generator=rng))
    assert (found > -torch.inf).float().mean() < 0.1, "hardly anything was ruled out"


def test_rows_do_not_change_each_other():
    rng = torch.Generator().manual_seed(1)
    head, x = make(torch.randn(2000, 256, generator=rng)), torch.randn(33, 256, generator=rng)
    together = check(head, x)
    alone = torch.cat([check(head, row[None]) for row in x])
    assert torch.equal(together, alone)


def test_some_rows_whole_and_some_screened():
    rng = torch.Generator().manual_seed(2)
    head, x = make(torch.randn(1500, 128, generator=rng)), torch.randn(20, 128, generator=rng)
    check(head, x, torch.rand(20, generator=rng) < 0.5)
    check(head, x, torch.zeros(20, dtype=torch.bool))
    check(head, x[:0])


def test_the_first_of_equal_logits_is_told():
    weight = torch.randn(999, 64, generator=torch.Generator().manual_seed(3))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    best = (x @ weight.T).argmax(1)
    doubled = torch.cat([weight, weight[best]])
    check(make(doubled), x)
    check(make(doubled.flip(0)), x)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_computed_whole(value):
    rng = torch.Generator().manual_seed(5)
    head, x = make(torch.randn(1200, 96, generator=rng)), torch.randn(6, 96, generator=rng)
    x[2, 7] = value
    mask = torch.ones(6, dtype=torch.bool)
    found, whole = head(x, mask), head(x)
    assert torch.equal(found[2].nan_to_num(), whole[2].nan_to_num())
    assert found[2].isnan().equal(whole[2].isnan())
    others = torch.arange(6) != 2
    assert torch.equal(found[others].amax(1), whole[others].amax(1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_leaves_the_whole_product(value):
    weight = torch.randn(800, 64, generator=torch.Generator().manual_seed(7))
    weight[123, 4] = value
    head, x = make(weight), torch.randn(3, 64, generator=torch.Generator().manual_seed(8))
    found, whole = head(x, torch.ones(3, dtype=torch.bool)), head(x)
    assert torch.equal(found.nan_to_num(), whole.nan_to_num())
    assert found.isnan().equal(whole.isnan())


def test_where_all_is_alike_the_whole_is_computed_for_a_while():
    head = make(torch.ones(640, 32) * 0.1)
    x = torch.rand(4, 32, generator=torch.Generator().manual_seed(6))
    assert (check(head, x) > -torch.inf).all()
    assert head._pause == screened_head._PAUSE
    for _ in range(screened_head._PAUSE):
        check(head, x)
    assert head._pause == 0
    check(head, torch.zeros(3, 32))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), inner=st.integers(1, 800), outlier=st.sampled_from([1.0, 30.0, 1e4]))
def test_no_rough_logit_is_further_off_than_its_bound(seed, inner, outlier):
    """What all rests on, of each logit rather than of the largest ones; the bound as the kernel computes it."""
    rng = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(400, inner, generator=rng), torch.randn(12, inner, generator=rng)
    weight[:, 0] *= outlier
    x[:, inner // 2] *= outlier
    head = make(weight)
    whole, rough = head(x).double(), head._rough(x).double()
    levels = head._rough.levels
    scale = x.abs().amax(1, keepdim=True) / torch.tensor(levels)
    rest = x.double() - (x * (torch.tensor(levels) / x.abs().amax(1, keepdim=True))).round().double() * scale.double()
    bound = x.double().norm(dim=1)[:, None] * torch.from_numpy(head._of_length).double()
    bound += rest.norm(dim=1)[:, None] * torch.from_numpy(head._of_error).double()
    assert ((whole - rough).abs() <= bound).all()


def test_only_large_packed_heads_of_one_rank_are_screened(monkeypatch):
    weight = torch.randn(512, 64)
    assert isinstance(make_head(PackedLinear(weight, None, "none", torch.float32), weight, ALONE), WholeHead)
    monkeypatch.setattr(head_module, "_FROM", 1)
    assert isinstance(make_head(PackedLinear(weight, None, "none", torch.float32), weight, ALONE), ScreenedHead)


def generated(monkeypatch: pytest.MonkeyPatch, first: int, params: list[SamplingParams], **settings: object) -> list:
    """Tokens of prompts of many lengths, with heads screened from so many numbers on."""
    monkeypatch.setattr(head_module, "_FROM", first)
    outs = LLM(**settings).generate([*prompts_of_many_lengths(), *prompts_of_many_lengths()][: len(params)], params)
    return [(out.token_ids, out.finish_reason, out.error) for out in outs]


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_threads": 1}, {"speculative": "ngram"}, {"max_num_seqs": 3, "pool_size": "1024tok"}],
    ids=str,
)
def test_a_job_gets_the_same_tokens(monkeypatch, tmp_path, settings):
    """Greedy rows beside drawn ones, ones with log-probabilities, penalties and several samples."""
    kinds = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, temperature=0.8, seed=1),
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, logprobs=3),
        SamplingParams(max_tokens=12, repetition_penalty=1.3),
        SamplingParams(max_tokens=12, prompt_logprobs=1),
    ]
    params = [kinds[i % len(kinds)] for i in range(18)]
    settings = {"model": str(random_llama(tmp_path)), **settings}
    expected = generated(monkeypatch, 2**60, params, **settings)
    rows, plain = [], ScreenedHead._screened
    monkeypatch.setattr(ScreenedHead, "_screened", lambda head, x: rows.append(len(x)) or plain(head, x))
    assert generated(monkeypatch, 1, params, **settings) == expected
    assert sum(rows) >= 6 * 6, "rows that take their best token were not screened"
    assert all(tokens for tokens, *_ in expected)
    assert np.mean([len(tokens) for tokens, *_ in expected]) > 6
