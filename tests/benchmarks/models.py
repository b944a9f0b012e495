"""The models that the benchmarks run: GPT-2's shape with random weights (speed doesn't depend on what they say).

python -m tests.benchmarks.models
"""

from __future__ import annotations

import os
from pathlib import Path

from ember.config import ModelConfig
from ember.model.network import NetworkConfig, network_config
from ember.model.source import find_model, is_preset
from tests.benchmarks.costs import TokenCost
from tests.benchmarks.table import Table

EMBEDDED = "tiny"
RANDOM_GPT2 = "gpt2-random"


def cache_folder() -> Path:
    """Where generated models and what peers make of them are kept: EMBER_BENCHMARKS, or a folder in ~/.cache."""
    folder = Path(os.environ.get("EMBER_BENCHMARKS") or Path.home() / ".cache" / "ember-benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def random_gpt2() -> Path:
    """A Hugging Face folder of GPT-2 124M's shape with seeded random weights; needs transformers to be made."""
    folder = cache_folder() / RANDOM_GPT2
    if not (folder / "config.json").exists():
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config()).float().save_pretrained(folder)
    return folder


def model_config(name: str) -> ModelConfig:
    """Settings that name the model: `gpt2-random` (made on first use), a preset, or a folder."""
    if name == RANDOM_GPT2:
        return ModelConfig(path=str(random_gpt2()))
    return ModelConfig(name=name) if is_preset(name) else ModelConfig(path=name)


def model_path(name: str) -> str:
    """The folder of a model's files."""
    config = model_config(name)
    return str(find_model(config.name, config.path).path)


def network_of(name: str) -> NetworkConfig:
    """The shape of a model."""
    return network_config(Path(model_path(name)))


def main() -> None:
    """A row a model."""
    table = Table(
        "model        ", "layers", "width", "heads", "vocabulary", "context", "MFLOP/token", "of these LM head"
    )
    for name in (RANDOM_GPT2, EMBEDDED):
        net = network_of(name)
        cost = TokenCost.of(net)
        flops = f"{(cost.linear_flops + cost.head_flops) / 1e6:.1f}", f"{cost.head_flops / 1e6:.1f}"
        table.add(name, net.n_layer, net.n_embd, net.n_head, net.vocab_size, net.max_position, *flops)


if __name__ == "__main__":
    main()
