"""Chats through the openai package, on the embedded model with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ember import LLM, SamplingParams
from tests.serving.conftest import RunningServer

openai = pytest.importorskip("openai", reason="needs the serve extra")
pytestmark = pytest.mark.serve

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Call me"}]
PARAMS = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(chat_server: RunningServer):
    return openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client) -> str:
    return next(iter(client.models.list())).id


@pytest.fixture(scope="module")
def offline(chat_model: Path):
    llm = LLM(chat_model, num_threads=1, max_model_len=256, pool_size=512)
    return llm.chat(MESSAGES, SamplingParams(max_tokens=12, logprobs=2))[0]


def test_an_answer_is_the_offline_one(client, model, offline) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **PARAMS)
    assert answer.choices[0].message.content == offline.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(offline.prompt_token_ids)


def test_the_pieces_of_a_stream_make_it_too(client, model, offline) -> None:
    stream = client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **PARAMS)
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == offline.text
    assert choices[-1].finish_reason == offline.finish_reason


def test_log_probabilities(client, model, offline) -> None:
    """A stream's must be those of its pieces, none lost where text is held back."""
    ask = {"model": model, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stop": [" zzz"], **PARAMS}
    whole = client.chat.completions.create(**ask).choices[0].logprobs.content
    pieces = [c.choices[0].logprobs for c in client.chat.completions.create(stream=True, **ask)]
    streamed = [entry for piece in pieces if piece is not None for entry in piece.content]
    assert streamed == whole
    assert [entry.logprob for entry in whole] == [next(iter(p.values())).logprob for p in offline.logprobs]
    assert all(len(entry.top_logprobs) == 2 for entry in whole)


def test_an_answer_in_a_form(client, model) -> None:
    """`response_format` as OpenAI's clients send it; a schema that is none is named."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    ask = {"model": model, "messages": MESSAGES, **PARAMS}
    assert json.loads(_content(client, ask | {"response_format": form}))["a"] in (True, False)
    assert _content(client, ask | {"extra_body": {"structured_outputs": {"choice": ["no", "yes"]}}}) in ("no", "yes")
    with pytest.raises(openai.BadRequestError, match="look-around"):
        _content(client, ask | {"extra_body": {"structured_outputs": {"regex": "(?=a)"}}})


def _content(client, ask) -> str:
    return client.chat.completions.create(**ask).choices[0].message.content


def test_the_assistants_last_message_is_continued(client, model) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Ish"}]
    ask = {"model": model, "messages": messages, **PARAMS}
    plain = client.chat.completions.create(**ask)
    flagged = client.chat.completions.create(
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}, **ask
    )
    assert plain.choices[0].message.content == flagged.choices[0].message.content
    assert len(flagged.choices[0].token_ids) == 12
    with pytest.raises(openai.BadRequestError, match="add_generation_prompt"):
        client.chat.completions.create(extra_body={"add_generation_prompt": True}, **ask)


def test_variables_of_the_template_come_with_the_request(client, model) -> None:
    """vLLM's extension; a control token that they spell must stay text, as in messages."""

    def ids(**kwargs: object) -> list[int]:
        extra = {"return_token_ids": True, **({"chat_template_kwargs": kwargs} if kwargs else {})}
        answer = client.chat.completions.create(model=model, messages=MESSAGES, extra_body=extra, **PARAMS)
        return answer.choices[0].prompt_token_ids

    plain, opened, spelled = ids(), ids(opening="Hello"), ids(opening="<|endoftext|>")
    assert opened[-len(plain) :] == plain != opened
    assert spelled[-len(plain) :] == plain
    assert plain[0] not in spelled[: -len(plain)]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (["x"], "chat_template_kwargs must be an object"),
        ("x", "chat_template_kwargs must be an object"),
        ({"messages": []}, "chat_template_kwargs may not hold messages"),
        ({"add_generation_prompt": False}, "chat_template_kwargs may not hold add_generation_prompt"),
    ],
)
def test_wrong_variables_are_a_400(client, model, kwargs, said) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(
            model=model, messages=MESSAGES, extra_body={"chat_template_kwargs": kwargs}, **PARAMS
        )


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is an empty list"),
        ([{"role": "pirate", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": "word " * 1000}], "max_model_len"),
        ([{"role": "user", "content": ""}] * 20_000, "messages may hold 16384 at most"),
    ],
)
def test_wrong_messages_are_a_400(client, model, messages, said) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        client.chat.completions.create(model=model, messages=messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("extra", [{"tools": [{"type": "function"}]}, {"echo": True}, {"logprobs": 3}, {"n": 2}])
def test_what_is_not_supported_is_named(client, model, extra) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(extra))):
        client.chat.completions.create(model=model, messages=MESSAGES, extra_body=extra)


def test_a_model_without_a_template_says_so(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=MESSAGES)
