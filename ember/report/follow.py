"""A running job from another terminal, by its files alone: `ember top OUTPUT`.

Step statistics come in parts, some hundred steps or half a minute at a time, so what is shown is as old as that.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from ember.data.attempts import read_summary
from ember.data.folder import STEPS, SUMMARY
from ember.data.manifest import Manifest
from ember.data.store import Store, open_store
from ember.errors import UserError
from ember.report.columns import Columns
from ember.report.results import completion_parts, num_expected, saved_settings
from ember.report.tables import Parts
from ember.report.words import seconds

RUNNING = "running"
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 40
_KV_WIDTH = 40
_COLUMNS = (
    *("step", "start_s", "duration_s", "num_decode_tokens", "num_prefill_tokens", "num_running", "num_waiting"),
    *("num_preempted", "num_finished", "blocks_total", "blocks_used", "blocks_cached", "blocks_free"),
)
_CLEAR = "\x1b[2J\x1b[H"


@dataclass(frozen=True, slots=True)
class PartNumbers:
    """What one part of the step statistics says: sums over its steps, and its last step."""

    num_steps: int
    seconds: float
    decode_tokens: float
    prefill_tokens: float
    num_preempted: float
    num_finished: float
    last: dict[str, float]

    @staticmethod
    def of(steps: Columns) -> PartNumbers:
        """The numbers of a part's steps, of which there is at least one."""
        begin, end = steps["start_s"][0], steps["start_s"][-1] + steps["duration_s"][-1]
        return PartNumbers(
            num_steps=len(steps),
            seconds=max(float(end - begin), 1e-9),
            decode_tokens=steps.sum("num_decode_tokens"),
            prefill_tokens=steps.sum("num_prefill_tokens"),
            num_preempted=steps.sum("num_preempted"),
            num_finished=steps.sum("num_finished"),
            last={name: float(steps[name][-1]) for name in _COLUMNS},
        )


class Follower:
    """Reads what has been added to an output; each part of the step statistics once.

    Raises:
        UserError: it is no output of ember's.
    """

    def __init__(self, output: str) -> None:
        self.store: Store = open_store(output)
        found = Manifest.load(self.store)
        if found is None:
            raise UserError(f"{self.store.shown} holds no manifest.json; name the output of a job")
        self._manifest: Manifest = found
        self._parts: dict[str, PartNumbers] = {}
        self._rows: dict[str, int] = {}
        self.status = RUNNING

    def look(self, now: datetime) -> list[str]:
        """Read what is new; the lines to show."""
        summary = read_summary(self.store, SUMMARY)
        self.status = str(summary.get("status", RUNNING))
        steps = Parts(self.store.sub(STEPS))
        for name in steps.names:
            if name not in self._parts and len(table := steps.read(_COLUMNS, [name])):
                self._parts[name] = PartNumbers.of(Columns(table))
        completions = completion_parts(self.store, self._manifest)
        for name in completions.names:
            if name not in self._rows:
                self._rows[name] = completions.num_rows_of(name)
        return [*self._job_lines(summary, now), *self._step_lines()]

    def _job_lines(self, summary: dict[str, Any], now: datetime) -> list[str]:
        done, total = sum(self._rows.values()), num_expected(self._manifest, saved_settings(self.store))
        since = _since(summary, now)
        share = f" ({done / total:.0%})" if total else ""
        lines = [f"{self.store.shown}: {self.status}" + (f", began {seconds(since)} ago" if since else "")]
        left = self._left_s(total - done)
        soon = f", about {seconds(left)} left" if left and self.status == RUNNING else ""
        lines.append(f"  {'rows':<10} {done:,} of {total:,} written{share}{soon}")
        return lines

    def _left_s(self, num_rows: int) -> float | None:
        """Seconds that rows take at the speed of the steps seen so far, of all shards together."""
        shards: dict[str, list[PartNumbers]] = {}
        for name, part in self._parts.items():
            shards.setdefault(_shard(name), []).append(part)
        rate = sum(sum(p.num_finished for p in parts) / sum(p.seconds for p in parts) for parts in shards.values())
        return num_rows / rate if rate > 0 else None

    def _step_lines(self) -> list[str]:
        latest = self._latest()
        if not latest:
            return ["  no step statistics yet: they come some hundred steps at a time"]
        rate = sum(part.decode_tokens / part.seconds for part in latest)
        prefill = sum(part.prefill_tokens / part.seconds for part in latest)
        count = sum(part.num_steps for part in latest)
        last = {name: sum(part.last[name] for part in latest) for name in _COLUMNS}
        total = last["blocks_total"] or 1.0
        used, cached = last["blocks_used"] / total, last["blocks_cached"] / total
        bar = "#" * round(used * _KV_WIDTH) + "+" * round(cached * _KV_WIDTH)
        preempted = sum(part.num_preempted for part in latest)
        return [
            f"  {'speed':<10} {rate:,.0f} output tokens/s, {prefill:,.0f} prompt tokens/s, in the last {count:,} steps",
            f"  {'history':<10} {sparkline([p.decode_tokens / p.seconds for p in self._parts.values()][-_HISTORY:])}",
            f"  {'sequences':<10} {last['num_running']:,.0f} running, {last['num_waiting']:,.0f} waiting",
            f"  {'KV pool':<10} [{bar[:_KV_WIDTH]:<{_KV_WIDTH}}] {used:.0%} used, {cached:.0%} cached "
            f"of {total:,.0f} blocks",
            f"  {'preempted':<10} {preempted:,.0f} in the last {count:,} steps",
        ]

    def _latest(self) -> list[PartNumbers]:
        """The newest part of each shard."""
        newest = {_shard(name): part for name, part in self._parts.items()}
        return list(newest.values())


def follow(output: str, *, every_s: float, once: bool, stream: TextIO | None = None) -> None:
    """Show a job until it ends; where the stream is a terminal, in place.

    Raises:
        UserError: it is no output of ember's.
    """
    out = sys.stdout if stream is None else stream
    follower = Follower(output)
    while True:
        lines = follower.look(datetime.now(UTC))
        print((_CLEAR if out.isatty() and not once else "") + "\n".join(lines), file=out, flush=True)
        if once or follower.status != RUNNING:
            return
        time.sleep(every_s)


def sparkline(values: list[float]) -> str:
    """The values as little bars, from 0 to the largest."""
    most = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(value / most * len(_BARS)))] for value in values)


def _shard(part: str) -> str:
    return part.rpartition("-")[0]


def _since(summary: dict[str, Any], now: datetime) -> float | None:
    """Seconds since the latest attempt began."""
    began = [str(a.get("started_at")) for a in summary.get("attempts") or [] if isinstance(a, dict)]
    try:
        return max(0.0, (now - datetime.fromisoformat(began[-1])).total_seconds()) if began else None
    except (ValueError, TypeError):
        return None
