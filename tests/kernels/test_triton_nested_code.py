"""The machine code of the kernel of sums of two `int` weights, compiled for sm_90 without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from compress.formats.int import Params
from helpers import offline

pytest.importorskip("triton", reason="triton is not installed")

from compress.kernels.triton import nested as kernel  # noqa: E402
from compress.kernels.triton import products  # noqa: E402

H200 = products.Device(132, 227 * 1024)
POINTERS = {"words_a": "i16", "words_b": "i16", "words_c": "i16", "scales": "fp16", "zeros": "u8"}
SIZES = ("rows", "out_features", "stored_rows", "tiles", "tiles_2", "splits")


def built(bits: tuple[int, int], words: int, symmetric: bool) -> offline.Built:
    """A product of bfloat16 activations with two planes in groups of 128, split along the columns."""
    both = [Params(each, 128, symmetric, words) for each in bits]
    plan = kernel.choose(both, (4096, 4096), H200)
    signature = {f"{name}{end}": f"*{kind}" for end in ("", "_2") for name, kind in POINTERS.items()}
    signature |= {"x": "*bf16", "out": "*bf16", "partials": "*fp32", "counters": "*i32"}
    constants: dict[str, Any] = kernel.constants(both, plan._replace(parts=2))
    constants |= {"NARROW": 0, "NARROW_2": 0, "BF16": True, "USE_ASM": True}
    case = offline.Case(
        "compress.kernels.triton._nested", "multiply", signature | dict.fromkeys(SIZES, "i32"), constants, 90,
        plan.config.warps, plan.config.stages, ("out_features", "stored_rows"),
    )  # fmt: skip
    return offline.compile_cases([case])[0]


@pytest.mark.parametrize(("bits", "words", "symmetric"), [((4, 4), 128, True), ((2, 2), 64, False)])
def test_nothing_is_spilled(bits: tuple[int, int], words: int, symmetric: bool) -> None:
    code = built(bits, words, symmetric)
    assert not any(opcode.startswith(("LDL", "STL")) for opcode in code.opcodes)
    assert sum(count for opcode, count in code.opcodes.items() if "MMA" in opcode) > 0
    assert code.shared <= H200.shared
