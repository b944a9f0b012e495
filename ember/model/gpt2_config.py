"""The shape of a GPT-2 network, read from a model folder's config.json.

Two layouts: Hugging Face's (`model_type: gpt2`, linears stored `[in, out]`) and ember's own export (eight plain keys,
linears stored `[out, in]`). The folder is not trusted, and nothing in it is ignored: a feature that the network does
not have is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ember.errors import ConfigError
from ember.model.config_values import (
    check_dtype,
    eos_tokens,
    flag,
    one_of,
    read_generation,
    real,
    refuse_other_heads,
    refuse_unknown,
    tokens,
    whole,
)
from ember.model.json_file import read_json_object, show
from ember.model.weight_layout import WeightLayout

ACTIVATIONS = ("gelu_new", "gelu", "relu")
TOKENIZERS = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
GPT2_EOS = 50256

# Each size: its name in the file, then transformers' other names for it.
_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab_size": ("vocab_size",),
        "max_position": ("n_positions", "max_position_embeddings", "n_ctx"),
        "n_embd": ("n_embd", "hidden_size"),
        "n_layer": ("n_layer", "num_hidden_layers"),
        "n_head": ("n_head", "num_attention_heads"),
        "n_kv_head": ("n_kv_head", "num_key_value_heads"),
        "n_inner": ("n_inner",),
    }
)
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # not c_attn.bias
_LINEAR = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
_EMBER_SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "vocab_size", "max_position")
_EMBER_KEYS = frozenset({"name", "dtype", *_EMBER_SIZES})
_READ = """
    model_type architectures dtype torch_dtype activation_function layer_norm_epsilon tie_word_embeddings
    scale_attn_weights scale_attn_by_inverse_layer_idx eos_token_id bos_token_id tokenizer_class
"""
_HARMLESS = "embd_pdrop resid_pdrop n_ctx n_special predict_special_tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config:
    """The network's sizes and switches.

    Attributes:
        vocab_size, max_position, n_embd, n_inner: rows of wte, rows of wpe, the model's and the MLP's width.
        n_head, n_kv_head: query heads, and the K/V heads that they share (equal in GPT-2 proper).
        activation: gelu_new (tanh), gelu (erf) or relu.
        scale_attn_weights: scores are divided by sqrt(head_dim).
        scale_attn_by_inverse_layer_idx: scores of layer i (from 0) are divided by i + 1 too.
        layout: how linears are stored: "hf" `[in, out]`, "ember" `[out, in]`.
        eos_token_ids: tokens that end a text, all below vocab_size.
    """

    vocab_size: int
    max_position: int
    n_embd: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_inner: int
    activation: str
    layer_norm_epsilon: float
    tie_word_embeddings: bool
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool
    layout: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ConfigError("n_embd", self.n_embd, f"must be a multiple of n_head={self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ConfigError("n_kv_head", self.n_kv_head, f"must divide n_head={self.n_head}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.n_embd // self.n_head

    @property
    def weight_layout(self) -> WeightLayout:
        """With C = n_embd, V = vocab_size, P = max_position, Q = C + 2 * n_kv_head * head_dim, I = n_inner:

        wte.weight [V, C], wpe.weight [P, C], ln_f.{weight,bias} [C], lm_head.weight [V, C] only when untied, and for
        each layer h.{i}: ln_1 and ln_2 {weight,bias} [C], attn.c_attn [Q, C] and attn.c_proj [C, C],
        mlp.c_fc [I, C] and mlp.c_proj [C, I], each with its bias [out].
        """
        return WeightLayout(
            shapes=_shapes(self),
            prefix="transformer.",
            embedding="wte.weight",
            head="lm_head.weight",
            turned=_LINEAR if self.layout == "hf" else None,
            ignored=_CAUSAL_MASK,
        )

    @staticmethod
    def from_json(data: Mapping[str, Any], generation: Mapping[str, Any]) -> GPT2Config:
        """From the objects in Hugging Face's config.json and generation_config.json, whose EOS tokens win.

        Raises:
            ConfigError: a key is missing, wrong or not supported.
        """
        return _from_hf(data, generation)

    @staticmethod
    def from_folder(folder: Path) -> GPT2Config:
        """Read `config.json`, and the EOS tokens of `generation_config.json`, which win.

        Raises:
            UserError: a file is missing or not JSON, or (ConfigError) a key is missing, wrong or not supported.
                Names the file and the key.
        """
        path = folder / "config.json"
        data = read_json_object(path)
        try:
            return _from_hf(data, read_generation(folder)) if _is_hf(data) else _from_ember(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.key}", error.value, error.allowed) from None


def _is_hf(data: Mapping[str, Any]) -> bool:
    """Hugging Face's files always name a model_type; ember's export never does."""
    if "model_type" not in data and not {"name", "max_position"} & data.keys():
        raise ConfigError("model_type", "(missing)", 'must be "gpt2" (or the eight keys of ember\'s own export)')
    return "model_type" in data


def _from_hf(data: Mapping[str, Any], generation: Mapping[str, Any]) -> GPT2Config:
    one_of(data, "model_type", ("gpt2",))
    _refuse_unsupported(data)
    check_dtype(data)
    sizes = {key: _size(data, key, names) for key, names in _SIZES.items()}
    for key in ("vocab_size", "max_position", "n_embd", "n_layer", "n_head"):
        if sizes[key] is None:
            raise ConfigError(_SIZES[key][0], "(missing)", "must be given")
    n_embd, n_head = sizes["n_embd"] or 0, sizes["n_head"] or 0
    vocab_size = sizes["vocab_size"] or 0
    bos = tokens("bos_token_id", data.get("bos_token_id"), vocab_size)
    return GPT2Config(
        vocab_size=vocab_size,
        max_position=sizes["max_position"] or 0,
        n_embd=n_embd,
        n_layer=sizes["n_layer"] or 0,
        n_head=n_head,
        n_kv_head=sizes["n_kv_head"] or n_head,
        n_inner=sizes["n_inner"] or 4 * n_embd,
        activation=one_of(data, "activation_function", ACTIVATIONS, default="gelu_new"),
        layer_norm_epsilon=real(data, "layer_norm_epsilon", 1e-5, below=1),
        tie_word_embeddings=flag(data, "tie_word_embeddings", default=True),
        scale_attn_weights=flag(data, "scale_attn_weights", default=True),
        scale_attn_by_inverse_layer_idx=flag(data, "scale_attn_by_inverse_layer_idx", default=False),
        layout="hf",
        eos_token_ids=eos_tokens(data, generation, vocab_size),
        bos_token_id=bos[0] if bos else None,
    )


def _from_ember(data: Mapping[str, Any]) -> GPT2Config:
    for key in sorted(_EMBER_KEYS - data.keys()):
        raise ConfigError(key, "(missing)", f"must be given: ember's export has {', '.join(sorted(_EMBER_KEYS))}")
    for key in sorted(data.keys() - _EMBER_KEYS):
        raise ConfigError(key[:60], show(data[key]), "is not a key of ember's export; remove it")
    check_dtype(data)
    sizes = {key: whole(key, data[key]) for key in _EMBER_SIZES}
    eos = tokens("eos_token_id", GPT2_EOS, sizes["vocab_size"])
    return GPT2Config(
        **sizes,
        n_inner=4 * sizes["n_embd"],
        activation="gelu_new",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        layout="ember",
        eos_token_ids=eos,
        bos_token_id=eos[0] if eos else None,
    )


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Every key is one that is read, harmless, or off."""
    one_of(data, "tokenizer_class", TOKENIZERS, default=TOKENIZERS[0])
    refuse_other_heads(data, "GPT2LMHeadModel")
    known = {*_READ.split(), *_HARMLESS.split()} | {name for names in _SIZES.values() for name in names}
    refuse_unknown(data, known, "GPT-2")


def _size(data: Mapping[str, Any], key: str, names: tuple[str, ...]) -> int | None:
    """The value under the first of `names` that is set; aliases must agree. `n_ctx` is legacy and never wins."""
    given = {name: whole(name, data[name], key) for name in names if data.get(name) is not None}
    if len(given) > 1:
        given.pop("n_ctx", None)
    if len(set(given.values())) > 1:
        other, value = list(given.items())[1]
        raise ConfigError(other, value, f"contradicts {names[0]}={given[names[0]]}; keep one of them")
    return next(iter(given.values()), None)


def _shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    width, inner = config.n_embd, config.n_inner
    qkv = width + 2 * config.n_kv_head * config.head_dim
    linears = {"attn.c_attn": (qkv, width), "attn.c_proj": (width, width)}
    linears |= {"mlp.c_fc": (inner, width), "mlp.c_proj": (width, inner)}
    each: dict[str, tuple[int, ...]] = {}
    for norm in ("ln_1", "ln_2"):
        each |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    for linear, shape in linears.items():
        each |= {f"{linear}.weight": shape, f"{linear}.bias": shape[:1]}
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (config.vocab_size, width)}
    shapes["wpe.weight"] = (config.max_position, width)
    for i in range(config.n_layer):
        shapes |= {f"h.{i}.{name}": shape for name, shape in each.items()}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes
