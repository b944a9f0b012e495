"""The shape of a network of the Llama family, read from a model folder's config.json.

The members differ in data only: which biases there are, which layers see a window or turn positions, whether heads are
normalised. Nothing in the file is ignored: a feature that the network does not have is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ember.errors import ConfigError
from ember.model.config_values import (
    check_dtype,
    eos_tokens,
    flag,
    one_of,
    real,
    refuse_other_heads,
    refuse_unknown,
    tokens,
    whole,
)
from ember.model.json_file import show
from ember.model.rope import Rope
from ember.model.weight_layout import WeightLayout

_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "max_position": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
    }
)
_READ = """
    model_type architectures dtype torch_dtype hidden_act rms_norm_eps tie_word_embeddings eos_token_id bos_token_id
    rope_theta rope_scaling rope_parameters head_dim num_key_value_heads tokenizer_class
"""
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_new": "gelu_new"}
)
_INVERSE_FREQUENCIES = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq")
_WINDOWS: Mapping[str, Any] = MappingProxyType(
    {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What a `model_type` has.

    Attributes:
        defaults: keys that it reads besides those of all, and what they are where the file leaves them out (for some
            of all's keys too), as in transformers.
        head: its class with an LM head in transformers.
        theta: base of the rotary positions where the file names none.
        qkv_bias: whether queries, keys and values have a bias; None: where `attention_bias` says so.
        qk_norm: every head of queries and keys is normalised.
        is_gemma: norms scale by 1 + weight, and embeddings are multiplied by sqrt(n_embd).
    """

    defaults: Mapping[str, Any]
    head: str
    theta: float = 10_000.0
    qkv_bias: bool | None = None
    qk_norm: bool = False
    is_gemma: bool = False


def _family(head: str, defaults: Mapping[str, Any], **features: Any) -> Family:
    return Family(defaults=MappingProxyType({"tie_word_embeddings": False, **defaults}), head=head, **features)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _family("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
        "mistral": _family("MistralForCausalLM", {"sliding_window": 4096, "num_key_value_heads": 8}),
        "qwen2": _family("Qwen2ForCausalLM", {"num_key_value_heads": 32, **_WINDOWS}, qkv_bias=True),
        "qwen3": _family(
            "Qwen3ForCausalLM",
            {"attention_bias": False, "head_dim": 128, "num_key_value_heads": 32, **_WINDOWS},
            qk_norm=True,
        ),
        "smollm3": _family(
            "SmolLM3ForCausalLM",
            {
                **_WINDOWS,
                "sliding_window": None,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
                "attention_bias": False,
                "mlp_bias": False,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            },
            theta=2_000_000.0,
        ),
        "gemma": _family(
            "GemmaForCausalLM",
            {
                "attention_bias": False,
                "head_dim": 256,
                "num_key_value_heads": 16,
                "tie_word_embeddings": True,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": None,
            },
            is_gemma=True,
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The network's sizes and switches.

    Attributes:
        vocab_size, n_embd, n_inner: rows of the embedding, the model's and the MLP's width.
        max_position: the context, in tokens.
        n_head, n_kv_head, head_dim: query heads, the K/V heads that they share, and the width of one.
        activation: of the MLP's gate: silu, or gelu_new (tanh).
        qkv_bias, out_bias, mlp_bias: which linears have a bias.
        qk_norm: every head of queries and keys is normalised.
        windows: for each layer, how many tokens a query sees, itself the last of them; None: all before it.
        rotary: for each layer, whether positions turn queries and keys.
        norm_offset: added to the weights of norms.
        embedding_scale: factor on the embeddings.
        eos_token_ids: tokens that end a text, all below vocab_size.
    """

    vocab_size: int
    max_position: int
    n_embd: int
    n_inner: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    norm_offset: float
    embedding_scale: float
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.n_head % self.n_kv_head:
            raise ConfigError("num_key_value_heads", self.n_kv_head, f"must divide num_attention_heads={self.n_head}")
        if self.head_dim % 2:
            raise ConfigError("head_dim", self.head_dim, "must be even")
        if len(self.rope.factors) not in (0, self.head_dim // 2):
            raise ConfigError("factors", show(list(self.rope.factors)), f"must be {self.head_dim // 2} numbers")

    @property
    def weight_layout(self) -> WeightLayout:
        """The weights, with C = n_embd, I = n_inner, V = vocab_size, D = head_dim, Q = n_head * D, K = n_kv_head * D.

        embed_tokens.weight [V, C], norm.weight [C], lm_head.weight [V, C] only when untied, and for each layer
        layers.{i}: input_layernorm.weight and post_attention_layernorm.weight [C], self_attn.q_proj [Q, C], k_proj and
        v_proj [K, C], o_proj [C, Q], q_norm and k_norm [D] where heads are normalised, mlp.gate_proj and up_proj
        [I, C], down_proj [C, I]: `.weight` of each, and `.bias` [out] of those that have one.
        """
        return WeightLayout(
            shapes=_shapes(self),
            prefix="model.",
            embedding="embed_tokens.weight",
            head="lm_head.weight",
            turned=None,
            ignored=_INVERSE_FREQUENCIES,
        )

    @staticmethod
    def from_json(given: Mapping[str, Any], generation: Mapping[str, Any]) -> LlamaConfig:
        """From the objects in config.json and generation_config.json, whose EOS tokens win.

        Raises:
            ConfigError: a key is missing, wrong or not supported.
        """
        family = FAMILIES[one_of(given, "model_type", tuple(FAMILIES))]
        data = {**family.defaults, **given}
        refuse_unknown(data, {*_READ.split(), *_SIZES.values(), *family.defaults}, str(data["model_type"]))
        refuse_other_heads(data, family.head)
        check_dtype(data)
        return _build(family, data, {key: _size(data, name) for key, name in _SIZES.items()}, generation)


def _build(
    family: Family, data: Mapping[str, Any], sizes: dict[str, int], generation: Mapping[str, Any]
) -> LlamaConfig:
    n_layer, n_head, n_embd, vocab_size = (sizes[key] for key in ("n_layer", "n_head", "n_embd", "vocab_size"))
    rope = Rope.from_json(data, family.theta, sizes["max_position"])
    attention_bias = flag(data, "attention_bias", default=False)
    rotary = _rotary(data, n_layer)
    bos = tokens("bos_token_id", data.get("bos_token_id"), vocab_size)
    return LlamaConfig(
        **{**sizes, "max_position": max(sizes["max_position"], rope.context)},
        n_kv_head=_size(data, "num_key_value_heads", n_head),
        head_dim=_size(data, "head_dim", max(n_embd // n_head, 1)),
        activation=_ACTIVATIONS[_activation(data)],
        rms_norm_eps=real(data, "rms_norm_eps", 1e-6, below=1),
        tie_word_embeddings=flag(data, "tie_word_embeddings", default=False),
        rope=rope,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias,
        mlp_bias=flag(data, "mlp_bias", default=False),
        qk_norm=family.qk_norm,
        windows=_windows(data, rotary),
        rotary=rotary,
        norm_offset=1.0 if family.is_gemma else 0.0,
        embedding_scale=n_embd**0.5 if family.is_gemma else 1.0,
        eos_token_ids=eos_tokens(data, generation, vocab_size),
        bos_token_id=bos[0] if bos else None,
    )


def _size(data: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = data.get(name)
    if value is None and default is None:
        raise ConfigError(name, "(missing)", "must be given")
    return whole(name, default if value is None else value, "n_layer" if name == "num_hidden_layers" else name)


def _activation(data: Mapping[str, Any]) -> str:
    """Gemma's first files say gelu and mean its tanh form; `hidden_activation` is their later name for it."""
    if "hidden_activation" in data:
        chosen = data["hidden_activation"] or data["hidden_act"]
        data = {"hidden_act": "gelu_pytorch_tanh" if chosen == "gelu" else chosen}
    return one_of(data, "hidden_act", tuple(_ACTIVATIONS), default="silu")


def _rotary(data: Mapping[str, Any], n_layer: int) -> tuple[bool, ...]:
    """SmolLM3 leaves every fourth layer without positions, or those that `no_rope_layers` marks with 0."""
    if "no_rope_layers" not in data:
        return (True,) * n_layer
    marks, every = data["no_rope_layers"], whole("no_rope_layer_interval", data["no_rope_layer_interval"])
    if marks is None:
        marks = [int((i + 1) % every != 0) for i in range(n_layer)]
    if not isinstance(marks, list) or len(marks) < n_layer or not all(mark in (0, 1) for mark in marks):
        raise ConfigError("no_rope_layers", show(marks), f"must be a list of at least {n_layer} zeros and ones")
    return tuple(mark == 1 for mark in marks[:n_layer])


def _windows(data: Mapping[str, Any], rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    """What each layer sees. Where a file does not list it, the windows are in the layers without positions (SmolLM3),
    those from `max_window_layers` on (Qwen), or all (Mistral).
    """
    n_layer = len(rotary)
    if data.get("sliding_window") is None or not flag(data, "use_sliding_window", default=True):
        return (None,) * n_layer
    window = whole("sliding_window", data["sliding_window"])
    types = data.get("layer_types")
    if types is None:
        first = _first_window(data)
        slides = [not turns for turns in rotary] if not all(rotary) else [i >= first for i in range(n_layer)]
        types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    if not isinstance(types, list) or len(types) != n_layer:
        raise ConfigError("layer_types", show(types), f"must be a list with one a layer, {n_layer}")
    kinds = [one_of({"layer_types": kind}, "layer_types", ("full_attention", "sliding_attention")) for kind in types]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _first_window(data: Mapping[str, Any]) -> int:
    first = data.get("max_window_layers") or 0
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ConfigError("max_window_layers", show(first), "must be a whole number of at least 0")
    return first


def _shapes(c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    layer = {f"{norm}.weight": (c.n_embd,) for norm in ("input_layernorm", "post_attention_layernorm")}
    q_width, kv_width = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    linears = (
        ("self_attn.q_proj", (q_width, c.n_embd), c.qkv_bias),
        ("self_attn.k_proj", (kv_width, c.n_embd), c.qkv_bias),
        ("self_attn.v_proj", (kv_width, c.n_embd), c.qkv_bias),
        ("self_attn.o_proj", (c.n_embd, q_width), c.out_bias),
        ("mlp.gate_proj", (c.n_inner, c.n_embd), c.mlp_bias),
        ("mlp.up_proj", (c.n_inner, c.n_embd), c.mlp_bias),
        ("mlp.down_proj", (c.n_embd, c.n_inner), c.mlp_bias),
    )
    each: dict[str, tuple[int, ...]] = {**layer}
    for name, shape, has_bias in linears:
        each |= {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if has_bias else {})
    if c.qk_norm:
        each |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (c.vocab_size, c.n_embd), "norm.weight": (c.n_embd,)}
    for i in range(c.n_layer):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in each.items()}
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.n_embd)
    return shapes
