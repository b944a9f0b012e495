"""The progress bar of a job: rows done, output tokens per second, running and waiting sequences, KV use.

The only module that knows tqdm. It is told of every engine step and draws ten times a second at most; where the
stream is no terminal it prints a line now and then, and for machines JSON lines. It never costs a job its life: a
stream that breaks is left alone.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from ember.core.stats import StepStats

_DRAW_EVERY_S = 0.1
_LINE_EVERY_S = 10.0
_JSON_EVERY_S = 1.0
_RATE_WINDOW_S = 3.0
_IN_RECORD = ("num_running", "num_waiting", "blocks_used", "blocks_cached", "blocks_free", "blocks_total")
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_COUNT = "{n_fmt} rows [{elapsed}{postfix}]"


class ProgressBar:
    """Make it when the first row can start (its clock runs from here), update it every step, close it.

    Args:
        total_rows: rows to do; 0 if unknown.
        enabled: False shows nothing at all.
        json_lines: instead of bar or lines, a JSON object a second on a line of its own, and one at the end.
        stream: standard error if None.
        initial_rows: rows that were done before this run; they count as done, but not for the time that is left.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        total_rows: int,
        enabled: bool,
        stream: TextIO | None = None,
        *,
        json_lines: bool = False,
        initial_rows: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled, self._clock = enabled, clock
        self._stream = sys.stderr if stream is None else stream
        self._total, self._initial = total_rows, initial_rows
        self._rows, self._tokens = initial_rows, 0
        self._stats: StepStats | None = None
        self._rate = TokenRate(clock())
        self._start_s = clock()
        self._json = json_lines
        self._bar = self._make_bar() if enabled and self._stream.isatty() and not json_lines else None
        self._every_s = _JSON_EVERY_S if json_lines else _LINE_EVERY_S if self._bar is None else _DRAW_EVERY_S
        self._due_s = self._start_s + (0.0 if self._bar is not None else self._every_s)

    def update(self, rows_done: int, output_tokens: int, stats: StepStats) -> None:
        """Tell it the totals so far and the latest step's statistics. Free unless a drawing is due.

        Args:
            rows_done: rows finished, `initial_rows` among them.
            output_tokens: tokens sampled so far in this run, also those of unfinished rows.
        """
        if not self._enabled:
            return
        self._rows, self._tokens, self._stats = rows_done, output_tokens, stats
        now = self._clock()
        if now >= self._due_s:
            self._due_s = now + self._every_s
            self._draw(now, self._rate.at(now, self._tokens))

    def close(self) -> None:
        """Leave the bar where the job has come to (100% only if it has), with the mean speed. Once is enough."""
        if not self._enabled:
            return
        now = self._clock()
        self._draw(now, self._tokens / max(now - self._start_s, 1e-9), event="end")
        if self._bar is not None:
            self._quietly(self._bar.close)
        self._enabled = False

    def _make_bar(self) -> Any:
        # tqdm's own rate limit and its monitor thread are switched off: update() decides when to draw.
        return _Bar(
            total=self._total or None,
            initial=self._initial,
            file=self._stream,
            mininterval=0,
            **({"dynamic_ncols": True} if _knows_its_width(self._stream) else {"ncols": 80}),
            bar_format=_BAR if self._total else _COUNT,
        )

    def _draw(self, now: float, rate: float, event: str = "progress") -> None:
        if self._bar is None:
            line = json.dumps(self._record(now, rate, event)) if self._json else self._line(now, rate)
            self._quietly(lambda: print(line, file=self._stream, flush=True))
            return
        self._bar.n = self._rows
        self._bar.set_postfix_str(_state(rate, self._stats), refresh=False)
        self._quietly(self._bar.refresh)

    def _line(self, now: float, rate: float) -> str:
        elapsed, left_s = now - self._start_s, self._left_s(now)
        share = f"/{self._total} rows ({self._rows / self._total:.0%})" if self._total else " rows"
        eta = f"<{tqdm.format_interval(left_s)}" if left_s else ""
        return f"{self._rows}{share} [{tqdm.format_interval(elapsed)}{eta}, {_state(rate, self._stats)}]"

    def _left_s(self, now: float) -> float | None:
        """Seconds that the rest takes at the speed so far; None as long as nobody knows."""
        done, left = self._rows - self._initial, self._total - self._rows
        return (now - self._start_s) / done * left if done > 0 and self._total else None

    def _record(self, now: float, rate: float, event: str) -> dict[str, Any]:
        """What `progress=json` says: times in seconds; `rows_total` is null where it is unknown."""
        stats = self._stats or StepStats(step=0)
        left_s = self._left_s(now)
        return {
            "event": event,
            "time": round(time.time(), 3),
            "elapsed_s": round(now - self._start_s, 3),
            "left_s": None if left_s is None else round(left_s, 3),
            "rows_done": self._rows,
            "rows_total": self._total or None,
            "output_tokens": self._tokens,
            "tokens_per_s": round(rate, 3),
            **{name: getattr(stats, name) for name in _IN_RECORD},
        }

    def _quietly(self, draw: Callable[[], Any]) -> None:
        try:
            draw()
        except (OSError, ValueError):  # the terminal has gone, or the stream was closed
            self._enabled = False


class TokenRate:
    """Tokens per second of the last few seconds: an average in which older seconds fade."""

    def __init__(self, now: float) -> None:
        self._time, self._tokens = now, 0
        self._rate: float | None = None

    def at(self, now: float, tokens: int) -> float:
        """The rate at the time `now` (s), when `tokens` have come in all."""
        elapsed = now - self._time
        if elapsed <= 0:
            return self._rate or 0.0
        latest = (tokens - self._tokens) / elapsed
        weight = 1.0 if self._rate is None else -math.expm1(-elapsed / _RATE_WINDOW_S)
        self._rate = (self._rate or 0.0) + weight * (latest - (self._rate or 0.0))
        self._time, self._tokens = now, tokens
        return self._rate


class _Bar(tqdm):
    monitor_interval = 0


def _knows_its_width(stream: TextIO) -> bool:
    """False for a terminal of 0 columns (as some containers have), where tqdm would draw nothing."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):
        return False


def _state(rate: float, stats: StepStats | None) -> str:
    if stats is None:
        return f"{rate:,.0f} tok/s"
    kv = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    return f"{rate:,.0f} tok/s, run {stats.num_running} wait {stats.num_waiting}, KV {kv:.0%}"
