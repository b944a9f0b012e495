"""Which attention backend a setting means, and what each one can't do: said before anything is loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from ember.cache.kv_pool import FP8
from ember.errors import ConfigError


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that a setting means; `auto` is the fastest there is for the device and dtype.

    Raises:
        ConfigError: the backend does not run there.
    """
    fits_cpu = device.type == "cpu" and dtype == torch.float32
    if name == "cpu" and not fits_cpu:
        raise ConfigError("attention", name, f"runs on a CPU in float32, not on {device.type} in {dtype}; use auto")
    if name == "triton":
        _check_triton(device)
    if name == "auto":
        return "cpu" if fits_cpu else "batched"
    return name


def _check_triton(device: torch.device) -> None:
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "y", "on")
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        what = "runs on CUDA (on a CPU only in Triton's slow interpreter, with TRITON_INTERPRET=1 set)"
        raise ConfigError("attention", "triton", f"{what}, not on {device.type}; use auto")
    if find_spec("triton") is None:
        raise ConfigError("attention", "triton", "needs Triton: pip install 'ember-batch[triton]'")


def check_pool(name: str, kv_dtype: torch.dtype, device: torch.device) -> None:
    """Nothing, if the backend can read and write a pool of that dtype there.

    Raises:
        ConfigError: it can't.
    """
    if kv_dtype != FP8:
        return
    if name == "cpu":
        raise ConfigError("kv_dtype", "fp8", "attention=cpu has no such pool; use int8, which is as small and closer")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("kv_dtype", "fp8", f"{device.type} has no such numbers; use bfloat16 or float16")
    if device.type == "cuda" and name == "triton" and (has := torch.cuda.get_device_capability(device)) < (8, 9):
        what = f"needs a GPU of compute capability 8.9 or more, this one has {has[0]}.{has[1]}"
        raise ConfigError("kv_dtype", "fp8", f"attention=triton {what}; use int8")
