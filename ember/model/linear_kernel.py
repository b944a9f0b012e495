"""The compiled part of a linear layer (numba): the matrix product, and what a row goes through before and after it.

A row's result depends on the row alone, to the bit, and on nothing of the machine but that it has a fused multiply-add:

    y[m, n] = bias[n], then y[m, n] += x[m, k] * w[n, k] for k in order, each an `fma`

A vector's lanes are neighbouring n, so nothing is summed across them. The height of the matrix, the number of threads,
the width of the vectors and all that follows from them only say when a number is computed, not how. The blocking is
that of Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, 2008):

    w     [groups of panels][blocks of k][panels][k of the block][WIDTH columns]    packed once; read front to back
    x     a block of k of up to HEIGHT rows is copied, so that it stays in the cache while a group of panels passes
    tile  up to ROWS rows by WIDTH columns of y, held in registers over a block of k

Weights of 8 bits, with a scale a column, are multiplied by x rounded to 16 or 8 bits, with a scale a row (see
`quantized`). Their sums are whole numbers and exact in 32 bits, so any order will do:

    w     [panels][pairs of k][WIDTH columns][2 k]    a panel is passed by as many rows as fit into the cache
    or    [panels][quads of k][WIDTH columns][4 k]    an int32 each: for x in 8 bits, where an instruction takes quads,
                                                      of x as x + 128 and w; sums begin with -128 * (w's in all)
    y     the sums, then float32(sum) * the column's scale * the row's scale + bias, each rounded

Other weights are float32, float16 (here uint16) or bfloat16 (int16), and are widened as they are loaded. tanh and erf
are Eigen's rational approximations, a few units in the last place off. No library is called (the ends of PyTorch's own
vectors, where other code runs, move with the height of the matrix); `contract` allows fused multiply-add.

All compiled code is in this one file: numba's cache on the disk is renewed when the file changes, not what it imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending, njit, prange, types
from numba.core import cgutils

from ember.kernel_cache import ensure_kernel_cache, patience
from ember.model.processor import pair_instruction, quad_instruction, vector_lanes
from ember.threads import numba_follows_torch

ensure_kernel_cache()

LANES = vector_lanes()
VECTORS = 2
"""Vectors of columns in a tile."""
WIDTH = VECTORS * LANES
"""Columns of a panel: rows of the weight."""
ROWS = 12 if LANES == 16 else 6
"""Most rows of a tile: ROWS * VECTORS sums, and what they are made of, fill the registers."""
HEIGHT = 240
"""Rows of x that pass all panels before the next ones do: with DEPTH they fill about half of a 1 MB cache."""
DEPTH = 384
"""Most k in a block."""
UNROLL = 2
"""k a turn of the innermost loop."""
STRIPS = 4
"""Strips of a result that are computed together (see `multiply_strips`)."""
_AHEAD = 2048  # bytes of a strip's weight that are fetched early
_STRIDE = DEPTH + 16  # of the copied rows: no power of two, so that rows do not share sets of the cache

NONE, GELU_TANH, GELU_ERF, RELU = range(4)
ACTIVATIONS: Mapping[str, int] = MappingProxyType({"none": NONE, "gelu_new": GELU_TANH, "gelu": GELU_ERF, "relu": RELU})
INT8_DEPTH = 1536
"""Most k in a block of 8-bit weights."""
INT8_UNROLL = 4
"""k a turn of the innermost loop of 8-bit weights: two pairs, or a quad."""
SHIFT = 128
"""Added to x of 8 bits in quads, whose instruction takes it without a sign."""
LEVELS = 127
"""Largest weight of 8 bits; the smallest is its negative."""

_INT8_STRIDE = INT8_DEPTH + 32
_INT8_CACHE = 1 << 17  # numbers of x, of 16 bits, that stay in half of a cache of 512 KB
_MAGNITUDE = np.int32(0x7FFFFFFF)
F = np.float32
_carray: Any = numba.carray  # type: ignore[attr-defined]
intrinsic: Any = extending.intrinsic  # its own type hints count `typing` as an argument of the call
_ZERO, _HALF, _ONE, _SMALLEST, _INFINITE, _NAN = F(0), F(0.5), F(1), F(1e-30), F(np.inf), F(np.nan)
_CUBIC, _SQRT_2_BY_PI, _SQRT_HALF = F(0.044715), F(0.7978845608028654), F(0.7071067811865476)
_TANH_END = F(7.90531110763549805)
_T1, _T3, _T5, _T7 = F(4.89352455891786e-03), F(6.37261928875436e-04), F(1.48572235717979e-05), F(5.12229709037114e-08)
_T9, _T11, _T13 = F(-8.60467152213735e-11), F(2.00018790482477e-13), F(-2.76076847742355e-16)
_TD0, _TD2, _TD4, _TD6 = (
    F(4.89352518554385e-03),
    F(2.26843463243900e-03),
    F(1.18534705686654e-04),
    F(1.19825839466702e-06),
)
_ERF_END = F(4)
_E1, _E3, _E5 = F(-1.60960333262415e-02), F(-2.95459980854025e-03), F(-7.34990630326855e-04)
_E7, _E9 = F(-5.69250639462346e-05), F(-2.10102402082508e-06)
_E11, _E13 = F(2.77068142495902e-08), F(-2.72614225801306e-10)
_ED0, _ED2, _ED4 = F(-1.42647390514189e-02), F(-7.37332916720468e-03), F(-1.68282697438203e-03)
_ED6, _ED8 = F(-2.13374055278905e-04), F(-1.45660718464996e-05)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _tanh(x: Any) -> Any:
    x = max(min(x, _TANH_END), -_TANH_END)
    z = x * x
    p = (((((_T13 * z + _T11) * z + _T9) * z + _T7) * z + _T5) * z + _T3) * z + _T1
    return x * p / (((_TD6 * z + _TD4) * z + _TD2) * z + _TD0)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _erf(x: Any) -> Any:
    x = max(min(x, _ERF_END), -_ERF_END)
    z = x * x
    p = (((((_E13 * z + _E11) * z + _E9) * z + _E7) * z + _E5) * z + _E3) * z + _E1
    return x * p / ((((_ED8 * z + _ED6) * z + _ED4) * z + _ED2) * z + _ED0)


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _activate(y: Any, activation: Any) -> None:
    """y = activation(y), for a run of a row."""
    if activation == GELU_TANH:
        for n in range(len(y)):
            v = y[n]
            y[n] = _HALF * v * (_ONE + _tanh(_SQRT_2_BY_PI * (v + _CUBIC * v * v * v)))
    elif activation == GELU_ERF:
        for n in range(len(y)):
            v = y[n]
            y[n] = _HALF * v * (_ONE + _erf(v * _SQRT_HALF))
    elif activation == RELU:
        for n in range(len(y)):
            v = y[n]
            y[n] = _ZERO if v < _ZERO else v


_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)
_MULTIPLY_ADD = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
_PREFETCH = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])


def _at(builder: Any, pointer: Any, *offsets: Any) -> Any:
    for offset in offsets:
        pointer = builder.gep(pointer, [ir.Constant(_INDEX, offset) if isinstance(offset, int) else offset])
    return pointer


def _load(builder: Any, pointer: Any, stored: str = "float32") -> Any:
    """A vector from there, as float32."""
    kind = {"float32": _FLOAT, "uint16": ir.HalfType(), "int16": ir.IntType(16)}[stored]
    raw = builder.load(
        builder.bitcast(pointer, ir.VectorType(kind, LANES).as_pointer()), align=2 + 2 * (kind == _FLOAT)
    )
    if stored == "uint16":
        return builder.fpext(raw, _FLOATS)
    if stored == "int16":
        high = builder.shl(builder.zext(raw, _INTS), ir.Constant(_INTS, [16] * LANES))
        return builder.bitcast(high, _FLOATS)
    return raw


def _spread(builder: Any, value: Any, kind: Any = _FLOATS) -> Any:
    """The number in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _fetch_lines(builder: Any, place: Any, length: int) -> None:
    """Begin to bring the lines of so many bytes to the second level of the cache."""
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], _PREFETCH)
    read, second_level, data = (ir.Constant(_INT, number) for number in (0, 2, 1))
    for line in range(0, length, 64):
        builder.call(function, [_at(builder, place, line), read, second_level, data])


def _fetch_early(builder: Any, ahead: list[Any], k: Any, length: int) -> None:
    """The lines of so many bytes of the next block of the weight, from ahead[0] on, ahead[1] bytes a k.

    Each tile of a panel fetches its part of the block after it: so the memory is never idle while tiles are computed.
    """
    _fetch_lines(builder, _at(builder, ahead[0], builder.mul(k, ahead[1])), length)


def _ahead(builder: Any, w: Any, offsets: Any) -> list[Any]:
    """Where in the weight to fetch early, and the step, of both in bytes."""
    begin, step = cgutils.unpack_tuple(builder, offsets, 2)
    return [_at(builder, builder.bitcast(w, _BYTES), begin), step]


def _joined(builder: Any, values: list[list[Any]], blocks: list[Any]) -> list[Any]:
    """The values that the block gives from which this place was reached; values[i] are those of blocks[i]."""
    joined = []
    for choices in zip(*values, strict=True):
        joined.append(builder.phi(choices[0].type))
        for value, block in zip(choices, blocks, strict=True):
            joined[-1].add_incoming(value, block)
    return joined


def _loop(
    builder: Any, depth: Any, step: int, sums: list[Any], turn: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """sums = turn(k, sums) for k in 0, step .. depth, held in registers."""
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    k, *held = phis = _joined(builder, [[ir.Constant(_INDEX, 0), *sums]], [before])
    new = [builder.add(k, ir.Constant(_INDEX, step)), *turn(k, held)]
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", new[0], depth), loop, after)
    builder.position_at_end(after)
    return new[1:]


def _float_turn(builder: Any, x: Any, w: Any, ahead: Any, k: Any, sums: list[Any], stored: str) -> list[Any]:
    """sums[row * VECTORS + v] += x[row, k] * w[k, v] for UNROLL k."""
    multiply_add = cgutils.get_or_insert_function(builder.module, _MULTIPLY_ADD, f"llvm.fma.v{LANES}f32")
    new, here = list(sums), _at(builder, w, builder.mul(k, ir.Constant(_INDEX, WIDTH)))
    _fetch_early(builder, ahead, k, UNROLL * WIDTH * (4 if stored == "float32" else 2))
    for turn in range(UNROLL):
        row_of_w = _at(builder, here, turn * WIDTH)
        columns = [_load(builder, _at(builder, row_of_w, v * LANES), stored) for v in range(VECTORS)]
        for row in range(len(sums) // VECTORS):
            factor = _spread(builder, builder.load(_at(builder, x, k, row * _STRIDE + turn)))
            for v in range(VECTORS):
                at = row * VECTORS + v
                new[at] = builder.call(multiply_add, [factor, columns[v], new[at]])
    return new


def _begin(builder: Any, first: Any, fresh: Callable[[], list[Any]], left: list[Any]) -> list[Any]:
    """The sums so far: fresh ones, or what an earlier block of k left there."""
    with builder.if_else(first) as (then, otherwise):
        with then:
            new, from_then = fresh(), builder.block
        with otherwise:
            old, from_otherwise = [builder.load(place, align=4) for place in left], builder.block
    return _joined(builder, [new, old], [from_then, from_otherwise])


def _load_all(builder: Any, row: Any) -> list[Any]:
    """The columns of a panel."""
    return [_load(builder, _at(builder, row, v * LANES)) for v in range(VECTORS)]


def _places(builder: Any, y: Any, stride: Any, rows: int, kind: Any) -> list[Any]:
    """Where the vectors of a tile of y are, a row after the other."""
    starts = [builder.mul(stride, ir.Constant(_INDEX, row)) for row in range(rows)]
    return [
        builder.bitcast(_at(builder, y, start, v * LANES), kind.as_pointer())
        for start in starts
        for v in range(VECTORS)
    ]


def _store(builder: Any, values: list[Any], places: list[Any]) -> None:
    for value, place in zip(values, places, strict=True):
        builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=4)


def _float_tile(
    builder: Any, rows: int, data: list[Any], ahead: Any, *, depth: Any, stride: Any, first: Any, stored: str
) -> None:
    x, w, y, bias = data
    places = _places(builder, y, stride, rows, _FLOATS)
    sums = _begin(builder, first, lambda: _load_all(builder, bias) * rows, places)
    sums = _loop(builder, depth, UNROLL, sums, lambda k, held: _float_turn(builder, x, w, ahead, k, held, stored))
    _store(builder, sums, places)


def _by_height(builder: Any, height: Any, emit: Callable[[int], None]) -> None:
    """Code for a tile of each height, 1 to ROWS, of which the right one runs."""
    end = builder.append_basic_block()
    switch = builder.switch(height, end)
    for rows in range(1, ROWS + 1):
        block = builder.append_basic_block()
        switch.add_case(ir.Constant(_INDEX, rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(end)
    builder.position_at_end(end)


def _pointers(context: Any, builder: Any, kinds: Any, arrays: Any, offsets: Any) -> list[Any]:
    """Where in each of the arrays a tile begins."""
    made = [context.make_array(kind)(context, builder, array) for kind, array in zip(kinds, arrays, strict=True)]
    places = cgutils.unpack_tuple(builder, offsets, len(made))
    return [_at(builder, array.data, place) for array, place in zip(made, places, strict=True)]


@intrinsic
def _tile(
    typing: Any, rows: Any, x: Any, w: Any, y: Any, bias: Any, at: Any, ahead: Any, depth: Any, stride: Any, first: Any
) -> Any:
    """Add a block of k to a tile of y, or begin it.

    Args:
        rows: 1 to ROWS.
        x, w, y, bias: flat; copied rows with a stride of _STRIDE, the weight, the result, the padded bias.
        at: where in each of them.
        ahead: where in the weight the part of the next block begins that is fetched, and how much a k; in bytes.
        depth: k in the block, a multiple of UNROLL.
        stride: of the rows of y.
        first: whether this is the first block of k.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = _pointers(context, builder, signature.args[1:5], values[1:5], values[5])
        ahead = _ahead(builder, context.make_array(w)(context, builder, values[2]).data, values[6])
        rest = {"depth": values[7], "stride": values[8], "first": values[9], "stored": w.dtype.name}
        _by_height(builder, values[0], lambda height: _float_tile(builder, height, data, ahead, **rest))
        return context.get_dummy_value()

    number, offsets, two = types.intp, types.UniTuple(types.intp, 4), types.UniTuple(types.intp, 2)
    return types.void(number, x, w, y, bias, offsets, two, number, number, types.boolean), emit


def _sum_of_pairs(builder: Any, x: Any, w: Any) -> Any:
    """x[2i] * w[2i] + x[2i + 1] * w[2i + 1] of 16-bit numbers, in 32 bits. LLVM makes VNNI of this and a sum."""
    if name := pair_instruction(LANES):
        function = ir.FunctionType(_INTS, [_WORDS, _WORDS])
        return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [x, w])
    undefined, products = ir.Constant(_WORDS, ir.Undefined), []
    for parity in (0, 1):
        chosen = ir.Constant(_INTS, list(range(parity, 2 * LANES, 2)))
        halves = (builder.sext(builder.shuffle_vector(v, undefined, chosen), _INTS) for v in (x, w))
        products.append(builder.mul(*halves))
    return builder.add(*products)


def _load_ints(builder: Any, row: Any) -> list[Any]:
    """The columns of a panel, whole numbers."""
    places = [builder.bitcast(_at(builder, row, v * LANES), _INTS.as_pointer()) for v in range(VECTORS)]
    return [builder.load(place, align=4) for place in places]


def _load_pairs(builder: Any, w: Any) -> list[Any]:
    """Two k of each column of a panel, as 16-bit numbers."""
    stored = ir.VectorType(ir.IntType(8), 2 * LANES).as_pointer()
    places = [builder.bitcast(_at(builder, w, v * 2 * LANES), stored) for v in range(VECTORS)]
    return [builder.sext(builder.load(place, align=1), _WORDS) for place in places]


def _int8_turn(builder: Any, x: Any, w: Any, ahead: Any, k: Any, sums: list[Any]) -> list[Any]:
    """As `_float_turn`, for INT8_UNROLL k, in pairs or a quad."""
    _fetch_early(builder, ahead, k, INT8_UNROLL * WIDTH)
    return (_quad_turn if w.type.pointee == _INT else _pairs_turn)(builder, x, w, k, sums)


def _quad_turn(builder: Any, x: Any, w: Any, k: Any, sums: list[Any]) -> list[Any]:
    new, here = list(sums), _at(builder, w, builder.mul(k, ir.Constant(_INDEX, WIDTH // INT8_UNROLL)))
    function = ir.FunctionType(_INTS, [_INTS] * 3)
    multiply_add = cgutils.get_or_insert_function(builder.module, function, str(quad_instruction(LANES)))
    columns = _load_ints(builder, here)
    for row in range(len(sums) // VECTORS):
        place = builder.bitcast(_at(builder, x, k, row * _INT8_STRIDE), _INT.as_pointer())
        factors = _spread(builder, builder.load(place, align=4), _INTS)
        for v in range(VECTORS):
            at = row * VECTORS + v
            new[at] = builder.call(multiply_add, [new[at], factors, columns[v]])
    return new


def _pairs_turn(builder: Any, x: Any, w: Any, k: Any, sums: list[Any]) -> list[Any]:
    new, here = list(sums), _at(builder, w, builder.mul(k, ir.Constant(_INDEX, WIDTH)))
    for pair in range(0, INT8_UNROLL, 2):
        columns = _load_pairs(builder, _at(builder, here, pair * WIDTH))
        for row in range(len(sums) // VECTORS):
            place = builder.bitcast(_at(builder, x, k, row * _INT8_STRIDE + pair), _INT.as_pointer())
            factors = builder.bitcast(_spread(builder, builder.load(place, align=4), _INTS), _WORDS)
            for v in range(VECTORS):
                at = row * VECTORS + v
                new[at] = builder.add(new[at], _sum_of_pairs(builder, factors, columns[v]))
    return new


def _scaled(builder: Any, sums: list[Any], bias: Any, scales: Any, row_scales: Any) -> list[Any]:
    """sum * the column's scale * the row's + bias, in this order, each rounded."""
    biases, columns = _load_all(builder, bias), _load_all(builder, scales)
    rows = [_spread(builder, builder.load(_at(builder, row_scales, row))) for row in range(len(sums) // VECTORS)]
    done = []
    for at, value in enumerate(sums):
        scaled = builder.fmul(builder.sitofp(value, _FLOATS), columns[at % VECTORS])
        done.append(builder.fadd(builder.fmul(scaled, rows[at // VECTORS]), biases[at % VECTORS]))
    return done


def _int8_tile_of(
    builder: Any, rows: int, data: list[Any], ahead: Any, *, depth: Any, stride: Any, first: Any, last: Any
) -> None:
    x, w, y, starts, *ending = data
    places = _places(builder, y, stride, rows, _INTS)
    sums = _begin(builder, first, lambda: _load_ints(builder, starts) * rows, places)
    sums = _loop(builder, depth, INT8_UNROLL, sums, lambda k, held: _int8_turn(builder, x, w, ahead, k, held))
    with builder.if_else(last) as (then, otherwise):
        with then:
            _store(builder, _scaled(builder, sums, *ending), places)
        with otherwise:
            _store(builder, sums, places)


@intrinsic
def _int8_tile(
    typing: Any, rows: Any, x: Any, w: Any, y: Any, ending: Any, at: Any, ahead: Any, depth: Any, stride: Any, ends: Any
) -> Any:
    """Add a block of k to a tile of y, which holds whole numbers until its last block.

    Args:
        rows: 1 to ROWS.
        x, w, y: flat; rounded rows with a stride of _INT8_STRIDE, the weight, the result.
        ending: what the sums begin with, the padded bias, the scales of the weight and of x.
        at: where in each of these seven.
        ahead: as of `_tile`.
        depth: k in the block, a multiple of INT8_UNROLL.
        stride: of the rows of y.
        ends: whether this is the first block of k, and whether it is the last.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arrays = [*values[1:4], *cgutils.unpack_tuple(builder, values[4], 4)]
        data = _pointers(context, builder, [x, w, y, *ending], arrays, values[5])
        ahead = _ahead(builder, context.make_array(w)(context, builder, values[2]).data, values[6])
        first, last = cgutils.unpack_tuple(builder, values[9], 2)
        rest = {
            "depth": values[7],
            "stride": values[8],
            "first": _as_bit(builder, first),
            "last": _as_bit(builder, last),
        }
        _by_height(builder, values[0], lambda height: _int8_tile_of(builder, height, data, ahead, **rest))
        return context.get_dummy_value()

    number, offsets, two = types.intp, types.UniTuple(types.intp, 7), types.UniTuple(types.intp, 2)
    return types.void(number, x, w, y, ending, offsets, two, number, number, types.UniTuple(types.boolean, 2)), emit


def _as_bit(builder: Any, flag: Any) -> Any:
    """A boolean out of a tuple, where it is a byte."""
    return flag if flag.type == ir.IntType(1) else builder.trunc(flag, ir.IntType(1))


@intrinsic
def _fetch_row(typing: Any, array: Any, index: Any) -> Any:
    """Begin to bring WIDTH numbers of a flat array, from `index` on, into the cache."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = _at(builder, context.make_array(array)(context, builder, values[0]).data, values[1])
        _fetch_lines(builder, builder.bitcast(place, _BYTES), WIDTH * 4)
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@intrinsic
def _floats(typing: Any, address: Any) -> Any:
    """float32 at an address."""
    return types.CPointer(types.float32)(types.intp), lambda context, builder, signature, values: builder.inttoptr(
        values[0], _FLOAT.as_pointer()
    )


@intrinsic
def _float_of(typing: Any, bits: Any) -> Any:
    """The float32 of these bits."""
    return types.float32(types.int32), lambda context, builder, signature, values: builder.bitcast(values[0], _FLOAT)


@njit(error_model="numpy")
def _copy_rows(x: Any, begin: Any, stride: Any, rows: Any, depth: Any, to: Any) -> None:
    """A block of k of some rows, with an even number of k: one more is 0, as is the weight's."""
    for row in range(rows):
        source, target = begin + row * stride, row * _STRIDE
        for k in range(depth):
            to[target + k] = x[source + k]
        for k in range(depth, depth + depth % UNROLL):
            to[target + k] = _ZERO


@njit(error_model="numpy")
def _finish_tile(y: Any, begin: Any, stride: Any, rows: Any, more: Any, rest: Any) -> None:
    """The end of a tile that has all its sums: activation, then what is added to it, if anything (`step` > 0)."""
    columns, activation, at, step = rest
    for row in range(rows):
        run = y[begin + row * stride : begin + row * stride + columns]
        _activate(run, activation)
        if step > 0:
            for n in range(columns):
                run[n] += more[at + row * step + n]


@njit(error_model="numpy")
def _fetch_more(more: Any, at: Any, step: Any, rows: Any) -> None:
    """Bring what `_finish_tile` will add to a tile into the cache, while its sums are computed."""
    if step > 0:
        for row in range(rows):
            _fetch_row(more, at + row * step)


@njit(error_model="numpy")
def _rows_at(address: Any, rows: Any, stride: Any, columns: Any) -> Any:
    """The memory of so many rows, flat."""
    return _carray(_floats(address), ((rows - 1) * stride + columns,))


@njit(error_model="numpy")
def _share_of(part: Any, cuts: Any, rows: Any, panels: Any) -> Any:
    """The rows and the panels of a part, each (begin, end)."""
    row, panel = part // cuts[1], part % cuts[1]
    return (
        (rows * row // cuts[0], rows * (row + 1) // cuts[0]),
        (panels * panel // cuts[1], panels * (panel + 1) // cuts[1]),
    )


@njit(error_model="numpy")
def _next_block(begin: Any, depth: Any, width: Any, tile: Any, tiles: Any) -> Any:
    """The part of the block after this one that a tile fetches early: where it begins, and how much a k; in bytes."""
    step = (width + tiles - 1) // tiles
    return begin + depth * (width + tile * step), step


@njit(error_model="numpy")
def _multiply_share(
    x: Any, w: Any, bias: Any, more: Any, y: Any, shape: Any, activation: Any, rows: Any, panels: Any, copied: Any
) -> None:
    """The part of `multiply` that is in these rows and panels, each (begin, end)."""
    x_stride, more_stride, y_stride, width, inner, depth, group = shape
    for m in range(rows[0], rows[1], HEIGHT):
        height = min(HEIGHT, rows[1] - m)
        tiles = (height + ROWS - 1) // ROWS
        for first in range(panels[0] // group * group, panels[1], group):
            for k in range(0, inner, depth):
                taken = min(depth, inner - k)
                even = taken + taken % UNROLL
                _copy_rows(x, m * x_stride + k, x_stride, height, taken, copied)
                for panel in range(max(first, panels[0]), min(first + group, panels[1])):
                    n = panel * WIDTH
                    w_at = (first * (inner + inner % UNROLL) + k * group + (panel - first) * even) * WIDTH
                    for t in range(tiles):
                        begin, end = height * t // tiles, height * (t + 1) // tiles
                        y_at = (m + begin) * y_stride + n
                        at = (begin * _STRIDE, w_at, y_at, n)
                        ahead = _next_block(w_at * w.itemsize, even, WIDTH * w.itemsize, t, tiles)
                        last, more_at = k + taken == inner, (m + begin) * more_stride + n
                        if last:
                            _fetch_more(more, more_at, more_stride, end - begin)
                        _tile(end - begin, copied, w, y, bias, at, ahead, even, y_stride, k == 0)
                        if last and (activation != NONE or more_stride > 0):
                            rest = (min(WIDTH, width - n), activation, more_at, more_stride)
                            _finish_tile(y, y_at, y_stride, end - begin, more, rest)


@njit(parallel=True, cache=True, error_model="numpy")
def multiply(w: Any, bias: Any, addresses: Any, shape: Any, activation: Any, height: Any, cuts: Any) -> None:
    """y = activation(x w^T + bias) + more.

    Args:
        w: flat, packed (see the top of this file).
        bias: [panels * WIDTH] float32.
        addresses: of x, more and y, float32; rows with the strides that `shape` says; `more` has stride 0 where there
            is none.
        shape: strides of x, more and y; columns of y; k in all; k in a block; panels in a group.
        activation: a number of ACTIVATIONS.
        height: rows.
        cuts: the work is done in cuts[0] parts of the rows times cuts[1] of the panels.
    """
    count = (shape[3] + WIDTH - 1) // WIDTH
    for part in prange(cuts[0] * cuts[1]):
        rows, panels = _share_of(part, cuts, height, count)
        copied = np.empty(min(HEIGHT, rows[1] - rows[0]) * _STRIDE, np.float32)
        x = _rows_at(addresses[0], height, shape[0], shape[4])
        more = _rows_at(addresses[1], height, shape[1], shape[3])
        y = _rows_at(addresses[2], height, shape[2], count * WIDTH)
        _multiply_share(x, w, bias, more, y, shape, activation, rows, panels, copied)


@intrinsic
def _strips(typing: Any, x: Any, w: Any, y: Any, at: Any, depth: Any, first: Any) -> Any:
    """Add a block of k to some strips of y, LANES neighbouring numbers of a row, or begin them; there is no bias.

    Each is a chain as in a tile. Several at once, as a chain alone would wait for itself.

    Args:
        x, w, y: flat; rows, the weight, the result.
        at: where in each of them, strip by strip.
        depth: k in the block, a multiple of UNROLL.
        first: whether this is the first block of k.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arrays, places = values[:3], cgutils.unpack_tuple(builder, values[3], 3 * STRIPS)
        offsets = [context.make_tuple(builder, triple, places[i : i + 3]) for i in range(0, 3 * STRIPS, 3)]
        xs, ws, ys = zip(*(_pointers(context, builder, [x, w, y], arrays, some) for some in offsets), strict=True)
        multiply_add = cgutils.get_or_insert_function(builder.module, _MULTIPLY_ADD, f"llvm.fma.v{LANES}f32")
        left = [builder.bitcast(pointer, _FLOATS.as_pointer()) for pointer in ys]

        def turn(k: Any, held: list[Any]) -> list[Any]:
            here = builder.mul(k, ir.Constant(_INDEX, WIDTH))
            for step in range(UNROLL):
                for i, value in enumerate(held):
                    strip = _at(builder, ws[i], here, step * WIDTH)
                    _fetch_lines(builder, _at(builder, builder.bitcast(strip, _BYTES), _AHEAD), 1)
                    factor = _spread(builder, builder.load(_at(builder, xs[i], k, step)))
                    held[i] = builder.call(multiply_add, [factor, _load(builder, strip, w.dtype.name), value])
            return held

        sums = _begin(builder, values[5], lambda: [ir.Constant(_FLOATS, [0.0] * LANES)] * STRIPS, left)
        _store(builder, _loop(builder, values[4], UNROLL, sums, turn), left)
        return context.get_dummy_value()

    number, triple = types.intp, types.UniTuple(types.intp, 3)
    return types.void(x, w, y, types.UniTuple(number, 3 * STRIPS), number, types.boolean), emit


@njit(error_model="numpy")
def _strip_at(x_at: Any, row: Any, strip: Any, k: Any, even: Any, shape: Any) -> Any:
    """Where a block of k of a strip is in the copied row, the weight and y."""
    y_stride, inner, group = shape
    panel, column = strip // VECTORS, strip % VECTORS * LANES
    first = panel // group * group
    w_at = (first * (inner + inner % UNROLL) + k * group + (panel - first) * even) * WIDTH + column
    return x_at + k, w_at, row * y_stride + strip * LANES


@njit(parallel=True, cache=True, error_model="numpy")
def multiply_strips(w: Any, addresses: Any, shape: Any, height: Any, rows: Any, strips: Any, parts: Any) -> None:
    """Some strips of y = x w^T: LANES columns of a row each, their bits those of `multiply`.

    Args:
        w: as of `multiply`.
        addresses: of x and y, float32.
        shape: strides of x and y; columns of y, a multiple of WIDTH; k in all; k in a block; panels in a group.
        height: rows of x and y.
        rows, strips: [n] int64, the strips that are computed, best in the order of `strips`.
        parts: in so many parts.
    """
    x_stride, y_stride, width, inner, depth, group = shape
    for part in prange(parts):
        x, y = _rows_at(addresses[0], height, x_stride, inner), _rows_at(addresses[1], height, y_stride, width)
        length, end = inner + inner % UNROLL, len(rows) * (part + 1) // parts
        copied, place = np.zeros(STRIPS * length, np.float32), (y_stride, inner, group)
        for i in range(len(rows) * part // parts, end, STRIPS):
            some = (i, min(i + 1, end - 1), min(i + 2, end - 1), min(i + 3, end - 1))  # the last ones again, if need be
            for j in range(STRIPS):
                copied[j * length : j * length + inner] = x[rows[some[j]] * x_stride :][:inner]
            for k in range(0, inner, depth):
                even = min(depth, inner - k) + min(depth, inner - k) % UNROLL
                a, b, c, d = some
                at = (
                    *_strip_at(0, rows[a], strips[a], k, even, place),
                    *_strip_at(length, rows[b], strips[b], k, even, place),
                    *_strip_at(2 * length, rows[c], strips[c], k, even, place),
                    *_strip_at(3 * length, rows[d], strips[d], k, even, place),
                )
                _strips(copied, w, y, at, even, k == 0)


def _room(w: Any, count: Any) -> Any:
    """For so many rounded numbers of x, of the kind that goes with weights w."""
    return np.empty(count, np.uint8 if w.itemsize == 4 else np.int16)


@extending.overload(_room)
def _compiled_room(w: Any, count: Any) -> Any:
    kind = np.uint8 if w.dtype == types.int32 else np.int16

    def room(w: Any, count: Any) -> Any:
        return np.empty(count, kind)

    return room


@njit(error_model="numpy")
def _round_row(x: Any, levels: Any, begin: Any, step: Any, depth: Any, to: Any, shift: Any) -> Any:
    """x / s to the nearest whole numbers, plus `shift`; returns s = max|x| / levels, or NaN if x is not finite.

    Magnitudes compare alike as floats and as their bits. A block of `depth` k lies `step` numbers after the one before.
    """
    top = np.int32(0)
    bits = x.view(np.int32)
    for k in range(len(bits)):
        top = max(top, bits[k] & _MAGNITUDE)
    largest = _float_of(top)
    factor = levels / largest if _SMALLEST < largest < _INFINITE else _ZERO
    for k in range(0, len(x), depth):
        run, rounded = x[k : k + depth], to[begin + k // depth * step :]
        if factor > _ZERO:
            for i in range(len(run)):
                rounded[i] = np.int32(np.rint(run[i] * factor)) + shift
        else:
            rounded[: len(run)] = shift
        rounded[len(run) : len(run) + -len(run) % INT8_UNROLL] = shift
    return largest / levels if largest < _INFINITE else _NAN


@njit(error_model="numpy")
def _int8_share(
    x: Any, w: Any, ending: Any, more: Any, y: Any, shape: Any, levels: Any, activation: Any, rows: Any, panels: Any
) -> None:
    """The part of `multiply_int8` that is in these rows and panels, each (begin, end)."""
    x_stride, more_stride, y_stride, width, inner, depth = shape
    count = rows[1] - rows[0]
    most = max(2 * ROWS, min(HEIGHT, _INT8_CACHE // inner))
    times, blocks, padded = (count + most - 1) // most, (inner + depth - 1) // depth, inner + -inner % INT8_UNROLL
    most = min(most, count)
    rounded, row_scales = _room(w, blocks * most * _INT8_STRIDE), np.empty(most, np.float32)
    shift, together = np.int32(SHIFT if rounded.itemsize == 1 else 0), w.itemsize
    for time in range(times):
        m, end_m = rows[0] + count * time // times, rows[0] + count * (time + 1) // times
        height = end_m - m
        tiles = (height + ROWS - 1) // ROWS
        for row in range(height):
            run = x[(m + row) * x_stride : (m + row) * x_stride + inner]
            row_scales[row] = _round_row(run, levels, row * _INT8_STRIDE, most * _INT8_STRIDE, depth, rounded, shift)
        for panel in range(panels[0], panels[1]):
            n = panel * WIDTH
            for k in range(0, padded, depth):
                taken, last = min(depth, padded - k), k + depth >= padded
                for t in range(tiles):
                    begin, end = height * t // tiles, height * (t + 1) // tiles
                    x_at, y_at = (k // depth * most + begin) * _INT8_STRIDE, (m + begin) * y_stride + n
                    at = (x_at, (n * padded + k * WIDTH) // together, y_at, n, n, n, begin)
                    ends, ahead = (k == 0, last), _next_block(at[1] * together, taken, WIDTH, t, tiles)
                    more_at = (m + begin) * more_stride + n
                    if last:
                        _fetch_more(more, more_at, more_stride, end - begin)
                    _int8_tile(
                        end - begin,
                        rounded,
                        w,
                        y,
                        (ending[0], ending[1], ending[2], row_scales),
                        at,
                        ahead,
                        taken,
                        y_stride,
                        ends,
                    )
                    if last and (activation != NONE or more_stride > 0):
                        rest = (min(WIDTH, width - n), activation, more_at, more_stride)
                        _finish_tile(y, y_at, y_stride, end - begin, more, rest)


@njit(parallel=True, cache=True, error_model="numpy")
def multiply_int8(
    w: Any,
    starts: Any,
    scales: Any,
    bias: Any,
    addresses: Any,
    shape: Any,
    levels: Any,
    activation: Any,
    height: Any,
    cuts: Any,
) -> None:
    """y = activation(x w^T + bias) + more, with weights of 8 bits.

    Args:
        w: flat, int8 in pairs or int32 in quads (see the top of this file).
        starts: [panels * WIDTH] int32, what the sums begin with.
        scales, bias: [panels * WIDTH] float32.
        addresses, activation, height, cuts: as of `multiply`.
        shape: strides of x, more and y; columns of y; k in all; k in a block.
        levels: x is rounded to so many, float32.
    """
    count = (shape[3] + WIDTH - 1) // WIDTH
    for part in prange(cuts[0] * cuts[1]):
        rows, panels = _share_of(part, cuts, height, count)
        x = _rows_at(addresses[0], height, shape[0], shape[4])
        more = _rows_at(addresses[1], height, shape[1], shape[3])
        y = _rows_at(addresses[2], height, shape[2], count * WIDTH)
        _int8_share(x, w, (starts, bias, scales), more, y, shape, levels, activation, rows, panels)


def warm_up_strips(stored: str) -> None:
    """As `warm_up_multiply`, for `multiply_strips`."""
    numba_follows_torch()
    weights, ints = types.Array(numba.from_dtype(np.dtype(stored)), 1, "C"), types.Array(types.int64, 1, "C")
    two, six = types.UniTuple(types.int64, 2), types.UniTuple(types.int64, 6)
    _compile(multiply_strips, [weights, two, six, types.int64, ints, ints, types.int64])


def warm_up_multiply(stored: str) -> None:
    """Compile what multiplies weights of this numpy dtype (float32, uint16, int16; int8, int32), or load it."""
    numba_follows_torch()
    numbers, weights = types.Array(types.float32, 1, "C"), types.Array(numba.from_dtype(np.dtype(stored)), 1, "C")
    of_8_bits, starts = stored in ("int8", "int32"), types.Array(types.int32, 1, "C")
    ints = [types.UniTuple(types.int64, 3), types.UniTuple(types.int64, 6 if of_8_bits else 7)]
    rest = [types.int64, types.int64, types.UniTuple(types.int64, 2)]
    function: Any = multiply
    arguments = [weights, numbers, *ints, *rest]
    if of_8_bits:
        function, arguments = multiply_int8, [weights, starts, numbers, numbers, *ints, types.float32, *rest]
    _compile(function, arguments)


def _compile(function: Any, arguments: list[Any]) -> None:
    with patience("the CPU matrix kernel: a few seconds, once for each form of the weights"):
        function.disable_compile(False)
        function.compile(types.void(*arguments))
        function.disable_compile()
