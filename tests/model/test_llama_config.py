"""LlamaConfig reads what transformers writes and what Hub repos hold, and refuses by name what the network lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ember.errors import ConfigError, UserError
from ember.model.llama_config import FAMILIES, LlamaConfig
from ember.model.network import network_config

SIZES = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "gemma": "Gemma",
}


def read(folder: Path, model_type: str = "llama", generation: Any = None, **changes: Any) -> LlamaConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    config = network_config(folder)
    assert isinstance(config, LlamaConfig)
    return config


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_transformers_writes(model_type: str, tmp_path: Path) -> None:
    """Every key of transformers' own config must be known, or a saved model can't be loaded."""
    transformers = pytest.importorskip("transformers")
    whole = getattr(transformers, f"{CLASSES[model_type]}Config")(**SIZES)
    keys = {key: value for key, value in whole.to_dict().items() if key not in ("dtype", "model_type")}
    assert read(tmp_path, model_type, **keys).n_layer == 4
    whole.save_pretrained(tmp_path)
    assert network_config(tmp_path).n_kv_head == 2


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_file_that_leaves_all_out_means_transformers_defaults(model_type: str, tmp_path: Path) -> None:
    """Files on the Hub hold what differs from the defaults of their day; another default is another network."""
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, f"{CLASSES[model_type]}Config")(**SIZES)
    ours = read(tmp_path, model_type)
    assert ours.head_dim == theirs.head_dim if hasattr(theirs, "head_dim") else 12
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert (ours.windows[0] is None) == (model_type != "mistral")
    assert [int(turns) for turns in ours.rotary] == getattr(theirs, "no_rope_layers", [1] * 4)


def test_the_heads_of_old_llamas(tmp_path: Path) -> None:
    """Llama 1 has no num_key_value_heads: as many as queries."""
    del (sizes := dict(SIZES))["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    assert network_config(tmp_path).n_kv_head == 4


HUB = {
    "llama-3.2-1b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "mistral-7b": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_what_hub_repos_have(name: str, tmp_path: Path) -> None:
    """The files that people have, older than the newest names of keys."""
    (tmp_path / "config.json").write_text(json.dumps(HUB[name]))
    config = network_config(tmp_path)
    assert isinstance(config, LlamaConfig)
    assert config.rope.kind == ("llama3" if name.startswith("llama") else "default")
    assert config.windows[0] == (4096 if name.startswith("mistral") else None)
    assert config.max_position == HUB[name]["max_position_embeddings"]
    assert set(config.eos_token_ids) == {128001, 128008, 128009} or len(config.eos_token_ids) == 1


def test_generation_config_wins(tmp_path: Path) -> None:
    """A chat model stops at several tokens, which only generation_config.json lists."""
    assert read(tmp_path, generation={"eos_token_id": [7, 9]}, eos_token_id=3).eos_token_ids == (7, 9)


def test_windows(tmp_path: Path) -> None:
    """Which layers see a window: by a list, from a layer on, all, or those without positions."""
    on = {"use_sliding_window": True, "sliding_window": 9}
    listed = ["sliding_attention", "full_attention"] * 2
    assert read(tmp_path, "qwen2", **on, max_window_layers=3).windows == (None, None, None, 9)
    assert read(tmp_path, "qwen2", **on, max_window_layers=0).windows == (9,) * 4
    assert read(tmp_path, "qwen3", **on, layer_types=listed).windows == (9, None, 9, None)
    assert read(tmp_path, "qwen3", **{**on, "use_sliding_window": False}).windows == (None,) * 4
    assert read(tmp_path, "mistral", sliding_window=5).windows == (5,) * 4
    assert read(tmp_path, "smollm3", **on, no_rope_layers=[1, 0, 1, 0]).windows == (None, 9, None, 9)


def test_the_context_of_stretched_positions(tmp_path: Path) -> None:
    """Yarn and dynamic scaling are there to go beyond what max_position_embeddings says."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(tmp_path, rope_scaling=yarn).max_position == 512
    assert read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}).max_position == 256
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).max_position == 128


@pytest.mark.parametrize(
    ("model_type", "change", "says"),
    [
        ("bert", {}, 'model_type="bert": is not supported; must be one of gpt2, llama, mistral, qwen2, qwen3, smollm3'),
        (["llama"], {}, r"model_type=\[.*: is not supported"),
        ("llama", {"hidden_act": "relu"}, 'hidden_act="relu": is not supported; must be one of silu'),
        ("llama", {"sliding_window": 9}, "sliding_window=9: is a feature that ember's llama does not have"),
        ("mistral", {"attention_bias": True}, "attention_bias=true: is a feature"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types=.* is a feature"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true: is a feature"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config=.* is a feature"),
        ("llama", {"torch_dtype": "int8"}, 'torch_dtype="int8": is not supported'),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            "is no language model; use a LlamaForCausalLM",
        ),
        ("llama", {"hidden_size": None}, r"hidden_size=\(missing\): must be given"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers=1000000: must be a whole number"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4"),
        ("llama", {"head_dim": 7}, "head_dim=7: must be even"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps=0: must be a number"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2}}, 'rope_scaling.rope_type="longrope": is not'),
        ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, 'rope_type="mrope"'),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"factor=\(missing\): must be a number"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, r'rope_scaling\.factor="2": must be a number'),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}},
            r"rope_scaling\.beta_fast=3: is not",
        ),
        ("llama", {"rope_scaling": "linear"}, 'rope_scaling="linear": must be an object'),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_theta": -1}, "rope_theta=-1: must be a number"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "factors", "factors": [1.0]}},
            r"factors=\[1\.0\]: must be 6 numbers",
        ),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types=.* one a layer, 4"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 4}, 'layer_types="chunked_att'),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "3"}, 'max_window_layers="3": must be a whole'),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0: must be a whole number"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=.* must be a list of at least 4 zeros and ones"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0: must be a whole number"),
    ],
)
def test_refused_by_name(model_type: Any, change: dict[str, Any], says: str, tmp_path: Path) -> None:
    """What the network does not have, or can't be, is one line with the file, the key and the value."""
    with pytest.raises(ConfigError, match=says) as caught:
        read(tmp_path, model_type, **change)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A bias that the config does not ask for would be dropped without a word."""
    import torch
    from safetensors.torch import save_file

    from ember.model.weights import load_weights

    config = read(tmp_path)
    layout = config.weight_layout
    weights = {f"model.{name}": torch.zeros(shape) for name, shape in layout.shapes.items() if name != layout.head}
    weights[layout.head] = torch.zeros(layout.shapes[layout.head])
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}  # as Llama 1's files have it
    load = {"dtype": torch.float32, "device": torch.device("cpu")}
    save_file(weights | old, tmp_path / "model.safetensors")
    assert set(load_weights(tmp_path, layout, **load)) == set(layout.shapes)
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r'the weights hold "model\.layers\.0\.self_attn\.q_proj\.bias"'):
        load_weights(tmp_path, layout, **load)
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"the weights lack norm\.weight \[48\]"):
        load_weights(tmp_path, layout, **load)
