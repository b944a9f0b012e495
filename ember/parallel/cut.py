"""Which part of every weight a rank holds.

    queries, keys, values, gate, up     rows: the rank's heads, its share of the MLP     [out / n, in]
    what joins them again (out, down)   rows, or columns (see `Joining`)                 [out / n, in], [out, in / n]
    embedding, head                     rows: its share of the vocabulary                [V / n, C]
    norms, positions                    all of it

Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), has columns for what joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import gcd
from types import MappingProxyType

import torch

from ember.errors import ConfigError
from ember.model.network import NetworkConfig


class Joining(Enum):
    """How a layer is computed that every rank feeds with a share of its inputs.

    GATHER: all inputs come to every rank, which computes its share of the outputs: each output is the sum that one rank
        alone computes, in the same order, so that bits stay.
    ADD: every rank computes its inputs' part of all outputs, and the parts are added up: half the messages, other
        last bits.
    """

    GATHER = "gather"
    ADD = "add"


class _Kind(Enum):
    """How a weight is shared out."""

    ROWS = "rows"
    FUSED = "rows of queries, of keys, of values"
    JOINED = "as Joining says"


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        **dict.fromkeys(("wte", "embed_tokens", "lm_head"), _Kind.ROWS),
        **dict.fromkeys(("c_fc", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), _Kind.ROWS),
        "c_attn": _Kind.FUSED,
        **dict.fromkeys(("c_proj", "o_proj", "down_proj"), _Kind.JOINED),
    }
)
"""By the last word of a layer's canonical name; what is not here every rank has whole."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a network, `rank` of `size`."""

    rank: int
    size: int

    def bounds(self, total: int) -> tuple[int, int]:
        """First and end of its part of so many."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def of(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Its part of x along a dimension, a view."""
        first, end = self.bounds(x.shape[dim])
        return x.narrow(dim, first, end - first)


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts a rank's part out of each weight (see `load_weights`)."""

    share: Share
    network: NetworkConfig
    joining: Joining

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The part of the weight [out, in] or bias [out] of that canonical name."""
        layer, _, what = name.rpartition(".")
        match _KINDS.get(layer.rpartition(".")[2]):
            case None:
                return weight
            case _Kind.FUSED:
                return torch.cat([self.share.of(part) for part in torch.split(weight, self._widths())])
            case _Kind.JOINED if self.joining is Joining.ADD:
                return self._columns(weight) if what == "weight" else self._once(weight)
        return self.share.of(weight)

    def _widths(self) -> list[int]:
        """Rows of queries, keys and values."""
        network = self.network
        return [n * network.head_dim for n in (network.n_head, network.n_kv_head, network.n_kv_head)]

    def _columns(self, weight: torch.Tensor) -> torch.Tensor:
        return self.share.of(weight, dim=1)

    def _once(self, bias: torch.Tensor) -> torch.Tensor:
        """A bias is added by one rank only."""
        return bias if self.share.rank == 0 else torch.zeros_like(bias)


def check_ranks(size: int, network: NetworkConfig, device: torch.device) -> None:
    """See that a network can be shared out among so many ranks, and that there is a device for each.

    Raises:
        ConfigError: no; names what does not divide, or what is missing.
    """
    if size == 1:
        return
    common = gcd(network.n_kv_head, network.n_inner, network.n_embd)
    if common % size:
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        widths = f"{network.n_kv_head} K/V heads, MLP width {network.n_inner} and width {network.n_embd}"
        raise ConfigError("tensor_parallel_size", size, f"must divide the model's {widths}: use {fits}")
    if device.type not in ("cuda", "cpu") or not torch.distributed.is_available():
        what = f"ranks talk over CUDA or CPUs, not on {device.type} with this PyTorch"
        raise ConfigError("tensor_parallel_size", size, f"{what}; use 1")
    if device.type == "cuda" and device.index is not None:
        allowed = f"tensor_parallel_size={size} takes cuda:0 to cuda:{size - 1}; use device=cuda"
        raise ConfigError("device", device, f"{allowed} (CUDA_VISIBLE_DEVICES chooses among GPUs)")
    if device.type == "cuda" and (there := torch.cuda.device_count()) < size:
        raise ConfigError("tensor_parallel_size", size, f"one GPU a rank, but this process sees {there}")
