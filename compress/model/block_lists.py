"""Find a model's decoder blocks: the list of modules that its forward pass goes through."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from compress.errors import UnsupportedModelError
from compress.model.meta_pass import run_without_data, without_experts
from compress.runtime import linears
from compress.runtime.linear import PackedLinear

Lists = dict[str, nn.ModuleList]


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return name and list of the decoder blocks: the longest list with linears that is not inside another one.

    Where there are several such lists, a forward pass on the meta device shows which are part of reading a text. Raise
    UnsupportedModelError if there is no list, or if the parts of each block are in lists of their own.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder blocks")
    decoder = set(model.get_decoder().modules())  # of a model with a vision tower, the text part
    inside = {name: module for name, module in outer.items() if module in decoder} or outer
    layered = {name: module for name, module in inside.items() if _has_linears(module)} or inside
    if len(layered) > 1:
        layered = _called(layered, without_experts(model.config, model.dtype))
    return max(layered.items(), key=lambda item: len(item[1]))


def _has_linears(modules: nn.Module) -> bool:
    return any(isinstance(m, PackedLinear) or linears.shape_of(m) is not None for m in modules.modules())


def _called(lists: Lists, model: PreTrainedModel) -> Lists:
    """Return those of the lists that a forward pass on the meta device goes through; all if it does not get there."""
    order: list[str] = []
    for name in lists:
        for module in model.get_submodule(name).children():
            module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    run_without_data(model)
    found = {name: module for name, module in lists.items() if name in order} or lists
    longest = max(map(len, found.values()))
    parts = [name for name, module in found.items() if len(module) == longest]
    calls = [name for name in order if name in parts]
    if len(parts) > 1 and (not calls or calls != sorted(calls, key=calls.index)):  # in turn, not one after the other
        raise UnsupportedModelError(
            f"{type(model).__name__} has the parts of each decoder block in lists of their own ({', '.join(parts)}); "
            "such a model cannot be quantized block by block, give one of another architecture"
        )
    return found
