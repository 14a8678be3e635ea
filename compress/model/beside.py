"""List the linears beside what a model runs for text: those of towers, and of decoder blocks that text skips."""

from __future__ import annotations

import inspect
import re

from torch import nn

from compress.model.skeleton import Skeleton
from compress.runtime.linear import is_plain_linear
from compress.types import LinearSpec

OUTSIDE = -1  # the number of the block of what is in none of those that text runs through


def linears(skeleton: Skeleton) -> tuple[list[LinearSpec], dict[str, str]]:
    """Return the linears in model order, and those that cannot be quantized with the reason."""
    specs: list[LinearSpec] = []
    kept: dict[str, str] = {}
    for name, module in skeleton.model.named_modules():
        if not skeleton.is_beside(name) or not is_plain_linear(module):
            continue
        path, _, own = name.rpartition(".")
        parent = skeleton.model.get_submodule(path)
        if _reads_weight(parent, own):
            kept[name] = f"its weight is read by the {type(parent).__name__} around it"
        else:
            rows, columns = module.get_parameter("weight").shape
            skeleton.add(LinearSpec(name, (rows, columns), skeleton.dtype, OUTSIDE, name), specs, kept)
    return specs, kept


def is_tower(skeleton: Skeleton, name: str) -> bool:
    """Return whether a linear of `linears` is in a tower, not in a decoder block."""
    return not name.startswith(f"{skeleton.blocks_name}.")


def _reads_weight(parent: nn.Module, child: str) -> bool:
    """Return whether the class of a module reads the weight of a child: nothing is run that would show it."""
    return re.search(rf"\bself\.{child}\.weight\b", inspect.getsource(type(parent))) is not None
