"""Compiled kernels where nothing can be written beside the package or in the user's home."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

LOAD = """
import numba
from ember.attention import cpu_kernel
from ember.model import linear_kernel
print(numba.config.CACHE_DIR)
"""


def test_kernels_load_where_no_cache_can_be_kept(tmp_path):
    """A container whose site-packages belong to root, with a user that has no home: numba raised an error."""
    package = Path(__file__).parent.parent / "ember"
    shutil.copytree(package, tmp_path / "ember", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("", "attention", "model"):
        (tmp_path / "ember" / folder / "__pycache__").write_text("a file stands in the way, for root too")
    nowhere = dict.fromkeys(("HOME", "XDG_CACHE_HOME"), "/proc/nowhere")
    env = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"} | nowhere
    env |= {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "ember-kernels-"))
    assert "set NUMBA_CACHE_DIR" in done.stderr
    assert not list(tmp_path.glob("ember-kernels-*")), "left behind"
