"""The compiled part of `ScreenedHead` (numba): which logits of a row may be its largest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types

from ember.kernel_cache import ensure_kernel_cache, patience
from ember.model.linear_kernel import LANES
from ember.threads import numba_follows_torch

ensure_kernel_cache()

_SMALLEST, _NEVER = np.float32(1e-30), np.float32(-np.inf)
_UNDERFLOW = np.float32(1e-37)  # more than a chain loses where its numbers are too small for float32
_ROUND_UP = 1.0 + 1e-6  # more than what float32 rounds away of a norm, and in the few operations on it


@njit(error_model="numpy")
def _norms(x: Any, levels: Any) -> Any:
    """The length of a row, and of what rounding as in `linear_kernel` takes from it.

    Not a finite number where one of the row's is not.
    """
    largest = np.float32(0)
    for value in x:
        largest = max(largest, abs(value))
    factor = levels / largest if largest > _SMALLEST else np.float32(0)
    scale = np.float64(largest / levels)
    length = error = 0.0
    for value in x:
        rest = np.float64(value) - np.float64(np.rint(value * factor)) * scale
        length += np.float64(value) * np.float64(value)
        error += rest * rest
    return np.float32(np.sqrt(length) * _ROUND_UP), np.float32(np.sqrt(error) * _ROUND_UP)


@njit(error_model="numpy", fastmath={"nnan", "nsz"})
def _bound_row(y: Any, of_length: Any, of_error: Any, length: Any, error: Any, most: Any) -> Any:
    """What the row's largest is at least, and into `most` what a strip's largest is at most. All of y becomes -inf."""
    floor, end = _NEVER, len(of_length) // LANES * LANES
    for begin in range(0, end, LANES):
        highest = lowest = _NEVER
        for n in range(begin, begin + LANES):
            off = length * of_length[n] + error * of_error[n] + _UNDERFLOW
            highest, lowest = max(highest, y[n] + off), max(lowest, y[n] - off)
            y[n] = _NEVER
        most[begin // LANES] = highest
        floor = max(floor, lowest)
    for n in range(end, len(of_length)):
        off = length * of_length[n] + error * of_error[n] + _UNDERFLOW
        most[end // LANES] = max(most[end // LANES], y[n] + off) if n > end else y[n] + off
        floor = max(floor, y[n] - off)
        y[n] = _NEVER
    return floor


@njit(error_model="numpy")
def _strips_above(most: Any, floor: Any, found: Any) -> int:
    """How many strips may reach it; their numbers in `found`."""
    count = 0
    for strip in range(len(most)):
        if most[strip] >= floor:
            found[count] = strip
            count += 1
    return count


@njit(parallel=True, cache=True, error_model="numpy")
def screen(
    x: Any,
    x_stride: Any,
    inner: Any,
    y: Any,
    y_stride: Any,
    of_length: Any,
    of_error: Any,
    levels: Any,
    found: Any,
    counts: Any,
) -> None:
    """Find the strips, LANES neighbouring numbers, of each row of y that may hold the row's largest.

    Args:
        x: flat float32; rows of `inner` numbers, `x_stride` apart.
        y: flat float32; x w^T roughly, rows `y_stride` apart. Becomes -inf.
        of_length, of_error: [V] float32: how far y is off at most, a length of the row, and of the error in x.
        levels: x was rounded to so many for y, float32.
        found: [R, strips] int32, out: the numbers of the strips.
        counts: [R] int64, out: how many they are; under 1 where that can't be said.
    """
    for m in prange(len(counts)):
        length, error = _norms(x[m * x_stride : m * x_stride + inner], levels)
        row, counts[m] = y[m * y_stride : m * y_stride + len(of_length)], -1
        if length < np.inf:
            most = np.empty(found.shape[1], np.float32)
            floor = _bound_row(row, of_length, of_error, length, error, most)
            counts[m] = _strips_above(most, floor, found[m])


def warm_up_screen() -> None:
    """Compile, or load what an earlier process compiled."""
    numba_follows_torch()
    numbers, ints = types.Array(types.float32, 1, "C"), types.Array(types.int64, 1, "C")
    found = types.Array(types.int32, 2, "C")
    number = types.int64
    arguments = [numbers, number, number, numbers, number, numbers, numbers, types.float32, found, ints]
    with patience("the screening of the LM head: a few seconds, once"):
        screen.disable_compile(False)
        screen.compile(types.void(*arguments))
        screen.disable_compile()
