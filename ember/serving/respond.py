"""Answers on their way to one client: while it waits its departure is seen, and a slow one does not hold the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ember.entrypoints.generation import Generation, Piece
from ember.serving.answer import DONE, Answer
from ember.serving.asgi import App, Message, Receive, Send
from ember.serving.chunk_writer import ChunkWriter
from ember.serving.errors import ApiError, failed
from ember.serving.event import as_event, as_json
from ember.serving.patience import Patience


class BytesResponse:
    """A whole body, as an ASGI application."""

    def __init__(self, body: bytes, kind: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.body, self.status = body, status
        self.headers = {**(headers or {}), "content-type": kind, "content-length": str(len(body))}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send it."""
        await send(_start(self.status, self.headers))
        await send({"type": "http.response.body", "body": self.body})


class JsonResponse(BytesResponse):
    """A JSON body."""

    def __init__(self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(as_json(value), "application/json", status=status, headers=headers)

    @staticmethod
    def of_error(error: ApiError) -> JsonResponse:
        """The answer to what went wrong."""
        return JsonResponse(error.body, status=error.status, headers=error.headers)


class ObservedResponse:
    """Another response, whose status somebody hears of."""

    def __init__(self, response: App, heard: Callable[[int], None]) -> None:
        self._response, self._heard = response, heard

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send it."""

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._heard(message["status"])
            await send(message)

        await self._response(scope, receive, observed)


class WholeResponse:
    """The answer when all is computed."""

    def __init__(self, generation: Generation, answer: Answer) -> None:
        self._generation, self._answer = generation, answer

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Wait for it and send it, unless the client goes away first."""
        async with _watched(receive, self._generation):
            outputs = await self._generation.outputs()
        if not outputs:
            return
        wrong = next((failed(output) for output in outputs if output.error is not None), None)
        response = JsonResponse(self._answer.whole(outputs)) if wrong is None else JsonResponse.of_error(wrong)
        await response(scope, receive, send)


class StreamResponse:
    """Server-sent events as tokens come. What a slow client has not taken is joined into its next piece."""

    def __init__(self, generation: Generation, answer: Answer, send_timeout_s: float) -> None:
        self._generation, self._answer, self._timeout_s = generation, answer, send_timeout_s
        self._writer: ChunkWriter | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send the events; a client that takes none within the time is cut off."""
        self._writer = ChunkWriter.of(scope)
        await send(_start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}))
        try:
            async with _watched(receive, self._generation), Patience(self._timeout_s) as patience:
                async for events in self._events():
                    patience.begin()
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                    patience.end()
        except TimeoutError:
            logging.getLogger(__name__).warning("a client took nothing for %g s", self._timeout_s)
            return
        await send({"type": "http.response.body", "body": b""})

    def _pushed(self, piece: Piece) -> bool:
        """Write a piece the short way, if the client has taken all before."""
        if self._writer is None or not self._writer.ready:
            return False
        self._writer.write(self._answer.piece(piece))
        return True

    async def _events(self) -> AsyncIterator[bytes]:
        answer, outputs = self._answer, []
        if opening := answer.opening():
            yield opening
        while pieces := await self._generation.pieces(self._pushed):
            ended = [piece.output for piece in pieces if piece.output is not None]
            if wrong := next((failed(output) for output in ended if output.error is not None), None):
                yield as_event(wrong.body) + DONE
                return
            outputs += ended
            yield b"".join(map(answer.piece, pieces))
        yield answer.closing(outputs) + DONE


@asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Within, the generation is given up when the client goes away; at the end in any case."""
    watch = asyncio.create_task(_until_gone(receive, generation))
    try:
        yield
    finally:
        watch.cancel()
        generation.give_up()


async def _until_gone(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.give_up()


def _start(status: int, headers: Mapping[str, str]) -> Message:
    pairs = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}
