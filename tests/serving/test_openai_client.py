"""The server through the openai package, a client that we did not write."""

from __future__ import annotations

import asyncio
import json

import pytest

from ember import LLM, SamplingParams
from tests.serving.conftest import ROOT, RunningServer

openai = pytest.importorskip("openai", reason="needs the serve extra")
pytestmark = pytest.mark.serve

PROMPTS = ["The capital of France is", "Call me Ishmael.", "A whale is", "日本語 and 🐳🐳", "x"]
PARAMS = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(server: RunningServer):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline():
    llm = LLM(num_threads=1)
    return llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))


def test_a_completion_is_the_offline_one(client, offline) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPTS[0], **PARAMS)
    assert answer.choices[0].text == offline[0].text
    assert answer.choices[0].finish_reason == offline[0].finish_reason
    assert answer.usage.prompt_tokens == len(offline[0].prompt_token_ids)
    assert answer.usage.completion_tokens == len(offline[0].token_ids)


def test_many_prompts_answer_in_their_order(client, offline) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPTS, **PARAMS)
    assert [c.index for c in answer.choices] == list(range(len(PROMPTS)))
    assert [c.text for c in answer.choices] == [o.text for o in offline]


def test_n_choices_a_prompt_are_drawn_as_offline(client) -> None:
    """Choice i * n + j is sample j of prompt i; a stream tells its choices apart."""
    params = {"temperature": 1.0, "seed": 11, "n": 3, "max_tokens": 12}
    offline = LLM(num_threads=1).generate(PROMPTS[:2], SamplingParams(**params))
    expected = [done.text for output in offline for done in output.outputs]
    whole = client.completions.create(model="tiny", prompt=PROMPTS[:2], **params)
    assert [(c.index, c.text) for c in whole.choices] == list(enumerate(expected))
    texts = [""] * 6
    for chunk in client.completions.create(model="tiny", prompt=PROMPTS[:2], stream=True, **params):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_the_best_of_several(client) -> None:
    """Sequences that are drawn beside the choices must not end the engine's thread."""
    params = {"temperature": 1.0, "seed": 11, "best_of": 4, "max_tokens": 8}
    (offline,) = LLM(num_threads=1).generate(PROMPTS[:1], SamplingParams(**params))
    assert client.completions.create(model="tiny", prompt=PROMPTS[0], **params).choices[0].text == offline.text
    with pytest.raises(openai.BadRequestError, match="stream"):
        client.completions.create(model="tiny", prompt=PROMPTS[0], stream=True, **params)
    one = client.completions.create(model="tiny", prompt=PROMPTS[0], stream=True, **{**params, "best_of": 1})
    assert "".join(chunk.choices[0].text for chunk in one)


def test_the_model_is_found_by_its_id(client) -> None:
    assert client.models.retrieve("tiny") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="org/other"):
        client.models.retrieve("org/other")


def test_token_ids_are_prompts_too(client, offline) -> None:
    ids = [o.prompt_token_ids for o in offline]
    one = client.completions.create(model="tiny", prompt=ids[1], **PARAMS)
    many = client.completions.create(model="tiny", prompt=ids, **PARAMS)
    assert one.choices[0].text == offline[1].text
    assert [c.text for c in many.choices] == [o.text for o in offline]


def test_the_pieces_of_a_stream_make_the_offline_text(client, offline) -> None:
    """A character of several tokens, cut at each, would come as U+FFFD."""
    texts = [""] * len(PROMPTS)
    ends: dict[int, str] = {}
    stream = client.completions.create(
        model="tiny", prompt=PROMPTS, stream=True, stream_options={"include_usage": True}, **PARAMS
    )
    for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
        usage = chunk.usage
    assert texts == [o.text for o in offline]
    assert ends == {i: o.finish_reason for i, o in enumerate(offline)}
    assert usage.completion_tokens == sum(len(o.token_ids) for o in offline)


def test_a_stop_string_never_shows(client, offline) -> None:
    """The beginning of a stop string must be held back until it is known not to be one."""
    whole = offline[0].text
    stop = whole[12:20]
    stream = client.completions.create(model="tiny", prompt=PROMPTS[0], stream=True, stop=[stop, "never"], **PARAMS)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(c.text for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"


def test_echo_puts_the_prompt_first(client, offline) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPTS[0], echo=True, **PARAMS)
    stream = client.completions.create(model="tiny", prompt=PROMPTS[0], echo=True, stream=True, **PARAMS)
    assert whole.choices[0].text == PROMPTS[0] + offline[0].text
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_log_probabilities(client) -> None:
    """With echo those of the prompt come first, nothing before its first token; offsets point into the text."""
    params = {"temperature": 0, "max_tokens": 6}
    (offline,) = LLM(num_threads=1).generate(PROMPTS[:1], SamplingParams(**params, logprobs=1, prompt_logprobs=1))
    own = [next(iter(position.values())).logprob for position in offline.logprobs]
    prompt = [position and next(iter(position.values())).logprob for position in offline.prompt_logprobs]
    ask = {"model": "tiny", "prompt": PROMPTS[0], "logprobs": 1, **params}
    whole = client.completions.create(**ask).choices[0].logprobs
    assert whole.token_logprobs == own
    pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **ask)]
    assert [p for piece in pieces for p in piece.token_logprobs] == own
    assert [p for piece in pieces for p in piece.text_offset] == whole.text_offset
    echoed = client.completions.create(echo=True, **ask).choices[0]
    assert echoed.logprobs.token_logprobs == [*prompt, *own]
    for token, offset in zip(echoed.logprobs.tokens, echoed.logprobs.text_offset, strict=True):
        assert echoed.text[offset:].startswith(token)
    scored = client.completions.create(**{**ask, "max_tokens": 0}, echo=True).choices[0]
    assert (scored.text, scored.logprobs.token_logprobs) == (PROMPTS[0], prompt)


def test_penalties_and_biases_are_those_of_a_job(client) -> None:
    params = {"temperature": 0, "max_tokens": 16, "presence_penalty": 1.5, "logit_bias": {"257": -100, "696": 5}}
    (offline,) = LLM(num_threads=1).generate(PROMPTS[:1], SamplingParams(**params))
    assert client.completions.create(model="tiny", prompt=PROMPTS[0], **params).choices[0].text == offline.text


def test_a_seed_fixes_the_draw(client) -> None:
    ask = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 16, "seed": 7}
    first, second = (client.completions.create(**ask).choices[0].text for _ in range(2))
    assert first == second


def test_the_async_client(server: RunningServer, offline) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            whole = await client.completions.create(model="tiny", prompt=PROMPTS[0], **PARAMS)
            stream = await client.completions.create(model="tiny", prompt=PROMPTS[1], stream=True, **PARAMS)
            return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(ask()) == (offline[0].text, offline[1].text)


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_mistakes_raise_the_clients_own_errors(client) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="suffix") as caught:
        client.completions.create(model="tiny", prompt="x", suffix="y")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.BadRequestError, match="max_model_len") as caught:
        client.completions.create(model="tiny", prompt="word " * 1000)
    assert caught.value.code == "context_length_exceeded"


def test_64_streams_at_once_have_the_answers_of_an_offline_job(server: RunningServer) -> None:
    """Batches of any company: no token may change, and none be lost or change places on its way to its client."""
    lines = (ROOT / "jobs" / "prompts" / "humaneval.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    params = {"temperature": 0, "max_tokens": 12}
    offline = LLM().generate(prompts, SamplingParams(**params))
    left = iter(range(len(prompts)))
    answers: dict[int, str] = {}

    async def ask(client, index: int) -> str:
        try:
            answer = await client.completions.create(model="tiny", prompt=prompts[index], stream=True, **params)
        except openai.BadRequestError as error:
            return error.body["message"]
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> None:
                for index in left:
                    answers[index] = await ask(client, index)

            await asyncio.gather(*(one() for _ in range(64)))

    asyncio.run(run())
    assert [answers[i] for i in range(len(prompts))] == [o.text or o.error for o in offline]
    assert sum(o.error is not None for o in offline) == 4
