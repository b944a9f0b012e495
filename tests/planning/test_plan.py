"""`ember plan`: its steps are those of the job, its costs those that were timed, and it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.data.reader import PromptReader
from ember.entrypoints.cli import main
from ember.entrypoints.plan import EnginePlan
from ember.job import run_job
from ember.planning import calibration
from ember.planning.calibration import calibrate
from ember.planning.costs import StepCosts
from ember.planning.rows import RowCost, RowSample, sample_rows
from ember.planning.simulation import SimulatedStep, simulate
from ember.sampling_params import SamplingParams
from tests.fakes import POLICIES

COUNTS = ("num_running", "num_preempted", "blocks_used")


def write_rows(count: int = 12) -> None:
    lines = [{"prompt": "Of whales and men " * (1 + i % 4), "n": 3 + (5 * i) % 11} for i in range(count)]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def job(**settings) -> JobConfig:
    chosen = {"sampling": SamplingParams(ignore_eos=True), "sampling_columns": {"max_tokens": "n"}} | settings
    return JobConfig(data="rows.jsonl", output="out", progress=False, **chosen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_forecast_steps_are_those_of_the_job(policy, prefix_cache, job_folder: Path) -> None:
    """A forecast from other rules than the scheduler's own would be wrong wherever the pool or the budget is tight."""
    write_rows()
    tight = {"block_size": 4, "pool_size": "20", "max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    config = job(scheduler=policy, prefix_cache=prefix_cache, **tight)
    plan = EnginePlan.resolve(config)
    sample = sample_rows(config, plan, PromptReader(config))
    forecast = simulate(plan, sample.repeated(sample.num_running))
    run_job(config)
    steps = pq.read_table("out/steps").select(COUNTS).to_pylist()
    assert [{name: getattr(step, name) for name in COUNTS} for step in forecast] == steps
    assert sum(s.num_sampled for s in forecast) == sum(row.max_tokens for row in sample.costs)


def test_costs_are_found_again() -> None:
    """From exact times the fit must give the exact costs, and never a negative one."""
    truth = (0.01, 2e-4, 5e-4, 0.0)
    steps = [SimulatedStep(p, d, 50 * d * d + p * p, d, d, 0, 0) for p in (0, 10, 200) for d in (1, 7, 30, 100)]
    durations = [truth[0] + truth[1] * s.prefill_tokens + truth[2] * s.decode_tokens for s in steps]
    found = StepCosts.fitted(steps, durations)
    assert found.seconds == pytest.approx(truth, abs=1e-7)
    assert found.total_s(steps) == pytest.approx(sum(durations))
    disturbed = [20.0 if i in (0, 5) else duration for i, duration in enumerate(durations)]  # a kernel was compiled
    assert StepCosts.fitted(steps, disturbed).total_s(steps) == pytest.approx(sum(durations), rel=0.05)
    assert min(StepCosts.fitted(steps, durations[::-1]).seconds) >= 0.0


def test_rows_that_stop_early_are_expected_to(job_folder: Path) -> None:
    """One token in ten ends its row: about ten tokens a row, not max_tokens."""
    plan = EnginePlan.resolve(job(max_model_len=256))
    rows = [RowCost([1, 2, 3], 200)] * 400
    tokens = sum(s.num_sampled for s in simulate(plan, rows, stop_rate=0.1))
    assert 8 < tokens / 400 < 12


def test_a_sample_stands_for_all_rows() -> None:
    sample = RowSample([RowCost([1], 1), RowCost([1, 2], 2)], num_rows=1000, num_sampled=4)
    assert sample.num_running == 500
    assert [len(row.prompt) for row in sample.repeated(6)] == [1, 1, 1, 2, 2, 2]


def test_a_plan_prints_and_writes_nothing(job_folder: Path, capsys: pytest.CaptureFixture) -> None:
    write_rows()
    words = ["data=rows.jsonl", "output=out", "sampling_columns={max_tokens: n}", "pool_size=2048tok", "limit=8"]
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "        6,144 bytes a token" in said
    assert "rows    8, all looked at\n" in said
    assert "pool    128 blocks of 16 tokens" in said
    assert "8 at most, in " in said and "0 preemptions" in said
    assert "time    about" in said and "calibrate=true measures" in said
    assert not (job_folder / "out" / "manifest.json").exists()


def test_a_calibration_measures_costs_and_stops(job_folder: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(calibration, "STAGES", ((1.0, 0.3), (0.3, 0.2)))
    write_rows()
    config = job(pool_size="2048tok", sampling=SamplingParams(stop=["e"]))
    plan = EnginePlan.resolve(config)
    measured = calibrate(plan, sample_rows(config, plan, PromptReader(config)), config.sampling)
    assert measured.stop_rate > 0.05
    assert sum(measured.costs.seconds) > 0
    assert main(["plan", "data=rows.jsonl", "sampling.max_tokens=8", "calibrate=true"]) == 0
    assert "to load\n        measured on cpu in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["data=prompts.jsonl", "calibrate=true"], "calibrate=true: belongs to a plan: ember plan calibrate=true"),
        (["plan", "data=nowhere.jsonl"], "nowhere.jsonl"),
        (["plan"], "data must be given"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(words, line, job_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and line in said and said.count("\n") == 1


def test_rows_that_cannot_run_have_no_time(job_folder: Path, capsys: pytest.CaptureFixture) -> None:
    Path("rows.jsonl").write_text('{"prompt": ""}\n', encoding="utf-8")
    assert main(["plan", "data=rows.jsonl"]) == 0
    assert "1 of these can't run\ntime    none: no row can run\n" in capsys.readouterr().out
