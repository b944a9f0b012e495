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
    # A branch, not a commit, and so not pinned: its commit could not be looked up where this was written (offline).
    Preset("scribe", "mbsdeepak/scribe", "main"),
)
