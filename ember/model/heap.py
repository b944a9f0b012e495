"""Memory that was freed, back to the system."""

from __future__ import annotations

import ctypes
import sys


def release_freed() -> None:
    """Give the system the pages between what is in use, where the C library can (glibc).

    Weights are read, joined and packed one after another; what is packed stays behind what was read for it, and the
    holes are too small for the next ones: without this a network takes nearly twice its weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
