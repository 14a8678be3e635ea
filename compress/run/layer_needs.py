"""Say what a linear needs to be quantized (statistics of its input, gradients, a scale, text), and in which parts."""

from __future__ import annotations

from collections.abc import Sequence

from compress import plugins
from compress.lowrank import correct
from compress.quant import feedback
from compress.recipe.schema import Recipe
from compress.types import LayerPlan


def readers(layers: Sequence[LayerPlan], every: bool = False) -> dict[str, list[LayerPlan]]:
    """Return input key -> the layers whose method needs statistics of it, or all."""
    by_input: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        if every or needs_statistics(layer):
            by_input.setdefault(layer.spec.input_key, []).append(layer)
    return by_input


def needs_statistics(layer: LayerPlan) -> bool:
    """Return whether statistics of its input are part of how a linear is quantized."""
    if layer.scheme.config is None:
        return False
    method = plugins.load("quant", layer.scheme.method)
    return bool(method.NEEDS) or correct.needs_statistics(layer.scheme.lowrank)


def needs_gradients(layer: LayerPlan) -> bool:
    """Return whether the errors of a linear are weighed by the gradients of the model's loss."""
    return layer.scheme.lowrank is not None and layer.scheme.lowrank.metric == "fisher"


def tuning_needs_gradients(recipe: Recipe) -> bool:
    """Return whether the tuning of blocks weighs all linears by the gradients of the model's loss."""
    tune = recipe.tuning("block")
    return tune is not None and getattr(tune.config, "needs_gradients", False)


def needs_in_scale(layer: LayerPlan) -> bool:
    """Return whether a layer's inputs are quantized with one calibrated scale."""
    return layer.stored.activations is not None and layer.stored.activations.scale == "tensor"


def needs_text(layer: LayerPlan) -> bool:
    """Return whether calibration text is needed to quantize a linear, or to train its low-rank part."""
    lowrank = layer.scheme.lowrank
    trains = lowrank is not None and bool(lowrank.train or lowrank.train_blocks)
    return needs_statistics(layer) or needs_in_scale(layer) or needs_gradients(layer) or trains


def row_tiles(layer: LayerPlan) -> list[slice]:
    """Return the rows of each tile that a linear is quantized by, all in one if its method takes whole weights."""
    method, shape = plugins.load("quant", layer.scheme.method), layer.spec.shape
    if not hasattr(method, "quantize_rows"):
        return [slice(0, shape[0])]
    return feedback.row_tiles(shape, method.row_unit(layer.scheme.config, shape))


def spans(layer: LayerPlan) -> list[slice]:
    """Return the rows of each tile by which processes can share a linear, all in one if they cannot.

    Experts are many, and a low-rank part is of the whole weight.
    """
    if layer.scheme.config is None or layer.scheme.lowrank is not None or layer.spec.is_expert:
        return [slice(0, layer.spec.shape[0])]
    return row_tiles(layer)
