"""The CPU path promises more than equal tokens: the same bits of every logit, whatever the settings."""

from __future__ import annotations

from array import array

import pytest
import torch

from ember import LLM, SamplingParams
from ember.core.batch import ScheduledSequence
from ember.core.sequence import Sequence
from ember.core.speculation import Proposer
from ember.model.linear import make_linear
from tests.fakes import POLICIES, logit_positions, make_sequence, prompts_of_many_lengths

OUTPUT_TOKENS = 6
WEIGHTS = ("auto", "int8", "fp16", "w8a8")
KV_DTYPES = ("float16", "bfloat16", "int8")
FORMS = [*({"weights": form} for form in WEIGHTS), *({"kv_dtype": form} for form in KV_DTYPES)]
HEIGHTS = (*range(1, 65), 100, 120, 127, 128, 255, 299)
BASE = {"block_size": 16, "scheduler": "prefill_first", "max_num_batched_tokens": 2048, "pool_size": "8192tok"}


Logits = dict[tuple[int, int], torch.Tensor]


def logits_of(prompts: list[list[int]], proposer: Proposer | None = None, **settings: object) -> Logits:
    """Logits of every sampled position, by (prompt, position); of one computed twice the last."""
    llm = LLM(**{**BASE, **settings})
    llm.engine.scheduler.proposer = proposer
    seen: Logits = {}
    execute = llm.engine.runner.execute

    def recording(scheduled: list[ScheduledSequence]) -> torch.Tensor:
        logits = execute(scheduled)
        for (request_id, position), row in zip(logit_positions(scheduled), logits, strict=True):
            seen[request_id, position + 1] = row.clone()
        return logits

    llm.engine.runner.execute = recording  # type: ignore[method-assign]
    llm.generate(prompts, SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
    return seen


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of_many_lengths()


@pytest.fixture(scope="module", params=FORMS, ids=str)
def form(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], form: dict[str, str]) -> Logits:
    return logits_of(prompts, **form)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1},
        {"block_size": 3},
        {"block_size": 7},
        {"block_size": 64},
        {"block_size": 1000, "pool_size": "16000tok"},
        {"max_num_batched_tokens": 7, "scheduler": "mixed"},
        {"max_num_batched_tokens": 64},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "scheduler": "static"},
        {"pool_size": "520tok"},
    ],
    ids=str,
)
def test_no_setting_changes_a_bit(prompts, form, expected, settings):
    """A sum whose order follows the batch, the chunk or the block: greedy ties and sampled draws would flip."""
    found = logits_of(prompts, deterministic="require", **form, **settings)
    assert found.keys() == expected.keys()
    different = [key for key, logits in found.items() if not torch.equal(logits, expected[key])]
    assert not different


class Seer:
    """Proposes the tokens to come, but for every third."""

    def __init__(self, logits: Logits) -> None:
        self.logits, self.accepted = logits, 0

    def propose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        places = range(sequence.num_tokens, sequence.num_tokens + most)
        return [int(self.logits[sequence.request_id, n].argmax()) ^ (n % 3 == 0) for n in places]

    def learn(self, sequence: Sequence, num_proposed: int, num_accepted: int) -> None:
        self.accepted = num_accepted or self.accepted


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_does_not_change_a_bit(prompts, form, expected, policy):
    """Several tokens of a sequence in a step: K/V of a rejected one left in the way, a sum over the step's rows."""
    seer = Seer(expected)
    found = logits_of(prompts, seer, deterministic="require", scheduler=policy, **form)
    assert seer.accepted
    assert expected.keys() <= found.keys()
    assert not [key for key, logits in expected.items() if not torch.equal(logits, found[key])]


def test_found_prefixes_do_not_change_a_bit(form):
    """K/V that another row's step computed, beside other tokens, are the K/V that the row's own would be."""
    base = prompts_of_many_lengths()[-1]
    prompts = [[*base[:length], length] for length in (299, 40, 64, 65, 200)]
    plain = logits_of(prompts, prefix_cache=False, **form)
    found = logits_of(prompts, prefix_cache=True, scheduler="mixed", **form)
    assert plain.keys() == found.keys()
    assert not [key for key, logits in plain.items() if not torch.equal(logits, found[key])]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_do_not_change_a_bit(prompts, form, expected, num_threads):
    """A laptop and a server must make the same rows."""
    before = torch.get_num_threads()
    try:
        found = logits_of(prompts, num_threads=num_threads, **form)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(logits, expected[key]) for key, logits in found.items())


def test_the_forms_of_weights_differ():
    """Would `weights` be ignored, the tests above would show nothing about it."""
    rng = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 32, generator=rng), torch.randn(8, 32, generator=rng)
    exact, int8, fp16, w8a8 = (make_linear(weight, form=form)(x) for form in WEIGHTS)
    assert 1e-3 < (int8 - exact).norm() / exact.norm() < 3e-2
    assert 1e-3 < (w8a8 - int8).norm() / exact.norm() < 3e-2
    assert 1e-5 < (fp16 - exact).norm() / exact.norm() < 1e-3


def test_the_setting_reaches_the_network(prompts):
    logits = [logits_of(prompts[:1], weights=form)[0, len(prompts[0])] for form in ("auto", "int8")]
    assert not torch.equal(*logits)


def test_the_kinds_of_pool_differ(prompts):
    """As above, for `kv_dtype`."""
    logits = [logits_of(prompts[:1], kv_dtype=kind)[0, len(prompts[0])] for kind in ("auto", *KV_DTYPES)]
    for i, one in enumerate(logits):
        assert not any(torch.equal(one, other) for other in logits[:i])


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("shape", [(576, 192), (768, 192), (192, 768), (4096, 192), (37, 24), (50, 31)], ids=str)
@pytest.mark.parametrize("activation", ["none", "gelu_new", "gelu", "relu"])
def test_a_row_has_the_same_bits_at_every_height(form, shape, activation):
    """A library picking another kernel for a low matrix, or a scale or an activation that looks at neighbours."""
    rng = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=rng) * 0.05, torch.randn(shape[0], generator=rng)
    layer, x = make_linear(weight, bias, activation, form), torch.randn(300, shape[1], generator=rng)
    whole = layer(x)
    assert not [height for height in HEIGHTS if not torch.equal(layer(x[:height].clone()), whole[:height])]
    assert torch.equal(layer(x[200:203].clone()), whole[200:203])


def test_a_rows_bits_are_the_same_beside_any_neighbour():
    """One scale for the whole matrix: a row with large numbers would coarsen all others."""
    rng = torch.Generator().manual_seed(0)
    layer, x = make_linear(torch.randn(64, 32, generator=rng), form="int8"), torch.randn(8, 32, generator=rng)
    loud = torch.cat([x, 1000 * torch.ones(1, 32)])
    assert torch.equal(layer(loud)[:8], layer(x))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_many_logits_of_a_step_have_the_bits_of_many_steps(form):
    """Proposed tokens verified in one step, or a prompt scored in chunks, must see what single steps would."""
    runner = LLM(**{**BASE, **form}).engine.runner
    tokens = prompts_of_many_lengths()[-1][:90]
    one = logits_in_steps(runner, tokens, [1] * 90, first_block=0)
    many = logits_in_steps(runner, tokens, [2, 9, 1, 8, 31, 39], first_block=10)
    assert torch.equal(one, many)


def logits_in_steps(runner, tokens: list[int], counts: list[int], first_block: int) -> torch.Tensor:
    """Logits [len(tokens), V], computed so many tokens a step."""
    sequence = make_sequence(0, 1)
    sequence.token_ids = tokens
    table, rows, start = array("i", range(first_block, first_block + 10)), [], 0
    for count in counts:
        rows.append(runner.execute([ScheduledSequence(sequence, start, count, table, True, count)]))
        start += count
    return torch.cat(rows)
