"""Size what quantizing the linears of a block takes beside their weights, from shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compress import formats, plugins
from compress.calib import stats
from compress.lowrank import correct
from compress.quant import incoherence, target_correction
from compress.run import layer_needs
from compress.types import LayerPlan

MEASURING = 14  # bytes a weight that the errors in the report take: what is decoded, and while it is; measured: 6 to 13


def trained(layers: Sequence[LayerPlan], steps: str) -> int:
    """Return the parameters of low-rank parts for which the recipe asks for such steps of training."""
    trained = [layer for layer in layers if layer.scheme.lowrank is not None and getattr(layer.scheme.lowrank, steps)]
    return sum(
        layer.stored.lowrank.rank * sum(layer.spec.shape) for layer in trained if layer.stored.lowrank is not None
    )


def gradients(layers: Sequence[LayerPlan], item: int, every: bool) -> int:
    """Return the bytes of the gradients of a block's linears, their sums and squares; 0 if none needs them.

    every: of a recipe whose tuning needs them for all linears.
    """
    is_needed = every or any(map(layer_needs.needs_gradients, layers))
    return sum((8 + item) * layer.spec.numel for layer in layers) if is_needed else 0


def paired_columns(layers: Sequence[LayerPlan]) -> int:
    """Return the columns of all shared inputs of a block whose drift is summed."""
    return sum(users[0].spec.shape[1] for users in layer_needs.readers(layers).values() if not users[0].spec.is_expert)


def workspace(layers: Sequence[LayerPlan], paired: bool) -> int:
    """Return the bytes that the most demanding linear needs beside its weight and statistics."""
    distinct = {(x.scheme, x.spec.shape, x.spec.is_expert): x for x in layers}
    needs = []
    for layer in distinct.values():
        needs.append(layer_workspace(layer))
        if paired and not layer.spec.is_expert:
            needs[-1] += target_correction.target_workspace(layer.spec)
            needs.append(target_correction.solve_workspace(layer.spec.shape[1]))
    return max(needs, default=0)


def divided(layers: Sequence[LayerPlan]) -> int:
    """Return the bytes of sharing: a linear that waits until others have made the rest, one expert more than others.

    Of the linear that is a Hessian, and tiles.
    """
    large = [layer.spec for layer in layers if len(layer_needs.spans(layer)) > 1]
    waiting = max((4 * spec.shape[1] ** 2 + 5 * spec.numel for spec in large), default=0)
    return waiting + max((stats.nbytes(x.spec.shape[1]) for x in layers if x.spec.is_expert), default=0)


def layer_workspace(layer: LayerPlan) -> int:
    """Return the bytes that quantizing or measuring one linear needs."""
    if (need := MEASURING * layer.spec.numel) and layer.scheme.config is None:
        return need
    method = plugins.load("quant", layer.scheme.method)
    need = max(need, method.workspace(layer.scheme.config, layer.spec.shape))
    if layer.scheme.lowrank is not None:
        need = correct.workspace(layer.spec.shape, need)
    rotated = layer, layer_needs.needs_statistics(layer)
    return max(need, incoherence.turning(*rotated)) + incoherence.workspace(*rotated)


def floats(layer: LayerPlan) -> int:
    """Return the floating-point numbers that a packed linear stores."""
    specs = formats.specs(layer.stored, layer.spec.shape).values()
    return sum(math.prod(size) for size, dtype in specs if dtype.is_floating_point)
