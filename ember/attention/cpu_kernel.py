"""The compiled part of `CpuAttention` (numba): eight float32 lanes as a value, and attention written in them.

Vector code is written here, not left to the compiler, whose choices would follow the block size and the length of a
run. Nothing is summed across lanes but at the very end, every multiply-add is one `fma`, and no sum is reordered:

    scores   lane = slot        s[t] += q[d] * k[d, t]      for even d, for odd d, then both; keys: [head_dim, 8 slots]
    output   lane = dimension   o[d] += w[t] * v[t, d]      for t in order       values lie as [slot, head_dim]

A query takes its positions in tiles of 64 from position 0 on, with an online softmax (Milakov and Gimelshein,
arXiv:1805.02867) whose sum has a lane a position modulo 8; exp is the Cephes polynomial. Keys and values are float32,
float16 (here uint16), bfloat16 (int16) or int8 with a scale a slot, and turned into float32 as they are loaded.

All compiled code is in this one file: numba's cache on the disk is renewed when the file changes, not what it imports.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending, njit, prange, types
from numba.core import cgutils
from numba.core.datamodel import models

from ember.kernel_cache import ensure_kernel_cache

ensure_kernel_cache()

LANES = 8
TILE = 64
"""Positions in a tile of keys, counted from position 0 of the sequence."""
QUAD = 4
"""Query rows that share each load of a key or value."""

F = np.float32
_parallel: Any = njit(parallel=True, cache=True, error_model="numpy")
_UNCOUNTED: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
_inner: Any = njit(error_model="numpy", **_UNCOUNTED)
"""For what only compiled code calls: its arrays are the caller's, so nobody counts references to them."""
_part: Any = njit(error_model="numpy", inline="always", **_UNCOUNTED)
"""For what one place alone calls: it becomes a part of that place before anything is compiled."""
intrinsic: Any = extending.intrinsic  # its own type hints count `typing` as an argument of the call
_NEVER = F(-np.inf)
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_MULTIPLY_ADD = ir.FunctionType(_FLOATS, [_FLOATS] * 3)


class Lanes(types.Type):
    """Eight float32 in a vector register."""

    def __init__(self) -> None:
        super().__init__(name="float32x8")


_lanes = Lanes()


@extending.register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _FLOATS)


def _operation(emit: Callable[..., Any], *arguments: types.Type) -> Any:
    """A numba operation on values that gives Lanes; `emit(builder, *values)` writes its LLVM code."""
    return _lanes(*arguments), lambda context, builder, signature, values: emit(builder, *values)


def _constant(value: float, kind: ir.Type = _FLOATS) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _spread(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _address(context: Any, builder: Any, kind: types.Array, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _widen(builder: Any, name: str, raw: Any) -> Any:
    """To float32 from what the array stores."""
    if name == "int8":
        return builder.sitofp(raw, _FLOATS)
    if name == "uint16":
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), _FLOATS)
    if name == "int16":
        return builder.bitcast(builder.shl(builder.zext(raw, _INTS), _constant(16, _INTS)), _FLOATS)
    return raw


@intrinsic
def _load(typing: Any, array: Any, index: Any) -> Any:
    """array[index : index + 8] of a flat array, as float32."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        stored = ir.VectorType(context.get_data_type(array.dtype), LANES)
        address = _address(context, builder, array, *values)
        raw = builder.load(builder.bitcast(address, stored.as_pointer()), align=array.dtype.bitwidth // 8)
        return _widen(builder, array.dtype.name, raw)

    return _lanes(array, types.intp), emit


@intrinsic
def _store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """array[index : index + 8] = x in a flat float32 array."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = _address(context, builder, array, *values[:2])
        builder.store(values[2], builder.bitcast(address, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, _lanes), emit


@intrinsic
def _spread_at(typing: Any, array: Any, index: Any) -> Any:
    """array[index] of a flat float32 array in every lane."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _spread(builder, builder.load(_address(context, builder, array, *values)))

    return _lanes(array, types.intp), emit


@intrinsic
def _splat(typing: Any, x: Any) -> Any:
    """The float32 x in every lane."""
    return _operation(_spread, types.float32)


@intrinsic
def _fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""

    def emit(builder: Any, *values: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, _MULTIPLY_ADD, "llvm.fma.v8f32")
        return builder.call(function, values)

    return _operation(emit, x, y, z)


@intrinsic
def _add(typing: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return _operation(lambda builder, *values: builder.fadd(*values), x, y)


@intrinsic
def _subtract(typing: Any, x: Any, y: Any) -> Any:
    """x - y."""
    return _operation(lambda builder, *values: builder.fsub(*values), x, y)


@intrinsic
def _multiply(typing: Any, x: Any, y: Any) -> Any:
    """x * y."""
    return _operation(lambda builder, *values: builder.fmul(*values), x, y)


@intrinsic
def _larger(typing: Any, x: Any, y: Any) -> Any:
    """The larger of x and y; y where either is not a number."""
    return _operation(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b), x, y)


@intrinsic
def _zero_where_below(typing: Any, value: Any, x: Any, limit: Any) -> Any:
    """`value`, but 0 where x < limit."""

    def emit(builder: Any, *values: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", values[1], values[2]), _constant(0.0), values[0])

    return _operation(emit, value, x, limit)


@intrinsic
def _power_of_two(typing: Any, x: Any) -> Any:
    """2^n from 1.5 * 2^23 + n, which has the whole number n in its low bits."""

    def emit(builder: Any, value: Any) -> Any:
        biased = builder.add(builder.bitcast(value, _INTS), _constant(127, _INTS))
        return builder.bitcast(builder.shl(biased, _constant(23, _INTS)), _FLOATS)

    return _operation(emit, x)


@intrinsic
def _largest(typing: Any, x: Any) -> Any:
    """The largest lane, a float32."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        items = [builder.extract_element(values[0], ir.Constant(_INT, i)) for i in range(LANES)]
        best = items[0]
        for item in items[1:]:
            best = builder.select(builder.fcmp_ordered(">", item, best), item, best)
        return best

    return types.float32(x), emit


_LOG2E, _LN2_HIGH, _LN2_LOW = F(1.4426950408889634), F(0.693359375), F(-2.12194440e-4)
_C0, _C1, _C2 = F(1.9875691500e-4), F(1.3981999507e-3), F(8.3334519073e-3)
_C3, _C4, _C5 = F(4.1665795894e-2), F(1.6666665459e-1), F(5.0000001201e-1)
_LOWEST, _ZERO, _ONE, _ROUNDER = F(-87.0), F(0.0), F(1.0), F(12582912.0)
_FIRST = np.int64(0)
"""For a count that is handed on: numba would compile what takes a plain 0 a second time, for that value alone."""


@_inner
def _exp(x: Any) -> Any:
    """exp(x) for x <= 0; 0 below -87, and not a number stays so."""
    lowest, rounder = _splat(_LOWEST), _splat(_ROUNDER)
    y = _larger(lowest, x)
    n = _fma(y, _splat(_LOG2E), rounder)
    whole = _subtract(n, rounder)
    r = _fma(whole, _splat(-_LN2_HIGH), y)
    r = _fma(whole, _splat(-_LN2_LOW), r)
    p = _fma(_splat(_C0), r, _splat(_C1))
    p = _fma(p, r, _splat(_C2))
    p = _fma(p, r, _splat(_C3))
    p = _fma(p, r, _splat(_C4))
    p = _fma(p, r, _splat(_C5))
    p = _add(_fma(p, _multiply(r, r), r), _splat(_ONE))
    return _zero_where_below(_multiply(p, _power_of_two(n)), x, lowest)


@_inner
def _scores_of_one(s: Any, s_at: Any, q: Any, q_at: Any, k: Any, k_at: Any, groups: Any, dim: Any, width: Any) -> None:
    """s[t] = q . k[t] for some groups of 8 slots: the even dimensions in order, the odd ones in order, then both."""
    for g in range(groups):
        even = odd = _splat(_ZERO)
        at = k_at + g * LANES * width
        for d in range(0, dim - 1, 2):
            even = _fma(_spread_at(q, q_at + d), _load(k, at + d * LANES), even)
            odd = _fma(_spread_at(q, q_at + d + 1), _load(k, at + (d + 1) * LANES), odd)
        if dim % 2:
            even = _fma(_spread_at(q, q_at + dim - 1), _load(k, at + (dim - 1) * LANES), even)
        _store(s, s_at + g * LANES, _add(even, odd))


@_inner
def _scores_of_four(s: Any, s_at: Any, q: Any, q_at: Any, k: Any, k_at: Any, groups: Any, dim: Any, width: Any) -> None:
    """As `_scores_of_one`, for four rows of q."""
    q1, q2, q3 = q_at + width, q_at + 2 * width, q_at + 3 * width
    for g in range(groups):
        a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = _splat(_ZERO)
        at = k_at + g * LANES * width
        for d in range(0, dim - 1, 2):
            x, y = _load(k, at + d * LANES), _load(k, at + (d + 1) * LANES)
            a0, a1 = _fma(_spread_at(q, q_at + d), x, a0), _fma(_spread_at(q, q_at + d + 1), y, a1)
            b0, b1 = _fma(_spread_at(q, q1 + d), x, b0), _fma(_spread_at(q, q1 + d + 1), y, b1)
            c0, c1 = _fma(_spread_at(q, q2 + d), x, c0), _fma(_spread_at(q, q2 + d + 1), y, c1)
            d0, d1 = _fma(_spread_at(q, q3 + d), x, d0), _fma(_spread_at(q, q3 + d + 1), y, d1)
        if dim % 2:
            x, d = _load(k, at + (dim - 1) * LANES), dim - 1
            a0, b0 = _fma(_spread_at(q, q_at + d), x, a0), _fma(_spread_at(q, q1 + d), x, b0)
            c0, d0 = _fma(_spread_at(q, q2 + d), x, c0), _fma(_spread_at(q, q3 + d), x, d0)
        t = s_at + g * LANES
        _store(s, t, _add(a0, a1))
        _store(s, t + TILE, _add(b0, b1))
        _store(s, t + 2 * TILE, _add(c0, c1))
        _store(s, t + 3 * TILE, _add(d0, d1))


@_inner
def _values_of_one(o: Any, o_at: Any, w: Any, w_at: Any, v: Any, v_at: Any, count: Any, width: Any) -> None:
    """o[d] += w[t] * v[t, d] for some neighbouring slots in order, 64 dimensions at a time, then 8."""
    for at in range(0, width - 63, 64):
        to = o_at + at
        o0, o1, o2, o3 = _load(o, to), _load(o, to + 8), _load(o, to + 16), _load(o, to + 24)
        o4, o5, o6, o7 = _load(o, to + 32), _load(o, to + 40), _load(o, to + 48), _load(o, to + 56)
        for t in range(count):
            x, p = _spread_at(w, w_at + t), v_at + t * width + at
            o0, o1 = _fma(x, _load(v, p), o0), _fma(x, _load(v, p + 8), o1)
            o2, o3 = _fma(x, _load(v, p + 16), o2), _fma(x, _load(v, p + 24), o3)
            o4, o5 = _fma(x, _load(v, p + 32), o4), _fma(x, _load(v, p + 40), o5)
            o6, o7 = _fma(x, _load(v, p + 48), o6), _fma(x, _load(v, p + 56), o7)
        _store(o, to, o0)
        _store(o, to + 8, o1)
        _store(o, to + 16, o2)
        _store(o, to + 24, o3)
        _store(o, to + 32, o4)
        _store(o, to + 40, o5)
        _store(o, to + 48, o6)
        _store(o, to + 56, o7)
    for at in range(width // 64 * 64, width, LANES):
        o0 = _load(o, o_at + at)
        for t in range(count):
            o0 = _fma(_spread_at(w, w_at + t), _load(v, v_at + t * width + at), o0)
        _store(o, o_at + at, o0)


@_inner
def _values_of_four(o: Any, o_at: Any, w: Any, w_at: Any, v: Any, v_at: Any, count: Any, width: Any) -> None:
    """As `_values_of_one`, for four rows of o and w, 16 dimensions at a time."""
    row1, row2, row3 = o_at + width, o_at + 2 * width, o_at + 3 * width
    for at in range(0, width - 15, 16):
        a0, a1 = _load(o, o_at + at), _load(o, o_at + at + 8)
        b0, b1 = _load(o, row1 + at), _load(o, row1 + at + 8)
        c0, c1 = _load(o, row2 + at), _load(o, row2 + at + 8)
        d0, d1 = _load(o, row3 + at), _load(o, row3 + at + 8)
        for t in range(w_at, w_at + count):
            p = v_at + (t - w_at) * width + at
            x, y = _load(v, p), _load(v, p + 8)
            w0 = _spread_at(w, t)
            a0, a1 = _fma(w0, x, a0), _fma(w0, y, a1)
            w0 = _spread_at(w, t + TILE)
            b0, b1 = _fma(w0, x, b0), _fma(w0, y, b1)
            w0 = _spread_at(w, t + 2 * TILE)
            c0, c1 = _fma(w0, x, c0), _fma(w0, y, c1)
            w0 = _spread_at(w, t + 3 * TILE)
            d0, d1 = _fma(w0, x, d0), _fma(w0, y, d1)
        _store(o, o_at + at, a0)
        _store(o, o_at + at + 8, a1)
        _store(o, row1 + at, b0)
        _store(o, row1 + at + 8, b1)
        _store(o, row2 + at, c0)
        _store(o, row2 + at + 8, c1)
        _store(o, row3 + at, d0)
        _store(o, row3 + at + 8, d1)
    if width % 16:
        at = width - LANES
        for row in range(QUAD):
            o0 = _load(o, o_at + row * width + at)
            for t in range(count):
                o0 = _fma(_spread_at(w, w_at + row * TILE + t), _load(v, v_at + t * width + at), o0)
            _store(o, o_at + row * width + at, o0)


@_inner
def _softmax_step(
    s: Any, s_at: Any, begin: Any, seen: Any, o: Any, o_at: Any, width: Any, total: Any, row: Any, top: Any
) -> None:
    """Turn a row's scores of a tile into weights, and rescale what came before if the largest score has grown.

    A row that sees nothing of the tile stays as it was.
    """
    if begin >= seen:
        return
    low, groups = begin // LANES, (seen + LANES - 1) // LANES
    for t in range(low * LANES, begin):
        s[s_at + t] = _NEVER
    for t in range(seen, groups * LANES):
        s[s_at + t] = _NEVER
    best = _spread_at(top, row)
    for g in range(low, groups):
        best = _larger(_load(s, s_at + g * LANES), best)
    largest = _largest(best)
    lanes = _load(total, row * LANES)
    if largest > top[row]:
        shrink = _exp(_splat(top[row] - largest))
        lanes = _multiply(lanes, shrink)
        for d in range(o_at, o_at + width, LANES):
            _store(o, d, _multiply(_load(o, d), shrink))
        top[row] = largest
    for g in range(low, groups):
        at = s_at + g * LANES
        weight = _exp(_subtract(_load(s, at), _splat(largest)))
        lanes = _add(lanes, weight)
        _store(s, at, weight)
    _store(total, row * LANES, lanes)


@_inner
def _from(ahead: Any, r: Any, group: Any, window: Any) -> Any:
    """The first position of the tile that row r sees."""
    return max(0, ahead + r // group + 1 - window)


@_inner
def _to(ahead: Any, r: Any, group: Any) -> Any:
    """Where what row r sees of the tile ends."""
    return min(TILE, ahead + r // group + 1)


@_inner
def _rows_that_see(ahead: Any, rows: Any, group: Any, window: Any) -> Any:
    """The first row that sees something of the tile, and where such rows end."""
    return max(0, -ahead * group), min(rows, (TILE - 1 - ahead + window) * group)


@_inner
def _scale_by(s: Any, s_at: Any, groups: Any, scale: Any, at: Any) -> None:
    for g in range(groups):
        t = s_at + g * LANES
        _store(s, t, _multiply(_load(s, t), _load(scale, at + g * LANES)))


@_inner
def _score_run(
    s: Any, q: Any, offset: Any, k: Any, slot: Any, scale: Any, run: Any, dim: Any, width: Any, see: Any
) -> None:
    """Scores of the query rows from `offset` on with a run of a tile's positions that lie together in the pool.

    Args:
        slot: where the run begins.
        scale: of every slot, or empty: scores are multiplied by their key's.
        run: (begin, end) of the run within the tile, the first a multiple of LANES.
        see: ahead, rows, group, window: row r sees _from .. _to of the tile. Three more rows follow the last one, so
            that four can always be taken; what becomes of them is not used.
    """
    ahead, rows, group, window = see
    first, end = _rows_that_see(ahead, rows, group, window)
    for r in range(first, end, QUAD):
        alone = end - r == 1
        low, high = _from(ahead, r, group, window), _to(ahead, r if alone else r + QUAD - 1, group)
        begin = max(run[0], low // LANES * LANES)
        groups = (min(run[1], high) - begin + LANES - 1) // LANES
        s_at, q_at = (offset + r) * TILE + begin, (offset + r) * width
        at = slot + begin - run[0]
        if alone:
            _scores_of_one(s, s_at, q, q_at, k, at * width, groups, dim, width)
        else:
            _scores_of_four(s, s_at, q, q_at, k, at * width, groups, dim, width)
        if len(scale) > 0:
            for i in range(1 if alone else QUAD):
                _scale_by(s, s_at + i * TILE, groups, scale, at)


@_inner
def _add_values(
    o: Any, s: Any, row: Any, v: Any, slot: Any, run: Any, begin: Any, end: Any, width: Any, four: Any
) -> None:
    """Values of the part of a run that is in begin .. end of the tile, to a row of o, or to four."""
    begin, end = max(begin, run[0]), min(end, run[1])
    if begin < end:
        at = (slot + begin - run[0]) * width
        if four:
            _values_of_four(o, row * width, s, row * TILE + begin, v, at, end - begin, width)
        else:
            _values_of_one(o, row * width, s, row * TILE + begin, v, at, end - begin, width)


@_inner
def _value_run(o: Any, s: Any, offset: Any, v: Any, slot: Any, scale: Any, run: Any, width: Any, see: Any) -> None:
    """As `_score_run`: what a run's values add to the rows. With scales, weights are first multiplied by them."""
    ahead, rows, group, window = see
    first, end = _rows_that_see(ahead, rows, group, window)
    if len(scale) > 0:
        for r in range(first, end):
            _scale_by(s, (offset + r) * TILE + run[0], (run[1] - run[0] + LANES - 1) // LANES, scale, slot)
    for r in range(first, end, QUAD):
        row, low, high = offset + r, _from(ahead, r, group, window), _to(ahead, r, group)
        if end - r == 1:
            _add_values(o, s, row, v, slot, run, low, high, width, False)
            return
        shared = max(min(_from(ahead, r + QUAD - 1, group, window), high), low)  # where all four begin to see
        for i in range(QUAD):
            _add_values(o, s, row + i, v, slot, run, _from(ahead, r + i, group, window), shared, width, False)
        _add_values(o, s, row, v, slot, run, shared, high, width, True)
        for i in range(1, QUAD):
            begin = max(high, _from(ahead, r + i, group, window))
            _add_values(o, s, row + i, v, slot, run, begin, _to(ahead, r + i, group), width, False)


@_inner
def _weigh(s: Any, o: Any, offset: Any, width: Any, total: Any, top: Any, see: Any) -> None:
    """The softmax step of the rows that see something of the tile."""
    ahead, rows, group, window = see
    first, end = _rows_that_see(ahead, rows, group, window)
    for r in range(first, end):
        row, begin, seen = offset + r, _from(ahead, r, group, window), _to(ahead, r, group)
        _softmax_step(s, row * TILE, begin, seen, o, row * width, width, total, row, top)


@_inner
def _slot(table: Any, p: Any, size: Any, heads: Any, head: Any) -> Any:
    """Where the pool holds position p of a head, counted in slots of a head."""
    return (np.int64(table[p // size]) * heads + head) * size + p % size


@_inner
def _end_of_run(begin: Any, at: Any, here: Any, size: Any, straight: Any) -> Any:
    """Where what lies together in the pool from position `at` of the tile on ends: a whole tile once it is brought."""
    return min(here, at + size - (begin + at) % size) if straight else here


@_inner
def _bring(
    x: Any, near: Any, table: Any, begin: Any, count: Any, size: Any, heads: Any, head: Any, width: Any, lanes: Any
) -> None:
    """Copy a tile whose groups of 8 positions do not lie together in the pool to where they do; `lanes` interleaved."""
    for t in range(count):
        slot = _slot(table, begin + t, size, heads, head)
        at = t // lanes * lanes * width + t % lanes
        for d in range(width):
            near[at + d * lanes] = x[slot * width + d]


@_inner
def _bring_scales(scale: Any, near: Any, table: Any, begin: Any, count: Any, size: Any, heads: Any, head: Any) -> None:
    """As `_bring`, for scales."""
    if len(scale) > 0:
        for t in range(count):
            near[t] = scale[_slot(table, begin + t, size, heads, head)]


@_inner
def _fill(x: Any, count: Any, value: Any) -> None:
    for i in range(count):
        x[i] = value


@_inner
def _begin(
    q: Any, rows_q: Any, offset: Any, first: Any, rows: Any, head: Any, group: Any, width: Any, factor: Any
) -> None:
    """The scaled queries of a part that share a head of keys, row by row, to the rows from `offset` on."""
    for r in range(rows):
        for d in range(q.shape[2]):
            rows_q[(offset + r) * width + d] = q[first + r // group, head * group + r % group, d] * factor


@_inner
def _finish(
    o: Any, total: Any, offset: Any, out: Any, first: Any, rows: Any, head: Any, group: Any, width: Any
) -> None:
    """Divide the output of the rows from `offset` on by their sums of weights."""
    for r in range(rows):
        row, weights = offset + r, _ZERO
        for lane in range(row * LANES, row * LANES + LANES):
            weights += total[lane]
        for d in range(out.shape[2]):
            out[first + r // group, head * group + r % group, d] = o[row * width + d] / weights


@_part
def _score_tile(
    s: Any,
    q: Any,
    k: Any,
    k_scale: Any,
    near: Any,
    near_scale: Any,
    table: Any,
    place: Any,
    share: Any,
    dim: Any,
    width: Any,
    see: Any,
) -> None:
    """Scores of some heads' query rows with a tile: run by run, and of each run head by head.

    Args:
        near, near_scale: room for a tile that must be brought together; else empty.
        place: begin of the tile, positions in it, slots in a block, heads of keys.
        share: the first head, where they end, rows that each has room for, the first row of those meant.
    """
    begin, here, size, heads = place
    straight, at = size % LANES == 0, _FIRST
    while at < here:
        run = (at, _end_of_run(begin, at, here, size, straight))
        for head in range(share[0], share[1]):
            slot, keys, scale = _slot(table, begin + at, size, heads, head), k, k_scale
            if not straight:
                slot, keys, scale = _FIRST, near, near_scale
                _bring(k, near, table, begin, here, size, heads, head, width, LANES)
                _bring_scales(k_scale, near_scale, table, begin, here, size, heads, head)
            _score_run(s, q, head * share[2] + share[3], keys, slot, scale, run, dim, width, see)
        at = run[1]


@_part
def _value_tile(
    o: Any,
    s: Any,
    v: Any,
    v_scale: Any,
    near: Any,
    near_scale: Any,
    table: Any,
    place: Any,
    share: Any,
    width: Any,
    see: Any,
) -> None:
    """As `_score_tile`: what a tile's values add to the outputs."""
    begin, here, size, heads = place
    straight, at = size % LANES == 0, _FIRST
    while at < here:
        run = (at, _end_of_run(begin, at, here, size, straight))
        for head in range(share[0], share[1]):
            slot, values, scale = _slot(table, begin + at, size, heads, head), v, v_scale
            if not straight:
                slot, values, scale = _FIRST, near, near_scale
                _bring(v, near, table, begin, here, size, heads, head, width, 1)
                _bring_scales(v_scale, near_scale, table, begin, here, size, heads, head)
            _value_run(o, s, head * share[2] + share[3], values, slot, scale, run, width, see)
        at = run[1]


@_inner
def _pass(state: Any, pool: Any, table: Any, reach: Any, share: Any, shape: Any, rows: Any) -> None:
    """Take some rows of queries through a range of positions, tile by tile.

    A tile of keys is taken block by block, and of a block head by head: so they lie in memory. One head after the other
    would read runs of a few kilobytes, at half the speed.

    Args:
        state: queries, outputs, sums of weights, largest scores, scores.
        pool: k, v, their scales, room to bring a tile and its scales together.
        reach: first position, where they end, position of the first query, positions that a query sees.
        share: see `_score_tile`.
        shape: query rows a position, head_dim, the same in whole vectors, slots in a block, heads of keys.
    """
    q, o, total, top, s = state
    k, v, k_scale, v_scale, near, near_scale = pool
    group, dim, width, size, heads = shape
    for begin in range(reach[0] // TILE * TILE, reach[1], TILE):
        place, see = (begin, min(TILE, reach[1] - begin), size, heads), (reach[2] - begin, rows, group, reach[3])
        _score_tile(s, q, k, k_scale, near, near_scale, table, place, share, dim, width, see)
        for head in range(share[0], share[1]):
            _weigh(s, o, head * share[2] + share[3], width, total, top, see)
        _value_tile(o, s, v, v_scale, near, near_scale, table, place, share, width, see)


@_part
def _attend_tile(
    q: Any, out: Any, factor: Any, state: Any, pool: Any, tables: Any, parts: Any, tile: Any, heads: Any, shape: Any
) -> None:
    """Some heads of a tile of queries: what all parts share, then what each has of its own, the last part first.

    A quad of rows may run over into those after its part, whose output is out already then.

    Args:
        tile: first part, where they end, queries in all, positions shared (none behind a window), window.
        heads: the first, where they end, rows that each has room for.
    """
    first, end, queries, shared, window = tile
    group, width, row = shape[0], shape[2], _FIRST
    for p in range(first, end):
        for head in range(heads[0], heads[1]):
            rows = parts[p, 2] * group
            _begin(q, state[0], head * heads[2] + row, parts[p, 1], rows, head, group, width, factor)
        row += parts[p, 2] * group
    share = (heads[0], heads[1], heads[2], _FIRST)
    _pass(state, pool, tables[parts[first, 0]], (_FIRST, shared, shared, window), share, shape, queries * group)
    for p in range(end - 1, first - 1, -1):
        rows, position = parts[p, 2] * group, parts[p, 3]
        row -= rows
        share = (heads[0], heads[1], heads[2], row)
        reach = (max(shared, position - window + 1), position + parts[p, 2], position, window)
        _pass(state, pool, tables[parts[p, 0]], reach, share, shape, rows)
        for head in range(heads[0], heads[1]):
            _finish(state[1], state[2], head * heads[2] + row, out, parts[p, 1], rows, head, group, width)


def _attend_share(
    q: Any,
    k: Any,
    v: Any,
    k_scale: Any,
    v_scale: Any,
    tables: Any,
    parts: Any,
    tiles: Any,
    out: Any,
    factor: Any,
    heads: Any,
    size: Any,
    window: Any,
    begin_item: Any,
    end_item: Any,
) -> int:
    """One thread's part of `attend`: pairs of a tile of queries and a head, counted through. Returns 1; failed, 0."""
    dim, group, straight = q.shape[2], q.shape[1] // heads, size % LANES == 0
    width = (dim + LANES - 1) // LANES * LANES
    most = _FIRST
    for i in range(begin_item // heads, (end_item + heads - 1) // heads):
        most = max(most, tiles[i, 2] * group + QUAD - 1)
    rows_q, o = np.zeros(heads * most * width, np.float32), np.empty(heads * most * width, np.float32)
    total, top = np.empty(heads * most * LANES, np.float32), np.empty(heads * most, np.float32)
    s, near = np.empty(heads * most * TILE, np.float32), np.empty(0 if straight else TILE * width, k.dtype)
    near_scale = np.empty(0 if straight or len(k_scale) == 0 else TILE, np.float32)
    state, pool = (rows_q, o, total, top, s), (k, v, k_scale, v_scale, near, near_scale)
    for i in range(begin_item // heads, (end_item + heads - 1) // heads):
        _fill(o, heads * most * width, _ZERO)
        _fill(total, heads * most * LANES, _ZERO)
        _fill(top, heads * most, _NEVER)
        tile = (tiles[i, 0], tiles[i, 1], tiles[i, 2], tiles[i, 3], window)
        some = (max(0, begin_item - i * heads), min(heads, end_item - i * heads), most)
        _attend_tile(q, out, factor, state, pool, tables, parts, tile, some, (group, dim, width, size, heads))
    return 1


@_inner
def _first_item(costs: Any, heads: Any, thread: Any, threads: Any) -> Any:
    """Where a thread's pairs of a tile and a head begin, so that all threads' cost about the same."""
    last, i = len(costs) - 1, 0
    target = costs[last] * heads * thread // threads
    while i < last and costs[i + 1] * heads <= target:
        i += 1
    return i * heads + ((target - costs[i] * heads) // (costs[i + 1] - costs[i]) if i < last else 0)


@intrinsic
def _call(typing: Any, address: Any, arguments: Any) -> Any:
    """What the compiled function at an address makes of a tuple of arguments, a whole number.

    What numba calls by name it compiles again as a part of every caller, and `prange` is five callers deep.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments]
        function = ir.FunctionType(ir.IntType(64), kinds).as_pointer()
        return builder.call(builder.inttoptr(values[0], function), cgutils.unpack_tuple(builder, values[1]))

    return types.int64(address, arguments), emit


@_parallel
def attend(
    q: Any,
    k: Any,
    v: Any,
    k_scale: Any,
    v_scale: Any,
    tables: Any,
    parts: Any,
    tiles: Any,
    costs: Any,
    out: Any,
    factor: Any,
    heads: Any,
    size: Any,
    window: Any,
    threads: Any,
    share: Any,
) -> int:
    """Attention of every tile of queries, through the block tables.

    Args:
        q: [T, n_head, head_dim] float32.
        k, v: a layer's pool, flat (see `KVLayer`).
        k_scale, v_scale: flat float32, a scale a slot and head; empty if there are none.
        tables: [S, max_blocks] int32.
        parts, tiles, costs: see `QueryTiles`.
        out: [T, n_head, head_dim] float32.
        factor: on the scores, float32.
        heads: of keys and values.
        size: slots in a block.
        window: positions that a query sees, its own the last of them.
        threads: how many share the work.
        share: the address of what does the part of one (see `warm_up`).

    Returns:
        How many have done their part.
    """
    done = 0
    for thread in prange(threads):
        at = np.int64(thread)
        begin, end = _first_item(costs, heads, at, threads), _first_item(costs, heads, at + 1, threads)
        arguments = (q, k, v, k_scale, v_scale, tables, parts, tiles, out, factor, heads, size, window, begin, end)
        done += _call(share, arguments)
    return done


@_parallel
def store(k: Any, v: Any, slots: Any, to_k: Any, to_v: Any, size: Any) -> None:
    """Write new K/V [T, n_kv_head, head_dim], of the pool's dtype, to flat slots [T] of a layer's flat pool."""
    heads, dim = k.shape[1], k.shape[2]
    width = (dim + LANES - 1) // LANES * LANES
    lanes = LANES if size % LANES == 0 else 1
    for t in prange(len(slots)):
        block, offset = slots[t] // size, slots[t] % size
        for head in range(heads):
            row = (block * heads + head) * size + offset
            for d in range(dim):
                to_v[row * width + d] = v[t, head, d]
            group = row // lanes * lanes * width + offset % lanes
            for d in range(dim):
                to_k[group + d * lanes] = k[t, head, d]


@_inner
def _quantise(x: Any, to: Any, at: Any, step: Any) -> Any:
    """Write a vector as int8 to to[at], to[at + step] ..., and return its scale."""
    largest = _ZERO
    for d in range(len(x)):
        largest = max(largest, abs(x[d]))
    scale = largest / F(127.0)
    for d in range(len(x)):
        to[at + d * step] = np.int8(np.rint(x[d] / scale)) if scale > _ZERO else np.int8(0)
    return scale


@_parallel
def store_int8(k: Any, v: Any, slots: Any, to_k: Any, to_v: Any, k_scale: Any, v_scale: Any, size: Any) -> None:
    """As `store`, from float32 to int8 with a scale a slot."""
    heads, dim = k.shape[1], k.shape[2]
    width = (dim + LANES - 1) // LANES * LANES
    lanes = LANES if size % LANES == 0 else 1
    for t in prange(len(slots)):
        block, offset = slots[t] // size, slots[t] % size
        for head in range(heads):
            row = (block * heads + head) * size + offset
            k_scale[row] = _quantise(k[t, head], to_k, row // lanes * lanes * width + offset % lanes, lanes)
            v_scale[row] = _quantise(v[t, head], to_v, row * width, 1)


@cache
def warm_up(dtype: str) -> Any:
    """Compile for a pool of this dtype, or load what an earlier process compiled.

    Nothing is compiled later: arrays of one row, which count as contiguous, would else get code of their own.

    Returns:
        What does one thread's part of `attend`; it must live as long as its `address` is used.
    """
    number, whole = numba.from_dtype(np.dtype(dtype)), types.int64
    pool, ints, scales = types.Array(number, 1, "C"), types.Array(whole, 1, "C"), types.Array(types.float32, 1, "C")
    rows, out = types.Array(types.float32, 3, "A"), types.Array(types.float32, 3, "C")
    new = types.Array(number, 3, "A")
    tables, tiles = types.Array(types.int32, 2, "C"), types.Array(whole, 2, "C")
    if number == types.int8:
        _compile(store_int8, types.void(rows, rows, ints, pool, pool, scales, scales, whole))
    else:
        _compile(store, types.void(new, new, ints, pool, pool, whole))
    before, after = (rows, pool, pool, scales, scales, tables, tiles, tiles), (out, types.float32, whole, whole, whole)
    _compile(attend, whole(*before, ints, *after, whole, whole))
    return numba.cfunc(whole(*before, *after, whole, whole), cache=True, error_model="numpy")(_attend_share)


def _compile(function: Any, signature: Any) -> None:
    function.disable_compile(False)
    function.compile(signature)
    function.disable_compile()
