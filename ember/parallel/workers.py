"""The processes of ranks above 0, as rank 0 starts, feeds and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO, Any

from ember.errors import UserError
from ember.parallel.messages import Failed, receive, send
from ember.parallel.rank import RunnerSpec

NOTICE_S = 3.0
"""How long to look for one that has ended, when something went wrong: the system may tell of it a moment later."""
_LOOK_EVERY_S = 0.02


class Workers:
    """All of them. They end with this object, by `close`, and with this process, however that ends."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._workers)

    def start(self, spec: RunnerSpec) -> None:
        """Have each load its part.

        Raises:
            UserError: one can't be started; those that are there go on until `close`.
        """
        for rank in range(1, self._num_ranks):
            try:
                self._workers.append(_Worker(rank))
            except OSError as error:
                raise self._failed(rank, f"can't be started: {error.strerror or error}") from error
            with contextlib.suppress(OSError):  # it has ended; `wait_ready` says why
                self._workers[-1].send((spec, rank))

    def send(self, message: object) -> None:
        """To each of them.

        Raises:
            OSError: one has ended.
        """
        for worker in self._workers:
            worker.send(message)

    def wait_ready(self) -> None:
        """Until each has loaded its part.

        Raises:
            UserError: one could not; says which and why.
        """
        self._answers()

    def rooms(self) -> list[int]:
        """What each has measured, in bytes.

        Raises:
            UserError: one could not; says which and why.
        """
        return [answer.num_bytes for answer in self._answers()]

    def _answers(self) -> list[Any]:
        """The next one of each."""
        answers = []
        for worker in self._workers:
            answers.append(answer := worker.answer())
            if isinstance(answer, Failed):
                raise self._failed(worker.rank, answer.why)
        return answers

    def _failed(self, rank: int, why: str) -> UserError:
        return UserError(f"tensor_parallel_size={self._num_ranks}: rank {rank}: {why}")

    def when_one_ends(self, tell: Callable[[], None]) -> None:
        """Have `tell` called, by a thread, when one ends that was not to."""
        for worker in self._workers:
            threading.Thread(target=_watch, args=(worker, self._end, tell), daemon=True).start()

    @property
    def complete(self) -> bool:
        """Whether none has ended."""
        return all(worker.process.poll() is None for worker in self._workers)

    def lost(self) -> str | None:
        """Which one has ended, or ends now, and why; None: none."""
        deadline = time.monotonic() + NOTICE_S
        while time.monotonic() < deadline:
            for worker in self._workers:
                if worker.process.poll() is not None:
                    return f"rank {worker.rank}: {worker.last_answer().why}"
            time.sleep(_LOOK_EVERY_S)
        return None

    def close(self) -> None:
        """End them at once: they have nothing to save."""
        self._end()


class _Worker:
    """One process, and what it says."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ember.parallel.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # Ctrl-C is for the job, which finishes its rows
        )

    def send(self, message: object) -> None:
        """Raises OSError if the process has ended."""
        assert self.process.stdin is not None
        send(self.process.stdin, message)

    def answer(self) -> Any:
        """Its next message."""
        assert self.process.stdout is not None
        try:
            return receive(self.process.stdout)
        except EOFError:
            return Failed(self._how_it_ended())

    def last_answer(self) -> Failed:
        """Of a process that has ended."""
        while not isinstance(answer := self.answer(), Failed):
            pass
        return answer

    def _how_it_ended(self) -> str:
        code = self.process.wait()
        if code == -signal.SIGKILL:  # which leaves no time for a word
            return "killed by SIGKILL"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{how} ({lines[-1].strip()})" if lines else how

    def end(self) -> None:
        """Kill it, and let go of its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was still to be written
                pipe.close()


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()


def _watch(worker: _Worker, end: weakref.finalize[..., Workers], tell: Callable[[], None]) -> None:
    worker.process.wait()
    if end.alive:
        tell()
