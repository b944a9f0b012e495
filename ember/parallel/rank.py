"""What a rank computes with: its part of the weights, its heads of the KV pool. Alone, a rank has all of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ember.attention.base import make_backend
from ember.cache.kv_pool import KVPool, KVShape
from ember.core.decode_graphs import CudaCapture, DecodeGraphs
from ember.core.model_runner import ModelRunner
from ember.model.network import NetworkConfig, make_network
from ember.model.ranks import ALONE, Ranks
from ember.model.weights import load_weights
from ember.parallel.cut import Cutter, Joining, Share
from ember.parallel.group import Group
from ember.parallel.layers import TensorParallel
from ember.threads import threads_of_a_rank, use_threads


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSpec:
    """All that a model runner is made of: plain data, the same for every rank.

    Attributes:
        folder: the model's files.
        network: the whole network's sizes.
        form: how linears keep their weights (see `make_linear`).
        device: of rank 0.
        attention: the backend's name.
        kv_shape: of all heads.
        num_threads: that all ranks together compute with; None: as torch finds it.
        num_ranks: tensor_parallel_size.
        cuda_graphs: whether steps of up to `max_num_seqs` sequences of `max_model_len` tokens are captured.
        joining: see there.
    """

    folder: Path
    network: NetworkConfig
    form: str
    dtype: torch.dtype
    device: torch.device
    attention: str
    kv_shape: KVShape
    num_blocks: int
    num_threads: int | None
    num_ranks: int
    joining: Joining
    cuda_graphs: bool
    max_num_seqs: int
    max_model_len: int

    def group(self, rank: int) -> Group:
        """The group as a rank sees it, on a device of its own; nobody is met yet."""
        device = torch.device("cuda", rank) if self.device.type == "cuda" else self.device
        return Group(Share(rank, self.num_ranks), device)

    def load(self, group: Group | None = None) -> ModelRunner:
        """The runner of a rank of that group; without one, of a rank that is alone.

        Raises:
            UserError: the weights can't be read, or don't fit.
        """
        ranks: Ranks = ALONE
        device, shape, cutter, threads = self.device, self.kv_shape, None, self.num_threads
        if group is not None:
            ranks = TensorParallel(group, self.joining, self.network.vocab_size)
            device, cutter = group.device, Cutter(group.share, self.network, self.joining)
            shape = replace(shape, n_kv_head=shape.n_kv_head // self.num_ranks)
            threads = threads_of_a_rank(threads or torch.get_num_threads(), self.num_ranks)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # where kernels are launched that are not told where
        use_threads(threads)
        layout = self.network.weight_layout
        weights = load_weights(self.folder, layout, dtype=self.dtype, device=device, cut=cutter)
        network = make_network(self.network, weights, self.form, ranks)
        backend = make_backend(self.attention, shape.dtype)
        return ModelRunner(network, KVPool(shape, self.num_blocks, device), backend, device, self._graphs(device))

    def _graphs(self, device: torch.device) -> DecodeGraphs | None:
        if not self.cuda_graphs:
            return None
        width = -(-self.max_model_len // self.kv_shape.block_size)
        return DecodeGraphs(CudaCapture(device), most=self.max_num_seqs, width=width)
