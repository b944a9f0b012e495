"""A GGUF file's network: its metadata as the config.json that it was made from, its tensors under canonical names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ember.errors import ConfigError
from ember.model.gguf_file import GgufFile, GgufTensor
from ember.model.gpt2_config import GPT2Config
from ember.model.json_file import show
from ember.model.llama_config import LlamaConfig

_GPT2_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "wte",
        "position_embd": "wpe",
        "output_norm": "ln_f",
        "output": "lm_head",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
)
_LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2")
_PAIRS_SIDE_BY_SIDE = ("llama", "mistral", "smollm3")
"""Here the two numbers that turn together lie side by side in a head of q and k, not half a head apart."""
_END_TOKENS = ("eos", "eot", "eom")


def gguf_config(file: GgufFile) -> GPT2Config | LlamaConfig:
    """What the metadata say of the network.

    Raises:
        ConfigError: a key is missing, wrong or not supported. Names the file and the key.
    """
    try:
        architecture = file.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            allowed = f"is not supported; must be one of {', '.join(_ARCHITECTURES)}"
            raise ConfigError("general.architecture", show(architecture), allowed)
        generation = {"eos_token_id": _end_tokens(file)}
        if architecture == "gpt2":
            return replace(GPT2Config.from_json(_gpt2(file), generation), layout="ember")
        return LlamaConfig.from_json(_llama(file, architecture), generation)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error.key}", error.value, error.allowed) from None


def gguf_tensors(file: GgufFile) -> list[GgufTensor]:
    """Every tensor, by canonical name."""
    architecture = file.metadata["general.architecture"]
    names = _GPT2_NAMES if architecture == "gpt2" else _LLAMA_NAMES
    layer = "h" if architecture == "gpt2" else "layers"
    found: list[GgufTensor] = []
    for tensor in file.tensors.values():
        if tensor.name == _ROPE_FACTORS:  # in the config
            continue
        part = re.fullmatch(r"blk\.\d+\.attn_([qk])\.\w+", tensor.name)
        heads = _heads(file, architecture, part[1]) if part and architecture in _PAIRS_SIDE_BY_SIDE else 0
        found.append(replace(tensor, name=_canonical(tensor.name, names, layer), heads=heads))
    return found


def _heads(file: GgufFile, architecture: str, part: str) -> int:
    """Heads of queries (q) or keys (k)."""
    key = f"{architecture}.attention.head_count"
    heads: int = file.metadata.get(f"{key}_kv", file.metadata[key]) if part == "k" else file.metadata[key]
    return heads


def _canonical(name: str, names: Mapping[str, str], layer: str) -> str:
    """The canonical name; one that no network has stays as it is, and is refused with what else is too many."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in names:
        return f"{layer}.{block[1]}.{names[block[2]]}.{block[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{names[stem]}.{kind}" if stem in names else name


def _end_tokens(file: GgufFile) -> list[Any]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _END_TOKENS]
    return [file.metadata[key] for key in keys if key in file.metadata]


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError("token_embd.weight", "(missing)", "must be given")
    return embedding.shape[0]


def _getter(file: GgufFile, architecture: str, used: set[str]) -> Callable[[str], Any]:
    """Takes a value of the architecture's own keys."""

    def get(key: str) -> Any:
        used.add(f"{architecture}.{key}")
        return file.metadata.get(f"{architecture}.{key}")

    return get


def _gpt2(file: GgufFile) -> dict[str, Any]:
    used: set[str] = set()
    get = _getter(file, "gpt2", used)
    config = {
        "model_type": "gpt2",
        "vocab_size": _vocab_size(file),
        "n_positions": get("context_length"),
        "n_embd": get("embedding_length"),
        "n_layer": get("block_count"),
        "n_head": get("attention.head_count"),
        "n_inner": get("feed_forward_length"),
        "layer_norm_epsilon": get("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    _refuse_unread(file, "gpt2", used | {"gpt2.vocab_size"})
    return config


def _llama(file: GgufFile, architecture: str) -> dict[str, Any]:
    used: set[str] = set()
    get = _getter(file, architecture, used)
    heads = get("attention.head_count")
    window = get("attention.sliding_window") if architecture in ("llama", "mistral") else None
    config = {
        "model_type": "mistral" if window else architecture,
        "vocab_size": _vocab_size(file),
        "max_position_embeddings": get("context_length"),
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv") or heads,
        "head_dim": get("attention.key_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, get),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        **({"sliding_window": window} if window else {}),
    }
    biases = {"attention_bias": "attn_output", "mlp_bias": "ffn_down"}
    config |= {key: f"blk.0.{name}.bias" in file.tensors for key, name in biases.items()}
    _check(config, get)
    used |= {f"{architecture}.{key}" for key in ("vocab_size", "rope.dimension_count", "attention.value_length")}
    _refuse_unread(file, architecture, used)
    return config


def _check(config: Mapping[str, Any], get: Callable[[str], Any]) -> None:
    """Nothing, if values are as wide as keys and a whole head is turned."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if not isinstance(heads, int) or not isinstance(width, int) or not heads:
        raise ConfigError("attention.head_count", show(heads), "must be a whole number")
    head_dim = config["head_dim"] or width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key) not in (None, head_dim):
            raise ConfigError(key, show(get(key)), f"is not supported; must be {head_dim}, the width of a head")


def _refuse_unread(file: GgufFile, architecture: str, used: set[str]) -> None:
    for key, value in file.metadata.items():
        if key.startswith(f"{architecture}.") and key not in used and value:
            raise ConfigError(key, show(value), "is a feature that ember does not read from a GGUF file")


def _rope(file: GgufFile, get: Callable[[str], Any]) -> dict[str, Any]:
    """Rotary positions; the frequencies of Llama 3 come as a tensor of what to divide them by."""
    rope: dict[str, Any] = {"rope_theta": get("rope.freq_base")}
    kind, factor = get("rope.scaling.type"), get("rope.scaling.factor") or get("rope.scale_linear")
    original, magnitude = get("rope.scaling.original_context_length"), get("rope.scaling.attn_factor")
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        rope |= {key: get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    elif kind not in (None, "none", "linear"):
        raise ConfigError("rope.scaling.type", show(kind), "is not supported; must be none, linear or yarn")
    elif factor not in (None, 0, 1) and kind != "none":
        rope |= {"rope_type": "linear", "factor": factor}
    if magnitude not in (None, 0, 1):
        raise ConfigError("rope.scaling.attn_factor", show(magnitude), "is not supported; must be 1")
    if _ROPE_FACTORS in file.tensors:
        rope = {"rope_type": "factors", "rope_theta": rope["rope_theta"]}
        rope["factors"] = file.tensors[_ROPE_FACTORS].read().tolist()
    return rope
