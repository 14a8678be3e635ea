"""Modules that several decoder blocks share: their weights are stored, loaded and quantized with the first of these.

Later blocks are given them as the first block has left them: quantized, once that has been.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel


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
