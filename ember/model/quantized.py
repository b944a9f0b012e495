"""Linear layers with weights of 8 bits on a CPU, a row's result independent, to the bit, of the rows beside it.

W8A8: a scale for each output channel of the weight and for each row of x; 8-bit products, summed exactly.
PyTorch's `quantized::linear_dynamic` has one scale for the whole matrix, so that neighbours would matter. Instead

    y = fbgemm(x / s, input scale 1, zero point 64) * s + b        s = max|x| / 63, for each row
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ember.errors import ConfigError
from ember.model.linear import has_packed
from ember.model.linear_kernel import Finish, scale_rows

_OPERATORS = ("linear_prepack", "linear_with_input_q_dq_qweight_dq_output_fp32")


def check_weights(form: str, device: torch.device, dtype: torch.dtype) -> None:
    """See that `int8` or `fp16` weights run there.

    Raises:
        ConfigError: another device or dtype, or a PyTorch without the operators.
    """
    if device.type != "cpu" or dtype != torch.float32:
        found = f"{device.type} in {str(dtype).removeprefix('torch.')}"
        raise ConfigError("weights", form, f"runs on a CPU in float32, not on {found}; use auto")
    if form == "fp16":
        if not has_packed(device, dtype):
            raise ConfigError("weights", form, "needs a processor with a fused multiply-add; use auto")
        return
    has_all = all(hasattr(torch.ops.quantized, name) for name in _OPERATORS)
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

    def __call__(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] to [T, out]; `more` [T, out] is added last."""
        rows, scales = scale_rows(x)
        y: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows, 1.0, 64, self._packed)
        y = self._finish(y, scales)
        return y if more is None else y.add_(more)


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
