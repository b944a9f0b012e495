"""How idle threads wait. Two OpenMP runtimes share a process, torch's and numba's.

By default each keeps its threads spinning after every parallel region, where they take the cores from the other's, and
from every other process: measured on 2 cores, up to ten times slower. Free of torch: it must run before torch loads.
"""

from __future__ import annotations

import os


def sleep_when_idle() -> None:
    """Let idle OpenMP threads sleep, unless the user's OMP_WAIT_POLICY says otherwise."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
