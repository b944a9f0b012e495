"""Llama, from scratch: RMSNorm, rotary positions, grouped-query attention, a gated MLP, tied or untied LM head.

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (arXiv:2302.13971), and its relatives, which
differ in the data of `LlamaConfig` only. It sees one packed batch of tokens: no batch dimension, no padding. Attention
is the backend's; everything else is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ember.attention.base import AttentionBackend
from ember.cache.kv_pool import KVLayer
from ember.model.embedding import Embedding, token_embedding
from ember.model.head import Head, make_head
from ember.model.heap import release_freed
from ember.model.linear import Linear, make_linear
from ember.model.llama_config import LlamaConfig
from ember.model.ranks import ALONE, Ranks
from ember.model.row_ops import RowOps, make_row_ops

Weights = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Step:
    """What all layers of a forward pass share: `cos` and `sin` [T, head_dim / 2] of the tokens' positions."""

    attention: AttentionBackend
    cos: torch.Tensor
    sin: torch.Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, config: LlamaConfig, weights: Weights, name: str, ops: RowOps) -> None:
        self.weight, self.eps, self.ops = weights[f"{name}.weight"] + config.norm_offset, config.rms_norm_eps, ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, D] to [R, D]."""
        return self.ops.norm(x, self.weight, self.eps)


class Attention:
    """Causal self-attention with grouped queries, rotary positions and, perhaps, a window and normalised heads."""

    def __init__(self, config: LlamaConfig, weights: Weights, form: str, index: int, ops: RowOps, ranks: Ranks) -> None:
        self.head_dim, self.ops = config.head_dim, ops
        self.heads = [n // ranks.size for n in (config.n_head, config.n_kv_head, config.n_kv_head)]
        name = f"layers.{index}.self_attn"
        self.qkv_proj = _linear(weights, [f"{name}.{part}_proj" for part in "qkv"], config.qkv_bias, form)
        self.o_proj = ranks.joined(_linear(weights, [f"{name}.o_proj"], config.out_bias, form))
        self.norms = [RMSNorm(config, weights, f"{name}.{part}_norm", ops) for part in "qk"] if config.qk_norm else []
        self.window, self.is_rotary = config.windows[index], config.rotary[index]

    def __call__(self, x: torch.Tensor, layer: KVLayer, step: Step, more: torch.Tensor) -> torch.Tensor:
        """[T, n_embd] to [T, n_embd], plus `more`; the backend stores K/V in the layer's blocks."""
        qkv = self.qkv_proj(x)
        parts = torch.split(qkv.view(len(x), -1, self.head_dim), self.heads, dim=1)
        for norm, part in zip(self.norms, parts, strict=False):
            part.copy_(norm(part.reshape(-1, self.head_dim)).view_as(part))
        if self.is_rotary:
            self.ops.rotate(qkv, self.heads[0] + self.heads[1], step.cos, step.sin)
        q, k, v = parts
        out = step.attention.forward(q, k, v, layer, self.head_dim**-0.5, self.window)
        return self.o_proj(out.view(len(x), -1), more)


class MLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, weights: Weights, form: str, index: int, ops: RowOps, ranks: Ranks) -> None:
        self.activation, self.ops = config.activation, ops
        name = f"layers.{index}.mlp"
        self.gate_up_proj = _linear(weights, [f"{name}.gate_proj", f"{name}.up_proj"], config.mlp_bias, form)
        self.down_proj = ranks.joined(_linear(weights, [f"{name}.down_proj"], config.mlp_bias, form))

    def __call__(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """[T, n_embd] to [T, n_embd], plus `more`."""
        return self.down_proj(self.ops.gate(self.gate_up_proj(x), self.activation), more)


class Block:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, weights: Weights, form: str, index: int, ops: RowOps, ranks: Ranks) -> None:
        self.input_layernorm = RMSNorm(config, weights, f"layers.{index}.input_layernorm", ops)
        self.self_attn = Attention(config, weights, form, index, ops, ranks)
        self.post_attention_layernorm = RMSNorm(config, weights, f"layers.{index}.post_attention_layernorm", ops)
        self.mlp = MLP(config, weights, form, index, ops, ranks)
        release_freed()

    def __call__(self, x: torch.Tensor, layer: KVLayer, step: Step) -> torch.Tensor:
        """[T, n_embd] to [T, n_embd]."""
        x = self.self_attn(self.input_layernorm(x), layer, step, x)
        return self.mlp(self.post_attention_layernorm(x), x)


class Llama:
    """The network over canonical weights (see `LlamaConfig.weight_layout`); all linear weights are [out, in].

    Each weight is asked for once, when its layer is made: a mapping that reads it from its file at that moment leaves
    nothing in memory but the layers' own form of it.

    Args:
        form: how linears keep their weights: `auto`, `int8`, `w8a8` or `fp16` (see `make_linear`).
        ranks: who computes it; `weights` are this rank's.
    """

    def __init__(self, config: LlamaConfig, weights: Weights, form: str = "auto", ranks: Ranks = ALONE) -> None:
        self.config = config
        self.embed_tokens, self.lm_head = _ends(config, weights, form, ranks)  # the largest first
        norm = weights["norm.weight"]
        ops = make_row_ops(norm.device, norm.dtype)
        self.layers = [Block(config, weights, form, index, ops, ranks) for index in range(config.n_layer)]
        self.norm = RMSNorm(config, weights, "norm", ops)
        self.cos, self.sin = (
            table.to(norm.device) for table in config.rope.tables(config.head_dim, config.max_position)
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, layers: list[KVLayer], attention: AttentionBackend
    ) -> torch.Tensor:
        """Hidden states [T, n_embd] of the packed tokens; `input_ids` and `positions` are [T]."""
        x = self.embed_tokens(input_ids) * self.config.embedding_scale
        step = Step(attention, self.cos[positions], self.sin[positions])
        for block, layer in zip(self.layers, layers, strict=True):
            x = block(x, layer, step)
        return x

    def logits(self, hidden: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
        """See `Network.logits`."""
        return self.lm_head(self.norm(hidden), best_only).float()


def _ends(config: LlamaConfig, weights: Weights, form: str, ranks: Ranks) -> tuple[Embedding, Head]:
    """The token embedding and the LM head."""
    embedding = weights["embed_tokens.weight"]
    weight = embedding if config.tie_word_embeddings else weights["lm_head.weight"]
    own = make_linear(weight, form=form)
    return ranks.embedding(token_embedding(embedding, own)), make_head(own, weight, ranks)


def _linear(weights: Weights, names: list[str], has_bias: bool, form: str) -> Linear:
    """One layer of those of these names, their outputs side by side."""
    bias = _joined(weights, [f"{name}.bias" for name in names]) if has_bias else None
    return make_linear(_joined(weights, [f"{name}.weight" for name in names]), bias, form=form)


def _joined(weights: Weights, names: list[str]) -> torch.Tensor:
    return weights[names[0]] if len(names) == 1 else torch.cat([weights[name] for name in names])
