"""Real processes killed with real signals: nothing lost, nothing doubled, nothing torn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_killed_at_any_instant_every_row_is_there_once():
    """A row lost with its buffer, written by two attempts, or read from half a file. (200 kills by hand.)"""
    command = [sys.executable, "-m", "tests.durability.kill_stress", "--kills", "12", "--rows", "30", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tally = json.loads(done.stdout)
    assert tally["kills"] >= 12 and tally["kills_in_writer"] > 0
    assert not any(tally[key] for key in ("rows_lost", "rows_doubled", "rows_changed", "torn_files", "leftovers"))
