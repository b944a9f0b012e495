"""The shape of a GPT-2 network, read from a model folder's config.json.

Two layouts: Hugging Face's (`model_type: gpt2`, linears stored `[in, out]`) and ember's own export (eight plain keys,
linears stored `[out, in]`). The folder is not trusted, and nothing in it is ignored: a feature that the network does
not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ember.errors import ConfigError
from ember.model.json_file import read_json_object, show

ACTIVATIONS = ("gelu_new", "gelu", "relu")
TOKENIZERS = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend")
DTYPES = ("float32", "float16", "bfloat16", "float64")
"""What a config.json may say of its weights: those that can be read. It decides nothing: the files say it again."""
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
_EMBER_SIZES = ("n_layer", "n_head", "n_kv_head", "n_embd", "vocab_size", "max_position")
_EMBER_KEYS = frozenset({"name", "dtype", *_EMBER_SIZES})
_LIMITS: Mapping[str, int] = MappingProxyType({"n_layer": 4096, "n_head": 2**16, "n_kv_head": 2**16})  # others: 2^24
_READ = """
    model_type architectures dtype torch_dtype activation_function layer_norm_epsilon tie_word_embeddings
    scale_attn_weights scale_attn_by_inverse_layer_idx eos_token_id bos_token_id tokenizer_class
"""
# Keys that change no logit: training, summaries, labels, how transformers runs or generates, who wrote the file.
_HARMLESS = """
    attn_pdrop embd_pdrop resid_pdrop initializer_range gradient_checkpointing use_cache n_ctx
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params finetuning_task problem_type id2label label2id num_labels _num_labels
    transformers_version _name_or_path name_or_path _attn_implementation_autoset
    output_attentions output_hidden_states output_past output_scores return_dict return_dict_in_generate use_return_dict
    pad_token_id unk_token_id sep_token_id decoder_start_token_id is_decoder chunk_size_feed_forward torchscript
    use_bfloat16 max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences remove_invalid_values use_flash_attention _attn_implementation attn_implementation
    n_special predict_special_tokens
"""


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
            return _from_hf(data, _generation(folder)) if _is_hf(data) else _from_ember(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.key}", error.value, error.allowed) from None


def _is_hf(data: Mapping[str, Any]) -> bool:
    """Hugging Face's files always name a model_type; ember's export never does."""
    if "model_type" not in data and not {"name", "max_position"} & data.keys():
        raise ConfigError("model_type", "(missing)", 'must be "gpt2" (or the eight keys of ember\'s own export)')
    return "model_type" in data


def _from_hf(data: Mapping[str, Any], generation: Mapping[str, Any]) -> GPT2Config:
    _one_of(data, "model_type", ("gpt2",))
    _refuse_unsupported(data)
    _check_dtype(data)
    sizes = {key: _size(data, key, names) for key, names in _SIZES.items()}
    for key in ("vocab_size", "max_position", "n_embd", "n_layer", "n_head"):
        if sizes[key] is None:
            raise ConfigError(_SIZES[key][0], "(missing)", "must be given")
    n_embd, n_head = sizes["n_embd"] or 0, sizes["n_head"] or 0
    vocab_size = sizes["vocab_size"] or 0
    bos = _tokens("bos_token_id", data.get("bos_token_id"), vocab_size)
    return GPT2Config(
        vocab_size=vocab_size,
        max_position=sizes["max_position"] or 0,
        n_embd=n_embd,
        n_layer=sizes["n_layer"] or 0,
        n_head=n_head,
        n_kv_head=sizes["n_kv_head"] or n_head,
        n_inner=sizes["n_inner"] or 4 * n_embd,
        activation=_one_of(data, "activation_function", ACTIVATIONS, default="gelu_new"),
        layer_norm_epsilon=_epsilon(data.get("layer_norm_epsilon", 1e-5)),
        tie_word_embeddings=_flag(data, "tie_word_embeddings", default=True),
        scale_attn_weights=_flag(data, "scale_attn_weights", default=True),
        scale_attn_by_inverse_layer_idx=_flag(data, "scale_attn_by_inverse_layer_idx", default=False),
        layout="hf",
        eos_token_ids=_eos(data, generation, vocab_size),
        bos_token_id=bos[0] if bos else None,
    )


def _from_ember(data: Mapping[str, Any]) -> GPT2Config:
    for key in sorted(_EMBER_KEYS - data.keys()):
        raise ConfigError(key, "(missing)", f"must be given: ember's export has {', '.join(sorted(_EMBER_KEYS))}")
    for key in sorted(data.keys() - _EMBER_KEYS):
        raise ConfigError(key[:60], show(data[key]), "is not a key of ember's export; remove it")
    _check_dtype(data)
    sizes = {key: _whole(key, data[key]) for key in _EMBER_SIZES}
    eos = _tokens("eos_token_id", GPT2_EOS, sizes["vocab_size"])
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


def _check_dtype(data: Mapping[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        _one_of(data, key, DTYPES, default=DTYPES[0])


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Every key is one that is read, harmless, or off."""
    _one_of(data, "tokenizer_class", TOKENIZERS, default=TOKENIZERS[0])
    _refuse_other_heads(data.get("architectures"))
    known = {*_READ.split(), *_HARMLESS.split()} | {name for names in _SIZES.values() for name in names}
    for key, value in data.items():
        if key not in known and not _is_off(value):
            remedy = "is a feature that ember's GPT-2 does not have; use a model without it (null, if it has no effect)"
            raise ConfigError(show(key).strip('"'), show(value), remedy)


def _refuse_other_heads(architectures: Any) -> None:
    """A network trained to classify (`GPT2ForSequenceClassification`) would give text that means nothing."""
    for name in architectures if isinstance(architectures, list) else []:
        if str(name).startswith("GPT2For"):
            raise ConfigError("architectures", show(name), "is no language model; use a GPT2LMHeadModel")


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])


def _generation(folder: Path) -> Mapping[str, Any]:
    path = folder / "generation_config.json"
    return read_json_object(path) if path.exists() else {}


def _size(data: Mapping[str, Any], key: str, names: tuple[str, ...]) -> int | None:
    """The value under the first of `names` that is set; aliases must agree. `n_ctx` is legacy and never wins."""
    given = {name: _whole(name, data[name], key) for name in names if data.get(name) is not None}
    if len(given) > 1:
        given.pop("n_ctx", None)
    if len(set(given.values())) > 1:
        other, value = list(given.items())[1]
        raise ConfigError(other, value, f"contradicts {names[0]}={given[names[0]]}; keep one of them")
    return next(iter(given.values()), None)


def _whole(name: str, value: Any, key: str | None = None) -> int:
    limit = _LIMITS.get(key or name, 2**24)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ConfigError(name, show(value), f"must be a whole number in 1 .. {limit}")
    return value


def _flag(data: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(key, show(value), "must be true or false")
    return value


def _one_of(data: Mapping[str, Any], key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    value = data.get(key)
    value = default if value is None else value
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(key, show(value), f"is not supported; must be one of {', '.join(allowed)}")
    return value


def _epsilon(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigError("layer_norm_epsilon", show(value), "must be a number between 0 and 1")
    return float(value)


def _eos(data: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    if generation.get("eos_token_id") is not None:
        return _tokens("eos_token_id (in generation_config.json)", generation["eos_token_id"], vocab_size)
    return _tokens("eos_token_id", data.get("eos_token_id"), vocab_size)


def _tokens(key: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Token ids from an int or a list; one beyond the vocabulary can't occur, so it ends nothing and is left out."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        raise ConfigError(key, show(value), "must be a token id or a list of them")
    return tuple(dict.fromkeys(item for item in items if 0 <= item < vocab_size))
