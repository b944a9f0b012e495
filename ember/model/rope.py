"""Rotary positions (Su et al., arXiv:2104.09864) and the ways to stretch them over a longer context.

A pair of numbers d, d + D/2 of a head turns by position * frequency[d]. Each kind of scaling is a function that gives
the frequencies; what follows is the same for all. A position's angles depend on the position alone, so that a key is
the same however its prompt was cut. Arithmetic is in float32, as in transformers, whose angles models were trained on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ember.errors import ConfigError
from ember.model.config_values import one_of, real, whole
from ember.model.json_file import show


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """How positions turn into angles.

    Attributes:
        theta: the base; frequency[d] = theta^(-2d / D) before scaling.
        kind: default, linear, dynamic, llama3, yarn or factors.
        factor: by how much the context is stretched.
        original: the context of the training.
        low_freq_factor, high_freq_factor: llama3's; waves longer than original / low are stretched, those shorter than
            original / high are not.
        beta_fast, beta_slow, truncate: yarn's; rotations within `original` from which on, up to which a frequency is
            kept, or stretched; whether the dimensions of these are rounded outwards.
        magnitude: factor on cos and sin (yarn's attention factor).
        factors: by how much each frequency is divided (as GGUF files say it).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    factors: tuple[float, ...] = ()

    @staticmethod
    def from_json(data: Mapping[str, Any], default_theta: float, max_position: int) -> Rope:
        """From a config's `rope_parameters`, or `rope_scaling` and `rope_theta` as they were called before.

        Raises:
            ConfigError: a kind or a key that is not supported, or a wrong value.
        """
        name = "rope_parameters" if data.get("rope_parameters") is not None else "rope_scaling"
        given = data.get(name) or {}
        if not isinstance(given, dict):
            raise ConfigError(name, show(given), "must be an object")
        try:
            return _parse({"rope_theta": data.get("rope_theta"), **given}, default_theta, max_position)
        except ConfigError as error:
            is_outside = error.key == "rope_theta" and error.key not in given
            raise error if is_outside else error.under(name) from None

    @property
    def context(self) -> int:
        """Tokens that the stretched positions serve; 0 where the config's own number says it."""
        return int(self.original * self.factor) if self.kind in ("dynamic", "yarn") else 0

    def tables(self, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [num_positions, head_dim / 2] float32 of the angles of positions 0, 1, ..."""
        positions = torch.arange(num_positions, dtype=torch.float32)
        frequencies = _FREQUENCIES[self.kind](self, head_dim, positions)
        angles = (positions[:, None] * frequencies).double().numpy()  # numpy: the same code for every element
        cos, sin = ((turn(angles) * self.magnitude).astype(np.float32) for turn in (np.cos, np.sin))
        return torch.from_numpy(cos), torch.from_numpy(sin)


_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "factors": ("factors",),
        "dynamic": ("factor",),
        "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        "yarn": (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }
)
"""Each kind, and what it reads besides rope_theta."""


def _parse(given: Mapping[str, Any], default_theta: float, max_position: int) -> Rope:
    kind = one_of({"rope_type": given.get("rope_type") or given.get("type")}, "rope_type", tuple(_KEYS), "default")
    for key, value in given.items():
        whole_head = key == "partial_rotary_factor" and value == 1
        if key not in (*_KEYS[kind], "rope_theta", "rope_type", "type") and value is not None and not whole_head:
            raise ConfigError(key, show(value), f"is not supported with rope_type {kind}")
    original = given.get("original_max_position_embeddings")
    factor = real(given, "factor", None) if "factor" in _KEYS[kind] else 1.0
    return Rope(
        theta=real(given, "rope_theta", default_theta),
        kind=kind,
        factor=factor,
        original=max_position if original is None else whole("original_max_position_embeddings", original),
        low_freq_factor=real(given, "low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=real(given, "high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=real(given, "beta_fast", 32.0),
        beta_slow=real(given, "beta_slow", 1.0),
        truncate=given.get("truncate") is not False,
        magnitude=_magnitude(given, factor) if kind == "yarn" else 1.0,
        factors=tuple(real({"factors": item}, "factors", None) for item in given.get("factors") or ()),
    )


def _magnitude(given: Mapping[str, Any], factor: float) -> float:
    """Yarn's factor on cos and sin: as given, else from how far the context is stretched."""
    if given.get("attention_factor") is not None:
        return real(given, "attention_factor", None)
    both = given.get("mscale") and given.get("mscale_all_dim")
    weights = (real(given, "mscale", None), real(given, "mscale_all_dim", None)) if both else (1.0, 0.0)
    above, below = (0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0 for weight in weights)
    return above / below


def _default(rope: Rope, dim: int, positions: torch.Tensor) -> torch.Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, dim, 2).float() / dim)


def _linear(rope: Rope, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """All waves `factor` times as long."""
    return _default(rope, dim, positions) / rope.factor


def _factors(rope: Rope, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Each wave as many times as long as its factor says."""
    return _default(rope, dim, positions) / torch.tensor(rope.factors)


def _dynamic(rope: Rope, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """[P, D/2]: beyond the original context the base grows with the position (NTK-aware).

    As if every token were computed alone. transformers takes the longest row of its batch for all tokens of a step,
    so that there a key depends on how its prompt was cut.
    """
    length = (positions + 1).clamp_min(rope.original)
    growth = rope.factor * length / rope.original - (rope.factor - 1)
    base = rope.theta * growth ** (dim / (dim - 2))
    return 1.0 / base[:, None] ** (torch.arange(0, dim, 2).float() / dim)


def _llama3(rope: Rope, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between mixed (Llama 3.1's reference code)."""
    plain = _default(rope, dim, positions)
    turns = rope.original * plain / (2 * math.pi)  # within the original context
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: Rope, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """As `_llama3`, the mix being linear in the dimension (Peng et al., arXiv:2309.00071)."""
    low, high = (
        dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = ((torch.arange(dim // 2).float() - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    plain = _default(rope, dim, positions)
    return stretched * plain / rope.factor + (1 - stretched) * plain


_FREQUENCIES: Mapping[str, Callable[[Rope, int, torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "default": _default,
        "linear": _linear,
        "factors": _factors,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
    }
)
