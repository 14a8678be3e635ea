"""Find the linears of blocks that cost more than they save below 8 bits: gates of recurrences, and routers.

The decay of a linear attention or state space model and the share of a token in its state are made by small linears,
whose errors are carried on from token to token. Other tools keep them as they are (modelopt's list of what it disables,
the builders of engines); so do we, by default. A gate has one of the names in GATES and stands in a module with a
parameter of the decay, or beside such a module. A router is a linear beside experts, alone in its place, with a row for
each of them.

Norms, convolutions and the parameters of the decay themselves are no linears; nothing quantizes them. Where the time
step is a part of a wider projection, as in Mamba-2, that projection is none of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from compress.model import sublayers
from compress.model.skeleton import Skeleton
from compress.runtime import expert_layouts, linears
from compress.runtime.expert_layouts import ExpertLayout
from compress.types import LinearSpec, Plan

DECAYS = {"A_log", "dt_bias"}  # parameters
GATES = re.compile(r"(in_proj_(a|b|ba)|[abf]_proj|f_[ab]_proj|dt_proj|x_proj)$")


def spared_linears(skeleton: Skeleton) -> dict[str, str]:
    """Return the full names of these linears with the reason: `Plan.GATE` or `Plan.ROUTER`."""
    spared: dict[str, str] = {}
    for index, block in enumerate(skeleton.blocks):
        prefix = skeleton.block_prefix(index)
        for path, module in block.named_modules():
            where = f"{prefix}{path}".rstrip(".")
            if DECAYS & {name for name, _ in module.named_parameters(recurse=False)}:
                for owner in (where, where.rpartition(".")[0]):
                    names = dict(skeleton.model.get_submodule(owner).named_children()) if owner + "." != prefix else {}
                    spared |= {f"{owner}.{name}": Plan.GATE for name in names if GATES.match(name)}
            layout = expert_layouts.describe(module)
            if isinstance(layout, ExpertLayout):
                spared |= dict.fromkeys(_routers(skeleton, where, layout.experts), Plan.ROUTER)
    return spared


def _routers(skeleton: Skeleton, experts: str, count: int) -> Iterator[str]:
    """Yield the linears beside a module of experts, each alone in its place, that have a row for each of them."""
    around = experts.rpartition(".")[0]
    for name, child in skeleton.model.get_submodule(around).named_children():
        inside = [path for path, module in child.named_modules() if linears.shape_of(module) is not None]
        if f"{around}.{name}" != experts and len(inside) == 1:
            path = f"{around}.{name}.{inside[0]}".rstrip(".")
            if skeleton.model.get_submodule(path).get_parameter("weight").shape[0] == count:
                yield path


def keeps_bias(skeleton: Skeleton, spec: LinearSpec) -> bool:
    """Return whether a linear adds a bias to the residual stream, whatever becomes of its weight."""
    module = None if spec.is_expert else skeleton.model.get_submodule(spec.name)
    has_bias = len(spec.parameters) > 1 if module is None else getattr(module, "bias", None) is not None
    return has_bias and spec.name in sublayers.writers(skeleton)
