"""uvicorn with ember's way to stop: open requests finish within their time, or are told that they can't."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import TYPE_CHECKING, Any

from ember.entrypoints.async_engine import AsyncEngine, Observer
from ember.errors import ConfigError
from ember.interrupt import SIGNALS
from ember.serving.chunk_writer import with_chunk_writer
from ember.serving.settings import ServerConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

CLEAN = 0
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection (httpx: 5 s), so that they are the ones to close it."""
CLOSE_S = 5.0
"""After the last answer, for clients to take it."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, but does not listen yet.

    Raises:
        ConfigError: it can't be had.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError("port", port, f"can't listen on {host}: {error.strerror or error}") from None
    return bound


class HttpServer:
    """Answers on a socket, and runs an engine as long as it does."""

    def __init__(self, config: ServerConfig, app: FastAPI, engine: AsyncEngine, bound: socket.socket) -> None:
        self._config, self._engine, self._socket = config, engine, bound
        self._server = _uvicorn(app, config)
        self._signum: int | None = None
        self._stop = asyncio.Event()

    async def run(self, observer: Observer) -> int:
        """Serve until a signal comes; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._engine.start(observer)
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._stop.is_set():
            await asyncio.sleep(0.01)
        host, port = self._socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving on http://{shown}:{port} (Ctrl-C to stop)", file=sys.stderr, flush=True)
        await self._stop.wait()
        self._server.should_exit = True
        print(f"stopping: {self._engine.num_open} open requests (once more to stop at once)", file=sys.stderr)
        late = await self._engine.stop(self._config.grace_s)
        await serving
        return 128 + (self._signum or 0) if late else CLEAN

    def _on_signal(self, number: int) -> None:
        if self._signum is None:
            self._signum = number
            self._stop.set()
        else:
            self._engine.hurry()
            asyncio.get_running_loop().call_later(1.0, self._force)

    def _force(self) -> None:
        self._server.force_exit = True


def _uvicorn(app: FastAPI, config: ServerConfig) -> Any:
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            """Leave signals alone: HttpServer handles them."""
            return contextlib.nullcontext()

    return Server(
        uvicorn.Config(
            app,
            http=with_chunk_writer(AutoHTTPProtocol),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(config.grace_s + CLOSE_S),
        )
    )
