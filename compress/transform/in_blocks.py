"""Apply the transforms of a recipe that look at one block at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from compress import plugins
from compress.model import graph
from compress.model.skeleton import Skeleton
from compress.types import Plan


class BlockTransforms:
    """The steps of a recipe whose scope is a block, in their order."""

    def __init__(self, skeleton: Skeleton, steps: Iterable[Any]) -> None:
        self.skeleton = skeleton
        self.steps = [step for step in steps if plugins.load("transform", step.method).SCOPE == "block"]
        self.graph: graph.Graph | None = None  # traced when it is needed

    def apply(self, index: int, block: nn.Module, batches: Callable[[], Any], plan: Plan) -> list[str]:
        """Change a block in place; return what the report should say of it.

        batches: gives what reaches the block, anew at each call.
        """
        prefix = self.skeleton.block_prefix(index)
        if self.graph is None:
            self.graph = graph.trace(self.skeleton)
        sites = graph.sites(self.graph.blocks[index], block, batches, prefix.rstrip("."))
        rotated = {layer.spec.name for layer in plan.layers if layer.stored.ops}
        schemes = {
            key.removeprefix(prefix): dataclasses.replace(scheme, incoherence=True) if key in rotated else scheme
            for key, scheme in plan.schemes.items()
            if key.startswith(prefix)
        }
        notes: list[str] = []
        for step in self.steps:
            notes += plugins.load("transform", step.method).apply(block, sites, batches, step.config, schemes)
        return notes
