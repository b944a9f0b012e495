"""What the processor can do, as far as the kernels must know before they are compiled. Free of torch and numba."""

from __future__ import annotations

import platform
from functools import cache

_ARM = ("aarch64", "arm64")


@cache
def has_fused_multiply_add() -> bool:
    """Whether x * y + z is one instruction, rounded once: nearly every processor since 2013."""
    return platform.machine().lower() in _ARM or _feature("fma")


def vector_lanes() -> int:
    """float32 in the widest vectors worth using."""
    return 16 if _feature("avx512f") else 8


def _feature(name: str) -> bool:
    import llvmlite.binding as llvm  # the compiler's own view of the machine

    return bool(llvm.get_host_cpu_features().get(name))
