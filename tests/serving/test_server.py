"""The server as a process: its settings, who may call, how it stops."""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ember.entrypoints.llm import LLM
from ember.entrypoints.serve import serve
from ember.errors import UserError
from ember.model.chat_template import ChatTemplate
from ember.serving.http_server import HttpServer
from ember.serving.settings import ServerConfig
from tests.serving.conftest import RunningServer

LONG = {"prompt": "The sea", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


def ask(server: RunningServer, path: str, body: dict | None = None, **headers: str):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def test_settings_are_read_as_words_or_flags() -> None:
    words = ["model=gpt2", "--port", "9", "--block-size=32", "pool_size=4096tok", "cors_origins=[https://a.b]"]
    config = ServerConfig.from_words(words)
    assert (config.model.name, config.port, config.block_size, config.pool_size) == ("gpt2", 9, 32, "4096tok")
    assert config.cors_origins == ["https://a.b"]
    assert (config.host, config.model.path) == ("127.0.0.1", None)
    assert ServerConfig.from_words(["--model", "org/name@v1"]).model.path == "org/name@v1"
    assert ServerConfig.from_words(["api_key=123"]).api_key == "123"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prot=1"], "prot: no such setting"),
        (["port"], "port: settings are written key=value"),
        (["--port"], "--port: settings are written"),
        (["port=x"], "port=x: must be a whole number"),
        (["port=70000"], "port=70000: too large"),
        (["block_size=0"], "block_size=0"),
        (["api_key="], "api_key='': must be text"),
        (["data=x.jsonl"], "data: no such setting"),
        (["model=a", "model.path=b"], "model and model.path: give one of them"),
        (["max_queue=[1"], "max_queue=[1: can't be read"),
    ],
)
def test_a_wrong_setting_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        ServerConfig.from_words(words)
    assert serve(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve([f"port={port}"]) == 2
    assert f"error: port={port}: can't listen on 127.0.0.1: Address already in use" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ember.entrypoints.serve.find_spec", lambda name: None)
    assert serve([]) == 2
    assert capsys.readouterr().err == "error: serving needs fastapi: pip install 'ember-batch[serve]'\n"


@pytest.fixture(scope="module")
def small():
    """A server with a key and little room."""
    pytest.importorskip("fastapi", reason="needs the serve extra")
    words = ("max_num_seqs=2", "max_queue=1", "served_model=whale", "cors_origins=https://a.example", "grace_s=0.5")
    running = RunningServer(*words, EMBER_API_KEY="secret")
    yield running
    running.process.kill()
    running.wait()


@pytest.mark.serve
def test_strangers_are_expected_and_the_model_is_closed(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation on which the template runs for ever stopped all others; other ranks outlived the server."""
    order = []

    async def run(self: HttpServer, observer: object) -> int:
        order.append("serves")
        return 0

    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(ChatTemplate, "serve_strangers", lambda self: order.append("expects strangers"))
    monkeypatch.setattr(LLM, "close", lambda self: order.append("closed"))
    monkeypatch.setattr(HttpServer, "run", run)
    assert serve([f"model={chat_model}", "port=0", "max_model_len=256", "pool_size=512"]) == 0
    assert order == ["expects strangers", "serves", "closed"]


def test_without_the_key_only_health_answers(small: RunningServer) -> None:
    assert ask(small, "/health")[0] == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/none"):
        status, headers, body = ask(small, path)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert ask(small, path, Authorization="Bearer wrong")[0] == 401
    status, _, body = ask(small, "/v1/models", Authorization="Bearer secret")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "whale")
    assert ask(small, "/v1/completions", {"prompt": "x", "model": "tiny"}, Authorization="Bearer secret")[0] == 404


@pytest.mark.serve
def test_cross_origin_calls_only_from_where_allowed(small: RunningServer, server: RunningServer) -> None:
    mine = ask(small, "/health", Origin="https://a.example")[1]
    assert mine["Access-Control-Allow-Origin"] == "https://a.example"
    assert ask(small, "/health", Origin="https://b.example")[1]["Access-Control-Allow-Origin"] is None
    assert ask(server, "/health", Origin="https://a.example")[1]["Access-Control-Allow-Origin"] is None


@pytest.mark.serve
def test_more_choices_than_can_ever_be_open_are_400(small: RunningServer) -> None:
    """429 sends a client to try again, which can't help."""
    key = {"Authorization": "Bearer secret"}
    status, _, body = ask(small, "/v1/completions", {"prompt": "x", "n": 4}, **key)
    error = json.loads(body)["error"]
    assert (status, error["param"], error["code"]) == (400, "n", "too_many_choices")
    assert error["message"] == "n=4: a request may have 3 choices at most (max_num_seqs=2 and max_queue=1)"
    assert ask(small, "/v1/completions", {"prompt": ["x"] * 4}, **key)[0] == 400
    assert ask(small, "/v1/completions", {"prompt": "x", "n": 3, "max_tokens": 2}, **key)[0] == 200


def _values(metrics: str) -> str:
    return "\n".join(line for line in metrics.splitlines() if not line.startswith("#"))


@pytest.mark.serve
def test_a_full_queue_is_429_and_stopping_ends_every_stream(small: RunningServer) -> None:
    """One test, as its server is gone after it: three long streams, a fourth that finds no room, then SIGTERM."""
    key = {"Authorization": "Bearer secret"}
    ends: list[str] = []

    def stream() -> None:
        ends.append(ask(small, "/v1/completions", {**LONG, "stream": True}, **key)[2])

    clients = [threading.Thread(target=stream) for _ in range(3)]
    for client in clients:
        client.start()
    deadline = time.monotonic() + 30
    while "ember_requests_running 2.0\nember_requests_waiting 1.0" not in _values(ask(small, "/metrics", **key)[2]):
        assert time.monotonic() < deadline
    status, headers, body = ask(small, "/v1/completions", {**LONG, "max_tokens": 1}, **key)
    assert status == 429
    assert headers["Retry-After"] == "1"
    assert json.loads(body)["error"]["code"] == "queue_full"
    code, said = small.stop()
    for client in clients:
        client.join(10)
    finished = sum('"finish_reason":"length"' in end for end in ends)
    failed = sum('"code":"server_stopped"' in end for end in ends)
    assert finished + failed == 3
    assert all(end.endswith("data: [DONE]\n\n") for end in ends)
    assert code == (143 if failed else 0)
    assert "Traceback" not in said
