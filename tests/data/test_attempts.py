"""The history of a job: every attempt once, a killed one as killed, and sums that add up."""

from __future__ import annotations

import json

import pytest

from ember.data.attempts import Attempts
from ember.data.store import LocalStore
from ember.data.summary import JobSummary

NAME = "summary.json"


def summary(status="finished", *, rows=4, before=1, run_id="r"):
    return JobSummary(
        status=status,
        exit_code=0,
        run_id=run_id,
        num_rows_done=rows,
        num_rows_before=before,
        num_output_tokens=rows * 10,
        num_output_tokens_new=(rows - before) * 10,
        num_steps=5,
        num_preemptions=2,
        num_recomputed_tokens=3,
        duration_s=1.5,
        engine_s=1.0,
        peak_kv_utilization=0.5,
        tokens_per_s=20.0,
    )


def load(folder, run_id):
    return Attempts.load(LocalStore(folder), NAME, run_id)


def save(folder, value):
    (folder / NAME).write_text(json.dumps(value))


def test_a_killed_attempt_is_recorded_as_killed(tmp_path):
    """SIGKILL leaves `running` in the file for ever, and the attempt's numbers would count as those of a live one."""
    save(tmp_path, load(tmp_path, "first").started())
    assert json.loads((tmp_path / NAME).read_text())["status"] == "running"
    written = load(tmp_path, "second").started()
    assert [(a["run_id"], a["status"]) for a in written["attempts"]] == [("first", "killed"), ("second", "running")]


def test_sums_run_over_all_attempts(tmp_path):
    """The numbers of the last attempt passed off as the job's; a killed attempt that breaks the sum."""
    save(tmp_path, load(tmp_path, "a").finished(summary("interrupted", rows=3, before=0)))
    save(tmp_path, load(tmp_path, "b").started())
    written = load(tmp_path, "c").finished(summary(rows=10, before=4))
    assert [a["status"] for a in written["attempts"]] == ["interrupted", "killed", "finished"]
    assert [a.get("num_rows") for a in written["attempts"]] == [3, None, 6]
    assert written["total"] == {
        **{"num_attempts": 3, "num_killed": 1, "num_rows": 9, "num_output_tokens": 90, "num_steps": 10},
        **{"num_preemptions": 4, "num_recomputed_tokens": 6, "duration_s": 3.0, "engine_s": 2.0, "load_s": 0.0},
        **{"tokens_per_s": 30.0, "peak_kv_utilization": 0.5, "peak_blocks_used": 0, "peak_running": 0},
        **{"num_proposed_tokens": 0, "num_accepted_tokens": 0, "prefix_hit_tokens": 0, "num_evicted_blocks": 0},
        **{"num_prefill_tokens": 0, "num_decode_tokens": 0},
    }
    assert {"num_steps", "tokens_per_s", "duration_s"}.isdisjoint(written), "one attempt's numbers among the job's"
    assert (written["status"], written["num_rows_done"]) == ("finished", 10)


def test_finished_follows_its_own_start(tmp_path):
    """An attempt listed twice: as started, and as finished."""
    attempts = load(tmp_path, "a")
    save(tmp_path, attempts.started())
    written = attempts.finished(summary())
    assert [(a["run_id"], a["status"]) for a in written["attempts"]] == [("a", "finished")]
    assert written["attempts"][0]["started_at"].endswith("+00:00")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "{}", '{"attempts": 3}', '{"attempts": [1, null]}'])
def test_a_broken_summary_costs_history_only(tmp_path, text):
    """A summary.json that somebody edited must not keep a job from going on."""
    (tmp_path / NAME).write_text(text)
    assert len(load(tmp_path, "a").started()["attempts"]) == 1


def test_nothing_to_do_is_no_attempt(tmp_path):
    """A job that was killed after its last row: a resume has nothing to compute, but must say that all is done."""
    save(tmp_path, load(tmp_path, "a").started())
    written = load(tmp_path, "b").without_this(summary(rows=4, before=4))
    assert written["status"] == "finished"
    assert [(a["run_id"], a["status"]) for a in written["attempts"]] == [("a", "killed")]
    assert written["total"]["num_attempts"] == 1
