"""One engine for several threads, each with a chunk of rows: the batch stays full while one chunk ends and others run.

Knows nothing of what brings the chunks, so that it is tested without a cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from ember.config import JobConfig
from ember.core.stats import StepStats
from ember.data.output import RequestOutput
from ember.data.reader import PromptRow
from ember.entrypoints.llm import LLM
from ember.request import start

LOOK_EVERY_S = 0.02
"""How often a thread that is not stepping looks whether its rows are done."""

Ticket = Future[RequestOutput]


class SharedEngine:
    """Whichever thread has unfinished rows steps the engine, for the rows of all.

    Args:
        stopped: whether rows that are not running yet are to be given up.
    """

    def __init__(self, llm: LLM, config: JobConfig, stopped: Callable[[], bool]) -> None:
        self._llm, self._config, self._stopped = llm, config, stopped
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[tuple[PromptRow, Ticket]] = SimpleQueue()
        self._live: dict[int, list[Ticket]] = {}
        self._stats: list[StepStats] = []
        self._num_sampled = 0

    def compute(self, rows: Sequence[PromptRow]) -> list[tuple[PromptRow, RequestOutput]]:
        """The rows with their results; without those that were given up. Called by several threads at once."""
        tickets: list[tuple[PromptRow, Ticket]] = [(row, Future()) for row in rows]
        for item in tickets:
            self._inbox.put(item)
        while not all(ticket.done() for _, ticket in tickets):
            if self._lock.acquire(timeout=LOOK_EVERY_S):
                try:
                    self._turn()
                finally:
                    self._lock.release()
        return [(row, ticket.result()) for row, ticket in tickets if not ticket.cancelled()]

    def take_stats(self) -> tuple[list[StepStats], int]:
        """The steps since the last call, and how many tokens they sampled."""
        with self._lock:
            taken = self._stats, self._num_sampled
            self._stats, self._num_sampled = [], 0
        return taken

    def _turn(self) -> None:
        """Admit what has come in, then one step."""
        stopped = self._stopped()
        self._admit(stopped)
        if stopped:
            self._give_up_waiting()
        if not self._llm.engine.num_unfinished:
            return
        outputs, step = self._llm.step()
        self._stats.append(step.stats)
        self._num_sampled += step.num_sampled
        for output in outputs:
            self._finish(output)

    def _admit(self, stopped: bool) -> None:
        while True:
            try:
                row, ticket = self._inbox.get_nowait()
            except Empty:
                return
            if stopped:
                ticket.cancel()
                continue
            tickets = self._live.setdefault(row.row_index, [])
            tickets.append(ticket)
            if len(tickets) > 1:  # the cluster has sent the row again while it runs
                continue
            done = start(self._llm, row, self._config, together=True)
            if done is not None:
                self._finish(done)

    def _finish(self, output: RequestOutput) -> None:
        for ticket in self._live.pop(output.request_id):
            ticket.set_result(output)

    def _give_up_waiting(self) -> None:
        for row_index in self._llm.abort_waiting():
            for ticket in self._live.pop(row_index):
                ticket.cancel()
