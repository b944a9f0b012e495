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


def pair_instruction(lanes: int) -> str | None:
    """LLVM's name of what adds pairs of 16-bit products in vectors of so many sums, where it is one instruction."""
    if lanes == 16:
        return "llvm.x86.avx512.pmaddw.d.512" if _feature("avx512bw") else None
    return "llvm.x86.avx2.pmadd.wd" if _feature("avx2") else None


def quad_instruction(lanes: int) -> str | None:
    """LLVM's name of what adds four products of 8-bit numbers, x without a sign, to each of so many sums."""
    if lanes == 16:
        return "llvm.x86.avx512.vpdpbusd.512" if _feature("avx512vnni") else None
    has = _feature("avxvnni") or (_feature("avx512vnni") and _feature("avx512vl"))
    return "llvm.x86.avx512.vpdpbusd.256" if has else None


def _feature(name: str) -> bool:
    import llvmlite.binding as llvm  # the compiler's own view of the machine

    return bool(llvm.get_host_cpu_features().get(name))
