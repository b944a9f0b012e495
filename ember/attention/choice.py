"""Which attention backend a setting means, and what each one can't do: said before anything is loaded."""

from __future__ import annotations

import inspect
import os
from importlib.util import find_spec

import torch

from ember.cache.kv_pool import FP8, KVShape
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
    if name == "torch_varlen":
        _check_varlen(device, dtype)
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


def _check_varlen(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda" or dtype == torch.float32:
        name = str(dtype).removeprefix("torch.")
        what = f"runs on CUDA in bfloat16 or float16, not on {device.type} in {name}"
        raise ConfigError("attention", "torch_varlen", f"{what}; use auto")
    if not _has_paged_varlen():
        what = f"PyTorch {torch.__version__} has no varlen_attn that reads paged K/V"
        raise ConfigError("attention", "torch_varlen", f"{what}; install 2.13 or newer, or use triton")


def _has_paged_varlen() -> bool:
    """Whether this PyTorch's `varlen_attn` takes a block table."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"block_table", "seqused_k"} <= inspect.signature(varlen_attn).parameters.keys()


def check_pool(name: str, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
    """Nothing, if the backend can read and write such a pool there, with queries of that dtype.

    Raises:
        ConfigError: it can't.
    """
    if name == "torch_varlen":
        _check_pages(shape, dtype)
    if shape.dtype == FP8:
        _check_fp8(name, device)


def _check_pages(shape: KVShape, dtype: torch.dtype) -> None:
    """What FlashAttention asks of its pages."""
    if shape.dtype != dtype:
        raise ConfigError("kv_dtype", str(shape.dtype), "attention=torch_varlen reads K/V of dtype alone; use auto")
    if shape.block_size % 256:
        raise ConfigError("block_size", shape.block_size, "attention=torch_varlen takes multiples of 256")
    if shape.head_dim % 8 or shape.head_dim > 256:
        what = f"takes heads of a multiple of 8 up to 256, this model's are {shape.head_dim} wide"
        raise ConfigError("attention", "torch_varlen", f"{what}; use triton")


def _check_fp8(name: str, device: torch.device) -> None:
    if name == "cpu":
        raise ConfigError("kv_dtype", "fp8", "attention=cpu has no such pool; use int8, which is as small and closer")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("kv_dtype", "fp8", f"{device.type} has no such numbers; use bfloat16 or float16")
    if device.type == "cuda" and name == "triton" and (has := torch.cuda.get_device_capability(device)) < (8, 9):
        what = f"needs a GPU of compute capability 8.9 or more, this one has {has[0]}.{has[1]}"
        raise ConfigError("kv_dtype", "fp8", f"attention=triton {what}; use int8")
