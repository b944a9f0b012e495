"""The models that the benchmarks run: known shapes with random weights (speed doesn't depend on what they say).

python -m tests.benchmarks.models
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ember.config import ModelConfig
from ember.model.network import NetworkConfig, network_config
from ember.model.source import find_model, is_preset
from tests.benchmarks.costs import TokenCost
from tests.benchmarks.table import Table

EMBEDDED = "tiny"
RANDOM_GPT2 = "gpt2-random"
RANDOM_LLAMA = "llama-random"
RANDOM_LLAMA_1B = "llama-1b-random"


def cache_folder() -> Path:
    """Where generated models and what peers make of them are kept: EMBER_BENCHMARKS, or a folder in ~/.cache."""
    folder = Path(os.environ.get("EMBER_BENCHMARKS") or Path.home() / ".cache" / "ember-benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _gpt2() -> Any:
    """GPT-2 124M."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _llama() -> Any:
    """SmolLM2-135M: 30 layers, grouped queries (9 heads, 3 of K/V), tied embedding."""
    return _of_llamas_kind(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        rope_theta=100_000.0,
    )


def _llama_1b() -> Any:
    """The shape of Llama 3.2 1B: 5 GB in float32."""
    return _of_llamas_kind(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32_768,
        rope_theta=500_000.0,
    )


def _of_llamas_kind(**shape: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    same = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**same, **shape))


RANDOM: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {RANDOM_GPT2: _gpt2, RANDOM_LLAMA: _llama, RANDOM_LLAMA_1B: _llama_1b}
)
"""Makers of networks with random weights, by name."""


def random_model(name: str) -> Path:
    """A Hugging Face folder of one of RANDOM, its weights seeded and in float32; needs transformers to be made."""
    folder = cache_folder() / name
    if not (folder / "config.json").exists():
        import torch

        torch.manual_seed(0)
        RANDOM[name]().float().save_pretrained(folder)
    if name != RANDOM_GPT2 and not (folder / "tokenizer.json").exists():
        _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """What a folder of this kind must have: a token a byte, and as many more, never spelt, as the network has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(letters + [f"unused {i}" for i in range(len(letters), size)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def model_config(name: str) -> ModelConfig:
    """Settings that name the model: one of RANDOM (made on first use), a preset, or a folder."""
    if name in RANDOM:
        return ModelConfig(path=str(random_model(name)))
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
    for name in (RANDOM_GPT2, RANDOM_LLAMA, EMBEDDED):  # the other is for GPUs
        net = network_of(name)
        cost = TokenCost.of(net)
        flops = f"{(cost.linear_flops + cost.head_flops) / 1e6:.1f}", f"{cost.head_flops / 1e6:.1f}"
        table.add(name, net.n_layer, net.n_embd, net.n_head, net.vocab_size, net.max_position, *flops)


if __name__ == "__main__":
    main()
