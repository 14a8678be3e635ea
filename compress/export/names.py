"""Name the modules of a model as its published checkpoints do, by reversing transformers' own renaming."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming, revert_weight_conversion

from compress.runtime.expert_layouts import Layout
from compress.runtime.experts import Experts, is_supported, layout_of

FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
TRIED = 2  # experts whose names are asked for: the others differ by their number only


class Published(NamedTuple):
    """Names of modules: path in the model -> name in published checkpoints."""

    names: Mapping[str, str]
    experts: frozenset[str]  # paths of the modules of experts
    fused: frozenset[str]  # those of them that published checkpoints hold in a few fused tensors


def published(model: PreTrainedModel, linears: Iterable[str]) -> Published:
    """Return the names of these linears of a model, whose experts are `Experts`, or not taken apart yet."""
    modules = dict(model.named_modules())
    experts = {path: module.layout for path, module in modules.items() if isinstance(module, Experts)}
    experts |= {path: layout_of(module) for path, module in modules.items() if is_supported(module)}
    templates = {path: _templates(model, path, layout) for path, layout in experts.items()}
    renamings = _reversed(model)
    names = {}
    for linear in linears:
        path, number, projection = linear.rsplit(".", 2) if linear.count(".") > 1 else ("", "", linear)
        if path in experts:
            names[linear] = templates[path].get(projection, f"{path}.{{}}.{projection}").format(number)
        else:
            names[linear] = _renamed(f"{linear}.weight", renamings).removesuffix(".weight")
    return Published(names, frozenset(experts), frozenset(path for path, found in templates.items() if not found))


def _reversed(model: PreTrainedModel) -> list[WeightRenaming]:
    """Return what turns the names of a model into those of published checkpoints."""
    mapping = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    reverse = [entry.reverse_transform() for entry in mapping if not isinstance(entry, PrefixChange)]
    return [entry for entry in reverse if isinstance(entry, WeightRenaming)]


def _templates(model: PreTrainedModel, path: str, layout: Layout) -> dict[str, str]:
    """Return projection -> name with {} for the number of the expert; {} if no expert has a tensor of its own.

    transformers takes apart small stand-ins of the fused parameters, whose numbers tell what has gone where.
    """
    marks: dict[str, Tensor] = {}
    for name in dict.fromkeys(part.parameter for part in layout.parts):
        inside = [index for index, part in enumerate(layout.parts) if part.parameter == name]
        values = torch.tensor([[number * len(layout.parts) + index for index in inside] for number in range(TRIED)])
        is_turned = next(part.transposed for part in layout.parts if part.parameter == name)
        marks[f"{path}.{name}"] = values[:, None, :] if is_turned else values[:, :, None]
    try:
        taken = revert_weight_conversion(model, marks)
    except FAILURES:  # of an operation that needs the real sizes
        return {}
    names = {int(mark): name for name, mark in taken.items() if mark.numel() == 1}
    found = {}
    for index, part in enumerate(layout.parts):
        each = [names.get(number * len(layout.parts) + index, "") for number in range(TRIED)]
        before = os.path.commonprefix(each)
        if (
            f"{before}0{each[0][len(before) + 1 :]}" != each[0]
            or each[0][len(before) + 1 :] != each[1][len(before) + 1 :]
        ):
            return {}
        found[part.projection] = f"{before}{{}}{each[0][len(before) + 1 :]}".removesuffix(".weight")
    return found


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    """Return the name that all renamings make of a tensor's, one after the other."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
