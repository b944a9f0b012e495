"""engine=http: the job runner in front of a server, ours and one that fails in every way."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ember.run import main
from ember.runners import openai_client
from tests.serving.conftest import RunningServer

PROMPTS = Path(__file__).resolve().parents[2] / "jobs" / "prompts" / "sample.jsonl"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(job_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job logs into its folder: taken off again, or a later test's lines would go there."""
    monkeypatch.setattr(openai_client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    handlers, level = list(logging.root.handlers), logging.root.level
    yield
    logging.root.handlers, logging.root.level = handlers, level


def rows(output: str) -> list[dict]:
    return (
        pq.read_table(f"{output}/completions")
        .sort_by([("row_index", "ascending"), ("sample_index", "ascending")])
        .to_pylist()
    )


@pytest.mark.serve
@pytest.mark.parametrize(
    "sampling",
    [["sampling.max_tokens=16"], ["sampling=creative", "sampling.n=3", "sampling.max_tokens=24", "seed=5", "limit=8"]],
)
def test_rows_are_those_of_a_local_job(server: RunningServer, sampling: list[str], capsys) -> None:
    """Seeds, sample numbers and stop reasons must survive the way over the wire; of the cache nothing is known."""
    words = [f"data={PROMPTS}", "progress=false", *sampling]
    assert main([*words, "output=far", "engine=http", f"base_url={server.url}/v1"]) == 0
    assert "KV blocks" not in capsys.readouterr().out
    assert main([*words, "output=near"]) == 0
    assert "KV blocks" in capsys.readouterr().out
    own = {"num_cached_tokens", "num_preemptions", "queue_s", "ttft_s", "latency_s"}
    far, near = ([{k: v for k, v in row.items() if k not in own} for row in rows(name)] for name in ("far", "near"))
    assert far == near
    assert pq.read_table("far/steps").num_rows == 0
    fingerprint = json.loads(Path("far/manifest.json").read_text())["fingerprint"]
    assert (fingerprint["base_url"], fingerprint["served_model"]) == (f"{server.url}/v1", "tiny")


class FakeServer:
    """Answers with what `reply` makes of a body: (status, headers, bytes), or None to cut the connection."""

    def __init__(self, reply) -> None:
        self.reply, self.lock = reply, threading.Lock()
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        self.in_flight = self.most_in_flight = 0
        self.models = ["m"]


def text_of(prompt: str) -> str:
    return prompt[::-1]


def answer(body: dict) -> tuple[int, dict, bytes]:
    choices = [{"index": i, "text": text_of(body["prompt"]), "finish_reason": "stop"} for i in range(body.get("n", 1))]
    usage = {"prompt_tokens": 3, "completion_tokens": 7 * len(choices)}
    return 200, {}, json.dumps({"choices": choices, "usage": usage}).encode()


def failure(status: int, **headers: str):
    return status, headers, b'{"error": {"message": "no"}}'


@contextmanager
def fake(reply) -> Iterator[tuple[FakeServer, str]]:
    state = FakeServer(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {}, json.dumps({"data": [{"id": name} for name in state.models]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.bodies.append(body)
                state.keys.add(self.headers["Authorization"])
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            made = state.reply(body)
            with state.lock:
                state.in_flight -= 1
            if made is None:
                self.close_connection = True
            else:
                self._send(*made)

        def _send(self, status: int, headers: dict, data: bytes) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        try:
            yield state, f"http://127.0.0.1:{httpd.server_port}/v1"
        finally:
            httpd.shutdown()


def run(url: str, *words: str, output: str = "out") -> int:
    return main([f"output={output}", "engine=http", f"base_url={url}", "progress=false", *words])


def write_prompts(count: int) -> list[str]:
    prompts = [f"prompt {i}" for i in range(count)]
    Path("many.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    return prompts


def test_passing_failures_are_tried_again() -> None:
    """Each first try of a row fails in its own way."""
    ways = [
        failure(429, **{"Retry-After": "0"}),
        failure(503),
        failure(500),
        (200, {}, b"<html>"),
        (200, {}, b""),
        (502, {}, b"Bad Gateway"),
        None,
    ]
    prompts = write_prompts(40)
    seen: set[str] = set()
    lock = threading.Lock()

    def reply(body: dict):
        with lock:
            first = body["prompt"] not in seen
            seen.add(body["prompt"])
        return ways[prompts.index(body["prompt"]) % len(ways)] if first else answer(body)

    with fake(reply) as (server, url):
        assert run(url, "data=many.jsonl", "concurrency=5") == 0
        assert server.most_in_flight <= 5
    assert [row["completion"] for row in rows("out")] == [text_of(prompt) for prompt in prompts]
    assert len(server.bodies) == 80
    assert {(row["num_prompt_tokens"], row["num_output_tokens"]) for row in rows("out")} == {(3, 7)}


def hostile(**odd):
    """An answer with one value that no output has a place for."""
    choice = {"index": 0, "text": "x", "finish_reason": "stop", **odd}
    return 200, {}, json.dumps({"choices": [choice], "usage": {"prompt_tokens": 2**40}}).encode()


def test_what_a_server_says_beside_the_text_is_kept_if_it_can_be() -> None:
    """A count beyond an int32, or a stop reason that is no text, ended the whole job."""
    write_prompts(2)
    with fake(lambda body: hostile(stop_reason="\ud800")) as (_, url):
        assert run(url, "data=many.jsonl") == 0
    assert [(row["completion"], row["stop_reason"], row["num_prompt_tokens"]) for row in rows("out")] == [
        ("x", "\\ud800", 0)
    ] * 2


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (failure(400), "refused: "),
        ((400, {}, b'{"error": {"message": "long", "code": "context_length_exceeded"}}'), "prompt_too_long: "),
        (failure(500), "server_error: "),
        ((200, {}, b'{"choices": []}'), "bad_answer: "),
        ((200, {}, b'{"choices": [{"index": 0, "finish_reason": "stop"}]}'), "bad_answer: "),
        ((200, {}, b'{"choices": [{"index": 0, "text": "x", "finish_reason": "content_filter"}]}'), "bad_answer: "),
        (hostile(index=[]), "bad_answer: "),
        (hostile(text="\ud800"), "bad_answer: "),
        (hostile(token_ids=["a", None]), "bad_answer: "),
        (hostile(token_ids=[2**70]), "bad_answer: "),
        (hostile(prompt_token_ids=[-1]), "bad_answer: "),
    ],
)
def test_a_row_that_the_server_cannot_answer_costs_that_row(reply, said: str) -> None:
    prompts = write_prompts(4)

    def make(body: dict):
        return reply if body["prompt"] == prompts[2] else answer(body)

    with fake(make) as (_, url):
        assert run(url, "data=many.jsonl", "max_retries=1") == 3
    errors = [row["error"] for row in rows("out")]
    assert [error is None for error in errors] == [True, True, False, True]
    assert errors[2].startswith(said)


def test_a_server_that_goes_away_ends_the_job_which_goes_on_later(capsys: pytest.CaptureFixture[str]) -> None:
    """An outage must not become a file of error rows."""
    prompts = write_prompts(30)
    calls = iter(range(1000))

    def dying(body: dict):
        return answer(body) if next(calls) < 12 else failure(503)

    with fake(dying) as (server, url):
        assert run(url, "data=many.jsonl", "max_retries=1", "concurrency=2") == 1
        assert "the same command goes on when the server is back" in capsys.readouterr().err
        assert 10 <= len(rows("out")) <= 12
        server.reply = answer
        assert run(url, "data=many.jsonl", "concurrency=2") == 0
    assert [row["completion"] for row in rows("out")] == [text_of(prompt) for prompt in prompts]
    assert not any(row["error"] for row in rows("out"))


def test_what_ends_a_job_is_said_once(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """Rows that were still asked for failed when the connections closed: a traceback each, and a wrong reason."""
    prompts = write_prompts(12)
    over = threading.Event()

    def reply(body: dict):
        if body["prompt"] == prompts[3]:
            return failure(429)
        over.wait(10)
        return None

    with fake(reply) as (_, url):
        try:
            assert run(url, "data=many.jsonl", "max_retries=0", "concurrency=8") == 1
        finally:
            over.set()
    gc.collect()
    captured = capsys.readouterr()
    said = "".join([captured.err, captured.out, caplog.text, *(log.read_text() for log in Path().rglob("*.log"))])
    assert "status 429: no (1 tries)" in captured.err
    assert captured.err.count("\n") == 1
    assert not any(word in said for word in ("isconnected", "Traceback", "never retrieved"))


def test_another_server_or_model_is_another_job(capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of two models must not mix in one output."""
    write_prompts(2)
    with fake(answer) as (server, url):
        assert run(url, "data=many.jsonl") == 0
        server.models = ["m", "other"]
        assert run(url, "data=many.jsonl", "served_model=other", "limit=5") == 2
        assert "served_model" in capsys.readouterr().err


def test_the_key_is_sent_and_kept_nowhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_prompts(2)
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with fake(answer) as (server, url):
        assert run(url, "data=many.jsonl", "api_key_variable=MY_KEY") == 0
        assert server.keys == {"Bearer sk-secret"}
    assert not [p for p in Path().rglob("*") if p.is_file() and b"sk-secret" in p.read_bytes()]
    assert "sk-secret" not in "".join(capsys.readouterr())


def test_an_output_form_is_sent_as_servers_spell_it() -> None:
    write_prompts(1)
    with fake(answer) as (server, url):
        assert run(url, "data=many.jsonl", "sampling.choice=[a,b]") == 0
        assert run(url, "data=many.jsonl", "sampling.logprobs=1", output="other") == 3
    assert [body["structured_outputs"] for body in server.bodies] == [{"choice": ["a", "b"]}]
    assert "engine=http keeps no log-probabilities" in rows("other")[0]["error"]


def test_chats_go_to_the_chat_endpoint() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    Path("chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")

    def reply(body: dict):
        choice = {"index": 0, "message": {"role": "assistant", "content": ", hi"}, "finish_reason": "stop"}
        return 200, {}, json.dumps({"choices": [choice]}).encode()

    with fake(reply) as (server, url):
        assert run(url, "data=chats.jsonl") == 0
    assert server.bodies[0]["messages"] == messages
    assert server.bodies[0]["continue_final_message"] is True
    assert rows("out")[0]["completion"] == ", hi"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "base_url=null: must be a server's URL"),
        (["base_url=localhost:8000"], "must be a server's URL"),
        (["base_url=http://me:pw@host/v1"], "base_url=host: must be a server's URL"),
        (["base_url=http://127.0.0.1:9/v1"], "base_url=http://127.0.0.1:9/v1: no answer: "),
        (["base_url=http://x/v1", "model=gpt2"], "model=gpt2: engine=http takes served_model"),
        (
            ["base_url=http://x/v1", "dtype=bfloat16", "block_size=32", "seed=3"],
            "dtype=bfloat16: is the server's to decide: leave dtype, block_size out with engine=http",
        ),
        (["base_url=http://x/v1", "runner=ray"], "runner=ray: engine=http needs runner=local"),
        (["base_url=http://x/v1", "sampling.max_tokens=null"], "sampling.max_tokens=null: engine=http needs a number"),
        (["base_url=http://x/v1", "concurrency=0"], "concurrency=0"),
        (["engine=local", "base_url=http://x/v1"], "base_url=http://x/v1: needs engine=http"),
    ],
)
def test_a_wrong_setting_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data=prompts.jsonl", "output=out", "engine=http", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert "pw" not in error


def test_a_model_must_be_chosen_among_several(capsys: pytest.CaptureFixture[str]) -> None:
    with fake(answer) as (server, url):
        server.models = ["a", "b"]
        assert run(url, "data=prompts.jsonl") == 2
        assert "served_model=null: choose one of the server's models: a, b" in capsys.readouterr().err
        assert run(url, "data=prompts.jsonl", "served_model=b", "dry_run=true") == 0
        assert run(url, "data=prompts.jsonl", "served_model=b") == 0
    assert {body["model"] for body in server.bodies} == {"b"}
