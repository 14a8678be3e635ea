"""Whether inline assembly that takes two elements at a time is given neighbours, in kernels compiled without a GPU.

Triton promises no order of the elements that a thread holds; kernels that treat columns 2 i and 2 i + 1 as a pair hold
only as long as the compiler gives their operands layouts whose first step in a thread is one column.
"""

from __future__ import annotations

import json
import re
from typing import Any

from helpers import offline

ASSEMBLY = re.compile(r"elementwise_inline_asm .*packed_element = (\d+).*?\} (.*?)(?: loc\(|$)")
TENSOR = re.compile(r"tensor<((?:\d+x)+)\w+, (#ttg\.dot_op<\{.*?\}>|#\w+)>")
LAYOUT = re.compile(r"^(#\w+) = #ttg\.(\w+)<\{(.*)\}>", re.MULTILINE)


def compile_cases(cases: list[offline.Case]) -> list[offline.Built]:
    """As offline.compile_cases; an error, too, if assembly is given strangers."""
    return offline.compile_cases(cases, builder=__name__)


def strangers(ttgir: str, block_m: int) -> list[str]:
    """Operands of packed assembly whose layout does not pair neighbours along the columns of W.

    These are the last dimension of operands [.., n, k] and the one before it of activations [.., k, m].
    """
    layouts = {name: (kind, text) for name, kind, text in LAYOUT.findall(ttgir)}
    found = []
    for packed, operands in ASSEMBLY.findall(ttgir):
        for sizes, layout in TENSOR.findall(operands):
            shape = [int(size) for size in sizes.split("x") if size]
            axis = len(shape) - (2 if shape[-1] == block_m else 1)
            if packed == "2" and not _pairs(layout, layouts, shape, axis):
                found.append(f"{shape} {layout} {layouts.get(layout)}")
    return found


def _pairs(layout: str, layouts: dict[str, tuple[str, str]], shape: list[int], axis: int) -> bool:
    if width := re.search(r"kWidth = (\d+)", layout):
        return int(width.group(1)) > 1
    kind, text = layouts[layout]
    fields = {name: json.loads(value) for name, value in re.findall(r"(\w+) = (\[.*?\](?=, \w|$))", text)}
    step = [int(d == axis) for d in range(len(shape))]
    if kind == "linear":
        return bool(fields["register"][0] == step)
    if kind != "blocked":
        return False
    own, order = fields["sizePerThread"], fields["order"]
    spread = [a * b * c for a, b, c in zip(own, fields["threadsPerWarp"], fields["warpsPerCTA"], strict=True)]
    first = [d for d in order if own[d] > 1] or [d for d in order if spread[d] < shape[d]]
    return bool(first) and first[0] == axis and (own[axis] > 1 or spread[axis] == 1)


def build(case: offline.Case) -> offline.Built:
    """Compile in this process, which must not interpret kernels."""
    import triton

    compiled = []
    compile_one = triton.compile

    def kept(*values: Any, **options: Any) -> Any:
        compiled.append(compile_one(*values, **options))
        return compiled[-1]

    triton.compile = kept
    built = offline.build(case)
    triton.compile = compile_one
    wrong = strangers(compiled[-1].asm["ttgir"], case.constants["BLOCK_M"])
    assert not wrong, f"{case}: {wrong}"
    return built
