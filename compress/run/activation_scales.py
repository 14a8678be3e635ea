"""Calibrate the scales of activations that are quantized statically."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from compress.calib import stats as calib_stats
from compress.formats import transforms
from compress.model.blockwise import QUANTIZED, BlockPass
from compress.quant import incoherence
from compress.run.calibration_stream import CalibrationStream
from compress.run.layer_needs import needs_in_scale
from compress.runtime.activation_quant import LargestInput
from compress.types import LayerPlan


def calibrate(
    stream: CalibrationStream, index: int, block: nn.Module, layers: list[LayerPlan], seed: int
) -> dict[str, Tensor]:
    """Return linear -> its static scale, float32 [1], in one pass of the stream through a block if any has one."""
    static = {layer.spec.name: layer for layer in layers if needs_in_scale(layer)}
    if not static:
        return {}
    largest = {name: LargestInput() for name in static}

    def add(name: str, inputs: Tensor) -> None:
        layer = static[name]
        largest[name].add(
            transforms.apply_input(inputs, layer.stored.ops, incoherence.draw_on_device(layer, seed, inputs))
        )

    hooks = [(stream.skeleton.linear(block, name), partial(add, name)) for name in static]
    stream.forward(index, block, "calibrating", BlockPass(QUANTIZED, None, lambda _: calib_stats.hooked(hooks)))
    for tops in stream.ranks.gather({name: found.top for name, found in largest.items()}):
        for name, top in tops.items():
            if top is not None:
                largest[name].add(top)
    for name, layer in static.items():
        if largest[name].top is None and layer.spec.is_expert:  # seldom chosen: as the largest of its siblings
            siblings = [other for other in static if other.rpartition(".")[2] == name.rpartition(".")[2]]
            for top in [largest[other].top for other in siblings if static[other].spec.is_expert]:
                if top is not None:
                    largest[name].add(top.reshape(1))
    settings = {name: layer.stored.activations for name, layer in static.items()}
    return {name: largest[name].in_scale(given, name) for name, given in settings.items() if given is not None}
