"""Ctrl-C and SIGTERM: the first asks the job to wind down, the second ends it at once."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def or_interrupted(run: Callable[[], int]) -> int:
    """The exit code of `run`; 130 and one word if Ctrl-C comes outside a job, as while modules are imported."""
    try:
        return run()
    except BaseException as error:
        if not is_ctrl_c(error):
            raise
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it is a KeyboardInterrupt, or one in Python's wrapping: a signal in a class body is a RuntimeError."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


class Interrupted(BaseException):
    """Raised where a signal may break off what is running. Not an Exception: nothing swallows it."""


class Interrupts:
    """Catches the signals while it is entered; outside the main thread it catches nothing.

    Attributes:
        signum: the first signal that came, or None.
        at_once: whether a second one followed.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.at_once = False
        self._breakable_after: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def breakable(self, *, after: int) -> Iterator[None]:
        """While inside, the signal number `after` (1: the first, 2: the second) raises Interrupted.

        Raises:
            Interrupted: that signal came, or had come before.
        """
        self._breakable_after = after
        try:
            if self._count >= after:
                raise Interrupted
            yield
        finally:
            self._breakable_after = None

    @property
    def _count(self) -> int:
        return (self.signum is not None) + self.at_once

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum = number
        else:
            self.at_once = True
        if self._breakable_after is not None and self._count >= self._breakable_after:
            raise Interrupted
