"""A layer's output on a processor with other instructions, in a process that takes this one for such a processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ember.model.processor import vector_lanes

_OTHER = """
import sys
import numpy
from ember.model import processor
processor.vector_lanes = lambda: int(sys.argv[1])
processor.pair_instruction = processor.quad_instruction = lambda lanes: None
"""
_OUTPUT = """
import torch
from ember.model.linear import make_linear
from ember.model.quantized import Int8Linear
rng = torch.Generator().manual_seed(0)
x, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((37, {inner}), (100, {inner}), (100,)))
y = {layer}(x).numpy()
"""


def outputs_here_and_there(layer: str, inner: int, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """What a layer, an expression of `weight` [100, inner] and `bias`, makes here, and with other instructions."""
    code, here = _OUTPUT.format(layer=layer, inner=inner), dict[str, Any]()
    exec(code, here)
    other, file = "8" if vector_lanes() == 16 else "16", folder / "y.npy"
    done = subprocess.run(
        [sys.executable, "-c", f"{_OTHER}{code}numpy.save(sys.argv[2], y)", other, str(file)],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return here["y"], np.load(file)
