"""How one request is sampled: one dataclass for jobs, rows and the Python API."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ember.checks import at_least, boolean, real, whole
from ember.errors import ConfigError

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it could only widen the gap to the best token."""

MOST_SAMPLES = 16_384
"""Of one prompt."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        temperature: 0 is greedy (so is anything under 1e-5); else logits are divided by it.
        top_p: keep the smallest set of tokens whose probabilities sum to `top_p`; 1.0 is off.
        top_k: keep the `top_k` best tokens; 0, or more than the vocabulary, is off.
        min_p: drop tokens less likely than `min_p` times the likeliest; 0.0 is off.
        max_tokens: most output tokens; None means to the end of `max_model_len`.
        min_tokens: no EOS, stop id or stop string ends the output before this many tokens.
        stop: a string or list of strings; the text is cut before the first that appears.
        stop_token_ids: token ids that end the output.
        ignore_eos: EOS is a token like any other.
        seed: the row's own seed; None derives one from the job's seed and the row's index.
        n: samples of a prompt, each with random numbers of its own, which do not depend on `n`.

    Raises:
        ConfigError: a value of the wrong type or out of range; names the key.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 128
    min_tokens: int = 0
    stop: Any = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self.temperature = real("temperature", self.temperature, "must be a number >= 0")
        self.top_p = real("top_p", self.top_p, "must be in (0, 1]", high=1.0, open_low=True)
        self.min_p = real("min_p", self.min_p, "must be in [0, 1]", high=1.0)
        self.top_k = whole("top_k", self.top_k, "must be a whole number >= 0 (0 is off)")
        if self.max_tokens is not None:
            self.max_tokens = whole("max_tokens", self.max_tokens, "must be a whole number >= 0, or null")
        self.min_tokens = whole("min_tokens", self.min_tokens, "must be a whole number >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        self.stop = _stop_strings(self.stop)
        self.stop_token_ids = _token_ids(self.stop_token_ids)
        boolean("ignore_eos", self.ignore_eos)
        if self.seed is not None:
            self.seed = whole("seed", self.seed, "must be a whole number in 0 .. 2^63-1, or null")
        self.n = at_least("n", self.n, 1, high=MOST_SAMPLES)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, with no random number drawn."""
        return self.temperature < GREEDY_BELOW

    def override(self, changes: dict[str, Any]) -> SamplingParams:
        """These settings with a row's own on top.

        Raises:
            ConfigError: an unknown key or a value that is not allowed.
        """
        known = [f.name for f in fields(self)]
        for key, value in changes.items():
            if key not in known:
                raise ConfigError(key, value, f"no such sampling setting (there are: {', '.join(known)})")
        return replace(self, **changes)


def _stop_strings(value: Any) -> list[str]:
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise ConfigError("stop", value, "must be a non-empty string or a list of them")
    return list(strings)


def _token_ids(value: Any) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ConfigError("stop_token_ids", value, "must be a list of token ids")
    return [whole("stop_token_ids", token, "must be a list of token ids (whole numbers >= 0)") for token in value]
