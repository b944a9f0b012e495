"""Numbers to an accelerator, in copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALIGNED = 16
"""Bytes: where a tensor begins in a packed buffer, as wide loads want it."""


def upload(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, or rows of them, as a tensor there."""
    return upload_together([torch.tensor(numbers, dtype=dtype)], device)[0]


def upload_together(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Contiguous tensors of a CPU as they are there: parts of one buffer, brought by one copy.

    To CUDA it goes from pinned memory, while the host goes on. (PyTorch keeps such memory until its copy is done.)
    """
    if device.type == "cpu":
        return tensors
    starts = [0]
    for x in tensors:
        starts.append(starts[-1] + -(-x.nbytes // ALIGNED) * ALIGNED)
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for x, start in zip(tensors, starts, strict=False):
        _part(packed, start, x).copy_(x)
    there = _send(packed, device)
    return [_part(there, start, x) for x, start in zip(tensors, starts, strict=False)]


def _send(packed: torch.Tensor, device: torch.device) -> torch.Tensor:
    return packed.to(device, non_blocking=packed.is_pinned())


def _part(packed: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The bytes from `start` on, as a tensor of that dtype and shape."""
    return packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
