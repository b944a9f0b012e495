"""What runs beside the driver: the task that reads, and the Desk where all processes hear how the job goes.

Free of torch, so that these two start in no time.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from ember.data.reader import PromptReader
from ember.data.work import Work
from ember.runners.cluster import import_ray

LOOK_EVERY_S = 0.2
"""How often a process asks for news from the Desk."""


class Desk:
    """The one actor that all others know: whether an engine has loaded, whether the job is to stop.

    Args:
        patience: engines that may be loaded, one after the other, with no result between.
    """

    def __init__(self, patience: int) -> None:
        self._patience, self._loads = patience, 0
        self._loaded, self._stopped, self._hopeless = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def set_loaded(self) -> None:
        """An engine is ready."""
        self._loaded.set()
        self._loads += 1
        if self._loads > self._patience:
            self._hopeless.set()

    async def set_progress(self) -> None:
        """A result has come."""
        self._loads = 0

    async def set_stopped(self) -> None:
        """The job winds down."""
        self._stopped.set()

    async def loaded(self) -> None:
        """Returns when the first engine is ready."""
        await self._loaded.wait()

    async def hopeless(self) -> None:
        """Returns when engine after engine was loaded and none gave a result."""
        await self._hopeless.wait()

    async def stopped(self) -> None:
        """Returns when the job winds down."""
        await self._stopped.wait()


class Flag:
    """A local view of something that the Desk will say once; asked for at most every LOOK_EVERY_S."""

    def __init__(self, ref: Any) -> None:
        self._ref, self._up, self._next_s = ref, False, 0.0

    def __call__(self) -> bool:
        """Whether it has been said. A Desk that is lost says nothing more."""
        now = time.monotonic()
        if not self._up and self._ref is not None and now >= self._next_s:
            self._next_s = now + LOOK_EVERY_S
            self._look()
        return self._up

    def _look(self) -> None:
        ray = import_ray()
        if not ray.wait([self._ref], timeout=0)[0]:
            return
        try:
            ray.get(self._ref)
            self._up = True
        except ray.exceptions.RayError:
            self._ref = None


def read_chunks(
    batch: pa.Table, *, reader: PromptReader, work: Work, size: int, folder: str, desk: Any
) -> Iterator[dict[str, list[bytes]]]:
    """The rows that are left, in order, as pickled lists of `size` rows. Runs on the job's own node, in its folder."""
    os.chdir(folder)
    stopped = Flag(desk.stopped.remote())
    rows = work.rows(reader)
    while not stopped() and (chunk := list(islice(rows, size))):
        yield {"chunk": [pickle.dumps(chunk)]}
