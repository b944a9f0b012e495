"""ember: a batch job runner for language models. Importing it loads no torch; the names below do when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ember.threads import sleep_when_idle

if TYPE_CHECKING:
    from ember.data.output import CompletionOutput, RequestOutput
    from ember.entrypoints.llm import LLM
    from ember.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    homes = {
        "LLM": "ember.entrypoints.llm",
        "CompletionOutput": "ember.data.output",
        "RequestOutput": "ember.data.output",
        "SamplingParams": "ember.sampling_params",
    }
    if name not in homes:
        raise AttributeError(f"module 'ember' has no attribute {name!r}")
    sleep_when_idle()
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return __all__
