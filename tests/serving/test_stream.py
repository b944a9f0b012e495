"""The pieces of a stream on their way from the engine to the client, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ember.core.sequence import FinishReason
from ember.data.output import CompletionOutput
from ember.entrypoints.generation import Generation, Piece
from ember.sampling_params import SamplingParams
from ember.serving.answer import Answer, ChatAnswer, CompletionAnswer, PromptText
from ember.serving.asgi import Message
from ember.serving.call import Call
from ember.serving.chunk_writer import EXTENSION, ChunkWriter
from ember.serving.event import MARK
from ember.serving.patience import Patience
from ember.serving.respond import StreamResponse

TEXTS = ['"', "\\n", "\n", "日本 🐳", "\ud800", MARK, "[-1]"]


def answer_of(form: type[Answer], *, num_prompts: int = 2, **call: Any) -> Answer:
    prompts = [PromptText("x", [1, 2], "x")] * num_prompts
    asked = Call(prompts=[[1, 2]] * num_prompts, params=SamplingParams(), stream=True, **call)
    return form(asked, f"a {MARK} [-1] model", prompts)


def chunk_of(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"}\n\n")
    return json.loads(event[6:])


@pytest.mark.parametrize("form", [CompletionAnswer, ChatAnswer])
@pytest.mark.parametrize("flags", [{}, {"return_token_ids": True}, {"return_token_ids": True, "include_usage": True}])
def test_a_filled_frame_is_the_event_built_key_by_key(form: type[Answer], flags: dict[str, bool]) -> None:
    """Text that looks like the frame's own marks, or a model named so, must not be cut at."""
    answer = answer_of(form, **flags)
    built = chunk_of(answer.piece(Piece(1, "", [], [])))  # with log-probabilities, so not by a frame
    for text in TEXTS:
        chunk = chunk_of(answer.piece(Piece(1, text, [7, 9])))
        choice = chunk["choices"][0]
        assert (choice.get("text") or choice.get("delta", {}).get("content")) == text
        assert choice["index"] == 1
        assert choice.get("token_ids") == ([7, 9] if "return_token_ids" in flags else None)
        assert choice.keys() == built["choices"][0].keys()
        assert {**chunk, "choices": []} == {**built, "choices": []}


def test_what_is_not_taken_in_time_is_joined_choice_by_choice() -> None:
    """A client that lags gets fewer, longer pieces, none of them lost."""

    async def run() -> list[Piece]:
        generation = Generation(2, lambda _: None)
        for piece in (Piece(0, "a", [1]), Piece(1, "x", [9], []), Piece(0, "b", [2, 3]), Piece(1, "y", [8], [])):
            generation.put(piece)
        return await generation.pieces()

    assert asyncio.run(run()) == [Piece(0, "ab", [1, 2, 3]), Piece(1, "xy", [9, 8], [])]


class Client:
    """A connection, as ASGI's `send` and as the transport below it; `wire` is what was written, and by which way."""

    def __init__(self) -> None:
        self.stuck = False
        self.wire: list[tuple[str, bytes]] = []

    def get_write_buffer_size(self) -> int:
        return int(self.stuck)

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        size, _, chunk = data.partition(b"\r\n")
        assert len(chunk) == int(size, 16) + len(b"\r\n")
        self.wire.append(("short", chunk[:-2]))

    async def send(self, message: Message) -> None:
        self.wire.append(("asgi", message.get("body", b"")))

    async def receive(self) -> Message:
        return await asyncio.Future()

    def scope(self, version: str) -> Message:
        writer: Any = ChunkWriter(self)  # type: ignore[arg-type]
        return {"http_version": version, "extensions": {EXTENSION: writer}}

    def texts(self) -> list[tuple[str, str]]:
        """The way and the text of each piece."""
        events = [(way, chunk_of(data)) for way, data in self.wire if data.startswith(b"data: {")]
        return [(way, chunk["choices"][0]["text"]) for way, chunk in events]


def texts_of(version: str, *, stuck: range = range(0)) -> list[tuple[str, str]]:
    """Stream five pieces, a turn of the event loop each, to a client that is stuck for some of them."""
    client, generation = Client(), Generation(1, lambda _: None)
    response = StreamResponse(generation, answer_of(CompletionAnswer, num_prompts=1), 1.0)

    async def turn() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def run() -> None:
        task = asyncio.create_task(response(client.scope(version), client.receive, client.send))
        await turn()
        for i in range(4):
            client.stuck = i in stuck
            generation.put(Piece(0, str(i)))
            await turn()
        generation.put(Piece(0, "4", output=CompletionOutput(0, finish_reason=FinishReason.LENGTH)))
        await task

    asyncio.run(run())
    return client.texts()


def test_pieces_go_the_short_way_unless_the_client_lags() -> None:
    """A piece that overtakes one before it, or is written where there are no chunks (HTTP/1.0)."""
    assert texts_of("1.1") == [("short", "0"), ("short", "1"), ("short", "2"), ("short", "3"), ("asgi", "4")]
    lagging = texts_of("1.1", stuck=range(1, 3))
    assert lagging == [("short", "0"), ("asgi", "1"), ("asgi", "2"), ("short", "3"), ("asgi", "4")]
    assert texts_of("1.0") == [("asgi", str(i)) for i in range(5)]


def test_one_wait_that_is_too_long_ends_a_stream_many_short_ones_do_not() -> None:
    async def run(*waits: float) -> None:
        async with Patience(0.05) as patience:
            for wait in waits:
                patience.begin()
                await asyncio.sleep(wait)
                patience.end()
            await asyncio.sleep(0.08)  # not a wait for the client

    asyncio.run(run(0.01, 0.01, 0.01, 0.01, 0.01, 0.01))
    with pytest.raises(TimeoutError):
        asyncio.run(run(0.01, 5.0))
