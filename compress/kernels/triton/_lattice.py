"""The kernels of compress/kernels/triton/lattice.py: imported at the first launch, because they need triton.

A group has one of three widths, BITS - 1 to BITS + 1, that only the device knows: kernels have code for all of them.
"""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton import _planes
from compress.kernels.triton._parts import COMPILED, finish, powers  # noqa: F401
from compress.kernels.triton._planes import fields, width

CENTRES = {1: "0xB800B800", 2: "0xBE00BE00", 3: "0xC300C300", 4: "0xC780C780"}  # -(2**bits - 1) / 2 in float16, twice


@triton.constexpr_function
def coordinate_text(bits: int) -> str:
    """PTX: $1 are the words of two columns, the first in the low half, $2 and $3 where in them their codes of `bits`
    bits stand; $0 becomes their coordinates.
    """
    mask = "0x" + ("000" + str((1 << bits) - 1) if bits < 4 else "000F") * 2
    text = "{ .reg .b32 t, u, c; shr.u32 t, $1, $2; shr.u32 u, $1, $3; prmt.b32 t, t, u, 0x7610; "
    text += "lop3.b32 t, t, " + mask + ", 0x64006400, 0xEA; "  # 1024 + code
    text += "mov.b32 c, 0xE400E400; add.f16x2 t, t, c; "
    return text + "mov.b32 c, " + CENTRES[bits] + "; add.f16x2 $0, t, c; }"


@triton.constexpr_function
def spare_text() -> str:
    """PTX: $0 becomes the coordinates whose bits are the top ones of the words $1, $2 and $3, each of two columns."""
    text = "{ .reg .b32 t, u, c; shr.u32 t, $1, 15; lop3.b32 t, t, 0x00010001, 0x64006400, 0xEA; "
    text += "shr.u32 u, $2, 14; lop3.b32 t, u, 0x00020002, t, 0xEA; "
    text += "shr.u32 u, $3, 13; lop3.b32 t, u, 0x00040004, t, 0xEA; "
    text += "mov.b32 c, 0xE400E400; add.f16x2 t, t, c; mov.b32 c, " + CENTRES[3] + "; add.f16x2 $0, t, c; "
    return text + "}"


@triton.jit
def _coordinates(start, first, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, USE_ASM: tl.constexpr):
    """Coordinates float16 [n, BLOCK] from column `first` on of a group of codes of BITS bits.

    start [n, 1]: where its words begin; a plane of them is one tile.
    """
    A: tl.constexpr = width(BITS, 0)
    B: tl.constexpr = width(BITS, 1)
    if USE_ASM and B == 0:
        TILE_WORDS: tl.constexpr = GROUP // fields(A)
        k = first + tl.arange(0, BLOCK)[None, :]
        field, at = k // TILE_WORDS, start + k % TILE_WORDS
        text: tl.constexpr = coordinate_text(A)
        if A == 3:
            word = tl.load(at + tl.minimum(field // 5, 2) * TILE_WORDS)
            value = tl.inline_asm_elementwise(text, "=r,r,r,r", [word, field % 5 * 3], tl.float16, True, 2)
            last: tl.constexpr = spare_text()
            words = [tl.load(at, mask=field == 15), tl.load(at + TILE_WORDS, mask=field == 15),
                     tl.load(at + 2 * TILE_WORDS, mask=field == 15)]  # fmt: skip
            return tl.where(field == 15, tl.inline_asm_elementwise(last, "=r,r,r,r", words, tl.float16, True, 2), value)
        else:
            return tl.inline_asm_elementwise(text, "=r,r,r,r", [tl.load(at), field * A], tl.float16, True, 2)
    else:
        code = _planes.plane(start, first, 1, A, GROUP, GROUP // fields(A), BLOCK, False)
        if B != 0:
            start += A * GROUP // 16
            code = code << B | _planes.plane(start, first, 1, B, GROUP, GROUP // fields(B), BLOCK, False)
        return _centred(code, BITS)


@triton.jit
def _centred(code, BITS: tl.constexpr):
    above = (code << 1 | 0x6000).to(tl.int16).to(tl.float16, bitcast=True)  # 512 + code: conversions are slow
    return above - (512 + ((1 << BITS) - 1) / 2)


@triton.jit
def _words_before(group, group_bits, groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Words of a row before a group."""
    g = tl.arange(0, GROUPS)
    bits = tl.load(group_bits + g, mask=(g < group) & (g < groups), other=0).to(tl.int32)
    return tl.sum(bits, 0) * (GROUP // 16)


@triton.jit(do_not_specialize=["rows"])
def transform(x, lattices, out, factors, rows, in_features, columns, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
              DIM: tl.constexpr):  # fmt: skip
    """out [rows, columns] float16 * factors [groups, rows], powers of two, = G^T x for each block of DIM columns.

    Program (group, row); BLOCKS: a power of two that holds the blocks of a group. Columns from in_features on are 0.
    """
    group, row = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, DIM), tl.arange(0, DIM)
    block = tl.arange(0, BLOCKS)
    k = block[:, None] * DIM + i[None, :]
    inside = block[:, None] * DIM < GROUP
    k += group * GROUP
    values = tl.load(x + row * in_features + k, mask=inside & (k < in_features), other=0)
    matrix = tl.load(lattices + group * (DIM * DIM) + i[:, None] * DIM + j[None, :]).to(tl.float32)
    values = tl.sum(values.to(tl.float32)[:, :, None] * matrix[None, :, :], 1)  # block, j
    up, down = powers(tl.max(tl.max(tl.abs(values), 1), 0))
    tl.store(factors + group * rows + row, down)
    tl.store(out + row * columns + k, (values * up).to(tl.float16), mask=inside)


@triton.jit
def _add(start, x, n, m, rows, columns, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
         USE_ASM: tl.constexpr):  # fmt: skip
    """The products [n, m] of the coordinates of a group with the activations of the group, which begin at x."""
    total = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for first in tl.static_range(0, GROUP, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        activations = tl.load(x + m[None, :] * columns + k[:, None], mask=(m < rows)[None, :], other=0.0)
        total = tl.dot(_coordinates(start, first, BITS, GROUP, BLOCK_K, USE_ASM), activations, total)
    return total


@triton.jit(do_not_specialize=["rows", "parts"])
def multiply(x, factors, words, group_bits, scale, row_scales, out, partials, counters, rows, columns, out_features,
             stored_rows, groups, parts, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
             ROW_SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
             SPLIT: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = products of the coordinates with x and factors, those of `transform`; program (BLOCK_N
    rows of W, part of the groups). GROUPS: a power of two that holds the groups. With SPLIT, `parts` programs share
    them.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    start, end = groups * part // parts, groups * (part + 1) // parts
    at = words + tl.minimum(n, stored_rows - 1).to(tl.int64)[:, None] * (groups * (BITS * GROUP // 16))
    at += _words_before(start, group_bits, groups, GROUPS, GROUP)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for group in range(start, end):
        bits = tl.load(group_bits + group).to(tl.int32)
        columns_at = x + group * GROUP
        if bits == BITS:
            total = _add(at, columns_at, n, m, rows, columns, BITS, GROUP, BLOCK_K, USE_ASM)
        elif bits < BITS:
            total = _add(at, columns_at, n, m, rows, columns, BITS - 1, GROUP, BLOCK_K, USE_ASM)
        else:
            total = _add(at, columns_at, n, m, rows, columns, BITS + 1, GROUP, BLOCK_K, USE_ASM)
        acc += total * tl.load(factors + group * rows + m, mask=m < rows, other=0.0)[None, :]
        at += bits * (GROUP // 16)
    finish(tl.trans(acc), tl.load(scale), row_scales, out, partials, counters, block, part, parts, n, m, rows,
           out_features, ROW_SCALES, SPLIT)  # fmt: skip


@triton.jit
def _expanded(value, bend, height):
    """The mu-law curve: sgn(value) * (exp(|value| bend) - 1) * height."""
    a = tl.abs(value) * bend
    series = a * (1 + a / 2 * (1 + a / 3 * (1 + a / 4 * (1 + a / 5 * (1 + a / 6 * (1 + a / 7))))))
    grown = tl.where(a < 0.5, series, tl.exp(a) - 1) * height
    return tl.where(value < 0, -grown, grown)


@triton.jit
def _write(start, matrix, bend, height, factor, group, first, n, out, in_features, out_features, BITS: tl.constexpr,
           GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SIDE: tl.constexpr,
           COMPAND: tl.constexpr):  # fmt: skip
    """BLOCK_K columns of a group, from its column `first` on: matrix [SIDE, SIDE] times coordinates, curved, scaled."""
    j = first + tl.arange(0, BLOCK_K)
    z = tl.reshape(_coordinates(start, first, BITS, GROUP, BLOCK_K, False), (BLOCK_N * BLOCK_K // SIDE, SIDE))
    value = tl.reshape(tl.dot(z, matrix), (BLOCK_N, BLOCK_K))
    if COMPAND:
        value = _expanded(value, bend, height)
    k = group * GROUP + j
    mask = (n < out_features)[:, None] & (k < in_features)[None, :]
    at = out + n.to(tl.int64)[:, None] * in_features + k[None, :]
    tl.store(at, (value * factor[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def decode(words, group_bits, lattices, curves, scale, row_scales, out, in_features, out_features, groups,
           BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIDE: tl.constexpr,
           COMPAND: tl.constexpr, ROW_SCALES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """out [out_features, in_features]; program (group, BLOCK_N rows).

    SIDE: of the matrix that tensor cores take, twice DIM where DIM is 8; curves [groups, 2] float32: log(1 + mu) and
    limit / mu.
    """
    group = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = n < out_features
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    at = lattices + group * (DIM * DIM) + j % DIM * DIM + i % DIM  # transposed
    matrix = tl.load(at, mask=i // DIM == j // DIM, other=0.0)
    factor = tl.full((BLOCK_N,), 1.0, tl.float32) * tl.load(scale)
    if ROW_SCALES:
        factor *= tl.load(row_scales + n, mask=known, other=0.0).to(tl.float32)
    bend, height = 1.0, 1.0
    if COMPAND:
        bend, height = tl.load(curves + 2 * group), tl.load(curves + 2 * group + 1)
    start = words + tl.minimum(n, out_features - 1).to(tl.int64)[:, None] * (groups * (BITS * GROUP // 16))
    start += _words_before(group, group_bits, groups, GROUPS, GROUP)
    bits = tl.load(group_bits + group).to(tl.int32)
    for first in tl.static_range(0, GROUP, BLOCK_K):
        if bits == BITS:
            _write(start, matrix, bend, height, factor, group, first, n, out, in_features, out_features, BITS, GROUP,
                   BLOCK_N, BLOCK_K, SIDE, COMPAND)  # fmt: skip
        elif bits < BITS:
            _write(start, matrix, bend, height, factor, group, first, n, out, in_features, out_features, BITS - 1,
                   GROUP, BLOCK_N, BLOCK_K, SIDE, COMPAND)  # fmt: skip
        else:
            _write(start, matrix, bend, height, factor, group, first, n, out, in_features, out_features, BITS + 1,
                   GROUP, BLOCK_N, BLOCK_K, SIDE, COMPAND)  # fmt: skip
