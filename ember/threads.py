"""How many threads compute, and how idle ones wait. Two OpenMP runtimes share a process, torch's and numba's.

By default each keeps its threads spinning for long after every parallel region, where they take the cores from the
other's and from every other process: measured on 2 shared cores, up to ten times slower. Threads that sleep at once
cost a wake-up at every region instead, 20% of the time with 32 sequences of GPT-2 small. Free of torch until a function
needs it: how idle threads wait must be said before torch loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ember.errors import ConfigError

SPINS = 3000
"""Turns of its waiting loop (GNU OpenMP's) before an idle thread sleeps, some tens of microseconds.

On 2 idle cores 0, 1000, 3000 and 10000 gave 161, 177, 193 and 198 tokens/s with GPT-2 small; beside a process that kept
one core busy, 0, 3000 and 10000 gave 1,091, 949 and 788 with the embedded model.
"""


def sleep_when_idle() -> None:
    """Let idle OpenMP threads sleep soon, unless the user's OMP_WAIT_POLICY or GOMP_SPINCOUNT says otherwise."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_threads(num_threads: int | None, num_ranks: int = 1) -> None:
    """See that there are so many cores, and a thread for each rank.

    Raises:
        ConfigError: threads that would only wait for each other, or more than were asked for.
    """
    if num_threads is not None and num_threads < num_ranks:
        allowed = f"tensor_parallel_size={num_ranks} takes a thread a rank; set at least {num_ranks}, or null"
        raise ConfigError("num_threads", num_threads, allowed)
    if num_threads is not None and num_threads > (cores := num_cores()):
        raise ConfigError("num_threads", num_threads, f"this process may use {cores} cores; set at most that, or null")


def threads_of_a_rank(num_threads: int, num_ranks: int) -> int:
    """How many threads each of so many ranks computes with, of `num_threads` in all."""
    return max(1, num_threads // num_ranks)


def use_threads(num_threads: int | None) -> None:
    """Let torch compute with so many threads in this process; None leaves it as it is."""
    import torch

    if num_threads is not None:
        torch.set_num_threads(num_threads)


@contextmanager
def same_threads_after() -> Iterator[None]:
    """Give torch back the number of threads that it has now: the next job of a sweep may set none."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numba_follows_torch() -> None:
    """Let numba use as many threads as torch, in this Python thread: numba keeps the number for each thread apart.

    When numba starts its threads, on the first call, it sets OpenMP's number, which is torch's too: that is put back.
    """
    import numba
    import torch

    threads = torch.get_num_threads()
    if numba.get_num_threads() == threads:
        return
    numba.set_num_threads(min(threads, int(numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
