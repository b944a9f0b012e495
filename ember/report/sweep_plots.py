"""The pictures of a sweep: what the varied settings did to speed, memory and latency."""

from __future__ import annotations

from typing import Any

import numpy as np

from ember.report.drawing import (
    BLUE,
    COLOURS,
    MARKERS,
    SIZE,
    STYLES,
    TALL,
    Picture,
    percent,
    picture,
    thousands,
    times,
    whole,
)
from ember.report.measures import BY_KEY
from ember.report.ranking import NEAR
from ember.report.same_tokens import same_results
from ember.report.sweep import SPEED, Sweep, SweepJob, in_order
from ember.report.words import Unit, setting, written

_METRICS = (
    *("tokens_per_s", "mean_running", "mean_kv_use", "waste", "num_preemptions", "recomputed_share"),
    *("hit_rate", "p99_step_s", "p95_ttft_s", "p95_latency_s"),
)
_MOST_LINES = len(COLOURS)


def sweep_pictures(sweep: Sweep) -> list[Picture]:
    """All pictures that the varied settings give; none if nothing varied."""
    if not sweep.keys:
        return []
    shown = [key for key in _METRICS if any(job.values[key] for job in sweep.jobs)]
    pictures = [_over_key(sweep, key) for key in shown]
    if len(sweep.keys) == 2 and sweep.sort in BY_KEY and any(_known(job, sweep.sort) for job in sweep.jobs):
        pictures.insert(1, _map(sweep))
    return [*pictures, _trade(sweep)]


def _over_key(sweep: Sweep, metric: str) -> Picture:
    """The metric over the key with most values; a line for each combination of the others."""
    key, others = sweep.keys[0], sweep.keys[1:]
    places = [setting(value) for value in sweep.values_of(key)]
    lines: dict[str, list[tuple[int, float | None]]] = {}
    for job in in_order(sweep.jobs, [*others, key]):
        if _known(job, metric):
            point = (places.index(setting(job.settings.get(key))), job.values[metric])
            lines.setdefault(job.label(others) if others else "", []).append(point)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (label, points) in enumerate(lines.items()):
            axes.plot(
                *zip(*points, strict=True), label=label or None, **_look(number, joined=len(lines) <= _MOST_LINES)
            )
        axes.set_xticks(range(len(places)), places)
        axes.set_xlabel(key)
        axes.set_ylabel(BY_KEY[metric].label)
        most = max((value or 0.0 for line in lines.values() for _, value in line), default=0.0)
        axes.set_ylim(0, 1.1 * most or 1.0)
        if metric == SPEED and len(same_results(sweep.jobs)) == 1:
            axes.axhline((1 - NEAR) * most, color="#888888", lw=0.8, ls=":", label=f"{1 - NEAR:.0%} of the best")
        _numbers(axes.yaxis, metric)
        if len(lines) <= _MOST_LINES and axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.2)

    size = TALL if others else SIZE
    return picture(f"sweep_{metric}", BY_KEY[metric].label, _extremes(sweep, metric), draw, size)


def _look(number: int, *, joined: bool) -> dict[str, Any]:
    look = number % _MOST_LINES
    line: dict[str, Any] = {"ls": STYLES[look]} if joined else {"ls": "", "alpha": 0.7}
    return {"color": COLOURS[look], "marker": MARKERS[look], "ms": 5, **line}


def _extremes(sweep: Sweep, metric: str) -> str:
    """`From 12% with block_size=4 to 31% with block_size=64.`"""
    ranked = sorted((j for j in sweep.jobs if _known(j, metric)), key=lambda j: j.values[metric] or 0.0)
    low, high = (written(job.values[metric], BY_KEY[metric].unit) for job in (ranked[0], ranked[-1]))
    if low == high:
        return f"{low} in all jobs."
    return f"From {low} with {ranked[0].label(sweep.keys)} to {high} with {ranked[-1].label(sweep.keys)}."


def _map(sweep: Sweep) -> Picture:
    """Two keys: the sorted-by number of every combination, as a table in colours."""
    (across, up), metric = sweep.keys, sweep.sort
    columns, rows = (list(map(setting, sweep.values_of(key))) for key in (across, up))
    grid = np.full((len(rows), len(columns)), np.nan)
    for job in sweep.jobs:
        grid[rows.index(setting(job.settings.get(up))), columns.index(setting(job.settings.get(across)))] = (
            np.nan if job.values[metric] is None else job.values[metric]
        )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(grid, cmap="cividis", aspect="auto", origin="lower")
        axes.grid(False)
        middle = (np.nanmin(grid) + np.nanmax(grid)) / 2
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                colour = "black" if value > middle else "white"
                axes.text(column, row, written(value, BY_KEY[metric].unit), ha="center", va="center", color=colour)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xlabel(across)
        axes.set_ylabel(up)

    best = f"Best: {sweep.jobs[0].label(sweep.keys)}, {written(sweep.jobs[0].values[metric], BY_KEY[metric].unit)}."
    return picture("sweep_map", f"{BY_KEY[metric].label} of each combination", best, draw)


def _trade(sweep: Sweep) -> Picture:
    """Speed against latency, each job a point with its place in the table."""
    jobs = [(n, j) for n, j in enumerate(sweep.jobs, 1) if _known(j, "tokens_per_s") and _known(j, "p95_latency_s")]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, job in jobs:
            at = (job.values["p95_latency_s"], job.values["tokens_per_s"])
            axes.plot(*at, "o", color=BLUE, ms=5)
            axes.annotate(str(number), at, xytext=(4, 3), textcoords="offset points", fontsize=8)
        axes.set_xlabel(BY_KEY["p95_latency_s"].label)
        axes.set_ylabel(BY_KEY["tokens_per_s"].label)
        axes.set_ylim(0, 1.12 * max((job.values["tokens_per_s"] or 0.0 for _, job in jobs), default=0.0) or 1.0)
        axes.set_xlim(0, 1.06 * max((job.values["p95_latency_s"] or 0.0 for _, job in jobs), default=0.0) or 1.0)
        thousands(axes.yaxis)
        times(axes.xaxis)

    said = "Up and left is better. The numbers are the jobs' places in the table."
    return picture("sweep_trade", "Speed against latency", said, draw)


def _known(job: SweepJob, metric: str) -> bool:
    return job.values[metric] is not None


def _numbers(axis: Any, metric: str) -> None:
    {Unit.SHARE: percent, Unit.COUNT: whole, Unit.SECONDS: times}.get(BY_KEY[metric].unit, thousands)(axis)
