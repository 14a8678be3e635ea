"""The kernel of compress/kernels/triton/hadamard.py: imported at the first launch, because it needs triton."""

# ruff: noqa: PLR0913, PLR0917, ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _flip(values, bitmap, i):
    """Values with the signs that the bitmap has at i."""
    negative = (tl.load(bitmap + i // 8).to(tl.int32) >> i % 8) & 1
    return tl.where(negative != 0, -values, values)


@triton.jit
def transform(x, table, before, after, out, count, factor, TABLE: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr,
              BLOCK: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):  # fmt: skip
    """out [count, SIZE] = x [count, SIZE] H, times factor, with signs before and after; program (BLOCK lines).

    With TABLE > 1, that many lines are a row and one program's, and the table [TABLE, TABLE] is multiplied to them.
    Each stage of H sums and subtracts neighbours and puts all sums before all differences: the stages are alike, and
    after BITS of them everything is back in its place.
    """
    line = tl.arange(0, BLOCK)
    j = tl.arange(0, SIZE)[None, :]
    i = j
    if TABLE > 1:
        known = (line < TABLE)[:, None]
        i = tl.minimum(line, TABLE - 1)[:, None] * SIZE + j
        at = tl.program_id(0).to(tl.int64) * TABLE * SIZE + line[:, None] * SIZE + j
    else:
        first = tl.program_id(0).to(tl.int64) * BLOCK + line
        known = (first < count)[:, None]
        at = first[:, None] * SIZE + j
    values = tl.load(x + at, mask=known, other=0.0)
    if TABLE == 1:
        values = values.to(tl.float32)
    if BEFORE:
        values = _flip(values, before, i)
    if TABLE > 1:
        mask = known & (line < TABLE)[None, :]
        values = tl.dot(tl.load(table + line[:, None] * TABLE + line[None, :], mask=mask, other=0.0), values)
    for _ in tl.static_range(BITS):
        a, b = tl.split(tl.reshape(values, (BLOCK, SIZE // 2, 2)))
        values = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (BLOCK, SIZE))
    values *= factor
    if AFTER:
        values = _flip(values, after, i)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=known)
