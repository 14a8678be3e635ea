"""Write packed keys and values (kernels/cpu/kv_affine.py) as floating-point numbers, decoded in registers.

    x[t, c] = scale code[t, c] + min, in float32, rounded once

with one scale for each group and channel (keys) or for each token and group (values).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.kernels import llvm
from compress.kernels.contract import PlanarCodes
from compress.kernels.cpu.emitter import LANES, Writer
from compress.kernels.cpu.kv_affine import THREAD, PackedEmitter, addresses
from compress.numerics.packing import FIELDS

LEAST = 4  # words of a plane and token


def supports(codes: PlanarCodes, by_token: bool) -> bool:
    """Return whether `decode` can read such codes: vectors of LEAST words or more of a token, of one scale each."""
    if codes.bits not in FIELDS or codes.width % (FIELDS[codes.bits] * LEAST) or not llvm.available():
        return False
    lanes = min(LANES, codes.words)
    return LANES % lanes == 0 and codes.words % lanes == 0 and (not by_token or codes.group % lanes == 0)


def decode(
    planes: Sequence[Tensor], scales: Tensor, minima: Tensor, codes: PlanarCodes, by_token: bool, out: Tensor
) -> None:
    """planes [B, h, n, words]; scales, minima [B, h, n / group, width], by token [B, h, n, width / group];
    out [B, h, n, width] of one of DTYPES. The last two axes of all are contiguous.
    """
    kernel, groups = llvm.function(_AffineDecode, codes, by_token, out.dtype), scales.shape[2]
    stored = addresses((*planes, scales, minima, out))

    def work(first: int, last: int) -> None:
        for index in range(first, last):
            kernel(*stored[index], groups)

    llvm.parallel(work, len(stored), -(-THREAD // (out.shape[2] * codes.width)))


class _AffineDecode(Writer, PackedEmitter):
    """void decode(words..., scales, minima, out, groups)."""

    def __init__(self, codes: PlanarCodes, by_token: bool, dtype: torch.dtype) -> None:
        super().__init__("decode", codes.planes + 3, 1, dtype)
        self.sizes, self.by_token = codes, by_token
        self.planes = self.pointers[: codes.planes]
        self.scales, self.minima, self.out = self.pointers[codes.planes :]
        self.lanes = min(LANES, codes.words)
        tokens = 1 if by_token else codes.group
        with self.loop(self.integers[0]) as group:
            first = self.b.mul(group, self.i64(tokens))
            for start in range(0, codes.words, self.lanes):
                for field in range(FIELDS[codes.bits]):
                    self._column(group, first, tokens, (start, field))
        self.b.ret_void()

    def _column(self, group: Any, first: Any, tokens: int, place: tuple[int, int]) -> None:
        """The channels of a field from the word `start` on, for the tokens of a group."""
        b, (start, field) = self.b, place
        channel = field * self.sizes.words + start
        scale, low = self.line(*(self._factor(pointer, group, channel) for pointer in (self.scales, self.minima)))
        with self.loop(self.i64(tokens)) as token:
            row = b.add(first, token)
            words = b.add(b.mul(row, self.i64(self.sizes.words)), self.i64(start))
            codes = self.field([self.load(plane, words, self.short, self.lanes) for plane in self.planes], field)
            values = b.uitofp(codes, self.vector(self.float, self.lanes))
            at = b.add(b.mul(row, self.i64(self.sizes.width)), self.i64(channel))
            self.store(self.rounded(self.multiply_add(values, scale, low)), self.out, at)

    def _factor(self, pointer: Any, group: Any, channel: int) -> Any:
        b, sizes = self.b, self.sizes
        if self.by_token:
            at = b.add(b.mul(group, self.i64(sizes.width // sizes.group)), self.i64(channel // sizes.group))
            return self.splat(self.load_floats(pointer, at, torch.float16), self.lanes)
        at = b.add(b.mul(group, self.i64(sizes.width)), self.i64(channel))
        return self.load_floats(pointer, at, torch.float16, self.lanes)
