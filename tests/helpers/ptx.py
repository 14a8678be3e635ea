"""The inline assembly of the Triton kernels, run on the CPU: what Triton's interpreter cannot do.

    run("{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 15; }", outputs=1, inputs=[words])[0]

A register holds 32 bits, here an int64 tensor of numbers below 2^32, all of one shape: one element a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
Operands = list[Tensor]


def run(text: str, outputs: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The registers $0 .. of a block of instructions whose further registers $i are the inputs."""
    known = {f"${outputs + i}": value.long() & WORD for i, value in enumerate(inputs)}
    like = next(iter(known.values()))
    for statement in text.strip().removeprefix("{").removesuffix("}").split(";"):
        operation, _, rest = statement.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        target, *names = (name.strip() for name in rest.split(","))
        values = [known[name] if name in known else torch.full_like(like, int(name, 0)) for name in names]
        known[target] = OPERATIONS[operation](values) & WORD
    return [known[f"${i}"] for i in range(outputs)]


def halves(register: Tensor) -> tuple[Tensor, Tensor]:
    """The float16 numbers in the low and the high half."""
    return _half(register & 0xFFFF), _half(register >> 16)


def pairs(values: Tensor) -> Tensor:
    """16-bit values [..., 2 n] of any type -> registers [..., n] of neighbours, the first in the low half."""
    words = values.view(torch.int16).long() & 0xFFFF
    return words[..., 0::2] | words[..., 1::2] << 16


def _half(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.float16)


def _bytes(register: Tensor) -> list[Tensor]:
    return [register >> shift & 0xFF for shift in (0, 8, 16, 24)]


def _prmt(v: Operands) -> Tensor:
    source = torch.stack(_bytes(v[0]) + _bytes(v[1]))
    total = torch.zeros_like(v[0])
    for i in range(4):
        choice = v[2] >> 4 * i & 0xF
        byte = source.gather(0, (choice & 7)[None])[0]
        byte = torch.where(choice & 8 != 0, (byte >> 7) * 0xFF, byte)
        total |= byte << 8 * i
    return total


def _lop3(v: Operands) -> Tensor:
    total = torch.zeros_like(v[0])
    for case in range(8):
        terms = [value if case & bit else ~value for value, bit in zip(v[:3], (4, 2, 1), strict=True)]
        total |= terms[0] & terms[1] & terms[2] & -(v[3] >> case & 1)
    return total


def _dp4a(v: Operands) -> Tensor:
    return v[2] + sum((a * b for a, b in zip(_bytes(v[0]), _bytes(v[1]), strict=True)), torch.zeros_like(v[2]))


def _float16(function: Callable[..., Tensor]) -> Callable[[Operands], Tensor]:
    """An operation on both halves, rounded once."""

    def both(v: Operands) -> Tensor:
        parts = zip(*(halves(value) for value in v), strict=True)
        low, high = (function(*(p.double() for p in part)).half().view(torch.int16).long() & 0xFFFF for part in parts)
        return low | high << 16

    return both


OPERATIONS: dict[str, Callable[[Operands], Tensor]] = {
    "mov.b32": lambda v: v[0],
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "and.b32": lambda v: v[0] & v[1],
    "or.b32": lambda v: v[0] | v[1],
    "xor.b32": lambda v: v[0] ^ v[1],
    "shr.u32": lambda v: v[0] >> v[1],
    "shr.s32": lambda v: v[0].to(torch.int32).long() >> v[1],
    "shl.b32": lambda v: v[0] << v[1],
    "add.u32": lambda v: v[0] + v[1],
    "mul.lo.u32": lambda v: v[0] * v[1],
    "mad.lo.u32": lambda v: v[0] * v[1] + v[2],
    "dp4a.u32.u32": _dp4a,
    "add.f16x2": _float16(lambda a, b: a + b),
    "sub.f16x2": _float16(lambda a, b: a - b),
    "mul.f16x2": _float16(lambda a, b: a * b),
    "fma.rn.f16x2": _float16(lambda a, b, c: a * b + c),
}
