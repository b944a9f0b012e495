"""What a workload must cost on any engine: arithmetic of the linears, and the K/V that decoding must read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ember.model.gpt2_config import GPT2Config
from ember.model.network import NetworkConfig
from tests.benchmarks.workloads import Request


@dataclass(frozen=True, slots=True)
class TokenCost:
    """FLOPs of a token's linears without the LM head, of the head, and bytes of a token's K/V in float32."""

    linear_flops: int
    head_flops: int
    kv_bytes: int

    @staticmethod
    def of(network: NetworkConfig) -> TokenCost:
        """From the network's shape; a Llama's MLP has a third linear, the gate."""
        width, kv_width = network.n_embd, network.n_kv_head * network.head_dim
        heads, mlp = network.n_head * network.head_dim, 2 if isinstance(network, GPT2Config) else 3
        weights = network.n_layer * width * (2 * heads + 2 * kv_width + mlp * network.n_inner)
        return TokenCost(2 * weights, 2 * width * network.vocab_size, 2 * network.n_layer * kv_width * 4)


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes of float32 K/V. The arithmetic of attention hides behind the reading and isn't counted."""

    flops: int
    kv_bytes: int

    @staticmethod
    def of(network: NetworkConfig, requests: Iterable[Request]) -> Work:
        """The least for these requests: every token computed once, every decoding step reads its whole context.

        The last output token is never computed. A prompt's own K/V is read out of the caches while it is made.
        """
        cost, flops, slots = TokenCost.of(network), 0, 0
        for request in requests:
            length, out = len(request.prompt), request.out
            flops += (length + out - 1) * cost.linear_flops + out * cost.head_flops
            slots += sum(range(length + 1, length + out))
        return Work(flops, slots * cost.kv_bytes)
