"""The machine code of the `int` kernel, compiled without a GPU: every shipped configuration, its cost and memory."""

from __future__ import annotations

from typing import Any

import pytest

from compress.formats.int import Params
from helpers import offline

triton = pytest.importorskip("triton", reason="triton is not installed")

from compress.kernels.triton import int as kernel  # noqa: E402

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that a program can have
REGISTERS = 1 << 16  # of a multiprocessor
LOCAL = {80: 0, 90: 0, 100: 16}  # instructions on local memory: for sm_100 ptxas moves a few invariants there

POINTERS = {
    "words_a": "i16", "words_b": "i16", "words_c": "i16", "scales": "fp16", "zeros": "u8", "sums": "fp32",
    "partials": "fp32", "counters": "i32",
}  # fmt: skip
SIGNATURE = {name: f"*{kind}" for name, kind in POINTERS.items()} | {
    name: "i32" for name in ("rows", "out_features", "stored_rows", "tiles", "splits")
}


def typical(bits: int, symmetric: bool) -> Params:
    """Groups of 128 in tiles of 512 columns (256 for bytes)."""
    words = {2: 64, 3: 32, 4: 128, 5: 32, 6: 64, 7: 32, 8: 128}[bits]
    return Params(bits, 128, symmetric, words)


def case(
    params: Params, rows: int, config: kernel.Config, arch: int, kind: str, rank: int = 0, narrow: int = 0
) -> offline.Case:
    """A product with fp16 or bf16 activations, split along the columns."""
    fitted = kernel.fit(config, params.bits, rows, kernel.most_words(params), SHARED[arch])
    settings = {"BF16": kind == "bf16", "USE_ASM": True, "RANK": rank, "NARROW": narrow}
    constants: dict[str, Any] = kernel.constants(params, kernel.Launch(fitted, rows, 2)) | settings
    signature = SIGNATURE | {name: f"*{kind}" for name in ("x", "out", "hidden", "factor")}
    aligned = ("out_features", "stored_rows")
    return offline.Case(
        "compress.kernels.triton._int", "multiply", signature, constants, arch, fitted.warps, fitted.stages, aligned
    )


def per_weight(case: offline.Case, built: offline.Built, params: Params) -> float:
    """Instructions of the inner loop, for each weight."""
    weights = case.constants["BLOCK_N"] * case.constants["BLOCK_WORDS"] * kernel._fields(params)
    return built.loop_count * case.warps * 32 / weights


def local(built: offline.Built) -> int:
    """Instructions that touch local memory, where spilled registers go."""
    return sum(count for opcode, count in built.opcodes.items() if opcode.startswith(("LDL", "STL")))


def assert_lean(case: offline.Case, built: offline.Built, params: Params) -> None:
    """Nothing spilled, weights never written back to shared memory, and the shared memory that was planned."""
    assert local(built) <= LOCAL[case.arch], case
    assert "STS" not in built.loop, case
    config = kernel.Config(
        case.constants["BLOCK_N"], case.constants["BLOCK_WORDS"], case.warps, case.stages, programs=1
    )
    assert built.shared <= kernel.shared_bytes(config, params.bits, case.constants["BLOCK_M"]) <= SHARED[case.arch]
    assert not any(opcode.startswith("UTC") for opcode in built.opcodes), "weights pass through shared memory"
    assert sum(count for opcode, count in built.opcodes.items() if "MMA" in opcode) > 0, case


# Instructions of a weight with triton 3.6, in groups of 128, for bfloat16 activations. With 0.97 * bits of them an H200
# would still keep pace with its memory.
COSTS = [
    # bits, symmetric, rows, most
    (2, False, 8, 2.4),
    (3, True, 8, 2.2),
    (4, True, 8, 2.15),
    (8, True, 8, 2.85),
]
MORE_COSTS = [
    (2, True, 8, 1.85),
    (3, False, 8, 2.8),
    (4, True, 64, 2.95),
    (4, False, 8, 2.7),
]


@pytest.mark.slow
@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the costs are those of triton 3.6")
@pytest.mark.parametrize("costs", [COSTS, pytest.param(MORE_COSTS, marks=pytest.mark.slow)], ids=["some", "more"])
def test_cost_of_a_weight(costs: list[tuple[Any, ...]]) -> None:
    chosen = []
    for bits, symmetric, rows, _ in costs:
        params = typical(bits, symmetric)
        chosen.append((params, case(params, rows, kernel.TABLE[bits, rows][0], 90, "bf16")))
    for cost, (params, made), built in zip(costs, chosen, offline.compile_cases([c for _, c in chosen]), strict=True):
        assert_lean(made, built, params)
        assert per_weight(made, built, params) < cost[-1], (cost, per_weight(made, built, params))


@pytest.mark.slow
def test_a_low_rank_part_costs_the_loop_little() -> None:
    params = typical(4, True)
    made = [case(params, 8, kernel.TABLE[4, 8][0], 90, "bf16", rank) for rank in (0, 16, 128)]
    built = offline.compile_cases(made)
    assert all(one.loop_count <= 1.03 * built[0].loop_count for one in built), "other registers, some copies between"
    assert all(local(one) == 0 for one in built)
    assert sum("MMA" in opcode and count for opcode, count in built[1].opcodes.items()) > sum(
        "MMA" in opcode and count for opcode, count in built[0].opcodes.items()
    )


def test_experts_cost_what_one_weight_does() -> None:
    """The kernel of all experts has the loop of that of one weight, and spills nothing."""
    params, config = typical(4, symmetric=True), kernel.TABLE[4, 8][0]
    single = case(params, 8, config, 90, "bf16")
    unshared = {"SUMMED", "SPLIT", "RANK"}
    constants = {name: value for name, value in single.constants.items() if name not in unshared}
    signature = {name: f"*{kind}" for name, kind in POINTERS.items() if name not in {"sums", "partials", "counters"}}
    signature |= {"x": "*bf16", "out": "*bf16", "slots": "*i32", "owners": "*i32"}
    sizes = ("pairs", "per", "experts", "out_features", "stored_rows", "tiles", "width")
    aligned = ("out_features", "stored_rows", "width")
    grouped = offline.Case(
        "compress.kernels.triton._grouped", "multiply", signature | dict.fromkeys(sizes, "i32"), constants, 90,
        single.warps, single.stages, aligned,
    )  # fmt: skip
    one, all_experts = offline.compile_cases([single, grouped])
    assert_lean(grouped, all_experts, params)
    assert all_experts.loop_count <= 1.03 * one.loop_count


@pytest.mark.parametrize("bits", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)])
def test_narrow_tiles_leave_the_loop_over_whole_ones_as_it_is(bits: int) -> None:
    params = typical(bits, symmetric=False)
    made = [case(params, 8, kernel.TABLE[bits, 8][0], 90, "bf16", narrow=narrow) for narrow in (0, 2)]
    none, some = offline.compile_cases(made)
    assert some.loop_count <= 1.03 * none.loop_count
    assert local(some) == 0
    mma = [sum(count for opcode, count in built.opcodes.items() if "MMA" in opcode) for built in (none, some)]
    assert mma[0] < mma[1]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_shipped_configuration(bits: int, arch: int) -> None:
    made = []
    for rows, known in kernel.configurations(bits, arch // 10).items():
        for config in known:
            for symmetric in (True, False):
                params = typical(bits, symmetric)
                kinds = ("fp16", "bf16") if arch == 90 else ("bf16",)  # which has more to do
                made += [(params, config, case(params, rows, config, arch, kind)) for kind in kinds]
    for (params, config, one), built in zip(made, offline.compile_cases([c for _, _, c in made]), strict=True):
        assert_lean(one, built, params)
        if arch == 90:
            counts = not params.symmetric and one.constants["BLOCK_M"] <= kernel.LOOP_SUMS
            programs = config.with_zeros if counts and config.with_zeros else config.programs
            assert programs <= REGISTERS // (-(-built.registers // 8) * 8 * 32 * one.warps), one
            assert programs <= (228 * 1024) // (built.shared + 1024), one
