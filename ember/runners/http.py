"""`engine=http`: rows go to a server that speaks OpenAI's API, a bounded number at a time; this process records."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

from ember.core.stats import StepStats
from ember.data.output import RequestOutput
from ember.data.reader import PromptRow
from ember.errors import JobError
from ember.recorder import Recorder
from ember.runners.openai_client import OpenAIClient
from ember.runners.remote_request import RemoteRequests

LOOK_EVERY_S = 0.2
"""How often signals and the clock are looked at while answers are awaited."""

Task = asyncio.Task[tuple[PromptRow, RequestOutput]]


class HttpJob:
    """Keeps `concurrency` rows at the server, and hands those that are answered to the recorder."""

    def __init__(self, recorder: Recorder, rows: Iterator[PromptRow]) -> None:
        self.config, self.interrupts = recorder.config, recorder.interrupts
        self._recorder, self._rows = recorder, rows
        self._input_left = True
        self._asked: set[Task] = set()
        self._deadline_s: float | None = None
        self._first_failure: JobError | None = None

    def run(self) -> bool:
        """Work until the rows, or the time left after a signal, run out; returns whether all rows are written.

        Raises:
            JobError: the server is away, or refuses every row.
        """
        return asyncio.run(self._run())

    async def _run(self) -> bool:
        async with OpenAIClient.of(self.config) as client:
            try:
                return await self._work(RemoteRequests(client, self._recorder.plan.model_name, self.config))
            finally:  # before the connections close, or each task would fail of that
                await self._give_up()

    async def _work(self, requests: RemoteRequests) -> bool:
        while True:
            self._feed(requests)
            if self.interrupts.signum is not None:
                self._wind_down()
            if not self._asked or self._out_of_time() or self._recorder.too_many_errors:
                return not self._input_left and not self._asked
            await self._take()

    async def _give_up(self) -> None:
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    def _feed(self, requests: RemoteRequests) -> None:
        while self._input_left and len(self._asked) < self.config.concurrency and self.interrupts.signum is None:
            row = next(self._rows, None)
            if row is None:
                self._input_left = False
                return
            self._asked.add(asyncio.create_task(self._answered(requests, row)))

    async def _take(self) -> None:
        """Wait a little for answers, and record those that have come: all, also if one of them ends the job."""
        done, self._asked = await asyncio.wait(self._asked, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=lambda task: task.exception() is not None):
            if task.exception() is not None and self._first_failure is not None:
                raise self._first_failure
            row, output = task.result()
            self._recorder.write(row, output)
            self._recorder.steps(0, [], sum(sample.num_tokens for sample in output.outputs))
        self._recorder.tick(StepStats(step=0, num_running=len(self._asked)))

    def _wind_down(self) -> None:
        """After the first signal: nothing new is asked, what was has `grace_s` to be answered."""
        if self._deadline_s is None:
            self._deadline_s = time.perf_counter() + self.config.grace_s
            print(
                f"stopping: {len(self._asked)} requests have {self.config.grace_s:g} s to be answered "
                "(once more to stop at once)",
                file=sys.stderr,
            )

    def _out_of_time(self) -> bool:
        return self.interrupts.at_once or (self._deadline_s is not None and time.perf_counter() > self._deadline_s)

    async def _answered(self, requests: RemoteRequests, row: PromptRow) -> tuple[PromptRow, RequestOutput]:
        try:
            return row, await requests.run(row)
        except JobError as error:  # of several, the first is the reason
            self._first_failure = self._first_failure or error
            raise
