"""The job from the outside: it streams, it stops when told to, and it goes on where it stopped."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from ember.config import JobConfig
from ember.core.model_runner import ModelRunner
from ember.errors import UserError
from ember.job import run_job
from ember.run import main
from ember.sampling_params import SamplingParams
from tests.durability.memory import constant_logits

NUM_SEQS = 16


def write_rows(path: Path, first: int, count: int, longest: int = 24) -> None:
    """Rows of mixed lengths, each with its own max_tokens."""
    rng = random.Random(first)
    with path.open("w") as file:
        for i in range(first, first + count):
            row = {"id": i, "prompt": "the people " * rng.randint(1, 12), "n_out": rng.randint(1, longest)}
            file.write(json.dumps(row) + "\n")


def completions(output: Path) -> dict[int, tuple[str, list[int]]]:
    rows = ds.dataset(output / "completions").to_table(["row_index", "completion", "token_ids"]).to_pylist()
    assert len({row["row_index"] for row in rows}) == len(rows)
    return {row["row_index"]: (row["completion"], row["token_ids"]) for row in rows}


def streaming_job(tmp_path: Path, **changes: object) -> JobConfig:
    settings = {
        "data": str(tmp_path / "in"),
        "output": str(tmp_path / "out"),
        "sampling": SamplingParams(ignore_eos=True),
        "sampling_columns": {"max_tokens": "n_out"},
        "max_num_seqs": NUM_SEQS,
        "commit_every": 50,
        "progress": False,
    }
    return JobConfig(**{**settings, **changes})


@pytest.mark.parametrize("scheduler", ["prefill_first", "mixed"])
def test_the_batch_stays_full_while_input_remains(tmp_path, monkeypatch, scheduler):
    """Reading a chunk and draining it: the batch would run empty at the end of each file or output part."""
    monkeypatch.setattr(ModelRunner, "execute", constant_logits)
    (tmp_path / "in").mkdir()
    for part in range(3):
        write_rows(tmp_path / "in" / f"{part}.jsonl", part * 80, 80)
    run_job(streaming_job(tmp_path, scheduler=scheduler, commit_every=20))
    assert len(completions(tmp_path / "out")) == 240
    assert len(list((tmp_path / "out" / "completions").glob("part-*.parquet"))) > 3
    steps = ds.dataset(tmp_path / "out" / "steps").to_table().to_pylist()
    running = [step["num_running"] for step in sorted(steps, key=lambda step: step["step"])]
    finished = [step["num_finished"] for step in sorted(steps, key=lambda step: step["step"])]
    assert sum(finished) == 240
    left, full = 240, running.index(NUM_SEQS)
    for step, (now, done) in enumerate(zip(running, finished, strict=True)):
        if step >= full and left >= NUM_SEQS:
            assert now == NUM_SEQS, f"step {step}: {now} running, {left} rows left"
        left -= done


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A folder with rows in `in`, and what a job makes of them when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "in").mkdir()
    write_rows(folder / "in" / "a.jsonl", 0, 120, longest=40)
    run_job(streaming_job(folder))
    return folder / "in", completions(folder / "out")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_in_order_and_the_same_command_goes_on(
    tmp_path, monkeypatch, capsys, uninterrupted, number, code
):
    """Rows that were finished lost at Ctrl-C, or rows in flight written half done."""
    monkeypatch.chdir(tmp_path)
    data, expected = uninterrupted
    words = [f"data={data}", "output=out", "sampling.ignore_eos=true", "sampling_columns={max_tokens: n_out}"]
    words += ["max_num_seqs=8", "grace_s=0.2", "progress=false", "commit_every=10"]
    command = [sys.executable, "-m", "ember.run", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    waited = time.monotonic() + 60
    while not list(Path("out").glob("completions/part-*.parquet")) and time.monotonic() < waited:
        time.sleep(0.02)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == code, said
    done = completions(Path("out"))
    assert 0 < len(done) < 120
    assert main(words) == 0
    assert completions(Path("out")) == expected
    capsys.readouterr()
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_job_with_nothing_to_do_returns_the_speed_it_had(tmp_path):
    """A search that tries a setting again must not learn that it is slow."""
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "0.jsonl", 0, 2, longest=2)
    first, again = (run_job(streaming_job(tmp_path)).tokens_per_s for _ in range(2))
    assert again == first > 0


@pytest.mark.parametrize(("attention", "exact"), [("cpu", True), ("batched", False)])
def test_the_summary_says_whether_bits_may_follow_the_batch(tmp_path, capsys, attention, exact):
    """A promise on paper only: with another kernel the rows of a near tie could change, and nobody would be told."""
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "0.jsonl", 0, 2, longest=2)
    run_job(streaming_job(tmp_path, attention=attention, device="cpu", weights="auto"))
    attempt = json.loads((tmp_path / "out" / "summary.json").read_text())["attempts"][-1]
    assert attempt["deterministic"] is exact
    assert attempt["settings"]["weights"] == "float32"
    why = attempt["deterministic_why"]
    assert (why is None) if exact else ("attention=batched" in why)
    assert ("note: not exact to the bit: attention=batched" in capsys.readouterr().err) is not exact


def test_a_job_with_other_weights_is_another_job(tmp_path):
    """int8 rows appended to float32 rows: `weights` must be part of what a result depends on."""
    (tmp_path / "in").mkdir()
    write_rows(tmp_path / "in" / "0.jsonl", 0, 2, longest=2)
    run_job(streaming_job(tmp_path, weights="int8", num_threads=1))
    with pytest.raises(UserError, match=r'weights: "int8" -> "auto"'):
        run_job(streaming_job(tmp_path))
    assert run_job(streaming_job(tmp_path, weights="int8")).num_rows_done == 2
