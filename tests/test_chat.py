"""Chat from the outside: jobs and the Python API on the embedded model with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ember import LLM, SamplingParams
from ember.config import JobConfig, ModelConfig
from ember.core.sequence import FinishReason
from ember.data.reader import PromptReader
from ember.errors import UserError
from ember.job import run_job
from ember.sampling_params import SamplingParams as Params
from tests.chat_models import chat_folder

SHORT = SamplingParams(max_tokens=3)
USER = {"role": "user", "content": "Call me"}
EOT = 4094


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def job(folder: Path, data: str, output: Path, **settings):
    model = ModelConfig(path=str(folder))
    settings = {"sampling": Params(max_tokens=3), "progress": False, "pool_size": "2048tok", **settings}
    summary = run_job(JobConfig(model=model, data=data, output=str(output), **settings))
    return summary, pq.read_table(output / "completions").sort_by("row_index").to_pylist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat") / "model")


def test_a_prompt_as_a_user_message(tmp_path: Path, folder: Path) -> None:
    """Instruct models got bare prompts, which they continue instead of answering."""
    data = write(tmp_path / "a.jsonl", {"prompt": "Call me", "topic": "sea"}, {"prompt": [1, 2]})
    summary, rows = job(folder, data, tmp_path / "out", chat=True, system="Be\\nbrief.")
    assert rows[0]["prompt"] == "<|endoftext|>system: Be\nbrief.\n<|endoftext|>user: Call me\n<|endoftext|>assistant:"
    assert rows[0]["prompt_token_ids"].count(rows[0]["prompt_token_ids"][0]) == 3
    assert rows[0]["num_output_tokens"] == 3 and json.loads(rows[0]["input_prompt"]) == "Call me"
    assert "token ids; chat=true needs text" in rows[1]["error"]
    assert summary.exit_code == 3


def test_rows_with_messages(tmp_path: Path, folder: Path) -> None:
    """Conversations needed a template of one's own, which can't do them."""
    chat = [USER, {"role": "assistant", "content": "Ishmael"}]
    rows_in = [
        {"messages": [USER]},
        {"messages": chat},
        {"messages": 5},
        {"prompt": "The sea"},
        {"messages": [{"role": "x"}]},
    ]
    _, rows = job(folder, write(tmp_path / "a.jsonl", *rows_in), tmp_path / "out", system="S")
    assert rows[0]["prompt"] == "<|endoftext|>system: S\n<|endoftext|>user: Call me\n<|endoftext|>assistant:"
    assert rows[1]["prompt"].endswith("<|endoftext|>assistant: Ishmael")
    assert rows[3]["prompt"] == "The sea"
    assert "messages is a number" in rows[2]["error"] and "messages[0].role" in rows[4]["error"]
    assert json.loads(rows[0]["messages"]) == [USER]


def test_messages_of_parquet_and_another_column(tmp_path: Path) -> None:
    """A list of structs, whose missing members are nulls, is what datasets of conversations are kept in."""
    table = pa.table({"prompt": ["p"], "chat": [[{**USER, "name": None}]], "id": ["a"]})
    pq.write_table(table, tmp_path / "a.parquet")
    row = next(PromptReader(JobConfig(data=str(tmp_path / "a.parquet"), messages_column="chat")).rows())
    assert row.prompt.messages == (USER,) and row.columns["input_prompt"] == "p"
    with pytest.raises(UserError, match=r"^messages_column=talk: no row has this column"):
        PromptReader(JobConfig(data=str(tmp_path / "a.parquet"), messages_column="talk"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"chat": True, "messages_column": "m"}, "messages_column=m"),
        ({"template": "{prompt}", "messages_column": "m"}, "messages_column=m"),
        ({"chat_date": "26 Jul 2024"}, "chat_date=26 Jul 2024: must be a date"),
        ({"chat_date": "2024-02-30"}, "chat_date"),
        ({"chat": 1}, "chat=1"),
    ],
)
def test_settings_that_contradict(settings: dict, says: str) -> None:
    """One of two settings was silently not used."""
    with pytest.raises(UserError, match=says):
        JobConfig(data="a.jsonl", **settings)


def test_what_needs_chat_is_refused_without(tmp_path: Path, folder: Path) -> None:
    """A base model answered chats with a format of somebody else's, a system prompt went nowhere."""
    data = write(tmp_path / "a.jsonl", {"prompt": "x"})
    with pytest.raises(UserError, match=r"^chat=true: tiny has no chat template"):
        run_job(JobConfig(data=data, output=str(tmp_path / "out"), chat=True))
    with pytest.raises(UserError, match=r"^system=S: needs chat=true"):
        PromptReader(JobConfig(data=data, system="S"))
    _, rows = job(folder, data, tmp_path / "out", chat=True, template="Q: {prompt}")
    assert "user: Q: x\n" in rows[0]["prompt"]


def test_a_template_error_is_that_rows(tmp_path: Path) -> None:
    """A template that refuses one conversation ended the job."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    source = refuses + "{{ messages[0].content }}"
    folder = chat_folder(tmp_path / "model", source)
    data = write(tmp_path / "a.jsonl", {"messages": [{"role": "system", "content": "s"}]}, {"messages": [USER]})
    summary, rows = job(folder, data, tmp_path / "out")
    assert rows[0]["error"].startswith("chat_template: ") and rows[0]["error"].endswith("says: no system role")
    assert (rows[0]["finish_reason"], rows[1]["prompt"], summary.exit_code) == ("error", "Call me", 3)


def test_a_template_that_cannot_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    """A misspelt template failed row by row, all night."""
    folder = chat_folder(tmp_path / "model", "{% for m in messages %}{{ m.content }}")
    data = write(tmp_path / "a.jsonl", {"prompt": "x"})
    with pytest.raises(UserError, match=r"^chat=true: the chat template says: .*endfor"):
        job(folder, data, tmp_path / "out", chat=True)
    mine = tmp_path / "mine.jinja"
    mine.write_text("{{ messages[0].content")
    with pytest.raises(UserError, match=rf"^chat_template={mine}: the chat template says: "):
        job(folder, data, tmp_path / "out", chat=True, chat_template=str(mine))


def test_openai_batch_of_chats_in_and_out(tmp_path: Path, folder: Path) -> None:
    """Lines of a chat batch came back as text completions, which clients can't read."""
    line = {
        "custom_id": "r",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [USER]},
    }
    settings = {"format": "openai_batch", "output_format": "openai_batch", "sampling": Params(max_tokens=3)}
    model = ModelConfig(path=str(folder))
    output, data = tmp_path / "out", write(tmp_path / "a.jsonl", line)
    run_job(JobConfig(model=model, data=data, output=str(output), progress=False, pool_size="2048tok", **settings))
    answer = json.loads(next((output / "completions").iterdir()).read_text())
    body = answer["response"]["body"]
    assert (answer["custom_id"], body["object"]) == ("r", "chat.completion")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": answer["ember"][0]["completion"]}


def test_another_template_is_another_job(tmp_path: Path, folder: Path) -> None:
    """Going on with another system message would mix two datasets in one output."""
    data = write(tmp_path / "a.jsonl", {"prompt": "x"})
    job(folder, data, tmp_path / "out", chat=True)
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
    for changed in ({"system": "S"}, {"chat_date": "2024-07-26"}, {"chat_template": str(tmp_path / "t.jinja")}):
        with pytest.raises(UserError, match=f"holds results of another job.*{next(iter(changed))}"):
            job(folder, data, tmp_path / "out", chat=True, **changed)
    assert (
        job(folder, data, tmp_path / "other", chat=True, chat_template=str(tmp_path / "t.jinja"))[1][0]["prompt"] == "x"
    )


def test_chat_from_python(folder: Path) -> None:
    """`LLM.chat` is what users of vLLM look for."""
    llm = LLM(folder, pool_size="2048tok")
    one = llm.chat([USER], SHORT)
    two = llm.chat([[USER], [USER, {"role": "assistant", "content": "Ish"}]], SHORT)
    assert one[0].prompt == two[0].prompt == "<|endoftext|>user: Call me\n<|endoftext|>assistant:"
    assert one[0].token_ids == two[0].token_ids and two[1].prompt.endswith("assistant: Ish")
    assert LLM(pool_size="2048tok").chat([USER], SHORT)[0].error_kind == "no_chat_template"
    with pytest.raises(UserError, match=r"messages\[0\]\.role"):
        llm.chat([{"content": "x"}], SHORT)


def test_the_tokenizers_eos_ends_an_answer(tmp_path: Path) -> None:
    """A folder whose config.json names the base model's EOS: answers ran on to max_tokens."""
    folder = chat_folder(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 5} if "model_type" in config else config))
    llm = LLM(folder, pool_size="2048tok")
    assert llm.plan.tokenizer.special["<|endoftext|>"] in llm.plan.eos_token_ids(is_chat=True)
    answer = llm.chat([USER], SamplingParams(max_tokens=2, min_tokens=1))[0]
    assert answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
