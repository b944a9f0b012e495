"""Beam search: transformers' hypotheses, whatever the pool, the batch and the order make of it."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from ember import LLM, SamplingParams
from ember.beam_search import BeamSearch, best_continuations
from ember.core.sequence import Sequence
from ember.errors import ConfigError
from tests.fakes import POLICIES, VOCAB, FakeRunner, continuation, make_engine, make_sequence, next_token, run_engine

TOKENS = 7


def logits_after(tokens, salt=0):
    """A made-up language model of TOKENS tokens."""
    rng = random.Random(f"{salt} {tokens}")
    return torch.tensor([rng.gauss(0, 2) for _ in range(TOKENS)])


def search(width, salt=0, **settings):
    """Run a search on the made-up model; its hypotheses."""
    one = BeamSearch(width, **settings)
    beams = {0: []}
    while True:
        for number, tokens in beams.items():
            assert not one.complete
            assert one.offer(number, logits_after(tokens, salt))
        moves = one.advance()
        if not moves:
            return one.hypotheses
        assert len({move.beam for move in moves}) == len(moves) <= width
        beams = {move.beam: [*beams[move.parent], move.token] for move in moves}


def test_a_wide_search_finds_the_best_of_all():
    """Beams as wide as there are texts: every text is looked at, so the best must come out, in order."""
    found = search(TOKENS**2, stop_ids=(), max_tokens=3)
    scores = {}
    for text in itertools.product(range(TOKENS), repeat=3):
        logs = [torch.log_softmax(logits_after(list(text[:i])).double(), -1)[text[i]].item() for i in range(3)]
        scores[text] = sum(logs) / 3
    best = sorted(scores, key=lambda text: -scores[text])[: len(found)]
    assert [tuple(h.token_ids) for h in found] == best
    assert found[0].score == pytest.approx(scores[best[0]])
    assert found[0].logprob == pytest.approx(3 * scores[best[0]])


def test_stop_ids_end_hypotheses_not_before_min_tokens():
    """Text after the end of a text; or an end that `min_tokens` forbids."""
    for salt in range(20):
        found = search(3, salt, stop_ids=(0, 1), max_tokens=6, min_tokens=2)
        assert 1 <= len(found) <= 3
        for h in found:
            assert not {0, 1} & set(h.token_ids[:-1])
            assert h.stop_id == (h.token_ids[-1] if h.token_ids[-1] in (0, 1) else None)
            assert len(h.token_ids) == 6 if h.stop_id is None else len(h.token_ids) > 2


def test_likeliest_tokens_are_in_order_and_ties_go_to_the_lower_id():
    """Another order of equal tokens on another machine, or in another batch."""
    found = best_continuations(torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0]), 3, banned=[2])
    assert [token for token, _ in found] == [1, 4, 3]
    assert found[0][1] == found[1][1] > found[2][1]
    assert best_continuations(torch.tensor([1.0, math.nan]), 1) == []


def beams_of(width, *, prompt, max_tokens, first_id=0):
    """The family of a search, as `LLM.add` makes it."""
    params = SamplingParams(beam_width=width, n=width, max_tokens=max_tokens)
    leader, *others = (Sequence(first_id + i, list(prompt), params, 0, max_tokens, i, first_id) for i in range(width))
    leader.children = others
    one = BeamSearch(width, stop_ids=(), max_tokens=max_tokens)
    family = leader.family
    for beam in family:
        beam.search, beam.beams = one, family
    return leader


def expected(width, prompt, max_tokens):
    """What the search gives on the fake network without an engine."""
    one = BeamSearch(width, stop_ids=(), max_tokens=max_tokens)
    beams = {0: list(prompt)}
    while True:
        for number, tokens in beams.items():
            one.offer(number, -((torch.arange(VOCAB) - next_token(tokens)) % VOCAB).float())
        moves = one.advance()
        if not moves:
            return [h.token_ids for h in one.hypotheses]
        beams = {move.beam: [*beams[move.parent], move.token] for move in moves}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 14), (4, 4), (4, 40), (16, 1)])
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(8, 64), (2, 64), (1, 3), (8, 2)])
@pytest.mark.parametrize(("prefix_cache", "plans_ahead"), [(True, False), (False, False), (True, True)])
def test_searches_come_to_the_same_end_in_any_pool(
    policy, block_size, num_blocks, max_num_seqs, budget, prefix_cache, plans_ahead
):
    """Beams that wait for each other's blocks for ever; K/V of one beam under another's tokens."""
    engine = make_engine(
        policy,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        prefix_cache=prefix_cache,
        plans_ahead=plans_ahead,
        runner=FakeRunner(block_size),
    )
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    families = [beams_of(4, prompt=p, max_tokens=6, first_id=10 * i) for i, p in enumerate(prompts)]
    members = [leader.family for leader in families]
    plain = make_sequence(50, 4, 8)
    for leader in (families[0], plain, families[1]):
        engine.add(leader)
    run_engine(engine)
    assert plain.output_token_ids == continuation(plain.token_ids[:4], 8)
    for family, prompt in zip(members, prompts, strict=True):
        assert [beam.output_token_ids for beam in family] == expected(4, prompt, 6)
    assert engine.scheduler.blocks.num_used == 0
    assert not engine.scheduler.held


def test_beams_share_what_they_have_in_common():
    """A table of its own for every beam."""
    engine = make_engine(block_size=4, num_blocks=200)
    engine.add(beams_of(4, prompt=range(40), max_tokens=8))
    outs = run_engine(engine)
    assert max(out.stats.blocks_used for out in outs) <= 10 + 4 * 2
    assert sum(out.stats.num_prefill_tokens for out in outs) == 40
    assert sum(out.stats.num_decode_tokens for out in outs) == 4 * 7


@pytest.mark.parametrize("policy", POLICIES)
def test_beams_start_only_where_all_find_a_place(policy):
    """A second search in the one place left over: both pushed each other out, all computed again at every token."""
    beams = SamplingParams(beam_width=4, max_tokens=12)
    llm = LLM(max_num_seqs=5, scheduler=policy, prefix_cache=False, pool_size="4096tok")
    for index, prompt in enumerate(["Call me Ishmael.", "The whale", "A long voyage"]):
        assert llm.add(index, prompt, beams) is None
    steps = []
    while llm.engine.num_unfinished:
        steps.append(llm.step()[1].stats)
    assert sum(step.num_recomputed_tokens for step in steps) == 0


def test_a_search_that_is_given_up_leaves_nothing(llm):
    """Beams that are held, or pending, forgotten in the middle of a step."""
    params = SamplingParams(beam_width=3, max_tokens=8)
    for steps in (0, 1, 3):
        llm.add(0, [5] * 20, params)
        for _ in range(steps):
            llm.step()
        assert llm.abort_all() == {0}
        assert llm.engine.num_unfinished == 0
        assert llm.engine.scheduler.blocks.num_used == 0
        llm.engine.scheduler.blocks.check_integrity()


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", dtype="float32", max_model_len=128, pool_size="2000tok")


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
def test_hypotheses_are_those_of_transformers(llm, early_stopping, length_penalty):
    """Scores, lengths, or the moment to stop, that differ from what everybody compares with."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(llm.plan.folder.path).eval()
    prompt = llm.plan.tokenizer.encode("The whale and the captain of the ship")
    stop = [llm.plan.tokenizer.encode(text)[0] for text in (",", ".", " the")]
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=4,
        num_return_sequences=3,
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=[*llm.plan.network.eos_token_ids, *stop],
        pad_token_id=4095,
        **settings,
    )
    theirs = [[token for token in row[len(prompt) :] if token != 4095] for row in found.tolist()]
    params = SamplingParams(beam_width=4, n=3, max_tokens=10, stop_token_ids=stop, **settings)
    (ours,) = llm.generate([prompt], params)
    assert [sample.token_ids for sample in ours.outputs] == theirs
    assert [sample.index for sample in ours.outputs] == [0, 1, 2]
    assert ours.text == llm.plan.tokenizer.decode(theirs[0]) or ours.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"stop": ["x"]}, "stop"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 4}, "best_of"),
        ({"n": 5}, "beam_width"),
        ({"early_stopping": "often"}, "early_stopping"),
    ],
)
def test_what_a_search_cannot_heed_is_refused(settings, key):
    """A setting that is silently left out of account."""
    with pytest.raises(ConfigError, match=f"^{key}="):
        SamplingParams(beam_width=4, **settings)


@pytest.mark.parametrize("settings", [{"length_penalty": 0.5}, {"early_stopping": True}, {"early_stopping": "never"}])
def test_what_only_a_search_heeds_is_refused_without_one(settings):
    """`length_penalty=2` did nothing and said nothing."""
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}=.*beam_width"):
        SamplingParams(**settings)
    assert SamplingParams(beam_width=2, **settings).ranked


def test_tokens_of_beams_count_while_they_run():
    """The bar stood at 0 tokens a second for as long as a job had nothing but searches."""
    llm = LLM(device="cpu", pool_size="2048tok")
    assert llm.add(0, "The sea", SamplingParams(beam_width=3, max_tokens=5)) is None
    sampled = []
    while llm.engine.num_unfinished:
        sampled.append(llm.step()[1].num_sampled)
    assert sampled == [3] * 5
