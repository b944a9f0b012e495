"""The engine for many callers at once: one thread owns the LLM, an event loop hears from it.

    event loop: submit, abort ──► inbox (drained before each step) ──► thread: add, step, abort
                Generation    ◄── pieces (one call_soon_threadsafe a step) ◄──┘

The thread alone touches the LLM, so that the engine needs no locks; the loop alone touches Generations and counts what
is open. A request joins the running batch in the step after it was submitted, and one that is given up frees its
blocks before the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from ember.core.batch import StepOutput
from ember.data.output import RequestOutput
from ember.data.text_stream import TextStream
from ember.entrypoints.llm import LLM
from ember.errors import RequestError
from ember.sampling_params import SamplingParams

STOPPED = RequestError("server_stopped", "the server is shutting down")
BROKEN = RequestError("internal_error", "the engine failed on this batch; see the server's log")


class QueueFull(Exception):
    """More requests are open than the engine is to hold; try again later."""


class EngineStopped(Exception):
    """The engine takes no more requests: it is stopping, or has died."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, checked, and how to sample it."""

    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Piece:
    """What the request number `index` of a Generation got since its last piece; `output` is set on its last one."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None


class Observer(Protocol):
    """Hears what the engine does."""

    def step(self, step: StepOutput) -> None:
        """A step is done; called in the engine's thread."""

    def finished(self, output: RequestOutput) -> None:
        """A request has ended; called in the event loop."""


class Generation:
    """The requests of one call as they are computed. Belongs to the event loop.

    Attributes:
        num_open: requests that have not ended.
    """

    def __init__(self, num_requests: int, give_up: Callable[[Generation], None]) -> None:
        self.num_open = num_requests
        self._give_up = give_up
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._given_up = False

    async def pieces(self) -> list[Piece]:
        """What has come since the last call, at least one piece; nothing once all has ended or was given up."""
        if not self._pieces and self.num_open and not self._given_up:
            self._news.clear()
            await self._news.wait()
        taken, self._pieces = self._pieces, []
        return [] if self._given_up else taken

    async def outputs(self) -> list[RequestOutput]:
        """The results in the order of the requests; an empty list if they were given up."""
        done: dict[int, RequestOutput] = {}
        while pieces := await self.pieces():
            done |= {piece.index: piece.output for piece in pieces if piece.output is not None}
        return [] if self._given_up else [done[index] for index in sorted(done)]

    def give_up(self) -> None:
        """Nobody waits for the rest any more; harmless at any time."""
        if self.num_open and not self._given_up:
            self._given_up = True
            self._give_up(self)
            self._news.set()

    def put(self, piece: Piece) -> None:
        """Take a piece from the engine."""
        self._pieces.append(piece)
        self.num_open -= piece.output is not None
        self._news.set()


@dataclass(slots=True)
class _Live:
    """What the thread knows of a request."""

    generation: Generation
    index: int
    text: TextStream | None
    token_ids: list[int] = field(default_factory=list)


News = tuple[Generation, Piece]


class AsyncEngine:
    """Runs an LLM in a thread of its own.

    Args:
        max_open: most requests that wait or run; one more raises QueueFull.
    """

    def __init__(self, llm: LLM, *, max_open: int) -> None:
        self._llm, self._max_open = llm, max_open
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = Thread(target=self._run, name="ember-engine", daemon=True)
        self._live: dict[int, _Live] = {}
        self._ids: dict[Generation, list[int]] = {}
        self._num_requests = 0
        self._num_open = 0
        self._accepting = self._running = False
        self._all_closed = asyncio.Event()

    def start(self, observer: Observer | None = None) -> None:
        """Begin, within the event loop that will call."""
        self._loop = asyncio.get_running_loop()
        self._observer = observer
        self._accepting = self._running = True
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether it takes requests."""
        return self._accepting and self._thread.is_alive()

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return self._num_open

    def submit(self, requests: Sequence[Request], *, stream: bool) -> Generation:
        """Put requests in line together.

        Args:
            stream: whether pieces are to come as they are computed, or only the results.

        Raises:
            QueueFull: there is no room for all of them now.
            EngineStopped: it takes no more.
        """
        if not self.healthy:
            raise EngineStopped
        if self._num_open + len(requests) > self._max_open:
            raise QueueFull
        self._num_open += len(requests)
        generation = Generation(len(requests), self._abandon)
        self._inbox.put(lambda: self._start(generation, requests, stream))
        return generation

    async def stop(self, grace_s: float) -> int:
        """Take no more requests, give those that are open `grace_s` seconds, fail the rest; returns how many failed."""
        self._accepting = False
        late = 0
        if self._num_open:
            self._all_closed.clear()
            try:
                await asyncio.wait_for(self._all_closed.wait(), grace_s)
            except TimeoutError:
                late = self._num_open
        self._inbox.put(self._end)
        await asyncio.to_thread(self._thread.join)
        return late

    def hurry(self) -> None:
        """While it stops: wait no longer."""
        self._all_closed.set()

    def _abandon(self, generation: Generation) -> None:
        self._inbox.put(lambda: self._abort(generation))

    def _close(self, count: int) -> None:
        self._num_open -= count
        if not self._num_open:
            self._all_closed.set()

    def _hand_over(self, news: list[News]) -> None:
        for generation, piece in news:
            generation.put(piece)
            if piece.output is not None:
                self._close(1)
                if self._observer is not None:
                    self._observer.finished(piece.output)

    # from here on: the thread

    def _run(self) -> None:
        try:
            while self._running:
                if not self._llm.engine.num_unfinished:
                    self._inbox.get()()
                while not self._inbox.empty():
                    self._inbox.get()()
                if self._llm.engine.num_unfinished:
                    self._step()
        except BaseException:
            logging.getLogger(__name__).exception("the engine's thread has died")
            self._accepting = False
            self._fail_live(BROKEN)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _start(self, generation: Generation, requests: Sequence[Request], stream: bool) -> None:
        first, self._num_requests = self._num_requests, self._num_requests + len(requests)
        for index, request in enumerate(requests):
            text = TextStream(request.params.stop) if stream else None
            self._live[first + index] = _Live(generation, index, text)
        self._ids[generation] = list(range(first, first + len(requests)))
        done = [self._add(first + index, request) for index, request in enumerate(requests)]
        if news := [self._finish(output) for output in done if output is not None]:
            self._tell(self._hand_over, news)

    def _add(self, request_id: int, request: Request) -> RequestOutput | None:
        try:
            return self._llm.add(request_id, request.prompt_token_ids, request.params)
        except Exception:
            logging.getLogger(__name__).exception("a request could not be put in line")
            return _failed(request_id, BROKEN)

    def _abort(self, generation: Generation) -> None:
        ids = [i for i in self._ids.pop(generation, []) if self._live.pop(i, None) is not None]
        for request_id in ids:
            self._llm.abort(request_id)
        self._tell(self._close, len(ids))

    def _step(self) -> None:
        try:
            outputs, step = self._llm.step()
        except Exception:
            logging.getLogger(__name__).exception("an engine step failed; its requests end with an error")
            self._fail_all(BROKEN)
            return
        news = self._new_text(step, {output.request_id for output in outputs})
        news += [self._finish(output) for output in outputs]
        if news:
            self._tell(self._hand_over, news)
        if self._observer is not None:
            self._observer.step(step)

    def _new_text(self, step: StepOutput, finished: set[int]) -> list[News]:
        """Pieces of those that go on; the others' come with their results."""
        streams: dict[int, tuple[_Live, TextStream]] = {}
        for token in step.tokens:
            live = self._live[token.request_id]
            if live.text is not None:
                live.token_ids.append(token.token_id)
                streams[token.request_id] = live, live.text
        news: list[News] = []
        for request_id in streams.keys() - finished:
            live, stream = streams[request_id]
            if text := stream.take(self._llm.text_so_far(request_id)):
                news.append((live.generation, Piece(live.index, text, live.token_ids)))
                live.token_ids = []
        return news

    def _finish(self, output: RequestOutput) -> News:
        live = self._live.pop(output.request_id)
        text = "" if live.text is None else live.text.rest(output.text)
        ids = self._ids[live.generation]
        ids.remove(output.request_id)
        if not ids:
            del self._ids[live.generation]
        return live.generation, Piece(live.index, text, live.token_ids, output)

    def _fail_all(self, why: RequestError) -> None:
        self._llm.abort_all()
        self._fail_live(why)

    def _fail_live(self, why: RequestError) -> None:
        self._tell(self._hand_over, [self._finish(_failed(request_id, why)) for request_id in list(self._live)])

    def _end(self) -> None:
        self._fail_all(STOPPED)
        self._running = False


def _failed(request_id: int, why: RequestError) -> RequestOutput:
    return RequestOutput(request_id).with_error(why, [0])
