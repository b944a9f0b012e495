"""The networks by `model_type`, and what the engine knows of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from ember.attention.base import AttentionBackend
from ember.cache.kv_pool import KVLayer
from ember.errors import ConfigError
from ember.model.config_values import read_generation
from ember.model.gguf_file import GgufFile, is_gguf
from ember.model.gguf_network import gguf_config
from ember.model.gpt2 import GPT2
from ember.model.gpt2_config import GPT2Config
from ember.model.json_file import read_json_object, show
from ember.model.llama import Llama
from ember.model.llama_config import FAMILIES, LlamaConfig
from ember.model.ranks import ALONE, Ranks

NetworkConfig = GPT2Config | LlamaConfig


class Network(Protocol):
    """A network over a packed batch of T tokens."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, layers: list[KVLayer], attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states [T, n_embd] of the packed tokens; `input_ids` and `positions` are [T]."""

    def logits(self, hidden: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, vocab_size], float32, of the hidden states [R, n_embd] of the rows that sample.

        Of the rows of `best_only` [R] all that are not the largest may be -inf.
        """


def network_config(folder: Path) -> NetworkConfig:
    """What a model folder's `config.json` and `generation_config.json`, or a GGUF file, say of the network.

    Raises:
        UserError: a file is missing or not JSON, or (ConfigError) a key is missing, wrong or not supported. Names the
            file and the key.
    """
    if is_gguf(folder):
        return gguf_config(GgufFile.open(folder))
    path = folder / "config.json"
    data = read_json_object(path)
    model_type = data.get("model_type", "gpt2")  # GPT-2 has a second layout, without
    if model_type == "gpt2":
        return GPT2Config.from_folder(folder)
    try:
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            known = ", ".join(("gpt2", *FAMILIES))
            raise ConfigError("model_type", show(model_type), f"is not supported; must be one of {known}")
        return LlamaConfig.from_json(data, read_generation(folder))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.key}", error.value, error.allowed) from None


def make_network(
    config: NetworkConfig, weights: Mapping[str, torch.Tensor], form: str = "auto", ranks: Ranks = ALONE
) -> Network:
    """The network that the config describes; each weight is asked for once (see `GPT2`, `Llama`)."""
    if isinstance(config, GPT2Config):
        return GPT2(config, weights, form, ranks)
    return Llama(config, weights, form, ranks)
