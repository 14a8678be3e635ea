"""Find what a model runs when it reads text: its decoder blocks, and beside them towers, and blocks that text skips.

The decoder blocks are the list of modules that the forward pass goes through. A model of text beside images has a text
model inside, and beside it what makes states of images: a vision tower, a projector. A pass over text alone calls
neither these nor, in some models, the blocks that attend to images.

Modules that several blocks share are stored, loaded and quantized with the first of these. Later blocks are given them
as the first has left them: quantized, once that has been.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.errors import UnsupportedModelError
from compress.model.inputs import has_two_stacks
from compress.model.meta_pass import run_without_data, without_experts
from compress.runtime import linears
from compress.runtime.linear import PackedLinear

Lists = dict[str, nn.ModuleList]


class TextPath(NamedTuple):
    """What a pass over text alone does not need, in a model whose decoder blocks are in one list."""

    towers: tuple[str, ...]  # modules beside the text model
    skipped: tuple[int, ...]  # numbers of decoder blocks


class Blocks(nn.ModuleList):
    """The blocks that text runs through, of lists that have others too; what is set is set in the list of the block."""

    def __init__(self, lists: Lists, skipped: Iterable[int] = ()) -> None:
        gone = set(skipped)
        self.places = [(name, number) for name, each in lists.items() for number in range(len(each))]
        self.places = [place for place in self.places if place[1] not in gone]
        super().__init__(lists[name][number] for name, number in self.places)
        self.__dict__["lists"] = lists  # not registered as children

    def __setitem__(self, index: int, module: nn.Module) -> None:
        super().__setitem__(index, module)
        if "lists" in self.__dict__:
            name, number = self.places[index]
            self.__dict__["lists"][name][number] = module


def find_text_path(model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype, blocks_name: str) -> TextPath:
    """Return what text does not need of a model; config is that of the checkpoint.

    Nothing is left out of a model for text alone, nor of one that cannot be run without data.
    """
    blocks = model.get_submodule(blocks_name)
    if has_two_stacks(model):
        return TextPath((), ())
    outside = _modules_outside_decoder(model) if model.config.get_text_config() is not model.config else []
    if not outside and len({type(block) for block in blocks.children()}) < 2:
        return TextPath((), ())
    called: set[str] = set()
    copy = without_experts(config, dtype)
    for name, module in copy.named_modules():
        module.register_forward_pre_hook(lambda _, inputs, name=name: called.add(name))
    if run_without_data(copy) is not None:
        return TextPath((), ())
    towers = [name for name in outside if not any(f"{each}.".startswith(f"{name}.") for each in called)]
    skipped = [number for number, _ in enumerate(blocks.children()) if f"{blocks_name}.{number}" not in called]
    return TextPath(tuple(towers), tuple(skipped) if len(skipped) < len(list(blocks.children())) else ())


def _modules_outside_decoder(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules with parameters beside the text model, or beside a module that it is in."""
    decoder, ends = model.get_decoder(), (model.get_input_embeddings(), model.get_output_embeddings())
    path = next((name for name, module in model.named_modules() if module is decoder), "").split(".")
    names = []
    for depth in range(len(path)):
        parent = ".".join(path[:depth])
        for name, child in model.get_submodule(parent).named_children():
            inside = list(child.modules())
            if name != path[depth] and any(True for _ in child.parameters()) and not any(e in inside for e in ends):
                names.append(f"{parent}.{name}".lstrip("."))
    return names


def find_stacks(model: PreTrainedModel) -> Lists:
    """Return names and lists of the blocks in the order in which they are run: of an encoder before those of a decoder.

    Raises UnsupportedModelError as `find_blocks`.
    """
    parts = (model.get_encoder(), model.get_decoder()) if has_two_stacks(model) else (model.get_decoder(),)
    return dict(find_blocks(model, part) for part in parts)


def find_blocks(model: PreTrainedModel, part: nn.Module | None = None) -> tuple[str, nn.ModuleList]:
    """Return name and list of a part's blocks: the longest list with linears that is not inside another one.

    The part is the decoder by default.

    Where there are several such lists, a forward pass on the meta device shows which are part of reading a text. Raise
    UnsupportedModelError if there is no list, or if the parts of each block are in lists of their own.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = {name: m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder blocks")
    within = set((part or model.get_decoder()).modules())  # of a model with a vision tower, the text part
    inside = {name: module for name, module in outer.items() if module in within} or outer
    layered = {name: module for name, module in inside.items() if _has_linears(module)} or inside
    if len(layered) > 1:
        layered = _keep_called(layered, without_experts(model.config, model.dtype))
    return max(layered.items(), key=lambda item: len(item[1]))


def _has_linears(modules: nn.Module) -> bool:
    return any(isinstance(m, PackedLinear) or linears.shape_of(m) is not None for m in modules.modules())


def _keep_called(lists: Lists, model: PreTrainedModel) -> Lists:
    """Return those of the lists that a forward pass on the meta device goes through; all if it does not get there."""
    order: list[str] = []
    for name in lists:
        for module in model.get_submodule(name).children():
            module.register_forward_pre_hook(lambda *_, name=name: order.append(name))
    run_without_data(model)
    called = {name: module for name, module in lists.items() if name in order} or lists
    longest = max(map(len, called.values()))
    parts = [name for name, module in called.items() if len(module) == longest]
    calls = [name for name in order if name in parts]
    if len(parts) > 1 and (not calls or calls != sorted(calls, key=calls.index)):  # in turn, not one after the other
        raise UnsupportedModelError(
            f"{type(model).__name__} has the parts of each decoder block in lists of their own ({', '.join(parts)}); "
            "such a model cannot be quantized block by block, give one of another architecture"
        )
    return called


class RepeatedModules:
    """Those modules of a model on the meta device whose parameters are those of one in an earlier block."""

    def __init__(self, model: PreTrainedModel, aliases: Iterable[list[str]], blocks_name: str) -> None:
        """Find them; aliases: the names of each parameter that has several."""
        within = (group for group in aliases if all(name.startswith(f"{blocks_name}.") for name in group))
        owners = [[name.rpartition(".")[0] for name in group] for group in within]
        self.model = model
        self.first = {other: first for first, *others in owners for other in others}
        self.as_left: dict[str, nn.Module] = {}

    def take(self, prefix: str, is_first: bool) -> None:
        """Give the block of this prefix what an earlier one has left; is_first: it begins a pass over all blocks."""
        if is_first:
            self.as_left.clear()
        for name, first in self.first.items():
            if name.startswith(prefix) and first in self.as_left:
                self.model.set_submodule(name, _copy_flat(self.as_left[first]))

    def leave(self) -> None:
        """Keep those that are loaded, before their weights are given back."""
        for first in dict.fromkeys(self.first.values()):
            module = self.model.get_submodule(first)
            if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                self.as_left[first] = _copy_flat(module)

    def tie(self) -> None:
        """Tie all weights of the model again; transformers ties what has the same names in all of these blocks."""
        if not self.first:
            self.model.tie_weights()
        for name, first in self.first.items():
            module = self.model.get_submodule(first)
            self.model.get_submodule(name)._parameters.update(module.named_parameters(recurse=False))


def _copy_flat(module: nn.Module) -> nn.Module:
    """Return a module that holds the same parameters, and can be given others."""
    made = copy.copy(module)
    made._parameters = dict(module._parameters)
    return made
