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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from ember.core.batch import StepOutput
from ember.data.logprobs import PositionLogprobs
from ember.data.output import CompletionOutput, RequestOutput
from ember.data.text_stream import TextStream
from ember.entrypoints.generation import Generation, Piece
from ember.entrypoints.llm import LLM
from ember.errors import JobError, RequestError
from ember.model.chat_template import ChatPrompt
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

    prompt: list[int] | ChatPrompt
    params: SamplingParams


class Observer(Protocol):
    """Hears what the engine does."""

    def step(self, step: StepOutput) -> None:
        """A step is done; called in the engine's thread."""

    def finished(self, output: CompletionOutput) -> None:
        """A choice has ended; called in the event loop."""


@dataclass(slots=True)
class _Choice:
    """What the thread knows of a choice; `stream` is None if only the result is wanted."""

    index: int
    stream: TextStream | None
    token_ids: list[int] = field(default_factory=list)
    num_shown: int = 0

    def piece(
        self, text: str, logprobs: list[PositionLogprobs] | None, output: CompletionOutput | None = None
    ) -> Piece:
        """What is new."""
        ids, self.token_ids = self.token_ids, []
        self.num_shown += len(ids)
        return Piece(self.index, text, ids, logprobs, output)


@dataclass(slots=True)
class _Live:
    """What the thread knows of a request: its choices that are open, by sample index."""

    generation: Generation
    choices: dict[int, _Choice]


News = tuple[Generation, Piece]


class AsyncEngine:
    """Runs an LLM in a thread of its own.

    Args:
        max_open: most choices that wait or run; one more raises QueueFull.
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
        """Choices that wait or run."""
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
        num_choices = sum(request.params.n for request in requests)
        if self._num_open + num_choices > self._max_open:
            raise QueueFull
        self._num_open += num_choices
        generation = Generation(num_choices, self._abandon)
        self._inbox.put(lambda: self._start(generation, requests, stream))
        return generation

    async def stop(self, grace_s: float) -> int:
        """Take no more requests, give what is open `grace_s` seconds, fail the rest; returns how many choices."""
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
        except BaseException as error:
            is_bug = not isinstance(error, JobError)
            logging.getLogger(__name__).error("the engine's thread has died: %s", error, exc_info=is_bug)
            self._accepting = False
            self._fail_live(BROKEN)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def _start(self, generation: Generation, requests: Sequence[Request], stream: bool) -> None:
        first, self._num_requests = self._num_requests, self._num_requests + len(requests)
        ids = self._ids[generation] = list(range(first, first + len(requests)))
        indices = count()
        for request_id, request in zip(ids, requests, strict=True):
            self._live[request_id] = _Live(generation, _choices(request.params, indices, stream))
        done = [self._add(request_id, request) for request_id, request in zip(ids, requests, strict=True)]
        self._hand_out([piece for output in done if output is not None for piece in self._finish(output)])

    def _add(self, request_id: int, request: Request) -> RequestOutput | None:
        try:
            return self._llm.add(request_id, request.prompt, request.params, together=False)
        except Exception:
            logging.getLogger(__name__).exception("a request could not be put in line")
            return self._failed(request_id, BROKEN)

    def _abort(self, generation: Generation) -> None:
        num_choices = 0
        for request_id in self._ids.pop(generation, []):
            if live := self._live.pop(request_id, None):
                num_choices += len(live.choices)
                self._llm.abort(request_id)
        self._tell(self._close, num_choices)

    def _step(self) -> None:
        try:
            outputs, step = self._llm.step()
        except JobError:  # nothing can be computed any more
            raise
        except Exception:
            logging.getLogger(__name__).exception("an engine step failed; its requests end with an error")
            self._fail_all(BROKEN)
            return
        streams = self._add_tokens(step)
        news = [piece for output in outputs for piece in self._finish(output)]
        self._hand_out(news + [piece for key in streams for piece in self._new_text(*key)])
        if self._observer is not None:
            self._observer.step(step)

    def _add_tokens(self, step: StepOutput) -> list[tuple[int, int]]:
        """Note the tokens of choices that stream; returns which, as (request_id, sample_index)."""
        keys: dict[tuple[int, int], None] = {}
        for token in step.tokens:
            choice = self._live[token.request_id].choices.get(token.sample_index)
            if choice is not None and choice.stream is not None:
                choice.token_ids.append(token.token_id)
                keys[token.request_id, token.sample_index] = None
        return list(keys)

    def _new_text(self, request_id: int, sample_index: int) -> list[News]:
        """The piece of a choice that goes on, if there is text to show; one that has ended came with its result."""
        live = self._live.get(request_id)
        choice = None if live is None else live.choices.get(sample_index)
        if live is None or choice is None or choice.stream is None:
            return []
        text = choice.stream.take(self._llm.text_so_far(request_id, sample_index))
        if not text:
            return []
        logprobs = self._llm.logprobs_since(request_id, sample_index, choice.num_shown)
        return [(live.generation, choice.piece(text, logprobs))]

    def _finish(self, output: RequestOutput) -> list[News]:
        """The last pieces of choices that have ended."""
        live = self._live[output.request_id]
        news: list[News] = []
        for done in output.outputs:
            choice = live.choices.pop(done.index)
            text = "" if choice.stream is None else choice.stream.rest(done.text)
            logprobs = None if done.logprobs is None else done.logprobs[choice.num_shown :]
            news.append((live.generation, choice.piece(text, logprobs, done)))
        if not live.choices:
            del self._live[output.request_id]
            self._ids[live.generation].remove(output.request_id)
            if not self._ids[live.generation]:
                del self._ids[live.generation]
        return news

    def _hand_out(self, news: list[News]) -> None:
        if news:
            self._tell(self._hand_over, news)

    def _fail_all(self, why: RequestError) -> None:
        self._llm.abort_all()
        self._fail_live(why)

    def _fail_live(self, why: RequestError) -> None:
        self._hand_out([piece for i in list(self._live) for piece in self._finish(self._failed(i, why))])

    def _failed(self, request_id: int, why: RequestError) -> RequestOutput:
        return RequestOutput(request_id).with_error(why, list(self._live[request_id].choices))

    def _end(self) -> None:
        self._fail_all(STOPPED)
        self._running = False


def _choices(params: SamplingParams, indices: Iterator[int], stream: bool) -> dict[int, _Choice]:
    """Which sequences the choices of a ranked request are shows at its end: until then there is no text to stream."""
    stream = stream and not params.ranked
    return {i: _Choice(next(indices), TextStream(params.stop) if stream else None) for i in range(params.n)}
