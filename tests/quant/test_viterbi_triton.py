"""The search on a GPU, in Triton's interpreter: the integers of torch's; its machine code."""

from __future__ import annotations

import pytest
import torch

from compress.formats import trellis as trellis_format
from compress.formats.trellis import Params
from compress.quant import trellis, viterbi
from compress.quant.viterbi import Search
from helpers import (
    interpreter,  # noqa: F401
    offline,
)

SHAPES = [  # code, bits, bits of a state, rows
    *(("mul1", 1, 5, 32), ("mul1", 2, 4, 16), ("3inst", 3, 7, 16), ("mcg", 4, 8, 16), ("hyb", 1, 8, 32)),
    *(("mul1", 1.5, 5, 32), ("mul1", 2.5, 7, 32), ("mul1", 1.25, 4, 64)),
]
LARGER = [
    *(("mul1", 2, 6, 32), ("hyb", 2, 8, 16), ("mul1", 2.5, 5, 32), ("mul1", 3.5, 8, 32), ("mul1", 1.75, 5, 64)),
    ("mul1", 2.75, 7, 64),
]


def searches(code: str, bits: float, state_bits: int, rows: int) -> tuple[Search, Search]:
    """The search in torch, and by the kernel."""
    params = Params(bits, state_bits, rows, code)
    table = trellis_format.states_table(params, trellis._hyb_table() if code == "hyb" else None)
    plain, kernel = (Search(table, state_bits, params.symbol_bits) for _ in range(2))
    plain.compiled = kernel.compiled = None
    costs = viterbi.GpuCosts(plain.farthest, plain.costs.shift, plain.limits)
    kernel.on_gpu = viterbi.TritonSearch(plain.symbol_bits, plain.levels[plain.index], costs)
    return plain, kernel


@pytest.mark.parametrize(
    ("code", "bits", "state_bits", "rows"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.slow) for shape in LARGER)],
)
def test_paths_are_those_of_torch(code: str, bits: float, state_bits: int, rows: int) -> None:
    plain, kernel = searches(code, bits, state_bits, rows)
    values = 4 * torch.randn(1, rows, generator=torch.Generator().manual_seed(int(bits)))  # some beyond the table
    found = kernel.encode(values)
    assert found.dtype == torch.int64 and torch.equal(found, plain.encode(values))


@pytest.mark.slow
def test_many_sequences_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kernel = searches("mul1", 2, 6, 16)
    monkeypatch.setattr(viterbi, "LAUNCH_DECISIONS", 2 * 16 * plain.nodes)
    values = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kernel.encode(values), plain.encode(values))


def test_a_cpu_keeps_to_its_own_code() -> None:
    assert not viterbi.runs_on_gpu(torch.device("cpu"))


@pytest.mark.slow
def test_machine_code_keeps_costs_in_registers() -> None:
    """About 11 instructions a state, of which the table is read two bytes at a time; whole bits spill nothing."""
    cases, states = [], []
    kinds = {"values": "*i32", "seams": "*i64", "emitted": "*i16", "tops": "*i32", "decisions": "*u8", "states": "*i64"}
    for state_bits, symbol_bits, dim in ((12, 2, 1), (14, 2, 1), (16, 2, 1), (12, 3, 1), (8, 4, 2), (12, 2.5, 1)):
        count, turns = float(symbol_bits).as_integer_ratio()
        nodes = 1 << (state_bits - int(symbol_bits))
        constants = {"COUNT": count, "TURNS": turns, "STATES": 1 << state_bits, "DIM": dim, "FARTHEST": 32767}
        constants |= {"SHIFT": 15, "MOST": 1000, "KNEE": 250 if symbol_bits > 2 else 1000, "PERIOD": 8, "FAR": 16383}
        constants |= {"SEAMED": state_bits != 14}
        kernel = "compress.kernels.triton._viterbi", "paths", {**kinds, "steps": "i32"}
        cases.append(offline.Case(*kernel, constants, warps=viterbi.warps_of_program(nodes)))
        states.append(1 << state_bits)
    for case, count, built in zip(cases, states, offline.compile_cases(cases), strict=True):
        turns = case.constants["TURNS"]  # steps of a pass of the loop
        assert built.spills <= (0 if turns == 1 else 8), case
        assert built.registers * 32 * case.warps <= 1 << 16, case
        if count >= 1 << 12:
            assert built.loop_count * 32 * case.warps < 13 * turns * count, (
                case,
                built.loop_count * 32 * case.warps / count,
            )
