"""`format=openai_batch`: request lines of OpenAI's Batch API as rows."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.data.reader import PromptReader
from ember.errors import UserError

BODY = {"model": "gpt-3.5-turbo-instruct", "prompt": "Hello"}
LINE = {"custom_id": "r1", "method": "POST", "url": "/v1/completions", "body": BODY}


def write(path, *rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path, **config):
    reader = PromptReader(JobConfig(data=path, **({"format": "openai_batch"} | config)))
    return reader, list(reader.rows())


def one(tmp_path, *, line=(), **body):
    """The row of one request whose body has these keys too."""
    return read(write(tmp_path / "a.jsonl", {**LINE, "body": BODY | body, **dict(line)}))[1][0]


def test_request_lines_are_rows(tmp_path):
    """OpenAI's own example needed a template, a mapping of columns and other names for the settings."""
    asked = {
        "max_tokens": 16,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["\n"],
        "seed": 7,
        "top_k": 3,
        "min_p": None,
        "n": 2,
    }
    rows_in = [
        {**LINE, "body": BODY | asked | {"user": "u", "metadata": {"k": "v"}, "store": True, "echo": False}},
        {**LINE, "custom_id": "r2", "body": {"model": "m", "prompt": [1, 2], "max_completion_tokens": 5, "stop": "x"}},
    ]
    reader, rows = read(write(tmp_path / "a.jsonl", *rows_in))
    assert [(row.id, row.prompt, row.error) for row in rows] == [("r1", "Hello", None), ("r2", [1, 2], None)]
    assert rows[0].sampling == {k: v for k, v in asked.items() if v is not None}
    assert rows[1].sampling == {"max_tokens": 5, "stop": "x"}
    assert reader.schema == pa.schema({"method": pa.string(), "url": pa.string(), "model": pa.string()})
    assert rows[1].columns == {"method": "POST", "url": "/v1/completions", "model": "m"}
    assert not reader.warnings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_logprobs", 3),
        ("echo", True),
        ("suffix", "end"),
        ("stream", True),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "grammar"}),
        ("structured_outputs", {"structural_tag": "x"}),
        ("guided_json", {}),
    ],
)
def test_what_cannot_be_honoured_is_an_error_that_names_it(tmp_path, key, value):
    """A request with a penalty came back as if it had been served."""
    row = one(tmp_path, **{key: value})
    assert row.prompt is None and f"body.{key}" in row.error
    assert row.id == "r1" and row.columns["model"] == BODY["model"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": False}, {}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"presence_penalty": 0.1, "frequency_penalty": -1}, {"presence_penalty": 0.1, "frequency_penalty": -1}),
        ({"logit_bias": {"50256": -100}}, {"logit_bias": {"50256": -100}}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json_schema": SCHEMA}),
    ],
)
def test_what_has_another_name_is_translated(tmp_path, body, sampling):
    """A chat's `logprobs` is true, a completion's a number; a schema hides two levels down."""
    row = one(tmp_path, **body)
    assert (row.error, row.sampling) == (None, sampling)


@pytest.mark.parametrize(
    ("key", "value"),
    [("echo", False), ("presence_penalty", 0), ("frequency_penalty", 0.0),
     ("logit_bias", {}), ("stream", False), ("suffix", None), ("tools", []), ("unheard_of", None)],
)  # fmt: skip
def test_defaults_ask_for_nothing(tmp_path, key, value):
    """Clients write every key with its default; such rows were refused."""
    assert one(tmp_path, **{key: value}).error is None


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"custom_id": None}, "custom_id is missing"),
        ({"custom_id": 7}, "custom_id must be text"),
        ({"url": "/v1/embeddings"}, "url is /v1/embeddings"),
        ({"url": "/v1/chat/completions"}, "body.prompt does not belong to /v1/chat/completions"),
        ({"url": "/v1/chat/completions", "body": {"model": "m"}}, "body.messages is missing"),
        ({"url": "/v1/chat/completions", "body": {"messages": []}}, "body.messages is an empty list"),
        ({"method": "GET"}, "method is GET"),
        ({"body": None}, "body is missing"),
        ({"body": "x"}, "body is not an object"),
        ({"body": {"messages": [{"role": "user", "content": "x"}]}}, "body.prompt is missing"),
        ({"body": {"model": "m"}}, "body.prompt is missing"),
        ({"body": {"prompt": ["a", "b"]}}, "list of prompts"),
        ({"body": {"prompt": ""}}, "body.prompt is empty"),
        ({"body": {"prompt": "x", "max_tokens": 1, "max_completion_tokens": 2}}, "differ"),
        ({"body": {"prompt": "x", "stop": ["\ud800"]}}, "lone surrogate"),
        ({"model": "m"}, "model belongs into body"),
    ],
)
def test_each_bad_line_is_one_error_row(tmp_path, line, what):
    """One bad request stopped the batch, or ran with half of what it asked for."""
    row = one(tmp_path, line=line)
    assert row.prompt is None and what in row.error and row.error.isprintable()
    assert row.id == {"custom_id": "r1", **line}["custom_id"] if line.get("custom_id", "") != 7 else row.id == "7"


def test_chat_requests_are_conversations(tmp_path):
    """Requests for chat completions, which most batch files hold, were error rows."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    body = {"model": "m", "messages": messages, "max_completion_tokens": 3, "response_format": {"type": "text"}}
    _, rows = read(write(tmp_path / "a.jsonl", {**LINE, "url": "/v1/chat/completions", "body": body}))
    assert rows[0].error is None and rows[0].sampling == {"max_tokens": 3}
    assert [(m["role"], m["content"]) for m in rows[0].prompt.messages] == [("system", "Be brief."), ("user", "Hi")]


def test_broken_lines_and_other_keys(tmp_path):
    """A line that is no JSON shifted the rows; a key beside the request's own vanished."""
    path = write(tmp_path / "a.jsonl", {**LINE, "tag": 5})
    with open(path, "a") as file:
        file.write("nonsense\n" + json.dumps(LINE) + "\n")
    reader, rows = read(path)
    assert [row.error is None for row in rows] == [True, False, True]
    assert [row.columns["tag"] for row in rows] == [5, None, None]
    assert str(reader.schema.field("tag").type) == "int64"


def test_the_format_is_suggested_and_checked(tmp_path):
    """Request lines without the setting were error rows with a riddle for a reason; Parquet with it was a KeyError."""
    path = write(tmp_path / "a.jsonl", LINE)
    assert any("format=openai_batch" in warning for warning in read(path, format="auto")[0].warnings)
    other = write(tmp_path / "b.jsonl", {"prompt": "x"})
    assert "custom_id" in read(other)[0].warnings[0]
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=r"^format=openai_batch: .*Parquet"):
        read(str(tmp_path / "c.parquet"))


@pytest.mark.parametrize(
    "config",
    [
        {"template": "{x}"},
        {"prompt_column": "p"},
        {"id_column": "i"},
        {"sampling_columns": {"seed": "s"}},
        {"chat": True},
        {"system": "s"},
        {"messages_column": "m"},
    ],
)
def test_settings_of_other_formats_are_refused(config):
    """A template was silently not used."""
    with pytest.raises(UserError, match=f"^{next(iter(config))}=.*openai_batch"):
        JobConfig(data="a.jsonl", format="openai_batch", **config)


def test_unknown_format():
    """A typo fell back to the default."""
    with pytest.raises(UserError, match=r"^format=openai: must be one of auto, openai_batch"):
        JobConfig(data="a.jsonl", format="openai")
