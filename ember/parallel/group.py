"""What ranks say to each other while they compute a step: tensors, over torch.distributed (NCCL on GPUs, else Gloo).

The group is this object's own, not PyTorch's global one: a process may have several engines, or a group of its own.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from ember.environment import environment
from ember.parallel.cut import Share

dist: Any = distributed  # which does not export its classes by its hints

HOST = "127.0.0.1"
PATIENCE = timedelta(minutes=10)
"""How long a rank waits for another that neither answers nor ends; one that ends is noticed at once."""
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Group:
    """The ranks of one network, as one of them sees them.

    Ranks call the same methods in the same order; each waits for the others.
    """

    def __init__(self, share: Share, device: torch.device) -> None:
        self.share, self.device = share, device
        self._group: Any = None  # of one of two kinds, which torch's hints know in part
        self._store: Any = None

    def invite(self) -> int:
        """Rank 0: be there for the others; returns the port that they find this rank at."""
        listener = socket.create_server((HOST, 0))  # the store's own would listen to the whole network
        port = int(listener.getsockname()[1])
        options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store = dist.TCPStore(HOST, port, None, True, timeout=PATIENCE, **options)
        return port

    def join(self, port: int | None = None) -> None:
        """Meet all other ranks; those above 0 at the port of rank 0.

        Raises:
            RuntimeError: one of them did not come.
        """
        store = self._store
        if port is not None:
            store = dist.TCPStore(HOST, port, None, False, timeout=PATIENCE)
        assert store is not None
        rank, size = self.share.rank, self.share.size
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = PATIENCE
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            with environment({"GLOO_SOCKET_IFNAME": _LOOPBACK}):
                self._group = dist.ProcessGroupGloo(store, rank, size, PATIENCE)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [T, n], side by side in the order of ranks: [T, size * n], on all ranks."""
        parts = self._like(x)
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=1)

    def gather_at_first(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On rank 0 every rank's x, all of one shape; elsewhere only x."""
        parts = self._like(x) if self.share.rank == 0 else []
        self._group.gather([parts] if parts else [], [x.contiguous()], dist.GatherOptions()).wait()
        return parts or [x]

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, on all ranks; may be written over x."""
        total = x.contiguous()
        self._group.allreduce([total]).wait()
        return total

    def abort(self) -> None:
        """End whatever this rank waits for; the group is of no more use."""
        if self._group is not None and hasattr(self._group, "abort"):
            self._group.abort()

    def _like(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(self.share.size)]
