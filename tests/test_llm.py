"""The Python API on the embedded model: what may be asked, what comes back, what a mistake costs."""

from __future__ import annotations

import dataclasses

import pytest

from ember import LLM, RequestOutput, SamplingParams
from ember.core.random_stream import row_seed
from ember.core.sequence import FinishReason
from ember.errors import ConfigError, UserError
from ember.model.presets import TINY
from tests.fakes import golden

CASES = golden()["cases"]
PROMPT, IDS = CASES[3]["prompt"], CASES[3]["prompt_ids"]
GREEDY = CASES[3]["greedy_ids"]
EOS = 4095


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", dtype="float32", pool_size="2048tok", max_num_seqs=8)


def greedy(count=8, **params):
    return SamplingParams(max_tokens=count, **params)


def one(llm, prompt=PROMPT, params=None, **kwargs):
    """The only output of a call."""
    (output,) = llm.generate(prompt, params or greedy(**kwargs))
    assert llm.engine.num_unfinished == 0
    assert llm.engine.scheduler.blocks.num_used == 0
    return output


def text_of(llm, tokens):
    return llm.plan.tokenizer.decode(tokens)


def is_error(output, kind, *parts):
    assert output.finish_reason is FinishReason.ERROR
    assert output.error_kind == kind
    assert (output.text, output.token_ids, output.stop_reason) == ("", [], None)
    assert "\n" not in output.error
    for part in parts:
        assert part in output.error
    return True


def test_one_string(llm):
    """A lone string is one prompt, not one a character."""
    output = one(llm)
    assert isinstance(output, RequestOutput)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == (0, PROMPT, IDS)
    assert output.token_ids == GREEDY[:8]
    assert output.text == text_of(llm, GREEDY[:8])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, None)
    assert (output.error, output.error_kind, output.num_cached_tokens, output.outputs[0].index) == (None, None, 0, 0)


def test_one_list_of_token_ids(llm):
    """A lone list of ints is one prompt, and has no prompt text."""
    output = one(llm, IDS)
    assert (output.prompt, output.prompt_token_ids, output.token_ids) == (None, IDS, GREEDY[:8])


def test_lists_of_prompts(llm):
    """Strings, token ids and both mixed, in the order given, each with its own result."""
    prompts = [PROMPT, IDS, CASES[0]["prompt"], CASES[1]["prompt_ids"]]
    outputs = llm.generate(prompts, greedy(5))
    assert [output.request_id for output in outputs] == [0, 1, 2, 3]
    expected = [CASES[i]["greedy_ids"][:5] for i in (3, 3, 0, 1)]
    assert [output.token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == [PROMPT, None, CASES[0]["prompt"], None]


def test_tuples_and_generators_are_lists(llm):
    """Any sequence of prompts will do."""
    assert [output.token_ids for output in llm.generate((PROMPT, IDS), greedy(2))] == [GREEDY[:2]] * 2
    assert len(llm.generate([tuple(IDS)], greedy(1))) == 1


def test_no_prompts(llm):
    """Nothing asked, nothing answered, no error."""
    assert llm.generate([]) == []
    assert llm.generate([], []) == []


def test_results_are_in_the_order_of_the_prompts(llm):
    """Short requests finish first; their results must not come first."""
    params = [greedy(count) for count in (20, 1, 9, 3, 15, 2, 7, 11, 5, 4)]
    outputs = llm.generate([PROMPT] * 10, params)
    assert [len(output.token_ids) for output in outputs] == [p.max_tokens for p in params]


def test_one_params_each(llm):
    """Each prompt is sampled by its own parameters."""
    first, second = llm.generate([PROMPT, PROMPT], [greedy(3), greedy(6, stop_token_ids=[GREEDY[1]])])
    assert first.token_ids == GREEDY[:3]
    assert second.token_ids == GREEDY[:2]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_params_is_refused(llm, count):
    """zip would silently drop prompts."""
    with pytest.raises(UserError, match=f"2 prompts but {count} sampling_params"):
        llm.generate([PROMPT, PROMPT], [greedy()] * count)
    assert llm.engine.num_unfinished == 0


def test_default_params_are_greedy_with_128_tokens(llm):
    """The documented default."""
    output = llm.generate(PROMPT)[0]
    assert output.token_ids[: len(GREEDY)] == GREEDY
    assert len(output.token_ids) == 128 or output.token_ids[-1] == EOS


def test_bad_prompts_are_results(llm):
    """A bad prompt costs itself and no other; each error says what is wrong."""
    prompts = ["", [], "x " * 2000, [1] * 512, [1, 4096], [-1], [True], ["a"], 7, None, {"a": 1}, "\ud800", PROMPT]
    outputs = llm.generate(prompts, greedy(4))
    assert is_error(outputs[0], "empty_prompt")
    assert is_error(outputs[1], "empty_prompt")
    assert is_error(outputs[2], "prompt_too_long", "max_model_len=512")
    assert is_error(outputs[3], "prompt_too_long", "512 tokens", "max_model_len=512")
    for index, part in [(4, "4096"), (5, "-1"), (6, "True"), (7, "'a'"), (8, "int"), (9, "NoneType"), (10, "dict")]:
        assert is_error(outputs[index], "bad_prompt", part)
    assert is_error(outputs[11], "bad_prompt", "surrogate")
    assert outputs[12].token_ids == GREEDY[:4]
    assert [output.request_id for output in outputs] == list(range(13))


def test_the_longest_prompt_gets_one_token(llm):
    """511 tokens leave room for one within 512; 512 leave none."""
    output = one(llm, [1] * 511, count=9)
    assert (len(output.token_ids), output.finish_reason) == (1, FinishReason.LENGTH)


def test_a_stop_token_id_beyond_the_vocabulary(llm):
    """It could never come: a mistake, and one of that row only."""
    assert is_error(one(llm, stop_token_ids=[5, 4096]), "bad_sampling", "4096", "4095")


def test_max_tokens_zero(llm):
    """Nothing to compute is no error: an empty completion, with the prompt's ids."""
    output = one(llm, params=greedy(0))
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], FinishReason.LENGTH)
    assert (output.prompt, output.prompt_token_ids) == (PROMPT, IDS)
    assert is_error(one(llm, "", params=greedy(0)), "empty_prompt")


def test_max_tokens_none_goes_to_the_end_of_the_context(llm):
    """Prompt and output together are max_model_len tokens, not one more."""
    output = one(llm, [7] * 480, params=SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.token_ids) == 512 - 480
    assert output.finish_reason is FinishReason.LENGTH


def test_max_model_len_is_the_limit():
    """A smaller max_model_len ends prompts and outputs there, and lets the pool be small."""
    small = LLM(device="cpu", dtype="float32", max_model_len=10, pool_size="16tok", block_size=4)
    output = one(small, [1, 2, 3], params=greedy(100, ignore_eos=True))
    assert len(output.token_ids) == 7
    assert is_error(one(small, [1] * 10), "prompt_too_long", "max_model_len=10")


def test_stop_token_ids(llm):
    """The stop token is kept among the ids and named; the text ends before it."""
    stop = GREEDY[4]
    at = GREEDY.index(stop)
    output = one(llm, count=20, stop_token_ids=[stop])
    assert output.token_ids == GREEDY[: at + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert output.text == text_of(llm, GREEDY[:at])
    shown = one(llm, count=20, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == text_of(llm, GREEDY[: at + 1])


def test_eos(llm, monkeypatch):
    """EOS ends and has no reason to name; ignored, it is a token like any other; min_tokens keeps it away."""
    eos = GREEDY[4]  # a token that comes, for the real one hardly does
    at = GREEDY.index(eos)
    network = dataclasses.replace(llm.plan.network, eos_token_ids=(eos, EOS))
    monkeypatch.setattr(llm, "plan", dataclasses.replace(llm.plan, network=network))
    output = one(llm, count=20)
    assert output.token_ids == GREEDY[: at + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
    ignoring = one(llm, count=20, ignore_eos=True)
    assert ignoring.token_ids == GREEDY[:20]
    kept_away = one(llm, count=20, min_tokens=at + 1)
    assert kept_away.token_ids[:at] == GREEDY[:at]
    assert eos not in kept_away.token_ids[: at + 1]


def test_min_tokens_holds_for_stop_ids_and_stop_strings(llm):
    """Before min_tokens neither may end the output; the stop id isn't even drawn."""
    stop = GREEDY[2]
    output = one(llm, count=12, stop_token_ids=[stop], min_tokens=6)
    assert stop not in output.token_ids[:6]
    assert len(output.token_ids) > 6
    word = text_of(llm, GREEDY[:1])
    output = one(llm, count=12, stop=word, min_tokens=3)
    assert len(output.token_ids) > 3
    assert output.text.startswith(word)


def test_a_stop_string_at_a_token_boundary(llm):
    """The text is cut before the stop; the ids end with the token that completed it."""
    pieces = [text_of(llm, [token]) for token in GREEDY]
    output = one(llm, count=20, stop=[pieces[3]])
    at = next(i for i in range(len(GREEDY)) if pieces[3] in "".join(pieces[: i + 1]))
    assert output.token_ids == GREEDY[: at + 1]
    assert output.text == "".join(pieces)[: "".join(pieces).index(pieces[3])]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, pieces[3])


def test_a_stop_string_across_tokens(llm):
    """A stop that begins in one token and ends in a later one, in the middle of both."""
    pieces = [text_of(llm, [token]) for token in GREEDY]
    stop = pieces[2][-1:] + pieces[3] + pieces[4][:2]
    whole = "".join(pieces)
    cut = whole.index(stop)
    output = one(llm, count=20, stop=["never comes", stop])
    assert output.text == whole[:cut]
    taken = next(i for i in range(1, len(pieces)) if stop in "".join(pieces[:i]))
    assert output.token_ids == GREEDY[:taken]
    assert output.stop_reason == stop


def test_a_stop_in_the_prompt_does_not_stop(llm):
    """Only the output is searched."""
    assert len(one(llm, count=5, stop=[PROMPT]).token_ids) == 5


def test_seeds(llm):
    """A row's own seed gives its text wherever it stands; without one, the job's seed and the row's number do."""
    sampled = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    seeded = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=5)
    first, second, third = llm.generate([PROMPT] * 3, [sampled, seeded, seeded])
    assert second.token_ids == third.token_ids != first.token_ids
    assert (first.seed, second.seed) == (row_seed(0, 0), 5)
    derived = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=first.seed)
    assert llm.generate([PROMPT], derived)[0].token_ids == first.token_ids
    assert llm.generate([PROMPT] * 2, sampled)[1].token_ids != first.token_ids


def test_the_engine_seed():
    """Another job seed, other texts; the same one, the same texts."""
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    texts = [
        LLM(device="cpu", dtype="float32", pool_size="512tok", seed=seed).generate(PROMPT, params)[0].text
        for seed in (0, 1, 1)
    ]
    assert texts[0] != texts[1] == texts[2]


def test_params_are_not_changed(llm):
    """One SamplingParams serves many calls; nor may a prompt's list grow by the output."""
    params, ids = greedy(3, stop=["zz"]), list(IDS)
    llm.generate([ids, ids], params)
    assert params == greedy(3, stop=["zz"])
    assert ids == IDS


def test_times_are_in_order(llm):
    """Queue time, first token, end: all counted from the arrival."""
    for output in llm.generate([PROMPT] * 12, greedy(6)):
        assert 0 <= output.queue_s <= output.ttft_s <= output.latency_s


def test_an_exception_in_the_middle_leaves_the_llm_usable(llm, monkeypatch):
    """Blocks and requests of a broken call must not stay behind: the next one would fail or wait for ever."""
    with monkeypatch.context() as patched:
        execute, calls = llm.engine.runner.execute, []

        def failing(scheduled):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return execute(scheduled)

        patched.setattr(llm.engine.runner, "execute", failing)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 12, greedy(8))
    assert llm.engine.num_unfinished == 0
    llm.engine.scheduler.blocks.check_integrity()
    assert one(llm).token_ids == GREEDY[:8]


@pytest.mark.parametrize("calls", [2, 14])
def test_an_exception_among_the_tokens_leaves_the_llm_usable(llm, monkeypatch, calls):
    """What had ended in that step was given up a second time: a KeyError, and an LLM that was broken for good."""
    push, left = llm._outputs.push, [None] * calls

    def failing(request_id, token):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return push(request_id, token)

    with monkeypatch.context() as patched:
        patched.setattr(llm._outputs, "push", failing)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 12, SamplingParams(max_tokens=2, ignore_eos=True))
    assert llm.engine.num_unfinished == 0
    llm.engine.scheduler.blocks.check_integrity()
    assert llm.engine.scheduler.blocks.num_used == 0
    assert one(llm).token_ids == GREEDY[:8]


def test_a_mistake_while_adding_leaves_the_llm_usable(llm):
    """Something that is no SamplingParams among the parameters: an exception, and nothing left in line."""
    with pytest.raises(UserError, match="sampling_params"):
        llm.generate([PROMPT] * 2, [greedy(), {"max_tokens": 3}])
    assert one(llm).token_ids == GREEDY[:8]


def test_special_tokens_are_plain_text_by_default(llm):
    """A prompt from anywhere must not be able to end the text; a job may allow it."""
    text = "<|endoftext|>CHAPTER 1."
    plain = one(llm, text, count=1)
    assert EOS not in plain.prompt_token_ids
    assert text_of(llm, plain.prompt_token_ids) == text
    assert llm.add(0, text, greedy(1), allow_special_tokens=True) is None
    while llm.engine.num_unfinished:
        finished, _ = llm.step()
    assert finished[0].prompt_token_ids == CASES[11]["prompt_ids"]


def test_add_and_step_stream_results(llm):
    """Jobs feed a live engine: results come as they finish, and requests may join at any time."""
    assert llm.add(7, PROMPT, greedy(2)) is None
    done = {}
    for step in range(20):
        if step == 1:
            assert llm.add(3, IDS, greedy(5)) is None
            assert llm.add(4, "", greedy(5)).finish_reason is FinishReason.ERROR
        finished, out = llm.step()
        done.update({output.request_id: step for output in finished})
        assert out.stats.num_finished == len(finished)
        if not llm.engine.num_unfinished:
            break
    assert list(done) == [7, 3]


def test_abort_all(llm):
    """Waiting and running requests are given up and named; their ids are free again."""
    for i in range(11):
        llm.add(i, PROMPT, greedy(5))
    llm.step()
    assert llm.abort_waiting() == {8, 9, 10}
    assert llm.abort_all() == set(range(8))
    assert llm.engine.scheduler.blocks.num_used == 0
    assert one(llm).token_ids == GREEDY[:8]


def test_unknown_settings_and_models_are_refused(tmp_path):
    """A typo must not be taken for a default."""
    with pytest.raises(UserError, match="block_sise: no such setting of an LLM; did you mean block_size"):
        LLM(block_sise=1)
    with pytest.raises(UserError, match="foo: no such setting of an LLM; there are: device, "):
        LLM(foo=1)
    with pytest.raises(ConfigError, match="block_size=0"):
        LLM(block_size=0)
    with pytest.raises(UserError):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="pool_size=3"):
        LLM(device="cpu", pool_size=3)


def test_a_model_folder_or_preset_name():
    """The same model by its preset's name and by its folder."""
    for name in ("tiny", str(TINY)):
        assert one(LLM(name, device="cpu", dtype="float32", pool_size="512tok")).token_ids == GREEDY[:8]


def test_prompts_may_come_from_a_generator(llm):
    """A look at the first prompt that takes it away."""
    outs = llm.generate((prompt for prompt in [PROMPT, "Call me", PROMPT]), greedy(8))
    assert [out.prompt for out in outs] == [PROMPT, "Call me", PROMPT]
    with pytest.raises(UserError, match="prompts must be"):
        llm.generate(None, greedy(8))


def test_a_model_folder_may_be_a_path():
    """`LLM(Path("models/mine"))` ending in an AttributeError."""
    assert LLM(TINY, pool_size="512tok").plan.network.vocab_size == 4096
