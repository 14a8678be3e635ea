"""Correct a quantized weight by two thin matrices beside it (EoRA, arXiv 2410.21271).

For a weight W, what its method makes of it, Q, and the inputs x that the quantized prefix gives, H = sum x x^T, the
best product of rank k is min tr[(W - Q - B^T A) H (W - Q - B^T A)^T]: `linalg.truncated` of W - Q. This is EoRA
(arXiv 2410.21271) and the exact form of QERA (arXiv 2410.06040), which solve it through the eigenvectors and the root
of H; here H may be singular. `metric: sizes` is QERA's approximation (the diagonal of H alone; LQER is near it),
`metric: none` a plain SVD, as in LoftQ and ZeroQuant-V2. `metric: fisher` is that of LQ-LoRA (arXiv 2311.12023): rows
and columns weigh what the gradients of the model's loss say (calib/fisher.py).

By default the part comes first: the best product of rank k in place of W itself is taken off W, the method rounds the
rest, and the better one of that product and of the best one for what Q leaves is stored. The rest is smaller just where
errors count, so that far more is gained than by `start: rounding`, where W is rounded as it is, as EoRA and QERA do:
losses of layers at rank 8 on tests/models/books-8m are 0.60 to 0.84 of those without a correction, and 0.79 to 0.92
with `start: rounding` (int2). In 4 bits (0.64 to 0.87 there) the rounding of the factors is part of what Q makes up
for, but they have the whole weight's size: where inputs differ much, `start: rounding` can then be the better one.

With `iterations` the weight is rounded again, less the part so far, and corrected again; the best try is kept. With
`metric: none` or `fisher` this is the loop of LQ-LoRA (whose code returns the last try) and of LoftQ, for any
quantized format; with `metric: inputs` that of CALDERA (arXiv 2405.18886).

Not done: one A for all linears that read the same input (`linalg.truncated_together`), which would have to be stored
once for several linears. Training of the factors is compress/tune/low_rank.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from compress import formats
from compress.formats import lowrank
from compress.lowrank.factors import Part, metric, split
from compress.numerics.linalg import truncation_workspace
from compress.types import Correction, Fisher, PackedWeight, Quantized, Stats


def needs_statistics(settings: Correction | None) -> bool:
    return settings is not None and settings.metric in ("inputs", "sizes")


def workspace(shape: tuple[int, int], method: int) -> int:
    """Return the bytes needed where the method takes so many: the weight, its rest, three products and the best try.

    The solver and the method take turns.
    """
    return max(method, truncation_workspace(shape)) + 6 * 4 * shape[0] * shape[1]


def corrected(
    weight: Tensor,
    given: Stats | Fisher | None,
    settings: Correction,
    quantize: Callable[[Tensor], Quantized],
    seed: int,
) -> Quantized:
    """Quantize weight [out, in] less a low-rank part, and return the result with this part beside it.

    `given` is what the metric needs; without it, or a token to go by, the metric is the plain one.
    """
    stats, fisher = (None, given) if isinstance(given, Fisher) else (given, None)
    measure = metric(stats, settings.metric, fisher=fisher)
    stored, original = settings.stored, weight.float()
    best: Quantized | None = None
    lowest = float("inf")
    part: Part | None = split(original, measure, stored, seed) if settings.start == "weight" else None
    for _ in range(settings.iterations):
        result = quantize(weight if part is None else original - part.product)
        residual = original - formats.decode_stored(result.weight, torch.float32)
        tried = [split(residual, measure, stored, seed), *([] if part is None else [part])]
        losses = [measure.loss(residual - one.product) for one in tried]
        loss = min(losses)
        part = tried[losses.index(loss)]
        if best is None or loss < lowest:
            best, lowest = _beside(result, part), loss
    assert best is not None
    return best


def _beside(result: Quantized, part: Part) -> Quantized:
    weight = result.weight
    tensors = {**weight.tensors, **{lowrank.PREFIX + name: tensor for name, tensor in part.tensors.items()}}
    stored = dataclasses.replace(weight.stored, lowrank=part.stored)
    return Quantized(PackedWeight(stored, tensors, weight.shape), result.notes)
