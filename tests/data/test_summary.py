"""The numbers of a job: counted right, JSON-ready, and shown within 80 columns."""

from __future__ import annotations

import json
import signal
import unicodedata
from dataclasses import fields

import pyarrow as pa
import pytest

from ember.core.sequence import FinishReason
from ember.core.stats import StepStats
from ember.data.summary import ATTEMPT_KEYS, JOB_KEYS, JobSummary, SummaryBuilder, final_table


def build(builder, **kwargs):
    return builder.build(**{"status": "finished", "run_id": "r", "num_rows_total": 3, "duration_s": 2.0, **kwargs})


def fail_row(builder, i, kind="bad_row", error="broken"):
    builder.add_sample(finish_reason="error", error=f"{kind}: {error}" if kind else error, row_index=i, id=f"id{i}")


def width(line):
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def test_rows_are_counted():
    """Error rows left out of the rows done, or finish reasons keyed by an enum's repr."""
    builder = SummaryBuilder()
    builder.add_sample(finish_reason=FinishReason.STOP, num_prompt_tokens=3, num_output_tokens=5, row_index=0)
    builder.add_sample(finish_reason=FinishReason.LENGTH, num_prompt_tokens=4, num_output_tokens=7, row_index=1)
    fail_row(builder, 2)
    summary = build(builder)
    assert (summary.num_rows_done, summary.num_errors, summary.num_rows_total) == (3, 1, 3)
    assert (summary.num_prompt_tokens, summary.num_output_tokens, summary.tokens_per_s) == (7, 12, 6.0)
    assert summary.job_numbers()["finish_reasons"] == {"stop": 1, "length": 1, "error": 1}


def test_only_the_first_errors_of_each_kind_are_kept():
    """A million bad rows must fill neither memory nor the screen, nor crowd out a rarer kind."""
    builder = SummaryBuilder()
    for i in range(100):
        fail_row(builder, i, error="x" * 10_000)
    fail_row(builder, 100, kind="prompt_too_long")
    summary = build(builder)
    assert summary.errors_by_kind == {"bad_row": 100, "prompt_too_long": 1}
    assert [e["row_index"] for e in summary.first_errors] == [0, 1, 2, 100]
    assert len(json.dumps(summary.job_numbers())) < 5000


def test_an_error_without_a_kind_is_still_counted():
    """A clean exit code for a job with an error row."""
    builder = SummaryBuilder()
    fail_row(builder, 0, kind=None, error="")
    assert build(builder).exit_code == 3
    assert build(builder).errors_by_kind == {"other": 1}


def test_steps_are_counted():
    """Peaks taken for sums, and a mean that idle steps pull down."""
    builder = SummaryBuilder()
    common = {"blocks_total": 8, "num_preempted": 1, "num_recomputed_tokens": 5, "duration_s": 0.5}
    builder.add_step(StepStats(step=0, blocks_used=4, kv_utilization=0.5, num_running=2, **common))
    builder.add_step(StepStats(step=1, blocks_used=2, kv_utilization=1.0, num_running=3, **common))
    builder.add_step(StepStats(step=2, **common))
    summary = build(builder, block_size=16)
    assert (summary.num_steps, summary.engine_s, summary.num_preemptions) == (3, 1.5, 3)
    assert (summary.num_recomputed_tokens, summary.peak_running) == (15, 3)
    assert (summary.peak_kv_utilization, summary.mean_kv_utilization) == (1.0, 0.75)
    assert (summary.peak_blocks_used, summary.blocks_total, summary.block_size) == (4, 8, 16)


def test_shares_are_of_the_right_whole():
    """A hit rate over all tokens would hide what the cache does to prompts; over none it is unknown, not 0."""
    builder = SummaryBuilder()
    counts = {"num_prefill_tokens": 30, "num_decode_tokens": 60, "num_recomputed_tokens": 10}
    builder.add_step(StepStats(step=0, prefix_hit_tokens=60, num_evicted_blocks=2, **counts))
    summary = build(builder)
    assert (summary.prefix_hit_rate, summary.recomputed_share, summary.num_evicted_blocks) == (0.6, 0.1, 2)
    assert "60 tokens found (60.0%), 2 blocks evicted" in final_table(summary, "out")
    assert "10 tokens computed again (10.0% of all)" in final_table(summary, "out")
    empty = build(SummaryBuilder())
    assert (empty.prefix_hit_rate, empty.recomputed_share) == (None, None)


@pytest.mark.parametrize(
    ("status", "errors", "signum", "code"),
    [
        ("finished", 0, None, 0),
        ("finished", 1, None, 3),
        ("interrupted", 1, signal.SIGINT, 130),
        ("interrupted", 0, signal.SIGTERM, 143),
        ("failed", 1, None, 1),
    ],
)
def test_exit_codes_are_the_design_s(status, errors, signum, code):
    """A script that goes on after an interrupted job, or takes error rows for success."""
    builder = SummaryBuilder()
    for i in range(errors):
        fail_row(builder, i)
    summary = build(builder, status=status, signum=signum)
    assert summary.exit_code == code
    assert type(summary.job_numbers()["exit_code"]) is int


def test_an_unknown_status_is_refused():
    """A misspelt status would leave with exit code 0."""
    with pytest.raises(ValueError, match="finnished"):
        build(SummaryBuilder(), status="finnished")


def test_an_empty_job_has_a_summary():
    """A division by zero rows, steps or seconds."""
    summary = build(SummaryBuilder(), num_rows_total=0, duration_s=0.0)
    assert (summary.tokens_per_s, summary.mean_kv_utilization, summary.exit_code) == (0.0, 0.0, 0)
    assert "0 of 0" in final_table(summary, "out")


def test_the_dictionary_is_strict_json():
    """NaN, infinities and objects make a summary.json that strict readers refuse."""
    settings = {"pool": float("inf"), "dtype": FinishReason.STOP, "path": object, 3: (1, float("nan"))}
    summary = JobSummary(status="finished", exit_code=0, run_id="r", tokens_per_s=float("nan"), settings=settings)
    plain = json.loads(json.dumps(summary.attempt_numbers(), allow_nan=False))
    assert plain["tokens_per_s"] is None
    assert plain["settings"]["3"] == [1, None]
    assert plain["settings"]["dtype"] == "stop"
    assert list(summary.job_numbers())[:3] == ["status", "exit_code", "num_rows_total"]


def test_every_number_has_one_scope():
    """A new field that is in neither summary, or an attempt's speed among the counts of the whole job."""
    names = {field.name for field in fields(JobSummary)}
    kept_elsewhere = {"run_id", "num_rows_before", "num_output_tokens_new"}
    assert sorted([*JOB_KEYS, *ATTEMPT_KEYS, *kept_elsewhere]) == sorted(names)
    builder = SummaryBuilder()
    part = {"row_index": [0], "id": ["a"], "finish_reason": ["stop"], "error": pa.array([None], pa.string())}
    part |= {"sample_index": [0], "num_samples": [1]}
    builder.add_committed(pa.table(part | {"num_prompt_tokens": [3], "num_output_tokens": [40]}))
    builder.add_sample(finish_reason="stop", num_prompt_tokens=4, num_output_tokens=7, row_index=1)
    summary = build(builder)
    job, attempt = summary.job_numbers(), summary.attempt_numbers()
    assert (job["num_rows_done"], job["num_prompt_tokens"], job["num_output_tokens"]) == (2, 7, 47)
    assert (attempt["num_rows"], attempt["num_output_tokens"], attempt["tokens_per_s"]) == (1, 7, 3.5)


def test_the_table_fits_80_columns_and_says_it_all():
    """A wrapped table, a cause without its remedy, or one that moves the cursor or takes twenty lines."""
    builder = SummaryBuilder()
    builder.add_sample(finish_reason="stop", num_prompt_tokens=10**9, num_output_tokens=10**9, row_index=0)
    fail_row(builder, 1, error="no such\ncolumn \x1b[2J" + "y" * 200)
    fail_row(builder, 2, error="漢字" * 300)
    builder.add_step(StepStats(step=0, blocks_used=4, blocks_total=8, kv_utilization=0.5, duration_s=1.0))
    settings = {"model": "a/very/long/path/to/a/model" * 3, "device": "cpu"}
    table = final_table(build(builder, settings=settings, duration_s=123456.0, load_s=99.0), "outputs/run/1")
    lines = table.split("\n")
    assert max(width(line) for line in lines if not line.startswith("    row")) <= 80
    assert max(map(width, lines)) <= 400
    assert "y" * 200 in table
    assert "\x1b" not in table
    assert "exit code 3" in lines[0]
    assert any("2 bad_row" in line for line in lines)
    assert any(line.strip().startswith("row 1 (id1): no such column") for line in lines)
    assert lines[-1].endswith(" outputs/run/1")


def test_the_table_of_a_resumed_job_says_what_is_this_attempts():
    """A speed of 10 rows under the tokens of a thousand."""
    summary = JobSummary(status="finished", exit_code=0, run_id="r", num_rows_done=9, num_output_tokens=90)
    assert "attempt" not in final_table(summary, "out")
    summary.num_rows_before, summary.num_output_tokens_new = 6, 30
    assert "  this attempt 30 output tokens; what follows is its own\n" in final_table(summary, "out")


def test_settings_take_as_many_lines_as_they_need():
    """The pool size, last of a long list, cut off: it is what one compares jobs by."""
    settings = {f"setting_{i}": "x" * 12 for i in range(7)} | {"pool_size": "4096tok"}
    table = final_table(build(SummaryBuilder(), settings=settings), "out")
    assert "pool_size=4096tok" in table
    assert max(map(width, table.split("\n"))) <= 80


def test_the_results_path_is_never_cut():
    """It is there to be copied."""
    path = "/data/" + "x" * 200
    assert final_table(build(SummaryBuilder()), path).endswith(path)
