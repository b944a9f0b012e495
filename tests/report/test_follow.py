"""`ember top`: what a running job has written so far, each part read once, until the job ends."""

from __future__ import annotations

import io
import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ember.entrypoints.cli import main
from ember.report.follow import Follower, follow, sparkline


def test_a_finished_job_is_shown_once(job: str) -> None:
    stream = io.StringIO()
    follow(job, every_s=60, once=False, stream=stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith(f"{job}: finished, began ")
    assert lines[1] == "  rows       12 of 12 written (100%)"
    assert lines[4].split()[0] == "sequences"
    assert "of 16 blocks" in lines[5]


def test_a_running_job_grows(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and steps that come in later are added; a part that was read is not read again."""
    output = Path(shutil.copytree(job, tmp_path / "out"))
    (output / "summary.json").write_text(json.dumps({"status": "running", "attempts": []}), encoding="utf-8")
    later = {name: sorted((output / name).iterdir())[-1] for name in ("completions", "steps")}
    for name, part in later.items():
        part.rename(tmp_path / f"{name}.parquet")
    follower = Follower(str(output))
    now = datetime.now(UTC)
    before = follower.look(now)
    for name, part in later.items():
        (tmp_path / f"{name}.parquet").rename(part)
    steps = pq.read_table(later["steps"])
    after = follower.look(now)
    assert re.fullmatch(r"  rows       5 of 12 written \(42%\), about .+ left", before[1])
    assert after[1] == "  rows       12 of 12 written (100%)"
    assert f"in the last {len(steps):,} steps" in after[2]
    monkeypatch.setattr("ember.report.tables.Parts.read", None)
    assert follower.look(now) == after


def test_before_the_first_step(job: str, tmp_path: Path) -> None:
    shutil.copy(Path(job) / "manifest.json", tmp_path / "manifest.json")
    assert "no step statistics yet" in Follower(str(tmp_path)).look(datetime.now(UTC))[-1]


def test_sparkline() -> None:
    assert sparkline([0, 1, 4, 8]) == "▁▂▅█"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["top", "nowhere"], "error: nowhere holds no manifest.json; name the output of a job\n"),
        (
            ["top", "x", "--every", "0"],
            "error: top: --every 0.0: must be more than 0 and less than a day (see ember top --help)\n",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(words, line, job_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == line
