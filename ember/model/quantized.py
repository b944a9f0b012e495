"""Linear layers with weights of 8 or 16 bits on a CPU, a row's result independent, to the bit, of the rows beside it.

int8 (W8A8): a scale for each output channel of the weight and for each row of x; 8-bit products, summed exactly.
PyTorch's `quantized::linear_dynamic` has one scale for the whole matrix, so that neighbours would matter. Instead

    y = fbgemm(x / s, input scale 1, zero point 64) * s + b        s = max|x| / 63, for each row

fp16: only the weight is rounded, to halves, which halves what a small batch reads; sums are in float32. fbgemm's code
for 1 or 2 rows left over at the end sums in another order, so the height is padded to a multiple of 3.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.nn.functional import pad

from ember.errors import ConfigError
from ember.model.row_kernel import Finish, scale_rows

FP16_ROWS = 3
"""The height of an fp16 matrix is a multiple of this."""

_FP16_PERIOD = 120
"""fbgemm cuts a tall matrix into pieces of that height; only the last one is lower."""

_OPERATORS = {
    "int8": ("linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32"),
    "fp16": ("linear_prepack_fp16", "linear_dynamic_fp16"),
}


def check_weights(form: str, device: torch.device, dtype: torch.dtype) -> None:
    """See that `int8` or `fp16` weights run there.

    Raises:
        ConfigError: another device or dtype, or a PyTorch without the operators.
    """
    if device.type != "cpu" or dtype != torch.float32:
        found = f"{device.type} in {str(dtype).removeprefix('torch.')}"
        raise ConfigError("weights", form, f"runs on a CPU in float32, not on {found}; use auto")
    has_all = all(hasattr(torch.ops.quantized, name) for name in _OPERATORS[form])
    if "fbgemm" not in torch.backends.quantized.supported_engines or not has_all:
        raise ConfigError("weights", form, "this PyTorch lacks fbgemm's operators (they need an x86 CPU); use auto")


class Int8Linear:
    """A linear layer with weight [out, in] in 8 bits, bias [out] or none, and one of the activations."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        scales = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny).double() / 127
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with _fbgemm():
            quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._finish = Finish(bias, len(weight), activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        rows, scales = scale_rows(x)
        y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, 1.0, 64, self._packed)
        return self._finish(y, scales)


class Fp16Linear:
    """A linear layer with weight [out, in] in 16 bits, bias [out] or none, and one of the activations."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        with _fbgemm():
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        self._finish = Finish(bias, len(weight), activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        padded = pad(x, (0, 0, 0, -len(x) % FP16_ROWS))
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(padded, self._packed)[: len(x)]
        return self._finish(y)


@cache
def fp16_rows_hold() -> bool:
    """Whether on this processor a row has the same bits at every height that `Fp16Linear` uses; tried, not assumed."""
    rng = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2 * _FP16_PERIOD, 24, generator=rng), torch.randn(37, 24, generator=rng)
    with _fbgemm():
        packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    whole = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    heights = range(FP16_ROWS, len(x), FP16_ROWS)
    return all(
        torch.equal(torch.ops.quantized.linear_dynamic_fp16(x[:height].clone(), packed), whole[:height])
        for height in heights
    )


@contextmanager
def _fbgemm() -> Iterator[None]:
    """Pack for fbgemm, whose sums do not depend on the rows beside, whatever engine PyTorch would take by itself."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize", UserWarning)  # deprecated after 2.13
            yield
    finally:
        torch.backends.quantized.engine = before
