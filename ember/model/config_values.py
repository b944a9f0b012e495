"""Single values of a model's config.json, which comes from a stranger: each is checked where it is read.

Every function raises ConfigError: the key, the value, what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ember.errors import ConfigError
from ember.model.json_file import read_json_object, show

DTYPES = ("float32", "float16", "bfloat16", "float64")
"""What a config.json may say of its weights: those that can be read. It decides nothing: the files say it again."""
_LIMITS: Mapping[str, int] = MappingProxyType({"n_layer": 4096, "n_head": 2**16, "n_kv_head": 2**16})  # others: 2^24
# Keys that change no logit: training, summaries, labels, how transformers runs or generates, who wrote the file.
_HARMLESS = """
    attention_dropout attn_pdrop initializer_range gradient_checkpointing use_cache pretraining_tp
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params finetuning_task problem_type id2label label2id num_labels _num_labels
    transformers_version _name_or_path name_or_path _attn_implementation_autoset transformers.js_config
    output_attentions output_hidden_states output_past output_scores return_dict return_dict_in_generate use_return_dict
    pad_token_id unk_token_id sep_token_id decoder_start_token_id is_decoder chunk_size_feed_forward torchscript
    use_bfloat16 max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences remove_invalid_values use_flash_attention _attn_implementation attn_implementation
"""


def read_generation(folder: Path) -> Mapping[str, Any]:
    """The folder's generation_config.json; empty if it has none.

    Raises:
        UserError: it is not a JSON object.
    """
    path = folder / "generation_config.json"
    return read_json_object(path) if path.exists() else {}


def refuse_unknown(data: Mapping[str, Any], known: Set[str], network: str) -> None:
    """Nothing, if every key is one that is read, harmless, or off."""
    harmless = _HARMLESS.split()
    for key, value in data.items():
        if key not in harmless and key not in known and not _is_off(value):
            remedy = f"is a feature that ember's {network} does not have; use a model without it"
            raise ConfigError(show(key).strip('"'), show(value), f"{remedy} (null, if it has no effect)")


def refuse_other_heads(data: Mapping[str, Any], good: str) -> None:
    """Nothing, unless the network was trained to classify (`...ForSequenceClassification`): its text means nothing."""
    names = data.get("architectures")
    for name in names if isinstance(names, list) else []:
        prefix, sep, kind = str(name).partition("For")
        if sep and good.startswith(prefix) and name != good and kind != "CausalLM":
            raise ConfigError("architectures", show(name), f"is no language model; use a {good}")


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])


def check_dtype(data: Mapping[str, Any]) -> None:
    """Nothing, if the weights are of a kind that can be read."""
    for key in ("dtype", "torch_dtype"):
        one_of(data, key, DTYPES, default=DTYPES[0])


def whole(name: str, value: Any, key: str | None = None) -> int:
    """A whole number from 1 to the limit of `key`."""
    limit = _LIMITS.get(key or name, 2**24)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ConfigError(name, show(value), f"must be a whole number in 1 .. {limit}")
    return value


def flag(data: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """True or false."""
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(key, show(value), "must be true or false")
    return value


def one_of(data: Mapping[str, Any], key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    """One of the texts that are allowed."""
    value = data.get(key)
    value = default if value is None else value
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(key, show(value), f"is not supported; must be one of {', '.join(allowed)}")
    return value


def real(data: Mapping[str, Any], key: str, default: float | None, *, below: float = 1e12) -> float:
    """A number above 0 and below a limit."""
    value = data.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < below:
        most = f"between 0 and {below:g}"
        raise ConfigError(key, "(missing)" if value is None else show(value), f"must be a number {most}")
    return float(value)


def eos_tokens(data: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a text; generation_config.json wins."""
    if generation.get("eos_token_id") is not None:
        return tokens("eos_token_id (in generation_config.json)", generation["eos_token_id"], vocab_size)
    return tokens("eos_token_id", data.get("eos_token_id"), vocab_size)


def tokens(key: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    """Token ids from an int or a list; one beyond the vocabulary can't occur, so it ends nothing and is left out."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        raise ConfigError(key, show(value), "must be a token id or a list of them")
    return tuple(dict.fromkeys(item for item in items if 0 <= item < vocab_size))
