"""Step statistics over time: attempts and shards on one axis, in bins, so that a million steps are still a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from ember.report.columns import Columns, Numbers

MAX_BINS = 160
MIN_BIN_STEPS = 4
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Steps over time at work: pauses between attempts are left out, shards that overlap by the clock lie together.

    A step's numbers are spread evenly over its duration.

    Attributes:
        edges: [bins + 1] of equal bins, seconds.
        starts: where an attempt begins after a pause, seconds.
    """

    steps: Columns
    edges: Numbers
    starts: list[float]
    _begin: Numbers
    _end: Numbers
    _engines: list[Places]

    @staticmethod
    def of(steps: Columns, summary: Mapping[str, Any]) -> Timeline:
        """The timeline of a job that has steps; `summary` says when its attempts began."""
        run_ids = steps.table["run_id"].to_pylist()
        offsets, starts = _offsets(steps, np.array(run_ids), _began(summary))
        begin = steps["start_s"] + np.array([offsets[run_id] for run_id in run_ids])
        end = begin + steps["duration_s"]
        bins = int(np.clip(len(steps) // MIN_BIN_STEPS, 1, MAX_BINS))
        edges = np.linspace(0.0, float(end.max()) or 1.0, bins + 1)
        return Timeline(steps, edges, starts, begin, end, _engines(run_ids, steps["engine"], begin))

    @property
    def middles(self) -> Numbers:
        """[bins] seconds."""
        return (self.edges[:-1] + self.edges[1:]) / 2

    def rate(self, name: str) -> Numbers:
        """[bins] the column's sum per second."""
        return self._of_all_engines(self.steps[name]) / np.diff(self.edges)

    def means(self, name: str) -> Numbers:
        """[bins] the column's mean over the time at work, added up over engines at once; NaN where none was."""
        seconds = self._end - self._begin
        at_work = np.minimum(self._of_all_engines(seconds), np.diff(self.edges))
        return self._of_all_engines(self.steps[name] * seconds) / np.where(at_work > 0, at_work, np.nan)

    def _of_all_engines(self, values: Numbers) -> Numbers:
        return sum((self._spread(own, values) for own in self._engines), np.zeros(len(self.middles)))

    def _spread(self, own: Places, values: Numbers) -> Numbers:
        """[bins] one engine's values: what has come up to each edge, and the differences between edges."""
        times = np.stack([self._begin[own], self._end[own]], axis=1).ravel()
        after = np.cumsum(values[own])
        sums = np.stack([after - values[own], after], axis=1).ravel()
        return np.diff(np.interp(self.edges, np.maximum.accumulate(times), sums))


def _began(summary: Mapping[str, Any]) -> dict[str, float]:
    """When each attempt began, in seconds since 1970."""
    found = {}
    for attempt in summary.get("attempts") or []:
        try:
            found[str(attempt["run_id"])] = datetime.fromisoformat(attempt["started_at"]).timestamp()
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _offsets(
    steps: Columns, runs: npt.NDArray[Any], began: Mapping[str, float]
) -> tuple[dict[str, float], list[float]]:
    """What to add to `start_s` of each attempt, and where new stretches of work begin.

    Attempts that overlap by the clock keep their distance; the others follow each other without a pause.
    """
    ends = steps["start_s"] + steps["duration_s"]
    spans = []
    for run_id in dict.fromkeys(runs.tolist()):
        own = runs == run_id
        spans.append((began.get(run_id), float(steps["start_s"][own].min()), float(ends[own].max()), run_id))
    spans.sort(key=lambda span: (span[0] is None, span[0] or 0.0))
    offsets: dict[str, float] = {}
    starts: list[float] = []
    zero, end = 0.0, 0.0  # the clock's time where the axis is 0, were there no pauses; where the axis ends so far
    for clock, first, last, run_id in spans:
        at = end if clock is None or not offsets or clock - zero >= end else clock - zero
        if at == end:
            zero = (clock or 0.0) - end
            starts += [end] if offsets else []
        offsets[run_id] = at - first
        end = max(end, at + last - first)
    return offsets, starts


def _engines(run_ids: list[str], engine: Numbers, begin: Numbers) -> list[Places]:
    """The steps of each engine of each attempt, in time."""
    own: dict[tuple[str, float], list[int]] = {}
    for index, name in enumerate(zip(run_ids, engine.tolist(), strict=True)):
        own.setdefault(name, []).append(index)
    return [np.array(sorted(steps, key=begin.__getitem__), dtype=np.int64) for steps in own.values()]
