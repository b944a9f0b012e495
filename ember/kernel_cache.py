"""Where numba keeps what it has compiled."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile

import numba


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


def _probe() -> None:
    pass
