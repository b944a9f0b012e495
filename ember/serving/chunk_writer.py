"""The short way for a stream's chunks: from the event loop straight to the connection, past ASGI and its tasks.

Through ASGI each chunk wakes a task and passes the layers of uvicorn and Starlette, which costs several times what the
chunk itself does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ember.serving.asgi import App, Message, Receive, Send

EXTENSION = "ember.chunk_writer"


class ChunkWriter:
    """Writes chunks of a body in chunked transfer coding (RFC 9112, 7.1) that ASGI's `send` began, and is to end."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    @staticmethod
    def of(scope: Message) -> ChunkWriter | None:
        """That of a request's connection; None where chunks can't be written so."""
        writer = scope.get("extensions", {}).get(EXTENSION)
        return writer if scope.get("http_version") == "1.1" else None

    @property
    def ready(self) -> bool:
        """Whether the system has taken all that was written before."""
        return not self._transport.get_write_buffer_size() and not self._transport.is_closing()

    def write(self, chunk: bytes) -> None:
        """Write a chunk, which is not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


def with_chunk_writer(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, whose requests find their connection's ChunkWriter among ASGI's extensions."""

    base: Any = protocol

    class Protocol(base):
        app: App

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            app, writer = self.app, ChunkWriter(transport)

            async def extended(scope: Message, receive: Receive, send: Send) -> None:
                await app({**scope, "extensions": {**scope.get("extensions", {}), EXTENSION: writer}}, receive, send)

            self.app = extended

    return Protocol
