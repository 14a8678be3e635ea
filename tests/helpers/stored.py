"""Stored tensors of any format: random ones, which is what a kernel reads, and those that methods choose."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress import formats, plugins
from compress.formats import codebook, columns, dense, exponents, nested, sliced, sparse, ternary
from compress.formats import int as int_format
from compress.numerics.packing import pack_stream
from compress.types import PackedWeight, Stored
from helpers import problems

METHODS = plugins.names("quant")
# Settings of methods, beside the defaults, that store other tensors.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gptq": [{"symmetric": False, "group_size": 32}],
    "lossless": [{"coding": "ranked"}],
    "kquant": [{"type": "q2_k"}, {"type": "q3_k"}, {"type": "q6_k", "sweeps": 0}, {"type": "iq4_xs"}],
    "grid_rtn": [
        {"type": name} for name in ("mxfp4", "mxfp8", "fp8", "fp8-channel", "fp8-block", "nf4", "dynamic8", "iq4_nl")
    ],
    "e8p": [{"bits": 3}, {"bits": 4, "row_scales": True}],
    "ternary": [{"packing": "planar", "group_size": 16}, {"group_size": -1}],
    "structured": [{"rows": 0.5}, {"columns": 0.3, "dtype": "float16"}, {"rows": 0.5, "columns": 0.5}],
    "glvq": [{"bits": 3}],
    "ptq161": [{"salient": 0.0}, {"salient": 0.5}],
    "pvq": [{"bpw": 1.5, "vector_dim": 16}],
    "lord": [{"bits": 8}, {"bits": 4, "group_size": 32, "dtype": "float16"}, {"ratio": 2.0, "metric": "sizes"}],
    "nf": [{"bits": 3, "scale_bits": 3, "block_size": 16}, {"bits": 2, "scale_bits": 2}],
    "hqq": [{"bits": 3, "group_size": 32}, {"bits": 2, "group_size": 24}],
    "aqlm": [{"bits": 4, "stages": 3, "codebook_dtype": "int8", "vector_dim": 4}],
    "decoupleq": [{"bits": 4, "group_size": 32}],
    "sinq": [{"bits": 3, "group_size": 32}],
    "sparsegpt": [
        {"bits": 16},
        {"kept": 4, "of": 8, "group_size": 8},
        {"kept": 8, "of": 16, "block_rows": 2, "block_columns": 2, "bits": 3, "score": "wanda"},
    ],
    "spqr": [{"bits": 2, "group_size": 8, "outliers": 0.1}, {"outliers": 0.0}],
    "trellis": [
        {"bits": 3, "state_bits": 6, "row_scales": True},
        {"code": "hyb", "state_bits": 8},
        {"bits": 2.5, "state_bits": 7},
    ],
    "gptvq": [{"bits": 4, "vector_dim": 2, "group_weights": 256}, {"bits": 3, "vector_dim": 1, "permute": False}],
    "vptq": [{"bits": 5, "outliers": 0.1}],
}


def former_codebooks(shape: tuple[int, int]) -> list[PackedWeight]:
    """Codebooks of two stages, with scales, and of a rank: layouts of earlier versions that no method writes now."""
    columns = shape[1]
    params = [
        codebook.Params(
            (5, 3), 4, codebook.tile_words((5, 3), columns), axis="out", group_columns=32, norm="columns", bias=True,
            outliers=min(3, columns),
        ),
        codebook.Params(
            (4,), 2, codebook.tile_words((4,), -(-columns // 2)), codebook_dtype="float16", scale_columns=16,
        ),
        codebook.Params((3,), 1, codebook.tile_words((3,), columns), group_rows=4, svd_rank=2),
    ]  # fmt: skip
    return [random_weight("codebook", each, shape) for each in params]


def random_weight(format: str, params: Any, shape: tuple[int, int], seed: int = 0) -> PackedWeight:
    """Every code, scale and table drawn anew; what selects is possible, scales are small and positive.

    Coded exponents are those of random weights, since few streams can be decoded: `params` gives the coding alone.
    """
    if format == "exponents":
        params, tensors = exponents.pack(problems.random(*shape, seed=seed).bfloat16(), params.coding)
        return PackedWeight(Stored(format, params), tensors, shape)
    stored = Stored(format, params)
    return PackedWeight(stored, random_parts(stored, shape, seed), shape)


def random_parts(stored: Stored, shape: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    """All tensors that are stored for a weight [out, in], drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (
        {"mask": sparse.pack(random_mask(stored.params, shape), {}, stored.params)["mask"]}
        if stored.format == "sparse"
        else {}
    )

    def draw(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        chosen = _draw_choice(name, stored, shape[1], size, generator)
        if chosen is not None:
            return chosen.to(dtype)
        if dtype.is_floating_point:
            return (0.001 + 0.01 * torch.rand(size, generator=generator)).to(dtype)
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max + 1, size, generator=generator).to(dtype)

    return {
        name: drawn.get(name) if name in drawn else draw(name, *spec)
        for name, spec in formats.specs(stored, shape).items()
    }


def random_mask(params: sparse.Params, shape: tuple[int, int], seed: int = 0) -> Tensor:
    """A mask [out, padded columns] that keeps what the format says."""
    generator = torch.Generator().manual_seed(seed)
    rows, groups = -(-shape[0] // params.block_rows), -(-shape[1] // params.of)
    scores = torch.rand(rows, groups, params.of // params.block_columns, generator=generator)
    entries = scores.argsort(-1).argsort(-1) < params.keep // params.block_columns
    mask = entries.flatten(1).repeat_interleave(params.block_rows, 0)[: shape[0]]
    return mask.repeat_interleave(params.block_columns, 1)


def _draw_choice(
    name: str, stored: Stored, columns: int, size: tuple[int, ...], generator: torch.Generator
) -> Tensor | None:
    """What selects, or must not be any pattern of bits; None for a tensor that can be anything."""
    if name in ("order", "outlier_index"):
        return torch.randperm(columns, generator=generator)[: size[0]]
    if name in ("rows", "columns"):  # that are kept
        return torch.arange(size[0])
    if name == "row_starts":
        return torch.linspace(0, stored.params.outliers, size[0]).long()
    if name == "outlier_columns":
        return torch.randint(0, columns, size, generator=generator)
    if name == "mask":
        chosen = torch.zeros(8 * size[0], dtype=torch.uint8)
        chosen[torch.randperm(columns, generator=generator)[: stored.params.salient]] = 1
        return pack_stream(chosen, 1)
    if name == "group_bits":
        return torch.full(size, stored.params.bits)
    return _draw_codes(name, stored, size, generator)


def _draw_codes(name: str, stored: Stored, size: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    """Codes and scales of formats in which some patterns of bits mean nothing."""
    if name == "codes" and getattr(stored.params, "values", "") == "e4m3":
        return torch.randn(size, generator=generator).mul_(100).clamp_(-448, 448)  # a larger number becomes NaN
    if name == "codes" and stored.format == "ternary":
        count = ternary.BYTE_DIGITS[stored.params.packing]
        trits = torch.randint(-1, 2, (*size, count), generator=generator).to(torch.int8)
        return ternary._to_bytes(trits, stored.params.packing)
    if name == "scales" and getattr(stored.params, "scale_type", "") == "e8m0":
        return torch.randint(110, 125, size, generator=generator)
    return None


def product(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [rows, in] times the decoded weight, in float64."""
    return x.double() @ formats.decode_stored(weight, torch.float64).T


@functools.cache
def samples(name: str, shape: tuple[int, int]) -> list[PackedWeight]:
    """Weights in a format as the methods that write it make them; a format without a method packs the weight itself."""
    weight = problems.random(*shape)
    if name == "exponents":  # its method keeps what is too small to gain by it
        packed = [exponents.pack(weight.bfloat16(), coding) for coding in ("huffman", "ranked")]
        return [PackedWeight(Stored(name, params), tensors, shape) for params, tensors in packed]
    stats = problems.stats(problems.inputs(2 * shape[1], shape[1]))
    methods = {method: plugins.load("quant", method) for method in METHODS}
    writers = {key: method for key, method in methods.items() if name == method.FORMAT}
    if writers:
        asked = [(method, settings) for key, method in writers.items() for settings in ({}, *VARIANTS.get(key, ()))]
        former = former_codebooks(shape) if name == "codebook" else []
        return [method.quantize(weight, stats, method.Config(**settings)).weight for method, settings in asked] + former
    if name == "columns":  # what methods wrote row by row
        return columnar(weight, ({}, {"bits": 3, "group_size": 16, "symmetric": False}, {"bits": 8, "group_size": 32}))
    if name in ("nested", "sliced"):
        return of_levels(name, shape)
    module = plugins.load("formats", name)
    return [PackedWeight(Stored(name, module.Params()), module.pack(weight, module.Params()), shape)]


def of_levels(name: str, shape: tuple[int, int]) -> list[PackedWeight]:
    """Random weights of formats with levels: sums of parts of several formats, and planes below one scale."""
    if name == "sliced":
        settings: list[tuple[tuple[int, ...], int, bool]] = [((2, 2), 16, True), ((2, 2, 4), 32, False)]
        made = [sliced.params_for(*each, shape[1]) for each in settings]
        return [random_weight(name, params, shape) for params in (*made, dataclasses.replace(made[1], kept=4))]
    integers = [
        random_weight("int", int_format.params_for(bits, 32, symmetric, shape[1]), shape, bits)
        for bits, symmetric in ((4, True), (3, False), (2, True))
    ]
    trits = random_weight("ternary", ternary.Params("base3", 64), shape)
    original = random_weight("dense", dense.Params(), shape)
    sums = [nested.join(integers[:2], (4, 7)), nested.join([trits, *integers[1:]], (2, 5, 7))]
    return [*sums, nested.join([integers[0], original], (4, 16))]


def columnar(weight: Tensor, settings: Sequence[dict[str, Any]]) -> list[PackedWeight]:
    """A weight [out, in] column by column: as it is, then rounded to nearest, with these settings each."""
    shape = (weight.shape[0], weight.shape[1])
    plain = dense.Params()
    made = [columns.from_dense(dense.pack(weight, plain), plain, shape)]
    for each in settings:
        packed = plugins.load("quant", "rtn").quantize(weight, None, plugins.load("quant", "rtn").Config(**each)).weight
        made.append(columns.from_int(packed.tensors, packed.params, shape))
    return [PackedWeight(Stored("columns", params), tensors, shape) for params, tensors in made]
