"""Multiply with sums of two `int` weights (compress/formats/nested.py) on a GPU, in one launch.

A program keeps its sums in registers, adds the products with the codes of the first plane and then those of the second,
each with scales and zero points of its own, and writes once: activations are read by one launch, and only its second
loop reads them again, from the cache. A level of one plane is an `int` weight and has the kernel of that (int.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compress.formats import nested
from compress.formats.int import Params as IntParams
from compress.formats.int import padded_shape
from compress.formats.nested import Params
from compress.kernels.contract import Shape
from compress.kernels.triton import _int, _nested, products
from compress.kernels.triton import int as plane
from compress.kernels.triton.products import GpuProduct

LEAST_BLOCK = 32  # rows of the weight of a program: two loops of zero points spill registers of a single warp with 16
ROWS = 8  # rows of activations of a launch: more have no registers left for the sums that zero points take


def prepare(tensors: Mapping[str, Tensor], params: Params, shape: Shape) -> GpuProduct | None:
    """Return the product with the sum of two `int` weights whose rows are stored as wide as each other."""
    parts = nested.summands(tensors, params, shape)
    if len(parts) != 2 or any(part.format != "int" for part in parts):
        return None
    kernels = [plane.prepare(part.tensors, part.params, shape) for part in parts]
    widths = {padded_shape(part.params, shape)[1] for part in parts}
    known = [kernel for kernel in kernels if kernel is not None]
    return _Nested(tensors, params, shape, known) if len(known) == len(parts) and len(widths) == 1 else None


def look_up(
    tensors: Mapping[str, Tensor], params: Params, shape: Shape, ids: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return rows [n, in] as `decode_rows` of the format; None where a part is no `int` weight."""
    parts = nested.summands(tensors, params, shape)
    if any(part.format != "int" for part in parts) or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    total: Any = 0
    for part in parts:
        total = total + plane.look_up(part.tensors, part.params, shape, ids, torch.float32)
    return total.to(dtype)


class _Nested(GpuProduct):
    most = 2 * ROWS  # of which a second launch reads the codes again

    def __init__(self, tensors: Mapping[str, Tensor], params: Params, shape: Shape, planes: list[GpuProduct]) -> None:
        super().__init__(tensors, params, shape)
        self.planes = planes

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Launch kernels only: graphs can capture it."""
        if x.dtype not in (torch.float16, torch.bfloat16):
            x = x.half()
        padding = padded_shape(self.planes[0].params, self.shape)[1] - self.shape[1]
        if padding:  # of widths that are no multiple of 32
            x = torch.nn.functional.pad(x, (0, padding))
        for first in range(0, x.shape[0], ROWS):
            self._launch(x[first : first + ROWS], out[first : first + ROWS])

    def _launch(self, x: Tensor, out: Tensor) -> None:
        device, both = products.properties(x.device), [each.params for each in self.planes]
        plan = choose(both, self.shape, device)
        stored_rows, _ = padded_shape(both[0], self.shape)
        given: list[Tensor] = []
        for each in self.planes:
            scales = each.tensors["scales"]
            given += [*plane.planes(each.tensors, each.params), scales, each.stored("zeros", scales)]
        space = products.workspace(x.device)
        tiles, narrow = zip(*(params.split(x.shape[1]) for params in both), strict=True)
        _nested.multiply[-(-stored_rows // plan.config.block_n), plan.parts](
            x, *given, out, space.partials, space.counters, x.shape[0], out.shape[1], stored_rows, *tiles, plan.parts,
            **constants(both, plan), NARROW=narrow[0], NARROW_2=narrow[1], BF16=x.dtype == torch.bfloat16,
            USE_ASM=_int.COMPILED, num_warps=plan.config.warps, num_stages=plan.config.stages,
        )  # fmt: skip

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in]; planes are added in float32, in their order, and rounded once."""
        first, second = (each.decode(torch.float32) for each in self.planes)
        return first.add_(second).to(dtype)


def choose(both: list[IntParams], shape: Shape, device: products.Device) -> plane.Launch:
    """Return how a launch is cut up: as for the plane of more bits, its steps as small as either plane asks for."""
    widest = max(both, key=lambda params: params.bits)
    plan = plane.choose(widest, shape, ROWS, device)
    words = min(plan.config.block_words, *(plane.most_words(params) for params in both))
    config = plan.config
    if config.block_n < LEAST_BLOCK:
        config = replace(config, block_n=LEAST_BLOCK, warps=2 * config.warps)
    for params in both:
        config = plane.fit(replace(config, block_words=words), params.bits, ROWS, words, device.shared)
    steps = min(max(1, padded_shape(params, shape)[1] // (plane._fields(params) * words)) for params in both)
    return plane.Launch(config, ROWS, max(1, min(plan.parts, steps)))


def constants(both: list[IntParams], plan: plane.Launch) -> dict[str, Any]:
    """Return the constants of the kernel that depend on the weight and the plan only."""
    shared: dict[str, Any] = {"BLOCK_N": plan.config.block_n, "BLOCK_M": plan.rows, "SPLIT": plan.parts > 1}
    for params, suffix in zip(both, ("", "_2"), strict=True):
        own = plane.layout(params) | {"BLOCK_WORDS": plan.config.block_words}
        shared |= {name + suffix: value for name, value in own.items()}
    return shared
