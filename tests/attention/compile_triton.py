"""Compile the Triton kernels for a GPU that need not be there; prints a line a kernel on what it is made of.

`TRITON_INTERPRET=0 python -m tests.attention.compile_triton [--arch 80]`
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ember.attention import triton as backend

POOL = {"DIM": 64, "WIDTH": 64, "SLOTS": 16, "LANES": 8, "DIMS": 64}
DECODE = "decode", {"ROWS": 16, "MOST": 1, "ALONE": True, "SPLIT": True}
PROMPT = "prompt", {"ROWS": 64, "MOST": 16, "ALONE": False, "SPLIT": False}
TYPES = {
    "tables": "*i32",
    "starts": "*i32",
    "contexts": "*i32",
    "slots": "*i64",
    "sums": "*fp32",
    "parts": "*fp32",
    "k_scale": "*fp32",
    "v_scale": "*fp32",
    "scale": "fp32",
}
NUMBERS = ("window", "kv_heads", "max_blocks", "sequences", "splits", "count", "k_stride", "v_stride")
CUT = {"TILE": backend.TILE, "FROM": backend.SPLIT_FROM, "MOST_SPLITS": backend.MOST_SPLITS}


def compile_for(arch: int, kernel, queries: str, pool: str, **constants):
    """The compiled kernel, for queries and a pool of these types."""
    types = dict.fromkeys(NUMBERS, "i32") | {"q": queries, "out": queries, "to_k": pool, "to_v": pool} | TYPES
    types |= dict.fromkeys("kv", pool if "q" in kernel.arg_names else queries)
    if constants.get("SPLIT") and "q" in kernel.arg_names:
        types["out"] = "*fp32"
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # numbers that a launch would find to be multiples of 16, and specialise on
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name.endswith("_stride")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32))


def instructions(compiled) -> str:
    """Shared memory in bytes, and loads, stores and products by kind."""
    found = re.findall(r"\b(?:ld\.global|st\.global|cp\.async\.c|wgmma\.mma|mma)[.\w:]*", compiled.asm["ptx"])
    counts = ", ".join(f"{number} {name}" for name, number in Counter(found).most_common(8))
    return f"{compiled.metadata.shared} B shared: {counts}"


def main() -> None:
    """Decoding and a prompt, over each kind of pool."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, default=90)
    arch = parser.parse_args().arch
    for pool, largest in (("*bf16", 0.0), ("*i8", 127.0), ("*fp8e4nv", 448.0)):
        for name, shape in DECODE, PROMPT:
            constants = {**POOL, **CUT, **shape, "SCALED": largest > 0, "GROUP": 4, "KIND": tl.bfloat16}
            print(name, pool, instructions(compile_for(arch, backend._attend, "*bf16", pool, **constants)))
        constants = {**POOL, "LARGEST": largest, "TOKENS": backend.STORED_TOGETHER}
        print("store", pool, instructions(compile_for(arch, backend._store, "*bf16", pool, **constants)))
    print("join", instructions(compile_for(arch, backend._join, "*bf16", "*bf16", DIM=64, DIMS=64, **CUT)))


if __name__ == "__main__":
    main()
