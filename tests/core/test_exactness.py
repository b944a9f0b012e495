"""Where bits are promised, and that `deterministic=require` refuses to promise more."""

from __future__ import annotations

import pytest
import torch

from ember.config import EngineConfig
from ember.core import exactness
from ember.core.exactness import why_not_exact
from ember.entrypoints.plan import EnginePlan
from ember.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("weights", ["auto", "int8", "w8a8", "fp16"])
def test_the_default_path_is_exact(weights):
    assert why_not_exact(CPU, torch.float32, weights, "cpu") is None


@pytest.mark.parametrize(
    ("device", "dtype", "attention", "says"),
    [
        (CPU, torch.bfloat16, "batched", "on cpu in bfloat16"),
        (CUDA, torch.float32, "batched", "on cuda in float32"),
        (CPU, torch.float32, "batched", "attention=batched"),
        (CPU, torch.float32, "reference", "attention=reference"),
    ],
)
def test_other_paths_say_why_they_are_not(device, dtype, attention, says):
    assert says in why_not_exact(device, dtype, "auto", attention)


def test_a_processor_without_fused_multiply_add_is_not_exact(monkeypatch):
    monkeypatch.setattr(exactness, "has_packed", lambda device, dtype: False)
    assert "fused multiply-add" in why_not_exact(CPU, torch.float32, "auto", "cpu")
    assert why_not_exact(CPU, torch.float32, "int8", "cpu") is None


def test_require_is_refused_where_bits_are_not_promised():
    plan = EnginePlan.resolve(EngineConfig(device="cpu", dtype="float32", attention="batched"))
    assert "attention=batched" in plan.why_not_exact
    with pytest.raises(ConfigError, match=r"deterministic=require: attention=batched sums .* use deterministic=auto"):
        EnginePlan.resolve(EngineConfig(device="cpu", attention="batched", deterministic="require"))
    assert EnginePlan.resolve(EngineConfig(device="cpu", deterministic="require")).why_not_exact is None


@pytest.mark.parametrize("weights", ["int8", "w8a8", "fp16"])
def test_low_precision_weights_are_refused_in_other_dtypes(weights):
    with pytest.raises(ConfigError, match=f"weights={weights}: runs on a CPU in float32, not on cpu in bfloat16"):
        EnginePlan.resolve(EngineConfig(device="cpu", dtype="bfloat16", weights=weights))
