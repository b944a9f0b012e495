"""Where numba keeps what it has compiled, and a word to the user while it compiles."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

import numba

LOADED_IN_S = 2.0
"""More than loading a compiled kernel takes."""


def ensure_kernel_cache() -> None:
    """Call before `njit(cache=True)`: where neither the package's folder nor the user's can be written, it would raise.

    A temporary folder serves then, for this process alone: compiled code that others may have put there is not run.
    """
    try:
        numba.njit(cache=True)(_probe)
    except RuntimeError:
        folder = tempfile.mkdtemp(prefix="ember-kernels-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
        logging.getLogger(__name__).warning(
            "compiled kernels can't be kept: no folder for them can be written; set NUMBA_CACHE_DIR to one that can"
        )


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Say what is going on if it takes longer than loading what was compiled before."""
    timer = Timer(LOADED_IN_S, logging.getLogger(__name__).warning, [f"compiling {what}"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _probe() -> None:
    pass
