"""Clients that cost little beside the server that they load: bytes and their times are kept, and read afterwards.

A client that parses as it goes, in Python, takes as much of the processor as the server does, and on a small machine
what it takes is missing in the engine.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from http.client import HTTPResponse
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

from tests.benchmarks.workloads import Request

_BLANK = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, seen by its client; seconds."""

    tokens: list[int]
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a number of clients saw."""

    seconds: float
    timings: list[Timing]

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(len(timing.tokens) for timing in self.timings) / self.seconds


@dataclass(slots=True)
class _Answer(asyncio.Protocol):
    """A connection for one request: what came, and when."""

    question: bytes
    ended: asyncio.Future[None]
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self.question)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def timing(self, begin: float) -> Timing:
        """Of an answer to a question asked at `begin`."""
        whole = b"".join(data for _, data in self.pieces)
        tokens = [token for body in _bodies(whole) for token in body["choices"][0]["token_ids"]]
        head = whole.index(_BLANK) + len(_BLANK)
        sizes = [0]
        for _, data in self.pieces:
            sizes.append(sizes[-1] + len(data))
        first = next(at for (at, _), size in zip(self.pieces, sizes[1:], strict=True) if size > head)
        last = self.pieces[-1][0]
        return Timing(tokens, first - begin, (last - first) / max(1, len(tokens) - 1))


async def load(url: str, requests: Seq[Request], clients: int, *, stream: bool) -> Load:
    """Send all requests, each client one at a time.

    Raises:
        RuntimeError: an answer is none.
    """
    questions = [_question(request, stream=stream) for request in requests]
    left, answers = iter(range(len(requests))), dict[int, tuple[float, _Answer]]()
    where, loop = urlsplit(url), asyncio.get_running_loop()

    async def client() -> None:
        for index in left:
            begin, answer = perf_counter(), _Answer(questions[index], loop.create_future())
            await loop.create_connection(lambda answer=answer: answer, where.hostname, where.port)  # type: ignore[misc]
            await answer.ended
            answers[index] = begin, answer

    begin = perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = perf_counter() - begin
    return Load(seconds, [answers[i][1].timing(answers[i][0]) for i in range(len(requests))])


def _question(request: Request, *, stream: bool) -> bytes:
    sampling = {"max_tokens": request.out, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"prompt": request.prompt, "return_token_ids": True, "stream": stream, **sampling}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _bodies(raw: bytes) -> list[dict[str, Any]]:
    """The JSON objects of an answer: one, or one an event."""
    answer = HTTPResponse(cast(Any, _Received(raw)))
    answer.begin()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {body.decode()}")
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [json.loads(body)]
    return [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]


class _Received:
    """Bytes as a socket to read from."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        """What was received."""
        return io.BytesIO(self._raw)
