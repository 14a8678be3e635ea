"""Keep every bit of bfloat16 weights in 67 to 75% of their bytes: exponents are coded, the rest stays as it is.

DFloat11, arXiv 2504.11651: of the 16 bits of a trained weight the 8 of the exponent hold about 2.6 bits of information.
Here each row of a weight is a stream of its own, so that rows of embeddings can be looked up and no index of threads is
stored; codes have at most 12 bits, not 32. `coding: ranked` is ours: 4 bits for an exponent, wide enough for all but 1
of 3,000, and of fixed width, so that kernels multiply what is stored.

A weight that is not bfloat16 is kept as it is: of float16, whose exponents have 5 bits, 15% of the bytes could be
saved, and float32 rarely comes up. So is one whose coded form would be larger. A float32 weight all of whose numbers
are bfloat16 is coded.

Not done: coding of vectors, such as those of norms, which are under 0.1% of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.formats import dense, exponents
from compress.kernels.loops import huffman as compiled
from compress.numerics import huffman
from compress.types import PackedWeight, Quantized, Stats, Stored, Work

FORMAT = "exponents"
NEEDS: frozenset[str] = frozenset()
INCOHERENCE = False
WEIGHT_STEPS = 30


@dataclass(frozen=True)
class Config:
    """Settings of the lossless storage of bfloat16."""

    coding: Literal["huffman", "ranked"] = "huffman"  # of exponents: huffman takes the fewest bytes, and is decoded as
    # a whole; ranked takes 12 bits a weight, and is multiplied as it is


def plan_params(config: Config, shape: tuple[int, int]) -> exponents.Params:
    """Return the parameters that a weight [out, in] usually has: how many bytes its exponents take, it tells itself."""
    return exponents.estimate(config.coding, shape)


def workspace(config: Config, shape: tuple[int, int]) -> int:
    """Return the bytes needed beside the stored weight: bits, exponents, fractions, ranks, counts."""
    return shape[0] * shape[1] * 24


def work(config: Config, shape: tuple[int, int]) -> Work:
    """Return what `quantize` takes."""
    return Work(0, WEIGHT_STEPS * shape[0] * shape[1])


def quantize(weight: Tensor, stats: Stats | None, config: Config, seed: int = 0) -> Quantized:
    """Store weight [out, in], any float dtype. `stats` and `seed` are unused."""
    shape = (weight.shape[0], weight.shape[1])
    narrow = weight.to(torch.bfloat16)
    if weight.dtype != torch.bfloat16 and not _is_same(narrow, weight):
        name = str(weight.dtype).removeprefix("torch.")
        return _as_it_is(weight, name, f"it is {name}, whose exponents are not coded: kept as it is")
    encode = compiled.encode if compiled.available() else huffman.encode
    params, tensors = exponents.pack(narrow, config.coding, encode)
    packed = PackedWeight(Stored("exponents", params), tensors, shape)
    if packed.nbytes >= 2 * weight.numel():
        return _as_it_is(narrow, "bfloat16", "its coded form would be larger: kept as it is")
    return Quantized(packed)


def _is_same(narrow: Tensor, weight: Tensor) -> bool:
    """Return whether nothing was lost."""
    return torch.equal(narrow.to(weight.dtype), weight) and torch.equal(narrow.signbit(), weight.signbit())


def _as_it_is(weight: Tensor, dtype: str, note: str) -> Quantized:
    params = dense.Params(dtype)
    shape = (weight.shape[0], weight.shape[1])
    return Quantized(PackedWeight(Stored("dense", params), dense.pack(weight, params), shape), (note,))
