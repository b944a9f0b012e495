"""Which device and dtype to use, and how much memory is there."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ember.core.device_memory import POOL_SHARE_GPU
from ember.errors import ConfigError

_CONTROL_GROUP = "/sys/fs/cgroup/memory"
POOL_SHARE_CPU = 0.3
"""Share of the free memory that an `auto` pool may take: the rest of the machine lives there too."""


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA, then MPS, then CPU.

    Raises:
        ConfigError: no such device, or not on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError("device", name, "no such device here; use auto, cpu, cuda, cuda:N or mps") from None
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is float32 on CPU and MPS, bfloat16 on CUDA."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pool_bytes(device: torch.device, num_ranks: int = 1, *, num_sharing: int = 1, weight_bytes: int = 0) -> int:
    """Bytes that an `auto` KV pool may take on the device, or in equal parts on the first so many of its kind.

    On a GPU the most that it could be: what steps take beside it is seen only when one runs (see `PoolMeter`).

    Args:
        num_sharing: engines that share the memory.
        weight_bytes: of all weights, which are not loaded yet.
    """
    if device.type == "cuda":
        gpus = [device] if num_ranks == 1 else range(num_ranks)
        room = min(_gpu_room(*torch.cuda.mem_get_info(gpu), num_sharing) for gpu in gpus)
        return max(0, room * num_ranks - weight_bytes)
    return int(_available_bytes() * POOL_SHARE_CPU) // num_sharing


def _gpu_room(free: int, total: int, num_sharing: int) -> int:
    usable = int(total * POOL_SHARE_GPU)
    return min(free - (total - usable), usable // num_sharing)


def total_bytes(device: torch.device, num_ranks: int = 1) -> int:
    """Bytes of memory that the device, or so many GPUs, have in all, within the control group's limit."""
    if device.type == "cuda":
        return num_ranks * torch.cuda.mem_get_info(device)[1]
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(installed, _read_number(f"{_CONTROL_GROUP}.max") or installed)


def _available_bytes() -> int:
    """What the system can give without swapping, within the control group's limit."""
    available = _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = (_read_number(f"{_CONTROL_GROUP}.{name}") for name in ("max", "current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
