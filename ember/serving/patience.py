"""A time limit for each of many short waits, that costs nothing where there is no wait."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Patience:
    """Within, no wait between `begin` and `end` may take longer than `seconds`; else the block ends in TimeoutError.

    `asyncio.timeout` sets and clears a timer each time; here one timer looks now and then how long the last wait has
    lasted.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._since: float | None = None

    async def __aenter__(self) -> Self:
        """Begin to look."""
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Look no more."""
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, tb)

    def begin(self) -> None:
        """A wait begins."""
        self._since = self._loop.time()

    def end(self) -> None:
        """It is over."""
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        end = (now if self._since is None else self._since) + self._seconds
        if end <= now and self._since is not None:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(end, self._look)
