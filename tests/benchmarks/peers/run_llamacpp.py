"""llama.cpp's server engine, called in this process. Options: weights (F32, Q8_0), kv (f32, f16), slots (at most)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from worker import Requests, Run, serve

CONTEXT = 1024
"""Tokens of a slot, as vLLM has them."""


def convert(model: str, cache: str, weights: str) -> str:
    """The model as a GGUF file, made once."""
    target = Path(cache) / f"{Path(model).name}-{weights}.gguf"
    if not target.exists():
        import gguf

        config = json.loads((Path(model) / "config.json").read_text())
        part = target.with_suffix(".part")
        writer = gguf.GGUFWriter(part, config["model_type"])
        {"gpt2": write_gpt2, "llama": write_llama}[config["model_type"]](writer, config)
        write_vocabulary(writer, config["vocab_size"])
        write_tensors(writer, Path(model), config, weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.rename(target)
    return str(target)


def write_gpt2(writer: Any, config: dict[str, Any]) -> None:
    """GPT-2's shape."""
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def write_llama(writer: Any, config: dict[str, Any]) -> None:
    """A Llama's shape."""
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])


def write_vocabulary(writer: Any, size: int) -> None:
    """Stands for a tokenizer, since prompts come as token ids: a token's text is a space and its id.

    The last token becomes EOS, so that ignoring EOS means that it is never chosen: llama.cpp can't do without.
    """
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"\u0120{i}" for i in range(size)])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["0 0"])
    writer.add_eos_token_id(size - 1)


def write_tensors(writer: Any, model: Path, config: dict[str, Any], weights: str) -> None:
    """Matrices in the format of `weights`; biases, norms and positions in float32, as llama.cpp's converter does."""
    import gguf
    from safetensors.numpy import load_file

    kind = gguf.GGMLQuantizationType[weights]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == config["model_type"])
    names = gguf.get_tensor_name_map(arch, config.get("n_layer") or config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        rows = in_ggufs_order(name, tensor, config)
        matrix = rows.ndim == 2 and "wpe" not in name
        full = name if name.startswith(("transformer.", "model.")) else f"transformer.{name}"
        data = gguf.quants.quantize(rows, kind) if matrix else rows
        writer.add_tensor(
            names.get_name(full, try_suffixes=(".weight", ".bias")), data, raw_dtype=kind if matrix else None
        )


def in_ggufs_order(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    """[out, in] in float32; of a Llama's q and k the two numbers that turn together side by side."""
    import numpy as np

    if ".c_" in name and name.endswith(".weight"):
        tensor = tensor.T
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is not None:
        halves = tensor.reshape(config[heads], 2, -1, tensor.shape[1])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    return np.ascontiguousarray(tensor, dtype=np.float32)


def load(options: dict[str, Any]) -> tuple[str, Run]:
    """A server whose slots share one K/V cache of all their contexts."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = convert(options["model"], options["cache"], options["weights"])
    kv = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options['kv'].upper()}")
    params.cache_type_k = params.cache_type_v = kv
    params.n_parallel = options["slots"]
    params.n_ctx = CONTEXT * options["slots"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
    params.cache_prompt = False
    params.port = 0
    server = xllamacpp.Server(params)

    def complete(request: dict[str, Any]) -> list[int]:
        asked = {"prompt": request["prompt"], "max_tokens": request["out"], "temperature": 0.0, "ignore_eos": True}
        return [int(token) for token in server.handle_completions(asked)["choices"][0]["text"].split()]

    def run(requests: Requests) -> list[list[int]]:
        with ThreadPoolExecutor(len(requests)) as clients:
            return list(clients.map(complete, requests))

    return f"llama.cpp (xllamacpp {xllamacpp.__version__})", run


if __name__ == "__main__":
    serve(load)
