"""The embedded model against continuations recorded with another implementation, token for token."""

from __future__ import annotations

import hashlib

import pytest

from ember import LLM, SamplingParams
from ember.model.presets import TINY
from tests.fakes import RecordingRunner, golden

CASES = golden()["cases"]


@pytest.fixture(scope="module")
def run():
    """All cases in one batch: (outputs, the logits of each)."""
    llm = LLM(dtype="float32", device="cpu", pool_size="4096tok")
    recorder = llm.engine.runner = RecordingRunner(llm.engine.runner)
    params = [SamplingParams(max_tokens=len(case["greedy_ids"]), ignore_eos=True) for case in CASES]
    return llm.generate([case["prompt_ids"] for case in CASES], params), recorder.logits


def test_the_record_is_of_these_weights():
    """New weights need a new record; without this the failures below would look like the network's."""
    data = (TINY / "model.safetensors").read_bytes()
    assert hashlib.sha256(data).hexdigest() == golden()["model_sha256"]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_greedy_continuation(index, run):
    """Any error in weights, network, paging or sampling changes some token of 64."""
    assert run[0][index].token_ids == CASES[index]["greedy_ids"]
    assert run[0][index].text == CASES[index]["greedy_text"]


@pytest.mark.parametrize("index", range(len(CASES)))
def test_first_logits(index, run):
    """Tokens forgive small errors; the logits of the first step don't."""
    case = CASES[index]
    logits = run[1][index, len(case["prompt_ids"]) - 1]
    values, ids = logits.topk(5)
    assert ids.tolist() == [token for token, _ in case["first_top5"]]
    assert values.tolist() == pytest.approx([value for _, value in case["first_top5"]], abs=1e-3)
    assert float(logits.logsumexp(0)) == pytest.approx(case["first_logsumexp"], abs=1e-3)


def test_the_prompts_are_tokenised_as_recorded():
    """The same text must become the same ids; `<|endoftext|>` only where special tokens are allowed."""
    tokenizer = LLM(dtype="float32", device="cpu", pool_size="512tok").plan.tokenizer
    for case in CASES:
        assert tokenizer.encode(case["prompt"], allow_special_tokens=True) == case["prompt_ids"]
