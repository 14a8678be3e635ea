"""Read keys and values of table codes (kv/codecs/lloyd.py) for a few queries, on CPUs with AVX-512 BW.

A code chooses one of up to 16 levels, small integers, by a permutation of a register; a norm belongs to each token:

    scores[m, t] = norm[t] sum_c q[m, c] level[code[t, c]]
    mixed[m, c] = sum_t (p[m, t] norm[t]) level[code[t, c]]

Everything else is as in compress/kernels/cpu/kv_affine.py: int16 queries (here with one scale for all tokens) or
products p norm, sums exact in int32. Levels are at most LARGEST_LEVEL, so that 512 channels do not overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import MOST_LEVEL_BITS, PlanarCodes
from compress.kernels.cpu import kv_affine
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.kv_affine import SHORTS

WIDEST = 512  # channels


def supports(bits: int, width: int) -> bool:
    """Return whether `scores` and `mix` can read such codes here."""
    codes = PlanarCodes(bits, width, width)
    if bits > MOST_LEVEL_BITS or width > WIDEST or not kv_affine.supports(codes, by_token=True):
        return False
    least = 2 * min(LANES, codes.words)  # lanes of a table of `mix`
    return least >= max(8, 2**bits) and {"avx512bw", "avx512vl"} <= llvm.features()


def scores(q: Tensor, planes: Sequence[Tensor], norms: Tensor, levels: tuple[int, ...], out: Tensor) -> None:
    """Write the products of q [B, h, m, width] float32 with keys to out [B, h, m, n] float32, n a multiple of LANES.

    planes [B, h, n, words] int16; norms [B, h, n, 1] float16. Rows of planes and norms and the last axis of out must be
    contiguous.
    """
    one = torch.ones(q.shape[3], dtype=torch.float16, device="cpu")
    zero = torch.zeros_like(one)
    kernel = partial(llvm.function, _LevelScores, levels, q.shape[3])
    plain = one.data_ptr(), zero.data_ptr()
    kv_affine.multiply_keys(kernel, q, (*planes, norms), plain, out, norms.shape[2] // LANES)


def mix(p: Tensor, planes: Sequence[Tensor], norms: Tensor, levels: tuple[int, ...], width: int) -> Tensor:
    """Return the sums [B, h, m, width] float32 of values with weights p [B, h, m, n] float32, n a multiple of BLOCK.

    planes [B, h, n, words]; norms [B, h, n, 1] float16.
    """
    kernel = partial(llvm.function, _LevelMix, levels, width)
    return kv_affine.sum_values(kernel, p, (*planes, norms, norms), width, 1)[0]


def _codes(levels: tuple[int, ...], width: int) -> PlanarCodes:
    return PlanarCodes(len(levels).bit_length() - 1, width, width)


class _Levels(kv_affine.PackedEmitter):
    levels: tuple[int, ...]

    def field(self, words: Sequence[Any], field: int) -> Any:
        """Levels of the codes of a field."""
        codes = super().field(words, field)
        lanes = codes.type.count
        kind = self.vector(self.short, lanes)
        table = self.ir.Constant(kind, [self.levels[code % len(self.levels)] for code in range(lanes)])
        return self.intrinsic(f"llvm.x86.avx512.permvar.hi.{16 * lanes}", kind, table, codes)


class _LevelScores(_Levels, kv_affine._AffineScores):
    """void scores(words..., norms, ones, zeros, q, out, space, parts of 16 tokens, stride): q [M, width]; ones and
    zeros [width] stand for the scales and minima of `kv_affine._AffineScores`."""

    def __init__(self, levels: tuple[int, ...], width: int, tokens: int) -> None:
        sizes = _codes(levels, width)
        kv_affine.PackedEmitter.__init__(self, "scores", sizes.planes + 6, 2)
        self.sizes, self.tokens, self.levels = sizes, tokens, levels
        self.planes = self.pointers[: sizes.planes]
        self.norms, self.scales, self.minima, self.q, self.out, self.space = self.pointers[sizes.planes :]
        parts, self.stride = self.integers
        self.repeats = max(1, SHORTS // sizes.words)  # tokens of a vector of words
        self.vectors = max(1, sizes.words // SHORTS)  # vectors of a field and a token
        scales = [self._factors(self.i64(0), m)[0] for m in range(tokens)]
        with self.loop(parts) as part:
            token = self.b.mul(part, self.i64(LANES))
            norms = self.load_floats(self.norms, token, torch.float16, LANES)
            for m, total in enumerate(self._sums(token, 0, LANES // self.repeats)):
                values = self.b.fmul(self.b.sitofp(total, self.vector(self.float, LANES)), norms)
                place = self.b.add(self.b.mul(self.stride, self.i64(m)), token)
                self.store(self.b.fmul(values, self.splat(scales[m], LANES)), self.out, place)
        self.b.ret_void()


class _LevelMix(_Levels, kv_affine._AffineMix):
    """The sums of `kv_affine._AffineMix` with one group; norms stand for scales, and sums of minima are dropped."""

    def __init__(self, levels: tuple[int, ...], width: int, tokens: int) -> None:
        self.levels = levels
        kv_affine._AffineMix.__init__(self, _codes(levels, width), tokens)
