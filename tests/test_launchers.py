"""Sweeps through Hydra's launchers: local processes and job queues, with the same folders, files and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from hydra.errors import MissingConfigException

import ember.job
from ember.config import JobConfig
from ember.job import run_job
from ember.launch.messages import explain
from ember.launch.outcome import BUG, FILE_NAME, Outcome
from ember.launch.places import shipped
from ember.launch.start import REQUEUES
from ember.run import main

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS = 12


def installed(plugin):
    return find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{plugin}") is not None


needs_joblib = pytest.mark.skipif(
    not installed("hydra_joblib_launcher"), reason="needs the launcher joblib: pip install 'ember-batch[joblib]'"
)
needs_submitit = pytest.mark.skipif(
    not installed("hydra_submitit_launcher"), reason="needs the launcher submitit: pip install 'ember-batch[slurm]'"
)


@pytest.fixture(autouse=True)
def prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Call me {i}", "sampling": {"max_tokens": 2 + i}} for i in range(NUM_ROWS)]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sweep(*words):
    """In a process of its own: launchers start others from it."""
    command = [sys.executable, "-m", "ember.run", "-m", "data=p.jsonl", "progress=false", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def tokens(output):
    rows = pq.read_table(f"{output}/completions", columns=["row_index", "token_ids"]).sort_by("row_index")
    return rows.to_pydict()


LAUNCHERS = [
    pytest.param("joblib", marks=needs_joblib),
    pytest.param("submitit_local", marks=needs_submitit),
]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_shards_in_processes_of_a_launcher_make_one_whole_output(launcher):
    done = sweep("shard=range(2)", "num_shards=2", "output=out", f"hydra/launcher={launcher}")
    assert done.returncode == 0, done.stderr
    assert len(list(Path("out/completions").glob("part-*"))) >= 2
    run_job(JobConfig(data="p.jsonl", output="local", progress=False))
    assert tokens("out") == tokens("local")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_fails_leaves_the_others_and_its_exit_code(launcher):
    """What a job returns or raises is lost in a launcher's process; an exception there would end the sweep."""
    done = sweep("max_model_len=100000,128", "output=out", "limit=2", f"hydra/launcher={launcher}")
    assert done.returncode == 2, done.stderr
    lines = done.stdout.split("settings\n")[1].splitlines()
    assert [line.split()[:3] for line in lines] == [["0", "2", "mistake"], ["1", "0", "ok"]]
    assert sorted(path.name for path in Path("out").iterdir() if path.is_dir()) == ["max_model_len=128"]


@needs_joblib
def test_processes_of_joblib_share_the_cores():
    """Threads of several processes on the same cores make every one of them many times slower."""
    joblib = pytest.importorskip("joblib")
    names = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")
    found = joblib.Parallel(n_jobs=2)(joblib.delayed(os.getenv)(name) for name in names)
    asked = [os.environ.get(name) for name in names]
    share = str(max(1, joblib.cpu_count() // 2))
    assert found == [own or share for own in asked]


@pytest.mark.parametrize(
    ("name", "extra"), [("joblib", "joblib"), ("submitit_slurm", "slurm"), ("ray", "ray-launcher"), ("slurm", "slurm")]
)
def test_a_launcher_that_is_not_installed_names_its_extra(name, extra):
    error = MissingConfigException("no such", f"hydra/launcher/{name}", ["basic"])
    assert explain(error, [f"hydra/launcher={name}"]) == (
        f"hydra/launcher={name}: this launcher is not installed: pip install 'ember-batch[{extra}]'"
    )


def test_any_other_launcher_is_no_choice():
    error = MissingConfigException("no such", "hydra/launcher/nope", ["basic"])
    assert explain(error, ["hydra/launcher=nope"]) == "hydra/launcher=nope: no such choice (there are: basic)"


@needs_submitit
def test_the_slurm_preset_sets_only_what_the_launcher_has():
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

    preset = yaml.safe_load((shipped("conf") / "hydra" / "launcher" / "slurm.yaml").read_text())
    assert preset.pop("defaults") == ["submitit_slurm"]
    assert set(preset) <= set(SlurmQueueConf.__dataclass_fields__)
    assert main(["hydra/launcher=slurm", "--cfg", "hydra"]) == 0


def test_a_job_that_its_queue_takes_back_is_not_called_done(monkeypatch):
    """submitit leaves by SystemExit when the time is over: an ember that caught it reported a finished job."""

    def run_job(config):
        raise SystemExit(122)

    monkeypatch.setattr(ember.job, "run_job", run_job)
    monkeypatch.setenv(REQUEUES, "/queue")
    assert main(["data=p.jsonl", "hydra.run.dir=run"]) == 122
    assert Outcome.read(Path("run")).exit_code == BUG
    monkeypatch.delenv(REQUEUES)
    Path("run", FILE_NAME).unlink()
    assert main(["data=p.jsonl", "hydra.run.dir=run"]) == 122
    assert Outcome.read(Path("run")).exit_code == 122


@pytest.mark.skipif(
    not installed("hydra_optuna_sweeper"), reason="needs the sweeper optuna: pip install 'ember-batch[optuna]'"
)
def test_a_search_is_led_by_the_speed_of_each_job():
    """The preset must ask for more tokens a second, not fewer, and get them from what a job returns."""
    words = ["hydra/sweeper=search", "hydra.sweeper.n_trials=3", "block_size=choice(8,16)", "output=out"]
    done = sweep(*words, "hydra.sweep.dir=hydra")
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(Path("hydra/optimization_results.yaml").read_text())
    totals = [json.loads(path.read_text())["total"] for path in Path("out").glob("*/summary.json")]
    assert found["best_params"]["block_size"] in (8, 16)
    assert found["best_value"] > 0
    assert totals


def test_the_search_preset_names_its_extra():
    error = MissingConfigException("", missing_cfg_file="hydra/sweeper/optuna")
    assert explain(error) == (
        "hydra/sweeper=search: Optuna's sweeper is not installed: pip install 'ember-batch[optuna]'"
    )
