"""Speculation beside everything that a request can ask for: the same tokens, ends and log-probabilities as without."""

from __future__ import annotations

import pytest

from ember import LLM, SamplingParams
from tests.fakes import POLICIES

PROMPTS = ["The people of the United States", "Call me", "one two one two one two", "The sea"]
WAYS = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "n": 3},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2, "n": 2},
    {"bad_words": ["the"], "logit_bias": {11: 2.0}, "min_tokens": 12, "stop": ["\n", "of"]},
    {"regex": "([a-z]+ ){2,9}", "temperature": 1.0, "ignore_eos": False},
    {"allowed_token_ids": [11, 12, 13, 14, 290, 262], "logprobs": 0},
]
SETTINGS = {"max_model_len": 64, "block_size": 4, "seed": 5, "device": "cpu", "dtype": "float32"}


class Seer:
    """Proposes what the samples will say, but for every fourth token."""

    def __init__(self, tokens):
        self.tokens, self.right, self.wrong = tokens, 0, 0

    def propose(self, sequence, most, num_running):
        at = sequence.num_output_tokens
        ahead = self.tokens[sequence.parent_id, sequence.sample_index][at : at + max(0, min(most, 6))]
        return [token ^ ((at + i) % 4 == 0) for i, token in enumerate(ahead)]

    def learn(self, sequence, num_proposed, num_accepted):
        self.right += num_accepted
        self.wrong += num_proposed > num_accepted


def finished(proposer=None, **settings):
    """Every sample's sequence at its end, by request and sample."""
    llm = LLM(**SETTINGS, **settings)
    if proposer is not None:
        llm.engine.scheduler.proposer = proposer
    done, step = {}, llm.engine.step

    def recording(on_token=None):
        out = step(on_token)
        llm.engine.scheduler.blocks.check_integrity()
        done.update({(s.parent_id, s.sample_index): s for s in out.finished})
        return out

    llm.engine.step = recording
    params = [SamplingParams(**{"max_tokens": 32, "ignore_eos": True, **way}) for way in WAYS]
    asked = [(prompt, one) for one in params for prompt in PROMPTS]
    llm.generate([prompt for prompt, _ in asked], [one for _, one in asked])
    return done


@pytest.fixture(scope="module")
def expected():
    return finished(pool_size="4096tok")


def said(sequence):
    return (
        sequence.output_token_ids,
        (sequence.finish_reason, sequence.stop_reason),
        *(sequence.logprobs, sequence.prompt_logprobs),
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pool_size", ["4096tok", "80tok"])
def test_nothing_of_a_sample_changes(policy, pool_size, expected):
    """A penalty that counts a rejected token, log-probabilities of a place that was drawn twice, or a forked sample
    that another's proposal was written into."""
    seer = Seer({key: sequence.output_token_ids for key, sequence in expected.items()})
    found = finished(seer, scheduler=policy, pool_size=pool_size)
    assert found.keys() == expected.keys()
    for key, sequence in found.items():
        assert said(sequence) == said(expected[key]), key
    assert seer.right > 200
    assert seer.wrong > 50
    if pool_size == "80tok":
        assert sum(s.num_preemptions for s in found.values()) > 0
