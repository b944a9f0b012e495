"""The pictures of one job: what its steps did over time, and how its rows are distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ember.report.columns import Columns, Numbers
from ember.report.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    HATCHES,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLES,
    TALL,
    Picture,
    percent,
    picture,
    thousands,
    whole,
)
from ember.report.measures import Values
from ember.report.results import JobResults
from ember.report.timeline import Timeline
from ember.report.words import Unit, seconds, written

_SHOWN_ELSEWHERE = frozenset(
    (
        *("run_id", "engine", "step", "start_s", "duration_s", "schedule_s", "model_s", "sample_s"),
        *("num_prefill_seqs", "num_prefill_tokens", "num_decode_tokens", "num_recomputed_tokens", "num_running"),
        *("num_waiting", "num_preempted", "num_finished", "blocks_total", "blocks_used", "blocks_cached"),
        *("blocks_free", "kv_tokens", "kv_utilization", "prefix_hit_tokens"),
    )
)
_NUM_BARS = 30


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve over time."""

    label: str
    values: Numbers
    colour: str
    style: Any = "-"


def job_pictures(results: JobResults, values: Values) -> list[Picture]:
    """All pictures that the job's files have something for."""
    rows, steps = Columns(results.rows), Columns(results.steps)
    over_time = _over_time(Timeline.of(steps, results.summary), values) if len(steps) else iter(())
    return [*over_time, *_distributions(rows)]


def _over_time(time: Timeline, values: Values) -> Iterator[Picture]:
    yield _throughput(time, values)
    yield _sequences(time, values)
    yield _tokens_a_step(time)
    yield _blocks(time, values)
    yield _utilization(time, values)
    yield _preemptions(time, values)
    yield _parts_of_a_step(time)
    if time.steps.sum("prefix_hit_tokens"):
        yield _hits(time, values)
    yield from _others(time)


def _throughput(time: Timeline, values: Values) -> Picture:
    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot(time.middles, time.rate("num_decode_tokens"), color=BLUE, label="output (decode)")
        if values["tokens_per_s"] is not None:
            above.axhline(values["tokens_per_s"], color=BLACK, lw=0.8, ls="--", label="mean of the whole job")
        below.plot(time.middles, time.rate("num_prefill_tokens"), color=RED, label="prompts (prefill)")
        if time.steps.sum("num_recomputed_tokens"):
            below.plot(time.middles, time.rate("num_recomputed_tokens"), color=BLACK, ls=":", label="recomputed")
        for axes in (above, below):
            axes.set_ylim(bottom=0)
            axes.set_ylabel("tokens/s")
            thousands(axes.yaxis)
            _legend(axes)
        _time_axis(below, time)

    said = f"{written(values['tokens_per_s'], Unit.RATE)} output tokens a second from the first step to the last."
    return picture("throughput", "Tokens computed per second", said, draw, TALL)


def _sequences(time: Timeline, values: Values) -> Picture:
    lines = [
        Line("running", time.means("num_running"), BLUE),
        Line("waiting in the engine", time.means("num_waiting"), RED, "--"),
    ]
    said = f"At most {written(values['peak_running'], Unit.COUNT)} at once, on average "
    said += f"{written(values['mean_running'], Unit.DECIMAL)}."
    return _curves("sequences", "Sequences running and waiting", "sequences", time, lines, said)


def _tokens_a_step(time: Timeline) -> Picture:
    names = ("num_decode_tokens", "num_prefill_tokens", "num_recomputed_tokens")
    labels, colours = ("decode", "prefill", "recomputed"), (SKY, ORANGE, PURPLE)
    per_step = [Columns(time.steps.table).sum(name) / len(time.steps) for name in names]
    said = ", ".join(f"{mean:,.1f} {label}" for mean, label in zip(per_step, labels, strict=True))
    columns = list(zip(labels, names, colours, strict=True))
    parts = [(label, time.means(name), colour) for label, name, colour in columns if time.steps.sum(name)]
    return _stack("tokens_a_step", "Tokens in a step", "tokens", time, parts, f"Mean of all steps: {said}.")


def _blocks(time: Timeline, values: Values) -> Picture:
    parts = [
        ("used by running sequences", time.means("blocks_used"), SKY),
        ("cached for reuse", time.means("blocks_cached"), ORANGE),
        ("free", time.means("blocks_free"), "#eeeeee"),
    ]
    most, mean = (written(values[key], Unit.SHARE) for key in ("peak_kv_use", "mean_kv_use"))
    said = f"Used by running sequences: at most {most} of the pool, on average {mean}."
    return _stack("blocks", "KV blocks", "blocks", time, parts, said)


def _utilization(time: Timeline, values: Values) -> Picture:
    lines = [Line("filled: live tokens per slot of used blocks", time.means("kv_utilization"), BLUE)]
    lines.append(Line("wasted", 1.0 - lines[0].values, RED, "--"))
    said = f"On average {written(values['waste'], Unit.SHARE)} of the slots in used blocks hold no token."
    return _curves("kv_utilization", "KV utilisation and waste", "share of slots", time, lines, said, share=True)


def _preemptions(time: Timeline, values: Values) -> Picture:
    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        for axes, name, colour in ((above, "num_preempted", BLUE), (below, "num_recomputed_tokens", RED)):
            axes.stairs(time.rate(name) * np.diff(time.edges), time.edges, fill=True, color=colour)
            whole(axes.yaxis)
            axes.set_ylim(bottom=0, top=None if time.steps.sum(name) else 1)
        above.set_ylabel("preemptions")
        below.set_ylabel("tokens\nrecomputed")
        _time_axis(below, time)

    count, tokens = (written(values[key], Unit.COUNT) for key in ("num_preemptions", "num_recomputed_tokens"))
    said = f"{count} preemptions: {tokens} tokens computed again." if values["num_preemptions"] else "None."
    return picture("preemptions", "Preemptions", said, draw, TALL)


def _parts_of_a_step(time: Timeline) -> Picture:
    names = ("model_s", "sample_s", "schedule_s")
    sums = [time.steps.sum(name) for name in (*names, "duration_s")]
    rest = time.means("duration_s") - sum(time.means(name) for name in names)
    shares = ", ".join(f"{name[:-2]} {total / (sums[3] or 1):.1%}" for name, total in zip(names, sums, strict=False))
    parts = [
        ("model", 1000 * time.means("model_s"), SKY),
        ("sample", 1000 * time.means("sample_s"), ORANGE),
        ("schedule", 1000 * time.means("schedule_s"), GREEN),
        ("the rest", 1000 * rest, "#bbbbbb"),
    ]
    return _stack("step_time", "Where a step's time goes", "ms a step", time, parts, f"Of all time in steps: {shares}.")


def _hits(time: Timeline, values: Values) -> Picture:
    parts = [
        ("computed", time.means("num_prefill_tokens"), SKY),
        ("from the prefix cache", time.means("prefix_hit_tokens"), ORANGE),
    ]
    said = f"{written(values['hit_rate'], Unit.SHARE)} of all prompt tokens came from the cache."
    return _stack("prefix_hits", "Prompt tokens in a step", "tokens", time, parts, said)


def _others(time: Timeline) -> Iterator[Picture]:
    """Columns that this module does not know: whatever an engine counts is shown."""
    for name in time.steps.table.schema.names:
        if name not in _SHOWN_ELSEWHERE and time.steps.sum(name):
            line = Line(name, time.means(name), BLUE)
            said = f"{time.steps.sum(name):,.10g} in all steps together."
            yield _curves(name, f"{name}, mean of a step", "a step", time, [line], said)


def _distributions(rows: Columns) -> Iterator[Picture]:
    lengths = [("prompt", rows.known("num_prompt_tokens")), ("output", _of_ran(rows, "num_output_tokens"))]
    yield from _histograms("lengths", "Lengths of prompts and outputs", "tokens", lengths, unit=Unit.COUNT)
    times = [
        ("wait in line", rows.known("queue_s")),
        ("time to first token", rows.known("ttft_s")),
        ("latency", rows.known("latency_s")),
    ]
    yield from _histograms("times", "Queueing, time to first token, latency", "seconds", times, unit=Unit.SECONDS)
    if any(len(values) for _, values in times):
        yield _cumulative(times)


def _of_ran(rows: Columns, name: str) -> Numbers:
    return rows[name][~np.isnan(rows["latency_s"])]


def _histograms(
    name: str, title: str, axis: str, series: Sequence[tuple[str, Numbers]], *, unit: Unit
) -> Iterator[Picture]:
    known = [(label, values) for label, values in series if len(values)]
    if not known:
        return

    def draw(figure: Any) -> None:
        for number, (axes, (label, values)) in enumerate(
            zip(np.atleast_1d(figure.subplots(1, len(known), sharey=True)), known, strict=True)
        ):
            counts, edges = np.histogram(values, bins=_bars(values, unit))
            axes.stairs(counts, edges, fill=True, fc=COLOURS[number], hatch=HATCHES[number], ec="white", lw=0.4)
            axes.axvline(float(np.median(values)), color=BLACK, lw=1, ls="--")
            axes.set_title(f"{label}\nmedian {written(float(np.median(values)), unit)}", fontsize=9, weight="normal")
            axes.set_xlabel(axis)
            axes.margins(x=0.01)
            (whole if unit is Unit.COUNT else thousands)(axes.xaxis)
            whole(axes.yaxis)
            if number == 0:
                axes.set_ylabel("rows")

    said = "; ".join(_spread(label, values, unit) for label, values in known)
    yield picture(name, title, f"{said}.", draw)


def _bars(values: Numbers, unit: Unit) -> Any:
    low, high = float(values.min()), float(values.max())
    if unit is Unit.COUNT:  # bars of whole numbers, each as wide as the next
        width = max(1, int(-(-(high - low + 1) // _NUM_BARS)))
        return np.arange(low - 0.5, high + width + 0.5, width)
    return np.linspace(low, high, _NUM_BARS + 1) if high > low else 1


def _spread(label: str, values: Numbers, unit: Unit) -> str:
    low, median, high, most = (written(float(np.quantile(values, q)), unit) for q in (0.0, 0.5, 0.95, 1.0))
    return f"{label}: {low} to {most}, median {median}, 95th percentile {high}"


def _cumulative(times: Sequence[tuple[str, Numbers]]) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (label, values) in enumerate(times):
            share = np.arange(1, len(values) + 1) / max(1, len(values))
            axes.step(np.sort(values), share, where="post", label=label, color=COLOURS[number], ls=STYLES[number])
        axes.axhline(0.95, color="#888888", lw=0.8)
        axes.set_xlabel("seconds")
        axes.set_ylabel("share of rows")
        axes.set_ylim(0, 1.01)
        percent(axes.yaxis)
        _legend(axes)

    said = "; ".join(
        f"{label}: 95% of rows within {seconds(float(np.quantile(values, 0.95)))}"
        for label, values in times
        if len(values)
    )
    return picture("times_cumulative", "Rows served within a time", f"{said}.", draw)


def _curves(
    name: str, title: str, axis: str, time: Timeline, lines: Sequence[Line], said: str, *, share: bool = False
) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for line in lines:
            axes.plot(time.middles, line.values, color=line.colour, ls=line.style, label=line.label)
        axes.set_ylabel(axis)
        axes.set_ylim(0, 1.02 if share else None)
        (percent if share else thousands)(axes.yaxis)
        _legend(axes)
        _time_axis(axes, time)

    return picture(name, title, said, draw)


def _stack(
    name: str, title: str, axis: str, time: Timeline, parts: Sequence[tuple[str, Numbers, str]], said: str
) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        areas = axes.stackplot(
            np.concatenate([time.edges[:1], time.middles, time.edges[-1:]]),
            [np.pad(np.nan_to_num(values), 1, mode="edge") for _, values, _ in parts],
            labels=[label for label, _, _ in parts],
            colors=[colour for _, _, colour in parts],
            lw=0.4,
            edgecolor="#444444",
        )
        for area, hatch in zip(areas, HATCHES, strict=False):
            area.set_hatch(hatch)
        axes.set_ylabel(axis)
        axes.set_ylim(bottom=0)
        thousands(axes.yaxis)
        _legend(axes)
        _time_axis(axes, time)

    return picture(name, title, said, draw)


def _legend(axes: Any) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2)


def _time_axis(axes: Any, time: Timeline) -> None:
    axes.set_xlim(time.edges[0], time.edges[-1])
    axes.set_xlabel("seconds at work" + (" (dashed: the job was started again)" if time.starts else ""))
    thousands(axes.xaxis)
    for start in time.starts:
        for each in axes.figure.axes:
            each.axvline(start, color="#888888", ls="--", lw=0.8)
