"""Whatever a client sends, it gets a clear answer and the others are served on. With curl and raw sockets."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from urllib.parse import urlsplit

import pytest

from tests.serving.conftest import RunningServer

pytestmark = pytest.mark.serve
LONG = {"prompt": "The sea", "max_tokens": 500, "ignore_eos": True, "stream": True}


def post(server: RunningServer, body: bytes, path: str = "/v1/completions", kind: str = "application/json"):
    """Status, headers and JSON of an answer."""
    request = urllib.request.Request(server.url + path, data=body, headers={"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


def metric(server: RunningServer, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"ember_{name} ")))


def until_idle(server: RunningServer) -> None:
    deadline = time.monotonic() + 120
    while metric(server, "requests_running") or metric(server, "requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert metric(server, "kv_blocks_used") == 0


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection((urlsplit(server.url).hostname, urlsplit(server.url).port), timeout=60)


def raw(body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


BODIES = {
    "not JSON": b"{",
    "no object": b"[]",
    "empty": b"",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "deep": b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "too deep for what comes after": b'{"prompt": "x", "metadata": ' + b"[" * 250 + b"]" * 250 + b"}",
    "a huge number": b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    "no prompt": b"{}",
    "null prompt": b'{"prompt": null}',
    "empty prompt": b'{"prompt": ""}',
    "no prompts": b'{"prompt": []}',
    "an empty prompt": b'{"prompt": ["a", ""]}',
    "mixed prompts": b'{"prompt": ["a", 1]}',
    "booleans as ids": b'{"prompt": [true]}',
    "an unknown token": b'{"prompt": [99999999]}',
    "a negative token": b'{"prompt": [-1]}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a surrogate in a stop string": b'{"prompt": "x", "stop": "\\ud800"}',
    "a huge prompt": b'{"prompt": "' + b"word " * 500_000 + b'"}',
    "too many prompts": b'{"prompt": [' + b'"a",' * 100_000 + b'"a"]}',
    "n": b'{"prompt": "x", "n": 1000000000}',
    "best_of": b'{"prompt": "x", "best_of": 1000000000}',
    "many samples": b'{"prompt": "x", "n": 1000}',
    "many samples to choose from": b'{"prompt": "x", "best_of": 1000}',
    "max_tokens as text": b'{"prompt": "x", "max_tokens": "8"}',
    "max_tokens below 0": b'{"prompt": "x", "max_tokens": -1}',
    "max_tokens beyond 64 bits": b'{"prompt": "x", "max_tokens": 1e300}',
    "temperature": b'{"prompt": "x", "temperature": -1}',
    "top_p": b'{"prompt": "x", "top_p": 0}',
    "stream as text": b'{"prompt": "x", "stream": "yes"}',
    "stream_options without stream": b'{"prompt": "x", "stream_options": {"include_usage": true}}',
    "an unknown stream option": b'{"prompt": "x", "stream": true, "stream_options": {"fast": true}}',
    "an empty stop string": b'{"prompt": "x", "stop": ""}',
    "many stop strings": json.dumps({"prompt": "x", "stop": ["ab"] * 10_000}).encode(),
    "a long stop string": json.dumps({"prompt": "x", "stop": "a" * 100_000}).encode(),
    "unknown stop ids": b'{"prompt": "x", "stop_token_ids": [123456789]}',
    "an unknown key": b'{"prompt": "x", "fast": true}',
    "suffix": b'{"prompt": "x", "suffix": "y"}',
    "user": b'{"prompt": "x", "user": 7}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_is_a_clear_400(server: RunningServer, name: str) -> None:
    status, _, answer = post(server, BODIES[name])
    assert status == 400, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(answer["error"]["message"]) < 1000
    assert post(server, b'{"prompt": "x", "max_tokens": 1}')[0] == 200


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"n": 10**9}, "n", "n=1000000000: a request may have 128 choices at most (max_choices=128)"),
        ({"n": 65, "prompt": ["x", "y"]}, "n", "n=65 for each of 2 prompts: a request may have 128 choices"),
        ({"best_of": 129}, "best_of", "best_of=129: a request may have 128 choices"),
        ({"prompt": ["x"] * 129}, "prompt", "129 prompts: a request may have 128 choices"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias", "logit_bias=[99999999]: the model's vocabulary ends at"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids", "stop_token_ids=[99999999]"),
        ({"prompt": [99999999]}, "prompt", "token id 99999999 is not in the vocabulary"),
        ({"regex": "a+"}, "regex", 'regex=a+ is not supported; it goes under structured_outputs: {"regex": ...}'),
        ({"choice": ["a"]}, "choice", 'it goes under structured_outputs: {"choice": ...}'),
        ({"json_schema": {}}, "json_schema", 'structured_outputs: {"json": ...} or response_format'),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "max_tokens and max_completion_tokens differ"),
    ],
)
def test_a_refusal_names_the_key_and_the_limit(server: RunningServer, asked: dict, param: str, said: str) -> None:
    """A limit of `SamplingParams` stood for the server's own, and `prompt` for the keys of sampling."""
    status, _, answer = post(server, json.dumps({"prompt": "x", **asked}).encode())
    assert (status, answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(said) or said in answer["error"]["message"]


def test_other_answers_than_400(server: RunningServer) -> None:
    assert post(server, b"{}", kind="text/plain")[0] == 415
    assert post(server, b'{"prompt": "' + b"x" * (5 << 20) + b'"}')[0] == 413
    assert post(server, b"{}", path="/v1/none")[0] == 404
    status, headers, _ = post(server, b"{}", path="/health")
    assert (status, set(headers["Allow"].split(", "))) == (405, {"GET", "HEAD"})
    status, _, answer = post(server, b'{"prompt": "x", "model": "\\ud800"}')
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_body_that_lies_about_its_size(server: RunningServer) -> None:
    """Without a length, or with a wrong one, the limit must hold all the same."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connect(server) as client:
        client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        try:
            for _ in range(6):
                client.sendall(chunk)
            client.sendall(b"0\r\n\r\n")
        except OSError:
            pass
        assert b" 413 " in client.recv(100)
    with connect(server) as client:
        client.sendall(f"{head}Content-Length: {10**15}\r\n\r\n".encode())
        assert b" 413 " in client.recv(100)


def test_a_client_that_leaves_within_its_body(server: RunningServer) -> None:
    """A traceback in the server's log for each (the fixture looks for one at the end)."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with connect(server) as client:
        client.sendall(f'{head}{{"pro'.encode())
        time.sleep(0.2)
    assert post(server, b'{"prompt": "x", "max_tokens": 1}')[0] == 200


def test_a_client_that_leaves_frees_its_blocks(server: RunningServer) -> None:
    """Both a stream and an answer that is waited for end with their client."""
    for body in (LONG, {**LONG, "stream": False}):
        with connect(server) as client:
            client.sendall(raw(body))
            while not metric(server, "kv_blocks_used"):
                pass
        until_idle(server)


def test_a_client_that_does_not_read_holds_nobody_up(server: RunningServer) -> None:
    """Its tokens wait for it; the engine does not."""
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        client.sendall(raw({**LONG, "prompt": ["The sea"] * 8}))
        assert post(server, b'{"prompt": "x", "max_tokens": 4}')[0] == 200
        until_idle(server)
        data = b""
        while b"[DONE]" not in data:
            data += client.recv(1 << 16)
        assert data.count(b'"finish_reason":"length"') == 8


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server: RunningServer) -> None:
    """What the README says, as typed."""
    words = ["curl", "-sS", "-N", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d"]
    body = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    whole = subprocess.run([*words, json.dumps(body)], capture_output=True, text=True, check=True).stdout
    stream = subprocess.run(
        [*words, json.dumps({**body, "stream": True})], capture_output=True, text=True, check=True
    ).stdout
    events = stream.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
    assert "".join(pieces) == json.loads(whole)["choices"][0]["text"] != ""
