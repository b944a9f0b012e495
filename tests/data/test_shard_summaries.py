"""One summary of all shards: right sums, and never `finished` before the last of them has."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.data.folder import OutputFolder
from ember.data.shard_summaries import merge_summaries
from ember.job import run_job
from ember.sampling_params import SamplingParams


def shard(status="finished", *, rows=5, errors=0, first=0, started="2024-01-01T00:00:00+00:00"):
    return {
        **{"status": status, "num_rows_total": 5, "num_rows_done": rows, "num_errors": errors},
        "errors_by_kind": {"bad_row": errors} if errors else {},
        "first_errors": [{"kind": "bad_row", "row_index": first + i, "error": "x"} for i in range(min(3, errors))],
        "finish_reasons": {"stop": rows - errors},
        "num_output_tokens": rows * 2,
        "settings": {"model": "tiny"},
        "attempts": [
            {
                "started_at": started,
                "status": status,
                "peak_running": rows,
                "num_output_tokens": rows * 2,
                "duration_s": 2.0,
            }
        ],
    }


def test_numbers_add_up_and_peaks_do_not():
    """A shard's numbers passed off as the job's; a peak of a hundred sequences on engines of ten."""
    merged = merge_summaries({1: shard(errors=2, first=10), 0: shard(rows=4, errors=3)}, 2)
    assert (merged["num_rows_total"], merged["num_rows_done"], merged["num_errors"]) == (10, 9, 5)
    assert (merged["num_output_tokens"], merged["total"]["peak_running"]) == (18, 5)
    assert merged["errors_by_kind"] == {"bad_row": 5}
    assert [e["row_index"] for e in merged["first_errors"]] == [0, 1, 2]
    assert merged["finish_reasons"] == {"stop": 4}
    assert (merged["total"]["num_attempts"], merged["total"]["tokens_per_s"], merged["exit_code"]) == (2, 4.5, 3)


def test_attempts_keep_their_shard_and_their_order():
    """A history in which nobody knows which machine failed."""
    late, early = "2024-01-02T00:00:00+00:00", "2024-01-01T00:00:00+00:00"
    merged = merge_summaries({0: shard(started=late), 1: shard(started=early)}, 2)
    assert [(a["shard"], a["started_at"]) for a in merged["attempts"]] == [(1, early), (0, late)]


@pytest.mark.parametrize(
    ("statuses", "status", "missing"),
    [
        (["finished", "finished"], "finished", []),
        (["finished", None], "incomplete", [1]),
        (["finished", "interrupted"], "interrupted", []),
        (["failed", "interrupted"], "failed", []),
        (["failed", "running"], "running", []),
        ([None, "running"], "running", [0]),
        ([None, None], "incomplete", [0, 1]),
    ],
)
def test_finished_means_all_of_them(statuses, status, missing):
    """A job called finished because the shards that happened to have run were."""
    merged = merge_summaries({i: shard(s) for i, s in enumerate(statuses) if s}, 2)
    assert (merged["status"], merged["shards_missing"], merged["num_shards"]) == (status, missing, 2)
    assert merged["exit_code"] == (0 if status == "finished" else None)


def test_summaries_of_another_number_of_shards_are_not_mixed_in(tmp_path):
    """Files left by a job of other shards; one that is broken."""
    (tmp_path / "summary-s000of003.json").write_text(json.dumps(shard(rows=3)))
    (tmp_path / "summary-s001of002.json").write_text("{")
    with OutputFolder(str(tmp_path), 0, 2) as folder:
        folder.write_summary(shard())
    merged = json.loads((tmp_path / "summary.json").read_text())
    assert (merged["num_rows_done"], merged["shards_missing"], merged["status"]) == (5, [1], "incomplete")


@pytest.fixture
def sharded(tmp_path):
    """Runs a shard of a job of two over five prompts; returns its summary."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "The sea" if i else ""}) + "\n" for i in range(5)))

    def run(number, **settings):
        sampling = SamplingParams(max_tokens=2)
        given = {"data": str(prompts), "output": str(tmp_path / "out"), "sampling": sampling, "progress": False}
        return run_job(JobConfig(**given, shard=number, num_shards=2, **settings))

    return run


def rows(tmp_path):
    table = pq.read_table(tmp_path / "out" / "completions", columns=["row_index"])
    return sorted(table["row_index"].to_pylist())


def test_shards_make_one_output(tmp_path, sharded):
    """Shards that overwrite each other's summary; steps of all shards under one engine; no word of the whole job."""
    assert sharded(1).exit_code == 0
    path = tmp_path / "out" / "summary.json"
    half = json.loads(path.read_text())
    assert (half["status"], half["shards_missing"], half["num_rows_done"]) == ("incomplete", [0], 2)
    assert sharded(0).exit_code == 3
    whole = json.loads(path.read_text())
    assert (whole["status"], whole["num_rows_done"], whole["num_errors"]) == ("finished", 5, 1)
    assert {a["shard"] for a in whole["attempts"]} == {0, 1}
    assert rows(tmp_path) == [0, 1, 2, 3, 4]
    steps = pq.read_table(tmp_path / "out" / "steps", columns=["engine"])
    assert set(steps["engine"].to_pylist()) == {0, 1}
    (tmp_path / "out" / "summary-s001of002.json").write_text(json.dumps({"status": "running", "attempts": [{}]}))
    path.unlink()
    assert sharded(1).exit_code == 0, "nothing to do, but its last attempt was killed before its summary"
    assert json.loads(path.read_text())["status"] == "finished"


def test_force_in_a_sweep_over_shards_keeps_the_first_shards_rows(tmp_path, sharded):
    """-m shard=range(2) force=true, one after the other: each shard moved the one before it aside."""
    sharded(0, seed=1)
    for number in (0, 1):
        sharded(number, seed=2, force=True)
    assert rows(tmp_path) == [0, 1, 2, 3, 4]
    for number in (0, 1):
        sharded(number, seed=2, force=True)
    assert rows(tmp_path) == [0, 1, 2, 3, 4]
