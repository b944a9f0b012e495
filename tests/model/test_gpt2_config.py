"""GPT2Config reads what transformers and ember write, and refuses by name what the network does not have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ember.errors import ConfigError, UserError
from ember.model.gpt2_config import GPT2Config
from ember.model.presets import TINY

SIZES = {"vocab_size": 100, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4}
EMBER = {"name": "x", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 48, "vocab_size": 50304, "max_position": 64}


def read(folder: Path, data: Any, generation: Any = None) -> GPT2Config:
    (folder / "config.json").write_text(data if isinstance(data, str) else json.dumps(data))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return GPT2Config.from_folder(folder)


def hf(**changes: Any) -> dict[str, Any]:
    return {"model_type": "gpt2", **SIZES, **changes}


def test_tiny() -> None:
    """Guards the embedded model: a config that refuses its own default model helps nobody."""
    config = GPT2Config.from_folder(TINY)
    assert (config.vocab_size, config.max_position, config.n_inner, config.head_dim) == (4096, 512, 768, 32)
    assert (config.eos_token_ids, config.bos_token_id, config.layout) == ((4095,), 4095, "hf")


def test_defaults_of_hugging_face(tmp_path: Path) -> None:
    """An old config.json without the newer switches must mean transformers' defaults."""
    config = read(tmp_path, hf(n_inner=None))
    assert (config.n_inner, config.n_kv_head, config.activation, config.layer_norm_epsilon) == (
        192,
        4,
        "gelu_new",
        1e-5,
    )
    assert config.tie_word_embeddings and config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx


def test_switches_are_read(tmp_path: Path) -> None:
    """A switch that is ignored gives plausible, wrong text."""
    switches = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}
    config = read(tmp_path, hf(**switches, activation_function="relu", layer_norm_epsilon=1e-6, n_inner=7, n_kv_head=2))
    assert {name: getattr(config, name) for name in switches} == switches
    assert (config.activation, config.layer_norm_epsilon, config.n_inner, config.n_kv_head) == ("relu", 1e-6, 7, 2)


def test_what_transformers_writes(tmp_path: Path) -> None:
    """Every key of transformers' own GPT-2 config must be known, or a saved model can't be loaded."""
    transformers = pytest.importorskip("transformers")
    full = transformers.GPT2Config().to_dict() | {"architectures": ["GPT2LMHeadModel"], "_name_or_path": "gpt2"}
    assert read(tmp_path, {k: v for k, v in full.items() if k != "dtype"}).n_layer == 12
    transformers.GPT2Config(vocab_size=10, bos_token_id=1, eos_token_id=2).save_pretrained(tmp_path)
    assert GPT2Config.from_folder(tmp_path).eos_token_ids == (2,)


def test_what_transformers_4_writes(tmp_path: Path) -> None:
    """transformers 4's to_dict wrote the generation defaults, empty pruned_heads and label maps too."""
    old = {
        "pruned_heads": {}, "is_decoder": False, "cross_attention_hidden_size": None, "tie_encoder_decoder": False,
        "torchscript": False, "use_bfloat16": False, "tf_legacy_loss": False, "max_length": 20, "min_length": 0,
        "do_sample": False, "early_stopping": False, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
        "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None,
        "num_return_sequences": 1, "output_scores": False, "return_dict_in_generate": False, "suppress_tokens": None,
        "forced_bos_token_id": None, "remove_invalid_values": False, "id2label": {"0": "LABEL_0"}, "prefix": None,
        "torch_dtype": "float32", "_attn_implementation_autoset": True, "tokenizer_class": None,
    }  # fmt: skip
    assert read(tmp_path, hf(**old)).n_embd == 48


def test_what_the_official_repo_has(tmp_path: Path) -> None:
    """The preset gpt2 must load: its config.json has n_ctx, summary_* and task_specific_params."""
    official = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
        "n_special": 0, "predict_special_tokens": True,
    }  # fmt: skip
    config = read(tmp_path, official)
    assert (config.eos_token_ids, config.bos_token_id, config.max_position) == ((50256,), 50256, 1024)


def test_aliases(tmp_path: Path) -> None:
    """transformers accepts hidden_size and its like for GPT-2; two that differ must not be chosen between silently."""
    aliases = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 32}
    data = {"model_type": "gpt2", "vocab_size": 100, "num_key_value_heads": 2, **aliases}
    config = read(tmp_path, data)
    assert (config.n_embd, config.n_head, config.n_layer, config.max_position, config.n_kv_head) == (48, 4, 2, 32, 2)
    with pytest.raises(ConfigError, match=r"hidden_size=64: contradicts n_embd=48"):
        read(tmp_path, hf(hidden_size=64))


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (7, None, (7,)),
        (7, {"eos_token_id": 9}, (9,)),
        (7, {"eos_token_id": [9, 3, 9]}, (9, 3)),
        (7, {"eos_token_id": None}, (7,)),
        ([1, 2], {}, (1, 2)),
        (None, None, ()),
        (50256, None, ()),
        (-1, None, ()),
    ],
)
def test_eos(tmp_path: Path, config_eos: Any, generation: Any, expected: tuple[int, ...]) -> None:
    """generation_config.json wins; an EOS beyond the vocabulary would index past the logits."""
    assert read(tmp_path, hf(eos_token_id=config_eos), generation).eos_token_ids == expected


def test_ember_layout(tmp_path: Path) -> None:
    """ember's own export has no switches: tied, gelu_new, linears [out, in], GPT-2's EOS if the vocabulary has it."""
    config = read(tmp_path, EMBER | {"dtype": "float32"})
    assert (config.layout, config.n_kv_head, config.n_inner, config.max_position) == ("ember", 2, 192, 64)
    assert (config.activation, config.tie_word_embeddings, config.eos_token_ids) == ("gelu_new", True, (50256,))
    assert read(tmp_path, EMBER | {"dtype": "float32", "vocab_size": 300}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"dtype": None}, None), ({"dtype": "x", "rope": 1}, "rope=1"), ({}, r"dtype=\(missing\)")],
)
def test_ember_layout_names_a_wrong_key(tmp_path: Path, change: dict, says: str | None) -> None:
    """A missing or extra key of the export must be named, not guessed."""
    if says is None:
        assert read(tmp_path, EMBER | change).layout == "ember"
        return
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, EMBER | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama"}, 'model_type="llama"'),
        ({"model_type": ["gpt2"]}, "model_type"),
        ({"activation_function": "silu"}, 'activation_function="silu"'),
        ({"activation_function": ["gelu"]}, "activation_function"),
        ({"add_cross_attention": True}, "add_cross_attention=true"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=true"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"tokenizer_class": "BertTokenizer"}, "tokenizer_class"),
        ({"multi\nline": 1}, r"multi\\nline"),
        ({"n_embd": 50}, "n_embd=50: must be a multiple of n_head=4"),
        ({"n_kv_head": 3}, "n_kv_head=3: must divide n_head=4"),
        ({"n_layer": -1}, "n_layer=-1"),
        ({"n_layer": 0}, "n_layer=0"),
        ({"n_layer": 10**9}, "n_layer=1000000000"),
        ({"vocab_size": 10**400}, "vocab_size=1000"),
        ({"n_embd": "48"}, 'n_embd="48"'),
        ({"n_embd": 48.0}, "n_embd=48.0"),
        ({"n_head": True}, "n_head=true"),
        ({"n_inner": 0}, "n_inner=0"),
        ({"n_embd": None}, r"n_embd=\(missing\)"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon=-1"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon=NaN"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"scale_attn_weights": 1}, "scale_attn_weights=1"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": [True]}, "eos_token_id"),
        ({"bos_token_id": 1.5}, "bos_token_id"),
    ],
)
def test_refused_by_name(tmp_path: Path, change: dict, says: str) -> None:
    """What the network does not have, or can't be, is one line with the file, the key and the value."""
    with pytest.raises(ConfigError, match=says) as caught:
        read(tmp_path, hf(**change))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("eos", ["x", {"a": 1}, [[1]]])
def test_wrong_eos_in_generation_config_names_that_file(tmp_path: Path, eos: Any) -> None:
    """The line named config.json for a mistake in the other file."""
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read(tmp_path, hf(), {"eos_token_id": eos})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "object"),
        ("null", "object"),
        ("{}", "model_type"),
        ("[" * 100_000, "not valid JSON"),
        ('{"model_type": "gpt2", "n_embd": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_broken_json(tmp_path: Path, text: str, says: str) -> None:
    """A broken config.json (nested 100,000 deep, too) is one line that names the file."""
    with pytest.raises(UserError, match=says) as caught:
        read(tmp_path, text)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_no_readable_file(tmp_path: Path) -> None:
    """Missing, not UTF-8, a folder, or a pipe that would hang the job for ever."""
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        GPT2Config.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(UserError, match="not valid JSON"):
        GPT2Config.from_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match="not a file"):
        GPT2Config.from_folder(tmp_path)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_of_weights_that_ember_cannot_read_is_refused(tmp_path: Path, key: str) -> None:
    """int8 was passed over: quantised weights would be taken for plain ones."""
    for dtype in ("float32", "float16", "bfloat16", "float64", None):
        assert read(tmp_path, hf(**{key: dtype})).n_layer == 2
    for wrong in ("int8", "float8_e4m3fn", "", 8, ["float32"]):
        with pytest.raises(ConfigError, match=rf"config\.json: {key}=.*: is not supported; must be one of float32, "):
            read(tmp_path, hf(**{key: wrong}))


def test_the_dtype_of_embers_export_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'config\.json: dtype="int8": is not supported; must be one of float32, '):
        read(tmp_path, EMBER | {"dtype": "int8"})
    assert read(tmp_path, EMBER | {"dtype": "bfloat16"}).layout == "ember"


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    """Its trunk loads, and makes text that means nothing."""
    assert read(tmp_path, hf(architectures=["GPT2LMHeadModel"])).n_layer == 2
    with pytest.raises(ConfigError, match='architectures="GPT2ForSequenceClassification": is no language model'):
        read(tmp_path, hf(architectures=["GPT2ForSequenceClassification"]))
