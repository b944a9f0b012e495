"""Where every logit has the same bits whatever the batch, and where it may not."""

from __future__ import annotations

import torch

from ember.errors import ConfigError
from ember.model.linear import has_packed


def why_not_exact(device: torch.device, dtype: torch.dtype, weights: str, attention: str) -> str | None:
    """Why logits may differ in the last bits with batch, chunk or block size; None: they never do.

    Args:
        weights: `auto`, `int8`, `w8a8` or `fp16`.
        attention: the backend's name.
    """
    if device.type != "cpu" or dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        return f"PyTorch's matrix products on {device.type} in {name} sum in an order that follows the batch"
    if attention != "cpu":
        return f"attention={attention} sums in an order that follows the batch"
    if weights not in ("int8", "w8a8") and not has_packed(device, dtype):
        return (
            "this processor has no fused multiply-add, and PyTorch's own linears sum in an order that follows the batch"
        )
    return None


def require_exact(asked: str, why_not: str | None) -> None:
    """See that `deterministic=require` can be kept.

    Raises:
        ConfigError: it can't; says why.
    """
    if asked == "require" and why_not is not None:
        raise ConfigError("deterministic", asked, f"{why_not}; use deterministic=auto, or a CPU in float32")
