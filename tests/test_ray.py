"""`runner=ray`: the same rows, once each, whatever dies; and what of it needs no cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ember.config import JobConfig
from ember.data.reader import PromptRow
from ember.entrypoints.llm import LLM
from ember.errors import UserError
from ember.job import run_job
from ember.runners.cluster import import_ray
from ember.runners.shared_engine import SharedEngine
from ember.sampling_params import SamplingParams

try:
    import ray
except ImportError:
    ray = None

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS = 96
FEWER = 48
SAME = ["row_index", "id", "prompt", "completion", "token_ids", "finish_reason", "error", "seed", "price"]
TIMEOUT_S = 240
needs_ray = pytest.mark.skipif(ray is None, reason="needs Ray: pip install 'ember-batch[ray]'")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Several processes share two cores here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def sampling(i):
    return {"max_tokens": 20 + (i * 7) % 200, "temperature": 0.8 * (i % 2)}


def write_prompts(path):
    """Rows of very different lengths, two of which can't run."""
    rows = [{"id": f"r{i}", "prompt": f"Call me {i}", "price": i / 4, "sampling": sampling(i)} for i in range(NUM_ROWS)]
    rows[5]["sampling"] = {"top_p": 7}
    rows[11]["prompt"] = ""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_prompts(Path("p.jsonl"))
    return "p.jsonl"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What the local runner makes of the same rows: its summary and its completions."""
    folder = tmp_path_factory.mktemp("local")
    write_prompts(folder / "p.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # error rows name their file as `data` spells it
        return run_job(config("p.jsonl", "out")), completions("out")


def config(data, output, **settings):
    chosen = {"max_num_seqs": 8, "commit_every": 1, "progress": False} | settings
    return JobConfig(data=data, output=output, **chosen)


def completions(output):
    return pq.read_table(f"{output}/completions").select(SAME).sort_by("row_index").to_pylist()


def words(data, output, *more):
    """A command line that runs the same in a process of its own."""
    fixed = ["max_num_seqs=8", "commit_every=1", "progress=false", "runner=ray"]
    return [sys.executable, "-m", "ember.run", f"data={data}", f"output={output}", *fixed, *more]


def wait_for_a_part(output):
    begin = time.monotonic()
    while not list(Path(output).glob("completions/part-*")):
        assert time.monotonic() - begin < TIMEOUT_S, "no part in time"
        time.sleep(0.05)


def wait_for_two_engines(output):
    """So that the one that is killed has work; an engine may start so late that the other has done it all."""
    wait_for_a_part(output)
    begin = time.monotonic()
    while time.monotonic() - begin < 8 and len(set(engines_of(output))) < 2:
        time.sleep(0.2)


def engines_of(output):
    parts = sorted(Path(output).glob("steps/part-*"))
    return [engine for part in parts for engine in pq.read_table(part, columns=["engine"])["engine"].to_pylist()]


def engine_processes():
    """The process ids of the engines of clusters that this process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"RayEngine" in title and os.getpid() in ancestors(int(folder.name)):
            found.append(int(folder.name))
    return found


def ancestors(pid):
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        yield pid


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_worker_costs_no_row_and_no_token(prompts, local):
    """Ray computes its chunks again: none may be lost, doubled or different, whichever engine gets them."""
    killed = []

    def kill_one():
        wait_for_two_engines("ray")
        killed.extend(engine_processes()[:1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    summary = run_job(config(prompts, "ray", runner="ray", num_engines=2, cpus_per_engine=1))
    killer.join(1)
    assert killed
    assert not ray.is_initialized()
    expected, rows = local
    assert completions("ray") == rows
    for key in ("num_rows_done", "num_errors", "errors_by_kind", "finish_reasons", "num_output_tokens", "exit_code"):
        assert getattr(summary, key) == getattr(expected, key), key
    check_steps("ray", summary)


def check_steps(output, summary):
    """Every engine's steps under its own number; the killed engine's last ones may be missing, its successor is new."""
    steps = pq.read_table(f"{output}/steps")
    assert len(steps) == summary.num_steps
    assert summary.settings["runner"] == "ray"
    engines = Counter(steps["engine"].to_pylist())
    assert sorted(engines) == list(range(len(engines)))
    assert len(engines) <= 3
    keys = list(zip(steps["engine"].to_pylist(), steps["step"].to_pylist(), strict=True))
    assert len(set(keys)) == len(keys)


@needs_ray
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_job_goes_on_after_its_driver_was_stopped(prompts, local, number, code):
    """With either runner: which one computes a row is not part of what the output belongs to."""
    # in a terminal Ctrl-C reaches the whole group, Ray's processes too
    job = subprocess.Popen(
        words(prompts, "out", "cpus_per_engine=1", f"limit={FEWER}"), cwd=".", env=environment(), start_new_session=True
    )
    wait_for_a_part("out")
    if number == signal.SIGINT:
        os.killpg(job.pid, number)
    else:
        job.kill()
    assert job.wait(TIMEOUT_S) == code
    before = completions("out")
    assert 0 < len(before) < FEWER
    summary = run_job(config(prompts, "out", limit=FEWER))
    assert summary.num_rows_before == len(before)
    assert completions("out") == local[1][:FEWER]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}


def row(index, max_tokens):
    return PromptRow(index, f"row {index}", None, f"Call me {index}", {"max_tokens": max_tokens}, {}, None)


def shared_engine(stopped=lambda: False, **settings):
    return SharedEngine(LLM(**settings), JobConfig(data="none.jsonl", **settings), stopped)


def test_threads_share_an_engine_and_each_gets_its_own_rows():
    """A chunk that drains must not leave the batch empty, and one thread's steps finish the rows of others."""
    engine = shared_engine(max_num_seqs=8)
    chunks = [[row(10 * c + i, 3 + 5 * i) for i in range(5)] for c in range(4)]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(engine.compute, chunks))
    assert [[r.row_index for r, _ in result] for result in results] == [[r.row_index for r in c] for c in chunks]
    alone = LLM().generate([r.prompt for r in chunks[2]], [SamplingParams(max_tokens=3 + 5 * i) for i in range(5)])
    assert [output.token_ids for _, output in results[2]] == [output.token_ids for output in alone]
    stats, num_sampled = engine.take_stats()
    assert max(step.num_running for step in stats) == 8
    assert num_sampled == sum(len(output.token_ids) for result in results for _, output in result)
    assert engine.take_stats() == ([], 0)


def test_a_row_that_is_sent_twice_runs_once():
    """Ray may retry a chunk whose first run goes on."""
    engine = shared_engine()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(engine.compute, [[row(3, 40)], [row(3, 40)]])
    assert first[0][1].token_ids == second[0][1].token_ids


def test_after_a_stop_what_runs_is_finished_and_the_rest_given_up():
    """Rows in flight when a job stops are finished or not written, never cut short."""
    said = []
    engine = shared_engine(stopped=lambda: bool(said), max_num_seqs=2)
    step = engine._llm.step

    def step_and_stop():
        said.append(True)
        return step()

    engine._llm.step = step_and_stop
    done = engine.compute([row(i, 6) for i in range(5)])
    assert [(r.row_index, len(output.token_ids)) for r, output in done] == [(0, 6), (1, 6)]
    assert engine.compute([row(9, 6)]) == []


def test_without_ray_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"^runner=ray needs Ray: pip install 'ember-batch\[ray\]'$"):
        import_ray()


MISTAKES = {
    ("runner", "dask"): "must be one of local, ray",
    ("num_engines", 2): "needs runner=ray",
    ("max_engines", 3): "needs runner=ray",
    ("gpus_per_engine", 2): "must be 0, 1 or a share",
    ("cpus_per_engine", 0): "must be a whole number >= 1",
}


@pytest.mark.parametrize(("setting", "line"), MISTAKES.items(), ids=str)
def test_a_wrong_setting_is_named(setting, line):
    key, value = setting
    with pytest.raises(UserError, match=f"^{key}={value}: {line}"):
        JobConfig(data="p.jsonl", **{key: value})


def test_the_pool_of_engines_has_bounds_in_order():
    with pytest.raises(UserError, match="max_engines=1: must be a whole number >= 2"):
        JobConfig(data="p.jsonl", runner="ray", num_engines=2, max_engines=1)
