"""The kernels of compress/kernels/triton/int.py; imported when the first one is launched, because they need triton.

Weights are the left operand of every product: out^T [n, m] = W [n, k] x^T [k, m]. Words go from shared memory to
registers, are unpacked there (compress/kernels/triton/unpack.py) and feed the tensor cores without a way back.

A step covers BLOCK_WORDS words of a tile, that is BLOCK_WORDS columns of each field: field f of word j of tile t is
column t * TILE_WORDS * F + f * TILE_WORDS + j. Codes of 5, 6 and 7 bits lie in planes of A, B and C bits (0: absent),
of which a step takes the words of the same columns; F is then the number of fields of the narrowest plane. Behind the
whole tiles of a row lie NARROW tiles of 32 columns, whose codes are read one by one, in the order of columns.

USE_ASM is off in the interpreter, which has neither inline assembly nor correct bfloat16: all is float32 there.
"""

# ruff: noqa: ANN001, ANN202, C901, PLR0912, PLR0913, PLR0915, PLR0917, SIM102
# mypy: ignore-errors

import triton
import triton.language as tl

from compress.kernels.triton._parts import sum_parts
from compress.kernels.triton.unpack import chain, combine_text, field_text, fields, narrow_words


@triton.jit
def _pick(a0, a1, a2, FIELD: tl.constexpr):
    """Of the three words of width 3, five fields each, the one that holds FIELD."""
    if FIELD < 5:
        return a0
    elif FIELD < 10:
        return a1
    else:
        return a2


@triton.jit
def _assemble(TEXT: tl.constexpr, CONSTRAINTS: tl.constexpr, args, BF16: tl.constexpr):
    """$0 of the assembly, pairs of float16 or bfloat16, for pairs of 16-bit operands."""
    if BF16:
        return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, args, tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, args, tl.float16, is_pure=True, pack=2)


@triton.jit
def _field(a0, a1, a2, WIDTH: tl.constexpr, FIELD: tl.constexpr, MIDDLE: tl.constexpr, BF16: tl.constexpr):
    """Field FIELD less MIDDLE, by assembly."""
    text: tl.constexpr = field_text(WIDTH, FIELD, MIDDLE, BF16)
    if WIDTH == 3 and FIELD == 15:
        return _assemble(text, "=r,r,r,r", (a0, a1, a2), BF16)
    else:
        return _assemble(text, "=r,r", (_pick(a0, a1, a2, FIELD) if WIDTH == 3 else a0,), BF16)


@triton.jit
def _plain(a0, a1, a2, WIDTH: tl.constexpr, FIELD: tl.constexpr):
    """Field FIELD as int32, without assembly."""
    if WIDTH == 3 and FIELD == 15:
        low = (a0.to(tl.int32) >> 15) & 1
        return low | ((a1.to(tl.int32) >> 15) & 1) << 1 | ((a2.to(tl.int32) >> 15) & 1) << 2
    else:
        word = _pick(a0, a1, a2, FIELD) if WIDTH == 3 else a0
        shift: tl.constexpr = WIDTH * (FIELD % 5 if WIDTH == 3 else FIELD)
        return (word.to(tl.int32) >> shift) & ((1 << WIDTH) - 1)


@triton.jit
def _code(held, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, FIELD: tl.constexpr):
    """The code whose column is field FIELD of the narrowest plane, int32; `held` as from `_advance`."""
    a0, a1, a2, b, c = held
    code = _plain(a0, a1, a2, A, FIELD % fields(A))
    if B != 0:
        code = code << B | _plain(b, b, b, B, FIELD % fields(B))
    if C != 0:
        code = code << C | _plain(c, c, c, C, FIELD % fields(C))
    return code


@triton.jit
def _value(held, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, FIELD: tl.constexpr, BF16: tl.constexpr,
           USE_ASM: tl.constexpr):  # fmt: skip
    """`_code` less half of its range, in the type of the products."""
    if USE_ASM:
        a0, a1, a2, b, c = held
        value = _field(a0, a1, a2, A, FIELD % fields(A), 1 << (A - 1), BF16)
        if B != 0:
            low = _field(b, b, b, B, FIELD % fields(B), 0, BF16)
            value = _assemble(combine_text(B, BF16), "=r,r,r", (value, low), BF16)
        if C != 0:
            low = _field(c, c, c, C, FIELD % fields(C), 0, BF16)
            value = _assemble(combine_text(C, BF16), "=r,r,r", (value, low), BF16)
        return value
    else:
        return (_code(held, A, B, C, FIELD) - (1 << (A + B + C - 1))).to(tl.float32)


@triton.jit
def _words(words, row, tiles, tile, skipped, j, TILE_WORDS: tl.constexpr, TAIL: tl.constexpr):
    """Words [n, j] of a tile, of rows of `tiles` tiles and TAIL words, from `skipped`; read once, so evicted first."""
    start = words + (row * (tiles * TILE_WORDS + TAIL) + j[None, :])  # the same for all steps
    return tl.load(start + (tile * TILE_WORDS + skipped), eviction_policy="evict_first")


@triton.jit
def _advance(held, words_a, words_b, words_c, row, tiles, tile, skipped, j, A: tl.constexpr, B: tl.constexpr,
             C: tl.constexpr, F: tl.constexpr, FIELD: tl.constexpr, TILE_WORDS: tl.constexpr,
             NARROW: tl.constexpr):  # fmt: skip
    """The words (a0, a1, a2, b, c) that hold field FIELD of the narrowest plane: `held`, or loaded where those end."""
    a0, a1, a2, b, c = held
    if FIELD % fields(A) == 0:
        TAIL: tl.constexpr = narrow_words(A, NARROW)
        many, at = tiles * (F // fields(A)), tile * (F // fields(A)) + FIELD // fields(A)
        a0 = _words(words_a, row * 3 if A == 3 else row, many, at, skipped, j, TILE_WORDS, TAIL)
        a1, a2 = a0, a0
        if A == 3:
            a1 = _words(words_a, row * 3 + 1, many, at, skipped, j, TILE_WORDS, TAIL)
            a2 = _words(words_a, row * 3 + 2, many, at, skipped, j, TILE_WORDS, TAIL)
    if B != 0:
        if FIELD % fields(B) == 0:
            many, at = tiles * (F // fields(B)), tile * (F // fields(B)) + FIELD // fields(B)
            b = _words(words_b, row, many, at, skipped, j, TILE_WORDS, narrow_words(B, NARROW))
    if C != 0:
        if FIELD == 0:
            c = _words(words_c, row, tiles, tile, skipped, j, TILE_WORDS, narrow_words(C, NARROW))
    return a0, a1, a2, b, c


@triton.jit
def _narrow_plane(words, row, in_row, first, tile, WIDTH: tl.constexpr):
    """Codes int32 [n, 32] of a plane in a narrow tile; in_row: stored columns of a row; first: of the narrow tiles."""
    COUNT: tl.constexpr = narrow_words(WIDTH, 1)
    k = tl.arange(0, 32)[None, :]
    field, j = k // COUNT, k % COUNT
    many, at = in_row // fields(WIDTH), first // fields(WIDTH) + tile * COUNT + j
    if WIDTH == 3:
        start = words + (row * 3 * many + at)
        code = tl.load(start + tl.minimum(field // 5, 2) * many).to(tl.int32) >> field % 5 * 3 & 7
        spare = tl.load(start).to(tl.int32) >> 15 & 1
        spare |= tl.load(start + many).to(tl.int32) >> 14 & 2
        spare |= tl.load(start + 2 * many).to(tl.int32) >> 13 & 4
        return tl.where(field == 15, spare, code)
    else:
        return tl.load(words + (row * many + at)).to(tl.int32) >> field * WIDTH & ((1 << WIDTH) - 1)


@triton.jit
def _narrow_code(words_a, words_b, words_c, row, in_row, first, tile, A: tl.constexpr, B: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """Codes int32 [n, 32] of a narrow tile."""
    code = _narrow_plane(words_a, row, in_row, first, tile, A)
    if B != 0:
        code = code << B | _narrow_plane(words_b, row, in_row, first, tile, B)
    if C != 0:
        code = code << C | _narrow_plane(words_c, row, in_row, first, tile, C)
    return code


@triton.jit
def _group(tile, skipped, F: tl.constexpr, FIELD: tl.constexpr, GROUP: tl.constexpr, TILE_WORDS: tl.constexpr):
    """Group of the columns of a field."""
    if GROUP == 0:
        return 0
    elif F * TILE_WORDS % GROUP == 0 and GROUP % TILE_WORDS == 0:  # known but for the tile
        return tile * (F * TILE_WORDS // GROUP) + FIELD * TILE_WORDS // GROUP
    else:
        return ((tile * F + FIELD) * TILE_WORDS + skipped) // GROUP


@triton.jit
def stored_zero(zeros, group, n, stored_rows, BITS: tl.constexpr):
    """Zero points int32 of rows n in a group (or in groups that broadcast with them): a stream of BITS bits each."""
    nbytes = stored_rows // 8 * BITS
    if 8 % BITS == 0:
        first = n * BITS // 8
        value = tl.load((zeros + first) + group * nbytes).to(tl.int32)
    else:  # some end in the next byte; the last does not, and the row ends there
        first = tl.minimum(n * BITS // 8, nbytes - 2)
        start = (zeros + first) + group * nbytes
        value = tl.load(start).to(tl.int32) | tl.load(start + 1).to(tl.int32) << 8
    return (value >> (n * BITS - first * 8)) & ((1 << BITS) - 1)


@triton.jit
def _scaled(acc, sums, scales, zeros, group, n, stored_rows, COUNTED: tl.constexpr, BITS: tl.constexpr):
    """Products with codes less half of their range, of one group -> products with weights.

    Without COUNTED the zero points are taken as half of the range.
    """
    scale = tl.load((scales + n) + group * stored_rows).to(tl.float32)
    if COUNTED:
        acc -= sums * _offset(stored_zero(zeros, group, n, stored_rows, BITS), BITS)[:, None]
    return acc * scale[:, None]


@triton.jit
def _offset(zero, BITS: tl.constexpr):
    """Zero points less half of the range, float32."""
    large = zero | 0x4B000000  # the float32 number 2**23 + zero: conversions of integers are slow
    return large.to(tl.float32, bitcast=True) - (8388608 + (1 << (BITS - 1)))


@triton.jit
def _shifted(acc, sums, scales, zeros, first, end, n, m, rows, stored_rows, BITS: tl.constexpr):
    """acc less what the zero points of groups `first` to `end` add to half of the range: a product of its own."""
    for start in range(first, end, 16):
        group = start + tl.arange(0, 16)
        known = group < end
        at = tl.minimum(group, end - 1)[None, :]
        scale = tl.load(scales + at * stored_rows + n[:, None]).to(tl.float32)
        offset = -scale * _offset(stored_zero(zeros, at, n[:, None], stored_rows, BITS), BITS)
        mask = known[:, None] & (m < rows)[None, :]
        totals = tl.load(sums + group[:, None] * rows + m[None, :], mask=mask, other=0.0)
        acc = tl.dot(tl.where(known[None, :], offset, 0.0), totals, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _with_lowrank(acc, hidden, factor, n, m, rows, out_features, RANK: tl.constexpr, USE_ASM: tl.constexpr):
    """acc [n, m] and the product of hidden [rows, RANK] with factor [RANK, out_features]."""
    for first in tl.static_range(0, RANK, 16):
        r = first + tl.arange(0, 16)
        mask = (n < out_features)[:, None] & (r < RANK)[None, :]
        left = tl.load(factor + r[None, :] * out_features + n[:, None], mask=mask, other=0.0)
        right = tl.load(
            hidden + m[None, :] * RANK + r[:, None], mask=(m < rows)[None, :] & (r < RANK)[:, None], other=0.0
        )
        if not USE_ASM:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right, acc)
    return acc


@triton.jit
def _finish(acc, hidden, factor, out, n, m, rows, out_features, RANK: tl.constexpr, USE_ASM: tl.constexpr):
    """out [rows, out_features] = acc^T, plus the low-rank part."""
    acc = _with_lowrank(acc, hidden, factor, n, m, rows, out_features, RANK, USE_ASM)
    mask = (n < out_features)[:, None] & (m < rows)[None, :]
    tl.store(out + m[None, :] * out_features + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _narrow_product(x, offsets, known, words_a, words_b, words_c, scales, zeros, row, stored, stored_rows, in_row,
                    first, tile, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
                    COUNTED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
                    USE_ASM: tl.constexpr):  # fmt: skip
    """Products [n, m] with the weights of a narrow tile."""
    kind: tl.constexpr = x.dtype.element_ty if USE_ASM else tl.float32
    code = _narrow_code(words_a, words_b, words_c, row, in_row, first, tile, A, B, C)
    column = first + tile * 32
    start = x + (offsets + tl.arange(0, 32)[:, None])
    columns = tl.load(start + column, mask=known[None, :], other=0.0).to(kind)
    products = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    products = tl.dot((code - (1 << (A + B + C - 1))).to(kind), columns, products)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if COUNTED:
        sums = tl.dot(tl.full((BLOCK_N, 32), 1.0, kind), columns, sums)
    group = 0 if GROUP == 0 else column // GROUP
    return _scaled(products, sums, scales, zeros, group, stored, stored_rows, COUNTED, A + B + C)


@triton.jit
def sum_columns(acc, x, offsets, known, words_a, words_b, words_c, scales, zeros, stored, stored_rows, tiles,
                first_step, last_step, first_narrow, last_narrow,
                A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, COUNTED: tl.constexpr,
                TILE_WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr,
                NARROW: tl.constexpr, BF16: tl.constexpr, USE_ASM: tl.constexpr):  # fmt: skip
    """acc [n, m] plus the products of some steps, and of some of the NARROW tiles, with the stored rows `stored` [n].

    offsets: where in x the rows of activations begin, [1, m]; known [m]: which of them there are.
    """
    j = tl.arange(0, BLOCK_WORDS)
    row = stored.to(tl.int64)[:, None]  # a weight may have more than 2**31 words
    F: tl.constexpr = fields(C if C != 0 else (B if B != 0 else A))
    BITS: tl.constexpr = A + B + C
    CHAIN: tl.constexpr = chain(F, GROUP, TILE_WORDS)
    whole, in_row = tiles * (F * TILE_WORDS), tiles * (F * TILE_WORDS) + NARROW * 32
    x_start = x + (offsets + j[:, None])
    ones = tl.full((BLOCK_N, BLOCK_WORDS), 1.0, x.dtype.element_ty if USE_ASM else tl.float32)
    for step in range(first_step, last_step):
        tile = step // (TILE_WORDS // BLOCK_WORDS)
        skipped = step % (TILE_WORDS // BLOCK_WORDS) * BLOCK_WORDS
        first = tile * (F * TILE_WORDS) + skipped  # column of the first word's field 0
        held = (0, 0, 0, 0, 0)
        for f in tl.static_range(F):
            held = _advance(held, words_a, words_b, words_c, row, tiles, tile, skipped, j, A, B, C, F, f, TILE_WORDS,
                            NARROW)  # fmt: skip
            columns = tl.load(x_start + first + f * TILE_WORDS, mask=known[None, :], other=0.0)
            if not USE_ASM:
                columns = columns.to(tl.float32)
            if f % CHAIN == 0:
                part_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                part_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # of x, the same in all rows
            part_acc = tl.dot(_value(held, A, B, C, f, BF16, USE_ASM), columns, part_acc)
            if COUNTED:
                part_sums = tl.dot(ones, columns, part_sums)
            if f % CHAIN == CHAIN - 1:
                group = _group(tile, skipped, F, f, GROUP, TILE_WORDS)
                acc += _scaled(part_acc, part_sums, scales, zeros, group, stored, stored_rows, COUNTED, BITS)
    for narrow in range(first_narrow, last_narrow):
        acc += _narrow_product(x, offsets, known, words_a, words_b, words_c, scales, zeros, row, stored, stored_rows,
                               in_row, whole, narrow, A, B, C, GROUP, COUNTED, BLOCK_N, BLOCK_M, USE_ASM)  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["rows", "splits"])
def multiply(x, words_a, words_b, words_c, scales, zeros, sums, hidden, factor, out, partials, counters,
             rows, out_features, stored_rows, tiles, splits,
             A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
             TILE_WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_WORDS: tl.constexpr,
             SUMMED: tl.constexpr, SPLIT: tl.constexpr, RANK: tl.constexpr, NARROW: tl.constexpr, BF16: tl.constexpr,
             USE_ASM: tl.constexpr):  # fmt: skip
    """out [rows, out_features] = x [rows, stored columns] W^T; program (rows of W, part of the columns).

    x is float16, or bfloat16 if BF16; GROUP is 0 for the whole row. SPLIT: the last to finish of the `splits` programs
    of the same rows sums their parts. SUMMED: `sums` [groups, rows] are those of x, else the loop takes them. RANK:
    hidden [rows, RANK] times factor [RANK, out_features] is added. NARROW: tiles of 32 columns behind the whole ones.
    """
    pid, part = tl.program_id(0), tl.program_id(1)
    n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    stored = tl.minimum(n, stored_rows - 1)  # rows past the end are read again, and dropped
    F: tl.constexpr = fields(C if C != 0 else (B if B != 0 else A))
    BITS: tl.constexpr = A + B + C
    COUNTED: tl.constexpr = not SYMMETRIC and not SUMMED
    steps = tiles * (TILE_WORDS // BLOCK_WORDS)
    in_row = tiles * (F * TILE_WORDS) + NARROW * 32
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc = sum_columns(acc, x, m[None, :] * in_row, m < rows, words_a, words_b, words_c, scales, zeros, stored,
                      stored_rows, tiles, steps * part // splits, steps * (part + 1) // splits,
                      NARROW * part // splits, NARROW * (part + 1) // splits, A, B, C, GROUP, COUNTED, TILE_WORDS,
                      BLOCK_N, BLOCK_M, BLOCK_WORDS, NARROW, BF16, USE_ASM)  # fmt: skip
    if SUMMED:  # the parts share the groups out anew
        count = tl.cdiv(in_row, GROUP) if GROUP != 0 else 1
        start, end = count * part // splits, count * (part + 1) // splits
        acc = _shifted(acc, sums, scales, zeros, start, end, stored, m, rows, stored_rows, BITS)
    if SPLIT:
        last, acc = sum_parts(acc, partials, counters, pid, part, splits, (m < rows)[None, :] & (n >= 0)[:, None])
        if last:
            _finish(acc, hidden, factor, out, n, m, rows, out_features, RANK, USE_ASM)
    else:
        _finish(acc, hidden, factor, out, n, m, rows, out_features, RANK, USE_ASM)


@triton.jit
def _store_weights(code, k, n, stored, group, scales, zeros, out, in_features, out_features, stored_rows,
                   BITS: tl.constexpr, SYMMETRIC: tl.constexpr):  # fmt: skip
    """out [n, k] = scale * (code - zero); all columns k are of one group."""
    scale = tl.load((scales + stored) + group * stored_rows).to(tl.float32)
    if SYMMETRIC:
        code -= 1 << (BITS - 1)
    else:
        code -= stored_zero(zeros, group, stored, stored_rows, BITS)[:, None]
    mask = (n < out_features)[:, None] & (k < in_features)[None, :]
    weight = code.to(tl.float32) * scale[:, None]
    tl.store(out + (n.to(tl.int64)[:, None] * in_features + k[None, :]), weight.to(out.dtype.element_ty), mask=mask)


@triton.jit
def decode(words_a, words_b, words_c, scales, zeros, out, in_features, out_features, stored_rows, tiles,
           A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, SYMMETRIC: tl.constexpr,
           TILE_WORDS: tl.constexpr, NARROW: tl.constexpr, BLOCK_N: tl.constexpr,
           BLOCK_WORDS: tl.constexpr):  # fmt: skip
    """out [out_features, in_features] = scale * (code - zero); program (rows of W, step or narrow tile)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_WORDS)
    stored = tl.minimum(n, stored_rows - 1)
    row = stored.to(tl.int64)[:, None]
    F: tl.constexpr = fields(C if C != 0 else (B if B != 0 else A))
    BITS: tl.constexpr = A + B + C
    steps = tiles * (TILE_WORDS // BLOCK_WORDS)
    whole = tiles * (F * TILE_WORDS)
    if NARROW != 0:
        if tl.program_id(1) >= steps:
            narrow = tl.program_id(1) - steps
            code = _narrow_code(words_a, words_b, words_c, row, whole + NARROW * 32, whole, narrow, A, B, C)
            k = whole + narrow * 32 + tl.arange(0, 32)
            group = 0 if GROUP == 0 else (whole + narrow * 32) // GROUP
            _store_weights(code, k, n, stored, group, scales, zeros, out, in_features, out_features, stored_rows,
                           BITS, SYMMETRIC)  # fmt: skip
            return
    tile = tl.program_id(1) // (TILE_WORDS // BLOCK_WORDS)
    skipped = tl.program_id(1) % (TILE_WORDS // BLOCK_WORDS) * BLOCK_WORDS
    held = (0, 0, 0, 0, 0)
    for f in tl.static_range(F):
        held = _advance(held, words_a, words_b, words_c, row, tiles, tile, skipped, j, A, B, C, F, f, TILE_WORDS,
                        NARROW)  # fmt: skip
        code = _code(held, A, B, C, f)
        group = _group(tile, skipped, F, f, GROUP, TILE_WORDS)
        k = (tile * F + f) * TILE_WORDS + skipped + j
        _store_weights(code, k, n, stored, group, scales, zeros, out, in_features, out_features, stored_rows,
                       BITS, SYMMETRIC)  # fmt: skip


COMPILED = isinstance(multiply, triton.runtime.JITFunction)  # not interpreted
