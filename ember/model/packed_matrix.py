"""A weight matrix laid out for `linear_kernel.multiply`, and the product with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import numpy as np
import torch

from ember.huge_pages import zeros
from ember.model import linear_kernel as kernel
from ember.threads import numba_follows_torch

_STORED_AS: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.float32: torch.float32, torch.float16: torch.uint16, torch.bfloat16: torch.int16}
)
"""What the kernel calls a dtype that numba has no type for."""
Triple = tuple[int, int, int]
_GROUP = (8, 16)  # fewest and most panels
_READING = 16  # see `fill`
_CHUNK = 256  # rows looked at at a time
_PADDING = 16
"""Numbers beside each row of a result: rows a power of two apart would share sets of the processor's cache."""


class PackedMatrix:
    """A matrix W [out, in] in panels of WIDTH rows, see `linear_kernel`; all in one run of memory.

    Args:
        weight: [out, in].
        dtype: what it is kept in: float32, float16 or bfloat16.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self.panels = -(-self.out_features // kernel.WIDTH)
        self.depth, self.group = _depth(self.in_features), _group(self.panels)
        self.dtype = dtype
        self.data = _pack(weight, dtype, self.group, self.depth)
        self._groups = torch.from_numpy(self.data).view(-1, self.group * kernel.WIDTH * _even(self.in_features))
        kernel.warm_up_multiply(self.data.dtype.name)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of W by number: ids [T] to [T, in] in W's dtype."""
        panel, row = ids // kernel.WIDTH, ids % kernel.WIDTH
        blocks = [_block(self._groups, k, self.depth, self.in_features) for k in range(0, self.in_features, self.depth)]
        found = torch.cat([block[panel // self.group, panel % self.group, :, row] for block in blocks], dim=1)
        return found[:, : self.in_features].view(self.dtype)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether its rows are those of `weight` [out, in], to the bit."""
        ids = torch.split(torch.arange(len(weight)), _CHUNK)
        return weight.shape == (self.out_features, self.in_features) and all(
            torch.equal(self.rows(some).to(weight.dtype), weight[some]) for some in ids
        )

    def multiply(
        self, x: torch.Tensor, bias: np.ndarray, activation: int, more: torch.Tensor | None = None
    ) -> torch.Tensor:
        """activation(x W^T + bias) + more.

        Args:
            x: [T, in] float32.
            bias: see `padded`.
            more: [T, out] float32, added last.

        Returns:
            [T, out]: columns of a wider tensor.
        """

        def run(addresses: Triple, strides: Triple, height: int, cuts: tuple[int, int]) -> None:
            shape = (*strides, self.out_features, self.in_features, self.depth, self.group)
            kernel.multiply(self.data, bias, addresses, shape, activation, height, cuts)

        return fill(run, x, more, self.out_features, _READING)

    def multiply_strips(self, x: torch.Tensor, y: torch.Tensor, rows: np.ndarray, strips: np.ndarray) -> None:
        """Some strips of y = x W^T, LANES columns of a row each, to the bit as in `multiply`.

        Args:
            x: [T, in] float32.
            y: [T, out]: columns of a wider tensor, as `multiply` gives it.
            rows, strips: [n] int64.
        """
        numba_follows_torch()
        x = with_runs(x)
        addresses = (x.data_ptr(), y.data_ptr())
        shape = (x.stride(0), y.stride(0), self.panels * kernel.WIDTH, self.in_features, self.depth, self.group)
        parts = min(torch.get_num_threads(), max(1, len(rows)))
        kernel.multiply_strips(self.data, addresses, shape, len(x), rows, strips, parts)


def fill(
    run: Callable[[Triple, Triple, int, tuple[int, int]], None],
    x: torch.Tensor,
    more: torch.Tensor | None,
    width: int,
    reading: int,
) -> torch.Tensor:
    """Let `run(addresses, strides, height, cuts)`, a call of a kernel, fill the result of a linear.

    Args:
        run: addresses and strides are those of x, `more` and the result (see `linear_kernel.multiply`).
        x: [T, in] float32.
        more: [T, out] float32, or none.
        width: out.
        reading: rows that take as long to compute as a weight takes to read from memory.

    Returns:
        [T, out]: columns of a wider tensor.

    Raises:
        TypeError: x or `more` is not float32: the kernel is told addresses only.
    """
    if x.dtype != torch.float32 or (more is not None and more.dtype != torch.float32):
        raise TypeError("the compiled linear takes float32")
    numba_follows_torch()
    x, panels = with_runs(x), -(-width // kernel.WIDTH)
    height, stride = x.shape[0], panels * kernel.WIDTH + _PADDING
    y, added, added_stride = torch.empty(height, stride), 0, 0
    if more is not None:
        more = with_runs(more)
        added, added_stride = more.data_ptr(), more.stride(0)
    if height:
        addresses, strides = (x.data_ptr(), added, y.data_ptr()), (x.stride(0), added_stride, stride)
        run(addresses, strides, height, _cuts(panels, height, torch.get_num_threads(), reading))
    return y[:, :width]


def padded(row: torch.Tensor | None, width: int) -> np.ndarray:
    """A row [width], or none, as float32 with zeros up to the end of the last panel."""
    whole = torch.zeros(-(-width // kernel.WIDTH) * kernel.WIDTH)
    if row is not None:
        whole[:width] = row
    return whole.numpy()


def _pack(weight: torch.Tensor, dtype: torch.dtype, group: int, depth: int) -> np.ndarray:
    """A panel at a time, so that next to nothing lies in memory twice."""
    stored, width = _STORED_AS[dtype], kernel.WIDTH
    rows, inner = weight.shape
    groups = zeros((-(-rows // (group * width)), group * width * _even(inner)), stored)
    for k in range(0, inner, depth):
        block, taken = _block(groups, k, depth, inner), min(depth, inner - k)
        for panel in range(-(-rows // width)):
            part = weight[panel * width : (panel + 1) * width, k : k + taken]
            block[panel // group, panel % group, :taken, : len(part)] = part.T.to(dtype).view(stored)
    return groups.view(-1).numpy()


def _block(groups: torch.Tensor, k: int, depth: int, inner: int) -> torch.Tensor:
    """A block of k of the groups [n, numbers], as [n, panels in a group, k, WIDTH]."""
    even, width = _even(min(depth, inner - k)), kernel.WIDTH
    group = groups.shape[1] // (width * _even(inner))
    return groups[:, k * group * width : (k + even) * group * width].view(-1, group, even, width)


def _group(panels: int) -> int:
    """Panels in a group: their part of y stays in the cache over all blocks of k; few are added to make it even."""
    sizes = range(min(panels, _GROUP[0]), min(panels, _GROUP[1]) + 1)
    return min(sizes, key=lambda size: (-(-panels // size) * size, -size))


def _depth(inner: int) -> int:
    """k in a block: even, and about the same in each."""
    blocks = -(-inner // kernel.DEPTH)
    return min(_even(-(-inner // blocks)), kernel.DEPTH)


def _even(k: int) -> int:
    return -(-k // kernel.UNROLL) * kernel.UNROLL


def with_runs(x: torch.Tensor) -> torch.Tensor:
    """x [T, n] with rows that are runs of memory, not overlapping."""
    step, each = x.stride()
    return x if each == 1 and step >= x.shape[1] else x.contiguous()


def flat(x: torch.Tensor) -> torch.Tensor:
    """The memory from the first number of x [T, n] to its last."""
    return x.as_strided(((len(x) - 1) * x.stride(0) + x.shape[1],), (1,))


@cache
def _cuts(panels: int, height: int, threads: int, reading: int) -> tuple[int, int]:
    """Into how many parts rows and panels are cut: one part a thread, the dearest as cheap as can be.

    A part costs its rows times its panels, and the panels once more for being read.
    """
    whole = [(rows, threads // rows) for rows in range(1, threads + 1) if threads % rows == 0]
    return min(whole, key=lambda cut: (-(-height // cut[0]) + reading) * -(-panels // cut[1]))
