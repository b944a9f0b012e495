"""The compiled part of a linear layer (numba): the matrix product, and what a row goes through before and after it.

A row's result depends on the row alone, to the bit, and on nothing of the machine but that it has a fused multiply-add:

    y[m, n] = bias[n], then y[m, n] += x[m, k] * w[n, k] for k in order, each an `fma`

A vector's lanes are neighbouring n, so nothing is summed across them. The height of the matrix, the number of threads,
the width of the vectors and all that follows from them only say when a number is computed, not how. The blocking is
that of Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, 2008):

    w     [groups of panels][blocks of k][panels][k of the block][WIDTH columns]    packed once; read front to back
    x     a block of k of up to HEIGHT rows is copied, so that it stays in the cache while a group of panels passes
    tile  up to ROWS rows by WIDTH columns of y, held in registers over a block of k

Weights are float32, float16 (here uint16) or bfloat16 (int16), and are widened as they are loaded. tanh and erf are
Eigen's rational approximations, a few units in the last place off. No library is called (the ends of PyTorch's own
vectors, where other code runs, move with the height of the matrix); `contract` allows fused multiply-add.

All compiled code is in this one file: numba's cache on the disk is renewed when the file changes, not what it imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending, njit, prange, types
from numba.core import cgutils

from ember.kernel_cache import ensure_kernel_cache, patience
from ember.model.processor import vector_lanes
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
_STRIDE = DEPTH + 16  # of the copied rows: no power of two, so that rows do not share sets of the cache
_AHEAD = 4096  # bytes of the weight that are fetched early

NONE, GELU_TANH, GELU_ERF, RELU = range(4)
ACTIVATIONS: Mapping[str, int] = MappingProxyType({"none": NONE, "gelu_new": GELU_TANH, "gelu": GELU_ERF, "relu": RELU})
LEVELS = 63
"""Largest quantised value: u8 in 1 .. 127 times s8 keeps sums of two products within 16 bits, as AVX2 adds them."""

_PARALLEL_FROM = 1 << 16  # elements; below, waking a thread costs more than it saves
_MAGNITUDE = np.int32(0x7FFFFFFF)
F = np.float32
intrinsic: Any = extending.intrinsic  # its own type hints count `typing` as an argument of the call
_ZERO, _HALF, _ONE, _LEVELS, _SMALLEST = F(0), F(0.5), F(1), F(LEVELS), F(1e-30)
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
def _scale_row(x: Any, bits: Any, out: Any) -> Any:
    """out = x * LEVELS / max|x|; returns max|x| / LEVELS. Magnitudes compare alike as floats and as their bits."""
    top = np.int32(0)
    for d in range(len(bits)):
        top = max(top, bits[d] & _MAGNITUDE)
    bits_of_top = np.empty(1, np.int32)
    bits_of_top[0] = top
    largest = bits_of_top.view(np.float32)[0]
    factor = _LEVELS / largest if largest > _SMALLEST else _ZERO
    for d in range(len(x)):
        out[d] = x[d] * factor
    return largest / _LEVELS


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


@njit(cache=True, fastmath={"contract"}, error_model="numpy")
def _finish_row(y: Any, scale: Any, bias: Any, activation: Any) -> None:
    """y = activation(y * scale + bias)."""
    for n in range(len(y)):
        y[n] = y[n] * scale + bias[n]
    _activate(y, activation)


_FLOAT, _INT, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
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


def _spread(builder: Any, value: Any) -> Any:
    """The number in every lane."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))


def _fetch_early(builder: Any, w: Any, itemsize: int) -> None:
    """The lines of a row of the panel that lies `_AHEAD` bytes on."""
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], _PREFETCH)
    read, keep, data = (ir.Constant(_INT, number) for number in (0, 3, 1))
    for line in range(0, WIDTH * itemsize, 64):
        address = builder.bitcast(_at(builder, w, (_AHEAD + line) // itemsize), _BYTES)
        builder.call(function, [address, read, keep, data])


def _products(builder: Any, x: Any, w: Any, depth: Any, sums: list[Any], rows: int, stored: str) -> list[Any]:
    """The loop over k: sums[row * VECTORS + v] += x[row, k] * w[k, v], held in registers."""
    multiply_add = cgutils.get_or_insert_function(builder.module, _MULTIPLY_ADD, f"llvm.fma.v{LANES}f32")
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    k, held = builder.phi(_INDEX), [builder.phi(_FLOATS) for _ in sums]
    k.add_incoming(ir.Constant(_INDEX, 0), before)
    for phi, value in zip(held, sums, strict=True):
        phi.add_incoming(value, before)
    new = list(held)
    here = _at(builder, w, builder.mul(k, ir.Constant(_INDEX, WIDTH)))
    for turn in range(UNROLL):
        row_of_w = _at(builder, here, turn * WIDTH)
        _fetch_early(builder, row_of_w, 4 if stored == "float32" else 2)
        columns = [_load(builder, _at(builder, row_of_w, v * LANES), stored) for v in range(VECTORS)]
        for row in range(rows):
            factor = _spread(builder, builder.load(_at(builder, x, k, row * _STRIDE + turn)))
            for v in range(VECTORS):
                at = row * VECTORS + v
                new[at] = builder.call(multiply_add, [factor, columns[v], new[at]])
    next_k = builder.add(k, ir.Constant(_INDEX, UNROLL))
    k.add_incoming(next_k, loop)
    for phi, value in zip(held, new, strict=True):
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, after)
    builder.position_at_end(after)
    return new


def _begin(builder: Any, first: Any, bias: Any, y: Any, starts: list[Any]) -> list[Any]:
    """The sums so far: the bias, or what an earlier block of k left in y."""
    places = [(start, v * LANES) for start in starts for v in range(VECTORS)]
    with builder.if_else(first) as (then, otherwise):
        with then:
            once = [_load(builder, _at(builder, bias, v * LANES)) for v in range(VECTORS)]
            fresh, from_then = [once[v // LANES] for _, v in places], builder.block
        with otherwise:
            left, from_otherwise = [_load(builder, _at(builder, y, *place)) for place in places], builder.block
    sums = []
    for a, b in zip(fresh, left, strict=True):
        phi = builder.phi(_FLOATS)
        phi.add_incoming(a, from_then)
        phi.add_incoming(b, from_otherwise)
        sums.append(phi)
    return sums


def _tile_of(builder: Any, rows: int, data: list[Any], *, depth: Any, stride: Any, first: Any, stored: str) -> None:
    x, w, y, bias = data
    starts = [builder.mul(stride, ir.Constant(_INDEX, row)) for row in range(rows)]
    sums = _products(builder, x, w, depth, _begin(builder, first, bias, y, starts), rows, stored)
    for index, value in enumerate(sums):
        to = _at(builder, y, starts[index // VECTORS], index % VECTORS * LANES)
        builder.store(value, builder.bitcast(to, _FLOATS.as_pointer()), align=4)


@intrinsic
def _tile(
    typing: Any, rows: Any, x: Any, w: Any, y: Any, bias: Any, at: Any, depth: Any, stride: Any, first: Any
) -> Any:
    """Add a block of k to a tile of y, or begin it.

    Args:
        rows: 1 to ROWS.
        x, w, y, bias: flat; copied rows with a stride of _STRIDE, the weight, the result, the padded bias.
        at: where in each of them.
        depth: k in the block, a multiple of UNROLL.
        stride: of the rows of y.
        first: whether this is the first block of k.
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kinds, offsets = signature.args[1:5], cgutils.unpack_tuple(builder, values[5], 4)
        arrays = [
            context.make_array(kind)(context, builder, value) for kind, value in zip(kinds, values[1:5], strict=True)
        ]
        data = [_at(builder, array.data, offset) for array, offset in zip(arrays, offsets, strict=True)]
        end = builder.append_basic_block()
        switch = builder.switch(values[0], end)
        for height in range(1, ROWS + 1):
            block = builder.append_basic_block()
            switch.add_case(ir.Constant(_INDEX, height), block)
            builder.position_at_end(block)
            _tile_of(builder, height, data, depth=values[6], stride=values[7], first=values[8], stored=w.dtype.name)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    number, offsets = types.intp, types.UniTuple(types.intp, 4)
    return types.void(number, x, w, y, bias, offsets, number, number, types.boolean), emit


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
                        _tile(end - begin, copied, w, y, bias, at, even, y_stride, k == 0)
                        if k + taken == inner and (activation != NONE or more_stride > 0):
                            columns, more_at = min(WIDTH, width - n), (m + begin) * more_stride + n
                            rest = (columns, activation, more_at, more_stride)
                            _finish_tile(y, y_at, y_stride, end - begin, more, rest)


@njit(parallel=True, cache=True, error_model="numpy")
def multiply(x: Any, w: Any, bias: Any, more: Any, y: Any, shape: Any, activation: Any, height: Any, cuts: Any) -> None:
    """y = activation(x w^T + bias) + more.

    Args:
        x, more, y: flat float32; rows with the strides that `shape` says; `more` has stride 0 where there is none.
        w: flat, packed (see the top of this file).
        bias: [panels * WIDTH] float32.
        shape: strides of x, more and y; columns of y; k in all; k in a block; panels in a group.
        activation: a number of ACTIVATIONS.
        height: rows.
        cuts: the work is done in cuts[0] parts of the rows times cuts[1] of the panels.
    """
    count = (shape[3] + WIDTH - 1) // WIDTH
    for part in prange(cuts[0] * cuts[1]):
        row, panel = part // cuts[1], part % cuts[1]
        rows = (height * row // cuts[0], height * (row + 1) // cuts[0])
        panels = (count * panel // cuts[1], count * (panel + 1) // cuts[1])
        copied = np.empty(min(HEIGHT, rows[1] - rows[0]) * _STRIDE, np.float32)
        _multiply_share(x, w, bias, more, y, shape, activation, rows, panels, copied)


@njit(cache=True)
def _scale_few(x: Any, bits: Any, out: Any, scales: Any) -> None:
    for m in range(len(x)):
        scales[m] = _scale_row(x[m], bits[m], out[m])


@njit(parallel=True, cache=True)
def _scale_many(x: Any, bits: Any, out: Any, scales: Any) -> None:
    for m in prange(len(x)):
        scales[m] = _scale_row(x[m], bits[m], out[m])


@njit(cache=True)
def _finish_few(y: Any, scales: Any, bias: Any, activation: Any) -> None:
    for m in range(len(y)):
        _finish_row(y[m], scales[m], bias, activation)


@njit(parallel=True, cache=True)
def _finish_many(y: Any, scales: Any, bias: Any, activation: Any) -> None:
    for m in prange(len(y)):
        _finish_row(y[m], scales[m], bias, activation)


def scale_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row [in] of x [T, in] to -LEVELS .. LEVELS: the scaled rows, and the scales [T] that give them back."""
    x = x.contiguous()
    out, scales = torch.empty_like(x), torch.empty(len(x))
    arrays = x.numpy(), x.view(torch.int32).numpy(), out.numpy(), scales.numpy()
    if x.numel() < _PARALLEL_FROM:
        _scale_few(*arrays)
    else:
        numba_follows_torch()
        _scale_many(*arrays)
    return out, scales


class Finish:
    """The end of a linear layer, in place: activation(y * scales + bias), row by row.

    Args:
        bias: [out], or none.
        width: out.
        activation: none, gelu_new, gelu or relu.
    """

    def __init__(self, bias: torch.Tensor | None, width: int, activation: str) -> None:
        self._bias = torch.zeros(width) if bias is None else bias
        self._activation = ACTIVATIONS[activation]
        warm_up()

    def __call__(self, y: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """y [T, out], scales [T] or none; returns y."""
        scales = torch.ones(len(y)) if scales is None else scales
        arrays = y.numpy(), scales.numpy(), self._bias.numpy(), self._activation
        if y.numel() < _PARALLEL_FROM:
            _finish_few(*arrays)
        else:
            numba_follows_torch()
            _finish_many(*arrays)
        return y


def warm_up() -> None:
    """Compile what int8 weights need, or load what an earlier process compiled."""
    numba_follows_torch()
    x, scales = np.zeros((1, 8), np.float32), np.zeros(1, np.float32)
    for scale in (_scale_few, _scale_many):
        scale(x, x.view(np.int32), np.empty_like(x), scales)
    for finish in (_finish_few, _finish_many):
        finish(x, scales, x[0].copy(), NONE)


def warm_up_multiply(stored: str) -> None:
    """Compile `multiply` for weights of this numpy dtype (float32, uint16 or int16), or load it."""
    numba_follows_torch()
    numbers, weights = types.Array(types.float32, 1, "C"), types.Array(numba.from_dtype(np.dtype(stored)), 1, "C")
    shape, cuts = types.UniTuple(types.int64, 7), types.UniTuple(types.int64, 2)
    with patience("the CPU matrix kernel: a few seconds, once for each form of the weights"):
        multiply.disable_compile(False)
        multiply.compile(types.void(numbers, weights, numbers, numbers, numbers, shape, types.int64, types.int64, cuts))
        multiply.disable_compile()
