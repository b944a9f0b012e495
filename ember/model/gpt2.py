"""GPT-2, from scratch: learned positions, pre-LayerNorm blocks, GELU MLP, (usually) tied LM head.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). It sees one packed batch of tokens:
no batch dimension, no padding. Attention is the backend's; everything else is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn.functional import embedding, layer_norm

from ember.attention.base import AttentionBackend
from ember.cache.kv_pool import KVLayer
from ember.model.embedding import Embedding, token_embedding
from ember.model.gpt2_config import GPT2Config
from ember.model.head import Head, make_head
from ember.model.linear import Linear, make_linear
from ember.model.ranks import ALONE, Ranks

MakeLinear = Callable[..., Linear]
"""Makes the linear layer of a name in the weights, with the activation that is to follow it."""


class LayerNorm:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def __init__(self, weights: Mapping[str, torch.Tensor], name: str, eps: float) -> None:
        self.weight, self.bias, self.eps = weights[f"{name}.weight"], weights[f"{name}.bias"], eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, n_embd] to [T, n_embd]."""
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Attention:
    """Causal self-attention with grouped queries: n_head query heads share n_kv_head K/V heads."""

    def __init__(self, config: GPT2Config, linear: MakeLinear, index: int, ranks: Ranks) -> None:
        self.head_dim = config.head_dim
        self.heads = [n // ranks.size for n in (config.n_head, config.n_kv_head, config.n_kv_head)]
        self.c_attn = linear(f"h.{index}.attn.c_attn")
        self.c_proj = ranks.joined(linear(f"h.{index}.attn.c_proj"))
        self.scale = 1.0 / math.sqrt(config.head_dim) if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= index + 1

    def __call__(
        self, x: torch.Tensor, layer: KVLayer, attention: AttentionBackend, more: torch.Tensor
    ) -> torch.Tensor:
        """[T, n_embd] to [T, n_embd], plus `more`; the backend stores K/V in the layer's blocks."""
        q, k, v = torch.split(self.c_attn(x).view(len(x), -1, self.head_dim), self.heads, dim=1)
        out = attention.forward(q, k, v, layer, self.scale)
        return self.c_proj(out.view(len(x), -1), more)


class MLP:
    """Two linears with the activation between them."""

    def __init__(self, config: GPT2Config, linear: MakeLinear, index: int, ranks: Ranks) -> None:
        self.c_fc = linear(f"h.{index}.mlp.c_fc", config.activation)
        self.c_proj = ranks.joined(linear(f"h.{index}.mlp.c_proj"))

    def __call__(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """[T, n_embd] to [T, n_embd], plus `more`."""
        return self.c_proj(self.c_fc(x), more)


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: GPT2Config, weights: Mapping[str, torch.Tensor], linear: MakeLinear, index: int, ranks: Ranks
    ) -> None:
        self.ln_1 = LayerNorm(weights, f"h.{index}.ln_1", config.layer_norm_epsilon)
        self.attn = Attention(config, linear, index, ranks)
        self.ln_2 = LayerNorm(weights, f"h.{index}.ln_2", config.layer_norm_epsilon)
        self.mlp = MLP(config, linear, index, ranks)

    def __call__(self, x: torch.Tensor, layer: KVLayer, attention: AttentionBackend) -> torch.Tensor:
        """[T, n_embd] to [T, n_embd]."""
        x = self.attn(self.ln_1(x), layer, attention, x)
        return self.mlp(self.ln_2(x), x)


class GPT2:
    """The network over canonical weights (see `load_weights`); all linear weights are [out, in].

    Each weight is asked for once, when its layer is made: a mapping that reads it from its file at that moment leaves
    nothing in memory but the layers' own form of it.

    Args:
        form: how linears keep their weights: `auto`, `int8`, `w8a8` or `fp16` (see `make_linear`).
        ranks: who computes it; `weights` are this rank's.
    """

    def __init__(
        self, config: GPT2Config, weights: Mapping[str, torch.Tensor], form: str = "auto", ranks: Ranks = ALONE
    ) -> None:
        self.wte, self.lm_head = _ends(config, weights, form, ranks)  # the largest first, while little is in memory
        linear = partial(_linear, weights, form)
        self.wpe = weights["wpe.weight"]
        self.blocks = [Block(config, weights, linear, index, ranks) for index in range(config.n_layer)]
        self.ln_f = LayerNorm(weights, "ln_f", config.layer_norm_epsilon)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, layers: list[KVLayer], attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states [T, n_embd] of the packed tokens; `input_ids` and `positions` are [T]."""
        x = self.wte(input_ids) + embedding(positions, self.wpe)
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, layer, attention)
        return x

    def logits(self, hidden: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
        """See `Network.logits`."""
        return self.lm_head(self.ln_f(hidden), best_only).float()


def _ends(config: GPT2Config, weights: Mapping[str, torch.Tensor], form: str, ranks: Ranks) -> tuple[Embedding, Head]:
    """The token embedding and the LM head."""
    wte = weights["wte.weight"]
    weight = wte if config.tie_word_embeddings else weights["lm_head.weight"]
    own = make_linear(weight, form=form)
    return ranks.embedding(token_embedding(wte, own)), make_head(own, weight, ranks)


def _linear(weights: Mapping[str, torch.Tensor], form: str, name: str, activation: str = "none") -> Linear:
    return make_linear(weights[f"{name}.weight"], weights[f"{name}.bias"], activation, form)
