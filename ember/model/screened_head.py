"""The LM head of rows that take their best token: all but a few logits are ruled out by a rough product in 8 bits.

A row that takes the token with the largest logit needs no other. The weight is held a second time in 8 bits, an eighth
to a quarter of the head's arithmetic and memory traffic, and for every logit it is known how far the rough one is off
at most. Those that could still be the largest are computed as ever, bit for bit; the rest are -inf.

    |x . w - x^ . w^|  <=  |x| |w - w^| + |x - x^| |w^|        ^: rounded; Cauchy and Schwarz

The lengths of w - w^ and w^ are taken once, in float64; those of x and x - x^ of every row. What float32 rounds away in
a chain of n multiply-adds (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1) and in scaling
the rough product is added, so that the bound holds for the numbers as computed. Where too many logits come near the
largest, as where a model finds everything equally likely, the whole product is cheaper, and is taken for a while.
"""

from __future__ import annotations

import numpy as np
import torch

from ember.model import linear_kernel, screen_kernel
from ember.model.linear import PackedLinear
from ember.model.packed_matrix import flat, with_runs
from ember.model.quantized import Int8Linear, channel_scales, rounded
from ember.threads import numba_follows_torch

_MOST = 1 / 4
"""Share of a row's strips, at most, that is cheaper to compute one by one than the whole row."""
_PAUSE = 32
"""Products taken whole after one of which most rows had too many strips."""
_UNIT = 2.0**-24  # half the distance from 1 to the next float32
_UP = 1 + 2.0**-20  # more than the next float32
_CHUNK = 256  # rows looked at at a time


class ScreenedHead:
    """An LM head that computes little more than the largest logit of those rows that need no other.

    Args:
        head: the whole head, with no bias.
        weight: its weight [V, C].
    """

    def __init__(self, head: PackedLinear, weight: torch.Tensor) -> None:
        self._whole = head
        self._rough = Int8Linear(weight, None, "none", bits=8)
        self._of_length, self._of_error = _bounds(weight, head.matrix.dtype)
        self._is_bounded = bool(np.isfinite(self._of_length).all())  # else a weight is no number, and all logits of it
        self._pause = 0
        linear_kernel.warm_up_strips(head.matrix.data.dtype.name)
        screen_kernel.warm_up_screen()

    def __call__(self, x: torch.Tensor, best_only: torch.Tensor | None = None) -> torch.Tensor:
        """See `Head`."""
        if best_only is None or not bool(best_only.any()):
            return self._whole(x)
        if bool(best_only.all()):
            return self._best(x)
        logits = torch.empty(len(x), len(self._of_length))
        logits[best_only], logits[~best_only] = self._best(x[best_only]), self._whole(x[~best_only])
        return logits

    def _best(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_bounded and not self._pause:
            return self._screened(x)
        self._pause = max(0, self._pause - 1)
        return self._whole(x)

    def _screened(self, x: torch.Tensor) -> torch.Tensor:
        numba_follows_torch()
        x, logits = with_runs(x), self._rough(x)
        num_strips = -(-len(self._of_length) // linear_kernel.LANES)
        found, counts = np.empty((len(x), num_strips), np.int32), np.empty(len(x), np.int64)
        bounds = self._of_length, self._of_error
        ends = flat(logits).numpy(), logits.stride(0)
        screen_kernel.screen(
            flat(x).numpy(), x.stride(0), x.shape[1], *ends, *bounds, self._rough.levels, found, counts
        )
        hard = (counts < 1) | (counts > _MOST * num_strips)
        self._pause = _PAUSE if 2 * hard.sum() > len(x) else 0
        if hard.any():
            logits[hard] = self._whole(x[hard])
            counts[hard] = 0
        rows = np.repeat(np.arange(len(x)), counts)
        strips = found[np.arange(num_strips) < counts[:, None]].astype(np.int64)
        order = strips.argsort(kind="stable")  # rows that need the same part of the weight follow each other
        self._whole.matrix.multiply_strips(x, logits, rows[order], strips[order])
        return logits


def _bounds(weight: torch.Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """How far a rough logit is off from the head's own, at most: a length of x, and of the error in x; [V] each.

    The head has the weight in `dtype`.
    """
    inner = weight.shape[1]
    chain, scaling = inner * _UNIT / (1 - inner * _UNIT), 8 * _UNIT
    all_scales, bounds = channel_scales(weight), torch.empty(2, len(weight))
    for begin in range(0, len(weight), _CHUNK):
        rows, scales = weight[begin : begin + _CHUNK].to(dtype).double(), all_scales[begin : begin + _CHUNK]
        rough = rounded(weight[begin : begin + _CHUNK], scales).double().mul_(scales.double()[:, None])
        length, whole = rough.norm(dim=1), rows.norm(dim=1)
        error = rough.sub_(rows).norm(dim=1)
        bounds[0, begin : begin + _CHUNK] = (error + chain * whole + scaling * length) * _UP
        bounds[1, begin : begin + _CHUNK] = (1 + scaling) * length * _UP
    of_length, of_error = bounds.numpy()
    return of_length, of_error
