"""Find what a model runs when it reads text, and what lies beside: towers for images and sound, blocks that text skips.

A model of text beside images has a text model inside, and beside it what makes states of images: a vision tower, a
projector. A pass over text alone calls neither these nor, in some models, the blocks that attend to images.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from compress.model.meta_pass import run_without_data, without_experts


class TextPath(NamedTuple):
    """What a pass over text alone does not need, in a model whose decoder blocks are in one list."""

    towers: tuple[str, ...]  # modules beside the text model
    skipped: tuple[int, ...]  # numbers of decoder blocks


class Blocks(nn.ModuleList):
    """The decoder blocks that text runs through, of a list that has others too; what is set is set in that list."""

    def __init__(self, whole: nn.ModuleList, skipped: Iterable[int]) -> None:
        gone = set(skipped)
        self.numbers = [number for number in range(len(whole)) if number not in gone]
        super().__init__(whole[number] for number in self.numbers)
        self.__dict__["whole"] = whole  # not registered as a child

    def __setitem__(self, index: int, module: nn.Module) -> None:
        super().__setitem__(index, module)
        if "whole" in self.__dict__:
            self.__dict__["whole"][self.numbers[index]] = module


def find(model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype, blocks_name: str) -> TextPath:
    """Return what text does not need of a model; config is that of the checkpoint.

    Nothing is left out of a model for text alone, nor of one that cannot be run without data.
    """
    blocks = model.get_submodule(blocks_name)
    beside = _beside_decoder(model) if model.config.get_text_config() is not model.config else []
    if not beside and len({type(block) for block in blocks.children()}) < 2:
        return TextPath((), ())
    called: set[str] = set()
    copy = without_experts(config, dtype)
    for name, module in copy.named_modules():
        module.register_forward_pre_hook(lambda _, inputs, name=name: called.add(name))
    if run_without_data(copy) is not None:
        return TextPath((), ())
    towers = [name for name in beside if not any(f"{each}.".startswith(f"{name}.") for each in called)]
    skipped = [number for number, _ in enumerate(blocks.children()) if f"{blocks_name}.{number}" not in called]
    return TextPath(tuple(towers), tuple(skipped) if len(skipped) < len(list(blocks.children())) else ())


def _beside_decoder(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules with parameters beside the text model, or beside a module that it is in."""
    decoder, ends = model.get_decoder(), (model.get_input_embeddings(), model.get_output_embeddings())
    path = next((name for name, module in model.named_modules() if module is decoder), "").split(".")
    found = []
    for depth in range(len(path)):
        parent = ".".join(path[:depth])
        for name, child in model.get_submodule(parent).named_children():
            inside = list(child.modules())
            if name != path[depth] and any(True for _ in child.parameters()) and not any(e in inside for e in ends):
                found.append(f"{parent}.{name}".lstrip("."))
    return found
