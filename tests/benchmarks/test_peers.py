"""What the peers are given: the same model as ember."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from ember.model.network import network_config
from ember.model.presets import TINY
from ember.model.weights import load_weights
from tests.benchmarks import peers
from tests.fakes import CPU, ember_logits
from tests.model.test_llama import IDS, random_model

GGUFReader = pytest.importorskip("gguf").GGUFReader
pytest.importorskip("transformers")


@pytest.fixture
def run_llamacpp(monkeypatch):
    """The runner, as the peer's own Python imports it."""
    monkeypatch.syspath_prepend(str(Path(peers.__file__).parent))
    return import_module("run_llamacpp")


def logits(path):
    """Of two positions of a prompt."""
    config = network_config(path)
    weights = load_weights(path, config.weight_layout, dtype=torch.float32, device=CPU)
    return ember_logits(config, weights, IDS, [30, 11])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_llama_cpps_file_holds_the_same_network(kind, tmp_path, run_llamacpp):
    """A benchmark against an engine that computes another model, whose tokens differ and may be cheaper."""
    folder = TINY
    if kind == "llama":
        folder = tmp_path / "small"
        random_model("Llama", tie_word_embeddings=True).save_pretrained(folder)
    file = Path(run_llamacpp.convert(str(folder), str(tmp_path), "F32"))
    assert torch.equal(logits(file), logits(folder))


def test_llama_cpps_q8_0_file_is_rounded(tmp_path, run_llamacpp):
    """A row named q8_0 that was measured in float32, or with positions and norms in 8 bits, unlike llama.cpp's own."""
    path = Path(run_llamacpp.convert(str(TINY), str(tmp_path), "Q8_0"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    matrices = [name for name, kind in kinds.items() if kind == "Q8_0"]
    assert len(matrices) == 4 * 4 + 1
    assert kinds["position_embd.weight"] == kinds["output_norm.weight"] == "F32"
