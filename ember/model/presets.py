"""The models that have a name of their own: where each lies, pinned to a revision so that a job means one thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

TINY = Path(__file__).parent / "tiny"


@dataclass(frozen=True, slots=True)
class Preset:
    """A name for a model.

    Attributes:
        repo: its Hub repo id; None for the model that ships inside ember.
        revision: the commit (or branch) of the repo; None for the model inside ember.
    """

    name: str
    repo: str | None
    revision: str | None


def _presets(*presets: Preset) -> Mapping[str, Preset]:
    return MappingProxyType({preset.name: preset for preset in presets})


PRESETS = _presets(
    Preset("tiny", None, None),
    Preset("gpt2", "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    Preset("gpt2-medium", "openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
    Preset("gpt2-large", "openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"),
    Preset("gpt2-xl", "openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2"),
    Preset("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b3b4b768ec3050bf629380bac"),
    Preset("smollm2-360m", "HuggingFaceTB/SmolLM2-360M-Instruct", "a10cc1512eabd3dde888204e902eca88bddb4951"),
    Preset("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "31b70e2e869a7173562077fd711b654946d38674"),
    Preset("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "7ae557604adf67be50417f59c2c2f167def9a775"),
    Preset("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "989aa7980e4cf806f80c7fef2b1adb7bc71aa306"),
    Preset("qwen3-0.6b", "Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca"),
    Preset("qwen3-1.7b", "Qwen/Qwen3-1.7B", "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e"),
    Preset("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", "9213176726f574b556790deb65791e0c5aa438b6"),
    Preset("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "fe8a4ea1ffedaf415f4da2f062534de366a451e6"),
    # A branch, not a commit, and so not pinned: its commit could not be looked up where this was written (offline).
    Preset("scribe", "mbsdeepak/scribe", "main"),
)
