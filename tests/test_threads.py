"""`num_threads`: torch's and numba's threads are as many, in whichever Python thread the engine steps."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ember import LLM, SamplingParams
from ember.config import JobConfig
from ember.errors import ConfigError
from ember.job import run_job
from ember.threads import num_cores

SEEN = """
import sys
from concurrent.futures import ThreadPoolExecutor
from ember import LLM, SamplingParams
import numba, torch
def go(llm):
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    return torch.get_num_threads(), numba.get_num_threads()
for num_threads in {asked}:
    llm = LLM(device="cpu", pool_size="2048tok", num_threads=num_threads)
    with ThreadPoolExecutor(1) as other:
        print(*go(llm), *other.submit(go, llm).result())
"""


def threads_seen(*asked: int | None, **environment: str) -> list[list[int]]:
    """Threads of torch and numba in the main thread, then in another one, of a fresh process; a line for each asked."""
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")} | environment
    code = SEEN.format(asked=asked)
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_torch_and_numba_agree_in_every_thread():
    """numba keeps its number for each Python thread: a worker's thread ran numba on all cores and torch on one."""
    of_torch, one = threads_seen(None, 1)
    assert of_torch == [of_torch[0]] * 4
    assert one == [1] * 4
    assert threads_seen(None, OMP_NUM_THREADS="1") == [[1] * 4]


def test_more_threads_than_cores_are_refused():
    with pytest.raises(ConfigError, match=rf"num_threads=4096: this process may use {num_cores()} cores"):
        LLM(device="cpu", pool_size="2048tok", num_threads=4096)
    with pytest.raises(ConfigError, match="num_threads=0"):
        LLM(num_threads=0)


def test_null_leaves_torch_as_it_is():
    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as other:
        other.submit(
            lambda: LLM(device="cpu", pool_size="2048tok").generate("a", SamplingParams(max_tokens=1))
        ).result()
    assert torch.get_num_threads() == before


def test_the_next_job_of_a_sweep_finds_torch_as_it_was(tmp_path):
    """`-m num_threads=1,null`: the second job ran on one thread."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "Once"}\n')
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for folder in ("a", "b"):
            config = JobConfig(
                data=str(tmp_path / "p.jsonl"), output=str(tmp_path / folder), num_threads=1, progress=False
            )
            run_job(config)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_dry_run_refuses_more_threads_than_cores(tmp_path):
    """It was found after the output had been claimed."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "Once"}\n')
    config = JobConfig(data=str(tmp_path / "p.jsonl"), num_threads=4096, dry_run=True)
    with pytest.raises(ConfigError, match="num_threads=4096"):
        run_job(config)
