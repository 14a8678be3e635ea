"""Attention of a few queries over keys and values of table codes (kv/codecs/lloyd.py), on CPUs with AVX-512 BW.

A code chooses one of up to 16 levels, small integers, by a permutation of a register; a norm belongs to each token:

    scores[m, t] = norm[t] sum_c q[m, c] level[code[t, c]]
    mixed[m, c] = sum_t (p[m, t] norm[t]) level[code[t, c]]

Everything else is as in compress/kernels/cpu/kv_affine.py: int16 queries (here with one scale for all tokens) or
products p norm, sums exact in int32. Levels are at most LARGEST_LEVEL, so that 512 channels do not overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.cpu import kv_affine
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.kv_affine import BLOCK, SHORTS, Sizes, addresses

LARGEST_LEVEL = 127
WIDEST = 512  # channels
MOST_BITS = 4


def supports(bits: int, width: int) -> bool:
    """Whether `scores` and `mix` can read such codes here."""
    sizes = Sizes(bits, width, width)
    if bits > MOST_BITS or width > WIDEST or not kv_affine.supports_values(sizes):
        return False
    least = 2 * min(LANES, sizes.words)  # lanes of a table of `mix`
    return least >= max(8, 2**bits) and {"avx512bw", "avx512vl"} <= llvm.features()


def scores(q: Tensor, planes: Sequence[Tensor], norms: Tensor, levels: tuple[int, ...], out: Tensor) -> None:
    """q [B, h, m, width] float32; planes [B, h, n, words] int16; norms [B, h, n, 1] float16; n a multiple of LANES; out
    [B, h, m, n] float32, its last axis contiguous. Rows of planes and norms must be contiguous.
    """
    q, sizes = q.contiguous(), _sizes(levels, q.shape[3])
    parts, stride = norms.shape[2] // LANES, out.stride(2)
    kernels = [(row, _compiled(_Scores, sizes, some, levels)) for row, some in kv_affine._pieces(q.shape[2])]
    stored, given = addresses((*planes, norms)), addresses((q, out))
    one = torch.ones(sizes.width, dtype=torch.float16, device="cpu")
    zero = torch.zeros_like(one)
    plain = one.data_ptr(), zero.data_ptr()

    def work(first: int, last: int) -> None:
        space = torch.empty(sizes.width * 4 * 8, dtype=torch.float32, device="cpu")
        place = space.data_ptr()
        for index in range(first, last):
            at_q, at_out = given[index]
            for row, kernel in kernels:
                rows_at = at_q + 4 * row * sizes.width, at_out + 4 * row * stride
                kernel(*stored[index], *plain, *rows_at, place, parts, stride)

    llvm.parallel(work, len(stored), -(-(1 << 19) // (max(parts, 1) * LANES * sizes.width)))


def mix(p: Tensor, planes: Sequence[Tensor], norms: Tensor, levels: tuple[int, ...], width: int) -> Tensor:
    """p [B, h, m, n] float32, n a multiple of BLOCK; planes [B, h, n, words]; norms [B, h, n, 1] float16 -> [B, h, m,
    width] float32.
    """
    p = p if p.stride(3) == 1 else p.contiguous()
    tokens, stride, sizes = p.shape[3], p.stride(2), _sizes(levels, width)
    out = torch.zeros(*p.shape[:3], width, dtype=torch.float32, device="cpu")
    unused = torch.zeros(*p.shape[:3], LANES, dtype=torch.float32, device="cpu")
    kernels = [(4 * row, _compiled(_Mix, sizes, some, levels)) for row, some in kv_affine._pieces(p.shape[2])]
    stored, given = addresses((*planes, norms, norms)), addresses((p, out, unused))

    def work(first: int, last: int) -> None:
        space = torch.empty(BLOCK * 4, dtype=torch.int32, device="cpu")
        place = space.data_ptr()
        for index in range(first, last):
            at_p, at_out, at_unused = given[index]
            for row, kernel in kernels:
                rows_at = at_p + row * stride, at_out + row * width, at_unused + row * LANES
                kernel(*stored[index], *rows_at, place, tokens // BLOCK, stride)

    llvm.parallel(work, len(stored), -(-(1 << 19) // (max(tokens, 1) * width)))
    return out


def _sizes(levels: tuple[int, ...], width: int) -> Sizes:
    return Sizes(len(levels).bit_length() - 1, width, width)


@cache
def _compiled(kind: type[Any], sizes: Sizes, tokens: int, levels: tuple[int, ...]) -> Any:
    return llvm.compiled(kind(sizes, tokens, levels))


class _Levels(kv_affine.Packed):
    levels: tuple[int, ...]

    def field(self, words: Sequence[Any], field: int) -> Any:
        """Levels of the codes of a field."""
        codes = super().field(words, field)
        lanes = codes.type.count
        kind = self.vector(self.short, lanes)
        table = self.ir.Constant(kind, [self.levels[code % len(self.levels)] for code in range(lanes)])
        return self.intrinsic(f"llvm.x86.avx512.permvar.hi.{16 * lanes}", kind, table, codes)


class _Scores(_Levels, kv_affine._Scores):
    """void scores(words..., norms, ones, zeros, q, out, space, parts of 16 tokens, stride): q [M, width]; ones and
    zeros [width] stand for the scales and minima of `cached._Scores`."""

    def __init__(self, sizes: Sizes, tokens: int, levels: tuple[int, ...]) -> None:
        kv_affine.Packed.__init__(self, "scores", sizes.planes + 6, 2)
        self.sizes, self.tokens, self.levels = sizes, tokens, levels
        self.planes = self.pointers[: sizes.planes]
        self.norms, self.scales, self.minima, self.q, self.out, self.space = self.pointers[sizes.planes :]
        parts, self.stride = self.integers
        self.repeats = max(1, SHORTS // sizes.words)  # tokens of a vector of words
        self.vectors = max(1, sizes.words // SHORTS)  # vectors of a field and a token
        scales = [self._factors(self.i64(0), m)[0] for m in range(tokens)]
        with self.loop(parts) as part:
            token = self.b.mul(part, self.i64(LANES))
            norms = self.halves(self.norms, token)
            for m, total in enumerate(self._sums(token, 0, LANES // self.repeats)):
                values = self.b.fmul(self.b.sitofp(total, self.vector(self.float, LANES)), norms)
                place = self.b.add(self.b.mul(self.stride, self.i64(m)), token)
                self.store(self.b.fmul(values, self.splat(scales[m], LANES)), self.out, place)
        self.b.ret_void()


class _Mix(_Levels, kv_affine._Mix):
    """As `cached._Mix` with a group of the whole width; norms stand for scales, what becomes of minima is not read."""

    def __init__(self, sizes: Sizes, tokens: int, levels: tuple[int, ...]) -> None:
        self.levels = levels
        kv_affine._Mix.__init__(self, sizes, tokens)
