"""Share pieces among the kernels of codes: activations as float16, and the sum of the parts of a product.

Activations of wider types than float16 are multiplied by a power of two of each row, the one that puts the largest of
those that a program reads near 2**15, and what comes of them is divided by it: no size of activations is lost.
"""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

COMPILED = not triton.knobs.runtime.interpret  # there is no inline assembly in the interpreter
SCANNED = tl.constexpr(128)  # columns of a step of the search for the largest


@triton.jit
def powers(largest):
    """(up, down), powers of two float32 whose product is 1: largest * up is below 2**16. Ones for inf and nan."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23  # biased by 127; 255 for inf and nan, which stay
    exponent = tl.maximum(exponent, 15)  # both powers of two must be normal
    up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return up, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_powers(x, first, end, m, rows, in_features):
    """`powers` of the columns `first` to `end` of the rows m [BLOCK_M] of x [rows, in_features]."""
    if x.dtype.element_ty == tl.float16:
        one = tl.full(m.shape, 1.0, tl.float32)
        return one, one
    else:
        largest = tl.zeros((m.shape[0], SCANNED), tl.float32)
        end = tl.minimum(end, in_features)
        for start in range(first, end, SCANNED):
            k = start + tl.arange(0, SCANNED)
            mask = (m < rows)[:, None] & (k < end)[None, :]
            value = tl.load(x + m[:, None] * in_features + k[None, :], mask=mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        return powers(tl.max(largest, 1))


@triton.jit
def half(x, up):
    """Activations as float16, times `up` if their type is wider."""
    if x.dtype == tl.float16:
        return x
    else:
        return (x.to(tl.float32) * up).to(tl.float16)


@triton.jit
def columns_of(x, k, m, up, rows, in_features, MASKED: tl.constexpr):
    """x^T [k, m] float16, the columns k and rows m of x [rows, in_features], times up [m]."""
    mask = (m < rows)[None, :]
    if MASKED:
        mask = mask & (k < in_features)[:, None]
    return half(tl.load(x + m[None, :] * in_features + k[:, None], mask=mask, other=0.0), up[None, :])


@triton.jit
def divided(value, DIVISOR: tl.constexpr, EXACT_FMA: tl.constexpr):
    """value / DIVISOR, rounded to nearest; the interpreter rounds inside tl.fma and divides instead."""
    if EXACT_FMA:
        quotient = value * (1 / DIVISOR)
        remainder = tl.fma(-quotient, tl.full(value.shape, DIVISOR, tl.float32), value)
        return tl.fma(remainder, tl.full(value.shape, 1 / DIVISOR, tl.float32), quotient)
    else:
        return value / DIVISOR


@triton.jit
def sum_parts(total, partials, counters, block, part, parts, mask):
    """Whether all parts of a block of results have come, and their sum in order; `total` [a, b] is this part.

    The last of the programs finds true; the counter is 0 again for the next launch.
    """
    a: tl.constexpr = total.shape[0]
    b: tl.constexpr = total.shape[1]
    place = tl.arange(0, a)[:, None] * b + tl.arange(0, b)[None, :]
    first = partials + block * parts * a * b
    tl.store(first + part * a * b + place, total, mask=mask)
    tl.debug_barrier()  # all threads have stored before the arrival is seen
    last = tl.atomic_add(counters + block, 1, sem="acq_rel") == parts - 1
    if last:
        total = tl.zeros((a, b), tl.float32)
        for i in tl.range(0, parts, loop_unroll_factor=4):  # loads in flight
            total += tl.load(first + i * a * b + place, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(counters + block, 0)
    return last, total


@triton.jit
def finish(total, factor, row_scales, out, partials, counters, block, part, parts, n, m, rows, out_features,
           ROW_SCALES: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """out [rows, out_features] at (m, n) = total [m, n], of all parts with SPLIT, times factor and row scales."""
    if SPLIT:
        last, total = sum_parts(total, partials, counters, block, part, parts, (m < rows)[:, None] & (n >= 0)[None, :])
        if last:
            _store(total, factor, row_scales, out, n, m, rows, out_features, ROW_SCALES)
    else:
        _store(total, factor, row_scales, out, n, m, rows, out_features, ROW_SCALES)


@triton.jit
def _store(total, factor, row_scales, out, n, m, rows, out_features, ROW_SCALES: tl.constexpr):
    total *= factor
    if ROW_SCALES:
        total *= tl.load(row_scales + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    mask = (m < rows)[:, None] & (n < out_features)[None, :]
    tl.store(out + m[:, None] * out_features + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_up(x, sums, rows, columns, count, GROUP: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """Program (row, MANY groups): sums [count, rows] float32 of x [rows, columns] over groups of GROUP columns."""
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    group = tl.program_id(1) * MANY + tl.arange(0, MANY)
    total = tl.zeros((MANY, BLOCK), tl.float32)
    for first in range(0, GROUP, BLOCK):
        k = group[:, None] * GROUP + first + j[None, :]
        mask = (first + j < GROUP)[None, :] & (k < columns)
        total += tl.load(x + row * columns + k, mask=mask, other=0.0).to(tl.float32)
    tl.store(sums + group * rows + row, tl.sum(total, 1), mask=group < count)
