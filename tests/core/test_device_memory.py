"""How large a pool may be beside weights, steps and other processes: counted on devices that only report numbers."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ember import LLM, SamplingParams
from ember.config import EngineConfig, JobConfig
from ember.core.device_memory import PoolMeter
from ember.core.hardware import pool_bytes
from ember.core.largest_step import largest_step
from ember.dry_run import show_engine
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError, UserError
from tests.fakes import golden

CUDA = torch.device("cuda")
CASE = golden()["cases"][3]


class Memory:
    """A device of `size` bytes of which other processes hold `others` and this one `own`; a step takes `step` more."""

    def __init__(self, size=1000, others=0, own=100, step=50):
        self.size, self.others, self.own, self.step = size, others, own, step
        self.at_peak = own

    def settle(self):
        self.at_peak = self.own

    def total(self):
        return self.size

    def free(self):
        return self.size - self.others - self.own

    def held(self):
        return self.own

    def peak(self):
        return self.at_peak

    def run(self):
        self.at_peak = self.own + self.step


def room(memory, **settings):
    return PoolMeter(memory=lambda device: memory, **settings).room(CUDA, memory.run)


class Large(Memory):
    """Room for 600,000 bytes; a device of any number is the same."""

    def __init__(self, device):
        super().__init__(size=1_000_000, own=250_000, step=50_000)
        self.run()

    def settle(self):
        pass


def test_the_pool_gets_what_weights_and_the_largest_step_leave():
    """A share of what was free before the weights: too much for a large model, too little for a small one."""
    assert room(Memory()) == 900 - 100 - 50
    assert room(Memory(others=200)) == 900 - 200 - 100 - 50
    assert room(Memory(own=880)) == 0, "never less than nothing"


def test_engines_that_share_a_device_get_equal_parts():
    """The first one took all; the second one counted what the first holds as lost for both."""
    first = Memory()
    mine = room(first, num_sharing=2)
    assert mine == 450 - 150
    assert room(Memory(others=100 + 50 + mine), num_sharing=2) == 450 - 150


def test_before_the_weights_are_there_the_size_is_the_most_that_it_can_be(monkeypatch):
    """A plan that refuses what would fit; of several GPUs the emptiest counts."""
    free = {0: 9000, 1: 5000, 2: 7000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free.get(gpu, 10_000), 10_000))
    assert pool_bytes(CUDA, weight_bytes=2000) == 9000 - 2000
    assert pool_bytes(CUDA, 3, weight_bytes=600) == 3 * 4000 - 600
    assert pool_bytes(CUDA, num_sharing=2, weight_bytes=2000) == 4500 - 2000
    assert pool_bytes(CUDA, weight_bytes=20_000) == 0
    cpu = torch.device("cpu")
    assert pool_bytes(cpu, weight_bytes=2**60) > 0


@given(
    seqs=st.integers(1, 40),
    tokens=st.integers(1, 200),
    length=st.integers(2, 64),
    proposed=st.integers(0, 8),
    block_size=st.integers(1, 80),
)
def test_the_largest_step_keeps_to_the_settings_and_uses_them_up(seqs, tokens, length, proposed, block_size):
    """A sequence longer than the model's context; or fewer tokens than a real step may have."""
    step = largest_step(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        num_proposed=proposed,
        block_size=block_size,
    )
    assert len(step) == min(seqs, tokens)
    assert sum(s.num_new_tokens for s in step) == min(tokens, len(step) * length)
    assert max(s.start + s.num_new_tokens for s in step) == length
    for s in step:
        end = s.start + s.num_new_tokens
        assert 1 <= s.num_logits <= min(s.num_new_tokens, 1 + proposed)
        assert len(s.block_table) * block_size >= end
        assert s.sequence.num_tokens == end <= length


def plan_of(memory, **settings):
    """As on a GPU, but for where it runs."""
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=8, max_num_batched_tokens=64, **settings)
    return replace(EnginePlan.resolve(config), meter=PoolMeter(memory=memory))


@pytest.mark.parametrize("settings", [{}, {"attention": "batched"}, {"speculative": "ngram"}, {"kv_dtype": "int8"}])
def test_a_pool_of_the_measured_size_serves(settings, caplog):
    """Block tables of another pool than the network's; a profile that leaves its numbers in a block that is reused."""
    chosen = {"block_size": 4, "max_model_len": 64, **settings}
    plan = plan_of(Large, **chosen)
    with caplog.at_level(logging.INFO, "ember.entrypoints.measured_pool"):
        llm = LLM.from_plan(plan)
    expected = min(8 * 16, 600_000 // plan.kv_shape.bytes_per_block)
    pool = llm._runner.pool
    assert llm.plan.num_blocks == llm.engine.scheduler.blocks.num_blocks == pool.num_blocks == expected
    assert expected < plan.num_blocks or settings
    assert not any(layer.v.any() for layer in pool.layers)
    assert "the largest step leaves 600000 bytes" in caplog.text
    (output,) = llm.generate(CASE["prompt"], SamplingParams(max_tokens=8))
    assert output.token_ids == CASE["greedy_ids"][:8] or settings


def test_the_measured_step_is_sampled_too(monkeypatch):
    """Sorting a large vocabulary's probabilities takes more than some networks."""
    seen = Counter()
    monkeypatch.setattr(
        "ember.entrypoints.measured_pool.Sampler.sample", lambda self, logits, sequences: seen.update([logits.shape])
    )
    LLM.from_plan(plan_of(Large, max_model_len=64, speculative="ngram"))
    assert seen == {(8, 4096): 1}


def test_too_little_room_is_one_line(monkeypatch):
    """A pool that no row of full length fits in would stop a job in its middle."""
    with pytest.raises(UserError, match=r"pool_size=auto: \d blocks .* set pool_size=.* or a smaller max_model_len"):
        LLM.from_plan(plan_of(lambda device: Memory(10_000), max_model_len=256))

    def no_room(self, device, step):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(PoolMeter, "room", no_room)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=64: a step of so many tokens takes more"):
        LLM.from_plan(plan_of(Large))


def test_a_gpu_is_measured_unless_the_size_is_said(monkeypatch, capsys):
    """A dry run that shows a guess as if it were so; a pool that was asked for and came out another."""
    monkeypatch.setattr("ember.entrypoints.plan.resolve_device", lambda name: CUDA)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (2**34, 2**34))
    asked = EnginePlan.resolve(EngineConfig(pool_size="64"))
    assert (asked.meter, asked.runner_spec().num_blocks) == (None, 64)
    auto = EnginePlan.resolve(EngineConfig())
    assert auto.meter is not None
    assert auto.runner_spec().num_blocks == 1
    assert EnginePlan.resolve(EngineConfig(), 3).meter == PoolMeter(num_sharing=3)
    job = JobConfig(data="none.jsonl")
    for plan in (asked, auto):
        show_engine(job, plan)
        assert ("at most: the job runs its largest step" in capsys.readouterr().out) == (plan is auto)
