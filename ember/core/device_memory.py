"""What the memory of a device has room for beside the weights and what the largest step takes: measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

POOL_SHARE_GPU = 0.9
"""Share of a GPU that weights, steps and an `auto` pool take together; the rest is for what is not measured."""


class DeviceMemory(Protocol):
    """Bytes of a device's memory."""

    def settle(self) -> None:
        """Wait for the device, give back what is only cached, and look for the peak from here on."""

    def total(self) -> int:
        """All there is."""

    def free(self) -> int:
        """What no process holds."""

    def held(self) -> int:
        """What this process holds."""

    def peak(self) -> int:
        """The most that this process held at once since `settle`."""


class CudaMemory:
    """A GPU's, as its driver and PyTorch's allocator tell."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        """See `DeviceMemory.settle`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def total(self) -> int:
        """See `DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See `DeviceMemory.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def held(self) -> int:
        """See `DeviceMemory.held`."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """See `DeviceMemory.peak`."""
        return torch.cuda.max_memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class PoolMeter:
    """Measures how large a pool may be.

    Attributes:
        memory: gives a device's.
        num_sharing: engines that share it in equal parts.
    """

    memory: Callable[[torch.device], DeviceMemory] = CudaMemory
    num_sharing: int = 1

    def room(self, device: torch.device, step: Callable[[], object]) -> int:
        """Bytes left for a pool on the device, which has the weights, while a step, run now, is at its peak."""
        memory = self.memory(device)
        memory.settle()
        step()
        peak = memory.peak()
        memory.settle()
        usable, held = int(memory.total() * POOL_SHARE_GPU), memory.held()
        others_leave = memory.free() - (memory.total() - usable)
        return max(0, min(others_leave, usable // self.num_sharing - held) - (peak - held))
