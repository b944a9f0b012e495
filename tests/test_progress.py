"""The bar: right at the end, quiet where nobody watches, cheap always, and never the death of a job."""

from __future__ import annotations

import io
import json
import pty

import pytest

from ember.core.stats import StepStats
from ember.progress import ProgressBar, TokenRate

STATS = StepStats(step=1, num_running=3, num_waiting=5, blocks_used=6, blocks_total=8)


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def __init__(self):
        super().__init__()
        self.writes = 0

    def isatty(self):
        return True

    def write(self, text):
        self.writes += 1
        return super().write(text)


def last(stream):
    return stream.getvalue().rstrip("\n").replace("\n", "\r").split("\r")[-1].strip()


def test_a_finished_job_stands_at_100_percent():
    """A bar left at 97% because the last update came within the rate limit."""
    clock, stream = Clock(), Terminal()
    bar = ProgressBar(4, True, stream, clock=clock)
    for rows in range(5):
        clock.now += 0.01
        bar.update(rows, rows * 10, STATS)
    bar.close()
    bar.close()
    assert last(stream).startswith("100%")
    assert "4/4" in last(stream)
    assert stream.getvalue().endswith("\n")


def test_an_interrupted_job_stands_where_it_was():
    """A bar that jumps to 100% on Ctrl-C."""
    stream = Terminal()
    bar = ProgressBar(4, True, stream, clock=Clock())
    bar.update(1, 10, STATS)
    bar.close()
    assert last(stream).startswith("25%")
    assert "1/4" in last(stream)


def test_the_bar_shows_speed_sequences_and_cache():
    """The numbers one watches a job for."""
    clock, stream = Clock(), Terminal()
    bar = ProgressBar(4, True, stream, clock=clock)
    clock.now += 2
    bar.update(1, 2468, STATS)
    assert "1,234 tok/s, run 3 wait 5, KV 75%" in last(stream)
    bar.close()


def test_a_terminal_is_drawn_ten_times_a_second_at_most():
    """Thousands of steps a second must not become thousands of writes."""
    clock, stream = Clock(), Terminal()
    bar = ProgressBar(10_000, True, stream, clock=clock)
    before = stream.writes
    for i in range(1000):
        clock.now += 0.001
        bar.update(i, i, STATS)
    assert 9 <= stream.writes - before <= 11
    bar.close()


def test_a_log_file_gets_few_lines_and_no_carriage_returns():
    """A cluster's log filled with megabytes of bar."""
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(1000, True, stream, clock=clock)
    for i in range(250):
        clock.now += 0.1
        bar.update(i, i * 100, STATS)
    bar.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "\r" not in stream.getvalue()
    assert lines[0].startswith("99/1000 rows (10%) [00:10<01:")
    assert "990 tok/s, run 3 wait 5, KV 75%" in lines[0]


def test_a_terminal_without_a_width_shows_the_bar():
    """Pseudo-terminals of containers have 0 columns, for which tqdm draws an empty line."""
    main, side = pty.openpty()
    with open(main, "rb", buffering=0) as screen, open(side, "w") as stream:
        bar = ProgressBar(4, True, stream, clock=Clock())
        bar.update(4, 10, STATS)
        bar.close()
        assert b"100%" in screen.read(4096)


def test_disabled_means_silent():
    """progress=false that still prints its last line."""
    for stream in (Terminal(), io.StringIO()):
        bar = ProgressBar(4, False, stream)
        bar.update(1, 10, STATS)
        bar.close()
        assert stream.getvalue() == ""


@pytest.mark.parametrize("stream_type", [Terminal, io.StringIO])
@pytest.mark.parametrize("total", [0, 3])
def test_no_rows_or_no_steps_are_no_trouble(stream_type, total):
    """A division by zero rows, seconds or blocks; an unknown total."""
    clock = Clock()
    bar = ProgressBar(total, True, stream_type(), clock=clock)
    bar.close()
    bar = ProgressBar(total, True, stream_type(), clock=clock)
    bar.update(0, 0, StepStats(step=0))
    clock.now += 20
    bar.update(2, 0, StepStats(step=0))
    bar.close()


@pytest.mark.parametrize("stream_type", [Terminal, io.StringIO])
def test_a_stream_that_breaks_does_not_stop_the_job(stream_type):
    """`ember ... 2>&1 | head` closes the pipe: the job goes on without a bar."""
    clock, stream = Clock(), stream_type()
    bar = ProgressBar(4, True, stream, clock=clock)

    def broken(_text):
        raise BrokenPipeError

    stream.write = broken
    for rows in range(3):
        clock.now += 20
        bar.update(rows, rows, STATS)
    bar.close()


def test_rows_done_earlier_count_as_done_but_not_as_speed():
    """A resumed job that promises to end at once, since half of it came in no time."""
    clock, stream = Clock(), io.StringIO()
    bar = ProgressBar(100, True, stream, initial_rows=50, clock=clock)
    clock.now += 10
    bar.update(60, 10, STATS)
    assert last(stream).startswith("60/100 rows (60%) [00:10<00:40")
    bar.close()


def test_the_rate_follows_the_last_seconds():
    """An average over the whole job would hide that it has come to a halt."""
    rate = TokenRate(0.0)
    assert rate.at(1.0, 100) == 100
    assert rate.at(2.0, 200) == pytest.approx(100)
    assert rate.at(30.0, 200) < 1
    assert rate.at(30.0, 200) < 1


def test_an_update_that_is_not_due_does_nothing():
    """A bar that costs a visible share of a step: between drawings an update only reads the clock (0.2 us)."""
    clock, stream = Clock(), Terminal()
    bar = ProgressBar(10**6, True, stream, clock=clock)
    bar.update(0, 0, STATS)
    before = stream.writes
    for i in range(1000):
        bar.update(i, i, STATS)
    assert stream.writes == before
    bar.close()


def test_json_lines_for_machines():
    """Each line alone is an object, also on a terminal, with nothing of the bar between; the last one says so."""
    clock, stream = Clock(), Terminal()
    bar = ProgressBar(4, True, stream, json_lines=True, initial_rows=1, clock=clock)
    for rows in (1, 2, 3):
        clock.now += 0.8
        bar.update(rows, 10 * rows, STATS)
    bar.close()
    first, last = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["event"], first["rows_done"], first["rows_total"], first["elapsed_s"]) == ("progress", 2, 4, 1.6)
    assert first["left_s"] == pytest.approx(3.2)
    assert (last["event"], last["rows_done"], last["output_tokens"]) == ("end", 3, 30)
    assert last["tokens_per_s"] == pytest.approx(30 / 2.4, abs=1e-3)
    assert (last["num_running"], last["blocks_used"], last["blocks_total"]) == (3, 6, 8)
