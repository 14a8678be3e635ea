"""The Triton kernels of the lattice format: their results in the interpreter, their machine code."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import interpreter  # noqa: F401
import offline
import ptx
from compress import formats
from compress.formats import lattice as lattice_format
from compress.formats.lattice import Params
from compress.kernels import dispatch
from compress.kernels.triton import _lattice, lattice, split_k
from compress.types import PackedWeight
from stored import product, random_weight

GLVQ = Params(2, 8, 128, compand=False, row_scales=True)  # what recipes/papers/glvq2bit.yaml makes


def random_lattice(params: Params, shape: tuple[int, int]) -> PackedWeight:
    """Groups of all three widths, matrices and curves of a usual size."""
    weight, generator = random_weight("lattice", params, shape), torch.Generator().manual_seed(1)
    count = lattice_format.groups(params, shape)
    more = torch.zeros(count, dtype=torch.int64)
    more[: count // 3], more[count // 3 : count // 3 * 2] = 1, -1
    weight.tensors["group_bits"].copy_(params.bits + more[torch.randperm(count, generator=generator)])
    spread = 1 / (2**params.bits * params.dim**0.5)  # so that values are about 1 at most, as the curve expects
    weight.tensors["lattices"].copy_(torch.randn(weight.tensors["lattices"].shape, generator=generator) * spread)
    if params.compand:
        weight.tensors["curves"][:, 0] = torch.rand(count, generator=generator) * 200 + 0.01
        weight.tensors["curves"][:, 1] = torch.rand(count, generator=generator) + 0.5
    return weight


@pytest.mark.parametrize(
    ("params", "shape", "rows"),
    [
        (GLVQ, (100, 1024), 1),
        (Params(2, 8, 128, False, False), (20, 333), 3),
        (Params(3, 16, 32, False, True), (40, 300), 8),
        (Params(4, 32, 96, False, True), (33, 400), 16),
        (Params(2, 8, 48, False, True), (20, 160), 9),
    ],
)
def test_matmul_is_that_of_the_decoded_weight(params: Params, shape: tuple[int, int], rows: int) -> None:
    known = dispatch.supported("cuda", "lattice", params, shape)
    assert known is not None and rows <= known.most_rows(torch.float16)
    weight = random_lattice(params, shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    wanted = product(x, weight)
    for dtype, bound in ((torch.float32, 1e-3), (torch.float16, 2e-3)):  # G^T x is rounded to float16
        found = lattice.prepare(weight.tensors, params, shape)(x.to(dtype))
        assert found.dtype == dtype and found.shape == wanted.shape
        assert (found - wanted).abs().max() < bound * wanted.abs().max()


@pytest.mark.parametrize(
    ("params", "shape"),
    [
        (GLVQ, (40, 512)),
        (Params(3, 16, 32, False, False), (33, 300)),
        (Params(4, 32, 96, False, True), (20, 400)),
        (Params(2, 8, 128, True, True), (20, 333)),
        (Params(4, 16, 64, True, False), (33, 200)),
    ],
)
def test_decode_is_that_of_the_format(params: Params, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_lattice(params, shape)
    wanted = formats.decode_stored(weight, torch.float64)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(math.nan))
    for dtype, bound in ((torch.float32, 2e-6), (torch.float16, 2**-10)):
        found = lattice.prepare(weight.tensors, params, shape).decode(dtype)
        assert found.dtype == dtype
        assert ((found - wanted).abs() <= bound * wanted.abs() + 2**-24).all()


def test_long_groups_and_curved_products_are_declined() -> None:
    assert not dispatch.supported("cuda", "lattice", Params(2, 8, 2048, False, True), (64, 2048))
    assert not dispatch.supported("cuda", "lattice", Params(2, 8, 16 * 63, False, True), (64, 2048))
    assert dispatch.supported("cuda", "lattice", Params(2, 8, 128, True, True), (64, 128)).most_rows(torch.float16) == 0


def test_old_contents_of_memory_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    params, shape = Params(2, 8, 32, False, True), (20, 330)
    weight, x = random_lattice(params, shape), torch.randn(3, 330)
    first = lattice.prepare(weight.tensors, params, shape)(x)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(math.nan))
    split_k.forget()
    assert torch.equal(lattice.prepare(weight.tensors, params, shape)(x), first)
    assert torch.equal(lattice.prepare(weight.tensors, params, shape)(x), first)  # the counters are 0 again


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_assembly_gives_every_coordinate(bits: int) -> None:
    words = torch.arange(1 << 16)
    others = (words * 40503 + 12345) & 0xFFFF  # a permutation of all words
    places = range(0, 17 - bits, bits)
    for shifts in zip(places, reversed(places), strict=True):
        operands = [words | others << 16, *(torch.full_like(words, shift) for shift in shifts)]
        made = ptx.halves(ptx.run(_lattice.coordinate_text(bits), 1, operands)[0])
        for half, word, shift in zip(made, (words, others), shifts, strict=True):
            assert torch.equal(half.double(), (word >> shift & (1 << bits) - 1).double() - (2**bits - 1) / 2)


def test_assembly_gathers_spare_bits() -> None:
    tops = torch.tensor(list(itertools.product(range(2), repeat=6)))  # of the words of two columns
    words = (tops << 15 | 0x2AAA).view(-1, 2, 3)
    operands = [words[:, 0, i] | words[:, 1, i] << 16 for i in range(3)]
    for column, half in enumerate(ptx.halves(ptx.run(_lattice.spare_text(), 1, operands)[0])):
        bits = tops.view(-1, 2, 3)[:, column]
        assert torch.equal(half.double(), (bits * torch.tensor([1, 2, 4])).sum(1).double() - 3.5)


POINTERS = {
    "x": "fp16", "factors": "fp32", "words": "i16", "group_bits": "u8", "scale": "fp32", "row_scales": "fp16",
    "out": "fp16", "partials": "fp32", "counters": "i32", "lattices": "fp16", "curves": "fp32",
}  # fmt: skip
SIZES = ("rows", "in_features", "columns", "out_features", "stored_rows", "groups", "parts")
SIGNATURE = {name: f"*{kind}" for name, kind in POINTERS.items()} | dict.fromkeys(SIZES, "i32")
SHAPE = (4096, 4096)
ALIGNED = ("in_features", "columns", "out_features", "stored_rows")
SPLIT = {"SPLIT": True, "USE_ASM": True}
COSTS = [
    # kernel, constants, dtype of x and out, arch, weights of a program; instructions of a weight with triton
    # 3.6, of the code for all three widths
    ("multiply", lattice.configuration(GLVQ, 8, SHAPE) | SPLIT, "fp16", 80, 64 * 128, 20),
    ("multiply", lattice.configuration(GLVQ, 16, SHAPE) | SPLIT, "bf16", 90, 64 * 128, 21),
    ("multiply", lattice.configuration(Params(4, 32, 64, False, True), 8, SHAPE) | SPLIT, "fp16", 100, 64 * 64, 34),
    ("transform", lattice.transform_constants(GLVQ), "bf16", 90, 128, 250),
    ("decode", lattice.decode_constants(GLVQ, SHAPE), "bf16", 100, 16 * 128, 70),
]


@pytest.mark.slow
def test_machine_code() -> None:
    cases = []
    for kernel, constants, dtype, arch, _, _ in COSTS:
        kinds = {"out": f"*{dtype}"} if kernel != "transform" else {"x": f"*{dtype}"}
        module = "compress.kernels.triton._lattice"
        cases.append(offline.Case(module, kernel, SIGNATURE | kinds, constants, arch, lattice.WARPS, 3, ALIGNED))
    for cost, case, built in zip(COSTS, cases, offline.compile_cases(cases), strict=True):
        assert built.spills == 0, cost[0]
        count: Any = built.loop_count if case.kernel == "multiply" else sum(built.opcodes.values())
        each = count * 32 * case.warps / cost[-2]
        assert each < cost[-1], (cost[0], case.arch, each)
