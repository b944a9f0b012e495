"""What this machine can do: the roof that the other benchmarks measure themselves by.

python -m tests.benchmarks.machine
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from tests.benchmarks.costs import Work
from tests.benchmarks.table import Table

MATRIX = 2048
"""Side of the multiplied matrices: large enough that the caches are used as well as they can be."""
READ_BYTES = 2**29
"""Bytes read at a time: far more than any cache."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Float32 FLOPs and bytes read from memory, a second."""

    flops: float
    read: float

    @staticmethod
    def measure(repeat: int = 7) -> Machine:
        """The best of `repeat` runs with torch's threads: what is possible, whatever else ran beside."""
        return Machine(matmul_rate(repeat), read_rate(repeat))

    def seconds(self, work: Work) -> float:
        """The least time that the work takes here in float32: first all arithmetic, then all reading."""
        return work.flops / self.flops + work.kv_bytes / self.read

    def __str__(self) -> str:
        rates = f"float32 matmul {self.flops / 1e9:.0f} GFLOP/s, memory read {self.read / 1e9:.1f} GB/s"
        return f"{rates}, {torch.get_num_threads()} threads"


def matmul_rate(repeat: int, side: int = MATRIX) -> float:
    """FLOPs a second of a large float32 product."""
    a, b = torch.rand(side, side), torch.rand(side, side)
    return 2 * side**3 / _least_seconds(lambda: a @ b, repeat)


def read_rate(repeat: int, size: int = READ_BYTES) -> float:
    """Bytes a second of adding up a large float32 vector."""
    numbers = torch.ones(size // 4)
    return size / _least_seconds(numbers.sum, repeat)


def _least_seconds(call: Callable[[], object], repeat: int) -> float:
    call()
    seconds = []
    for _ in range(repeat):
        begin = perf_counter()
        call()
        seconds.append(perf_counter() - begin)
    return min(seconds)


def main() -> None:
    """A row a number of threads."""
    table = Table("threads", "float32 matmul GFLOP/s", "memory read GB/s")
    most = torch.get_num_threads()
    for threads in sorted({1, most}):
        torch.set_num_threads(threads)
        machine = Machine.measure()
        table.add(threads, f"{machine.flops / 1e9:.0f}", f"{machine.read / 1e9:.1f}")


if __name__ == "__main__":
    main()
