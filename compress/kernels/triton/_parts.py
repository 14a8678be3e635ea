"""What the kernels of codes share on the device: activations as float16, and the sum of the parts of a product."""

# ruff: noqa: ANN001, ANN202 (signatures of kernels)
# mypy: ignore-errors

import triton
import triton.language as tl

COMPILED = not triton.knobs.runtime.interpret  # there is no inline assembly in the interpreter
# Activations of wider types than float16 are multiplied by this: up to a million then fits, and the absolute error of
# tiny ones is 5e-7.
X_SCALE = tl.constexpr(1 / 16)


@triton.jit
def half(x):
    """Activations as float16, times X_SCALE if their type is wider."""
    if x.dtype == tl.float16:
        return x
    else:
        return (x.to(tl.float32) * X_SCALE).to(tl.float16)


@triton.jit
def columns_of(x, k, m, rows, in_features, MASKED: tl.constexpr):
    """x^T [k, m] float16, the columns k and rows m of x [rows, in_features]."""
    mask = (m < rows)[None, :]
    if MASKED:
        mask = mask & (k < in_features)[:, None]
    return half(tl.load(x + m[None, :] * in_features + k[:, None], mask=mask, other=0.0))


@triton.jit
def x_factor(x):
    """What the products of `half(x)` are multiplied by; x is a pointer."""
    if x.dtype.element_ty == tl.float16:
        return 1.0
    else:
        return 1 / X_SCALE


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
