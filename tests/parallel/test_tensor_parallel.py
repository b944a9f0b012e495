"""`tensor_parallel_size=2` on a CPU: the bits of one rank; whoever is lost, nobody hangs and nobody stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from ember import LLM, SamplingParams
from ember.config import EngineConfig
from ember.core.device_memory import PoolMeter
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError, JobError, UserError
from ember.parallel import workers
from ember.parallel.cut import Share
from ember.parallel.group import Group
from tests.core.test_device_memory import Large
from tests.fakes import random_llama

ROOM = {"device": "cpu", "dtype": "float32", "max_model_len": 352, "pool_size": "6000tok"}
TIGHT = {**ROOM, "pool_size": "416tok", "max_num_batched_tokens": 48, "block_size": 8}
PREFIX = [(37 * i) % 4000 for i in range(100)]
PROMPTS = [[*PREFIX[:length], length] for length in (1, 17, 100, 64, 99, 3, 100, 80)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3, temperature=0.7, seed=5)
ROWS, LENGTH = 48, 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("llama"))


def outputs_of(model, **settings):
    """What a model gives for all prompts at once."""
    with closing(LLM(model, **settings)) as llm:
        return llm.generate(PROMPTS, PARAMS)


def logprobs(outputs):
    """Every log-probability that was reported, in order: sums over all logits of a position."""
    return [entry.logprob for output in outputs for position in output.logprobs for entry in position.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"), [("tiny", {}), ("llama", {}), ("llama", {"weights": "int8", "kv_dtype": "int8"})], ids=str
)
def test_two_ranks_give_the_bits_of_one(llama, model, form):
    """A head, a slice of the MLP or of the vocabulary that the wrong rank computes, or a sum in another order."""
    folder = llama if model == "llama" else model
    alone, both = outputs_of(folder, **ROOM, **form), outputs_of(folder, tensor_parallel_size=2, **TIGHT, **form)
    assert [output.token_ids for output in both] == [output.token_ids for output in alone]
    assert logprobs(both) == logprobs(alone)
    assert sum(output.num_preemptions for output in both)
    assert sum(output.num_cached_tokens for output in both)


@pytest.mark.slow
def test_where_bits_do_not_count_parts_are_added_up(llama):
    """A bias added by each rank, the residual added twice: what a GPU computes, on a CPU."""
    form = {"attention": "batched", "deterministic": "auto"}
    alone, both = outputs_of(llama, **ROOM, **form), outputs_of(llama, tensor_parallel_size=2, **TIGHT, **form)
    assert [output.token_ids for output in both] == [output.token_ids for output in alone]
    assert logprobs(both) == pytest.approx(logprobs(alone), abs=1e-4)


@pytest.mark.parametrize(("attention", "belongs"), [("cpu", False), ("batched", True)])
def test_the_size_belongs_to_a_job_where_it_changes_bits(attention, belongs):
    """Rows of other last bits in one output; or a job on a CPU that needs as many ranks to go on, for nothing."""
    plan = EnginePlan.resolve(EngineConfig(tensor_parallel_size=2, attention=attention, device="cpu"))
    hashes = SimpleNamespace(of=str)
    assert ("tensor_parallel_size" in plan.identity(hashes)) is belongs


@pytest.mark.slow
def test_ranks_measure_their_parts_of_the_pool():
    """Ranks with pools of different sizes; one that measures while another goes on to the next step."""
    settings = {**ROOM, "pool_size": "auto", "max_model_len": 150}
    config = EngineConfig(**settings, tensor_parallel_size=2, max_num_seqs=8)
    plan = replace(EnginePlan.resolve(config), meter=PoolMeter(memory=Large))
    with closing(LLM.from_plan(plan)) as llm:
        assert llm.plan.num_blocks == 2 * 600_000 // plan.kv_shape.bytes_per_block
        assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == [
            output.token_ids for output in outputs_of("tiny", **ROOM)
        ]


def test_only_this_machine_can_call_rank_0():
    """Where ranks meet there is no password: on all interfaces, anyone on the network could change what is said."""
    group = Group(Share(0, 2), torch.device("cpu"))
    port = f":{group.invite():04X}"
    sockets = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    listening = [local for _, local, _, state, *_ in sockets if state == "0A"]
    assert [local for local in listening if local.endswith(port)] == [f"0100007F{port}"]


def test_a_rank_that_does_not_start_is_one_line(monkeypatch):
    """Rank 0 waiting for ever for a process that is gone."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="tensor_parallel_size=2: rank 1: ended with exit code 1"):
        LLM(tensor_parallel_size=2, **ROOM)


def test_what_can_not_be_started_is_one_line(monkeypatch):
    """A traceback, with those that were started left to the garbage collector."""

    def refuse(*words, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(workers.subprocess, "Popen", refuse)
    with pytest.raises(UserError, match="tensor_parallel_size=2: rank 1: can't be started: Resource temporarily"):
        LLM(tensor_parallel_size=2, **ROOM)


@pytest.mark.slow
def test_a_rank_that_is_lost_before_it_comes_is_noticed(monkeypatch):
    """Rank 0 waited for it until its patience was over: ten minutes."""
    invite = Group.invite

    def invite_one_that_never_comes(group):
        (rank,) = ranks_of(os.getpid())
        os.kill(rank, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (rank, signal.SIGKILL)).start()
        return invite(group)

    monkeypatch.setattr(Group, "invite", invite_one_that_never_comes)
    begin = time.monotonic()
    with pytest.raises(UserError, match="tensor_parallel_size=2: rank 1: killed by SIGKILL"):
        LLM(tensor_parallel_size=2, **ROOM)
    assert time.monotonic() - begin < 120


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [None, 2])
def test_after_it_torch_has_its_threads_back(num_threads, monkeypatch):
    """Rank 0 took its share of them and kept it: whatever came next had half of its threads."""
    monkeypatch.setattr("ember.threads.num_cores", lambda: 8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        with closing(LLM(tensor_parallel_size=2, num_threads=num_threads, **ROOM)) as llm:
            assert torch.get_num_threads() == (num_threads or 4) // 2
            assert llm.plan.num_threads == (num_threads or 4)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_rank_takes_a_thread():
    """One thread for two ranks: each took one, and the summary said one."""
    with pytest.raises(
        ConfigError, match="num_threads=1: tensor_parallel_size=2 takes a thread a rank; set at least 2"
    ):
        EnginePlan.resolve(EngineConfig(tensor_parallel_size=2, num_threads=1, device="cpu"))


@pytest.mark.slow
def test_after_a_lost_rank_the_engine_says_so():
    """A step that goes on with what half of the ranks computed."""
    with closing(LLM(tensor_parallel_size=2, **ROOM)) as llm:
        assert llm.generate([PROMPTS[1]], SamplingParams(max_tokens=2))[0].token_ids
        (rank,) = ranks_of(os.getpid())
        os.kill(rank, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(JobError, match="tensor_parallel_size=2: rank 1: killed by SIGKILL"):
                llm.generate([PROMPTS[1]], SamplingParams(max_tokens=2))


def ranks_of(pid):
    """The processes of the other ranks that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == pid and b"ember.parallel.worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except (OSError, ValueError):
            continue
    return found


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(what, seconds=240.0):
    """The first true value of `what()`."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def start_job(folder, **settings):
    """A job in a process and a session of its own, as from a terminal."""
    lines = [json.dumps({"prompt": f"Chapter {i}. The captain"}) for i in range(ROWS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = {"data": "prompts.jsonl", "output": "out", "device": "cpu", "pool_size": "4096tok", "max_num_seqs": 4}
    given |= {"sampling.max_tokens": LENGTH, "sampling.ignore_eos": "true", "commit_every": 1, "progress": "false"}
    words = [f"{key}={value}" for key, value in (given | settings).items()]
    command = [sys.executable, "-m", "ember.run", *words]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)


def first_part(job, folder):
    """Wait until the job has written something; the process of its other rank."""
    wait_for(lambda: list((folder / "out" / "completions").glob("part-*")) or job.poll() is not None)
    assert job.poll() is None, job.stderr.read()
    (rank,) = ranks_of(job.pid)
    return rank


@pytest.mark.slow
def test_a_lost_rank_ends_the_job_which_then_goes_on(tmp_path):
    """A hang, a traceback, rows lost; or a job that only as many ranks may go on with."""
    job = start_job(tmp_path, tensor_parallel_size=2)
    os.kill(first_part(job, tmp_path), signal.SIGKILL)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 1
    assert errors.splitlines()[-1] == "error: tensor_parallel_size=2: rank 1: killed by SIGKILL"
    assert "Traceback" not in errors
    again = start_job(tmp_path, tensor_parallel_size=1)
    _, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors
    rows = pq.read_table(tmp_path / "out" / "completions").to_pylist()
    rows.sort(key=lambda row: row["row_index"])
    assert [row["row_index"] for row in rows] == list(range(ROWS))
    expected = LLM(**ROOM).generate([row["prompt"] for row in rows], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    assert [row["token_ids"] for row in rows] == [output.token_ids for output in expected]


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_no_rank_outlives_the_job(tmp_path, signum, exit_code):
    """Processes that keep memory when the job is long gone; a Ctrl-C that ends a rank under the running rows."""
    job = start_job(tmp_path, tensor_parallel_size=2, grace_s=0.5)
    rank = first_part(job, tmp_path)
    os.killpg(job.pid, signum)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == exit_code
    assert "Traceback" not in errors
    assert "rank 1" not in errors
    wait_for(lambda: not is_there(rank), seconds=20)
