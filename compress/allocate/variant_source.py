"""Open a model with variants of its linears, in any process: those of a database, and noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress import plugins
from compress.allocate.prefix_tree import Variant, VariantWeights
from compress.allocate.variants import Database
from compress.importers import open_checkpoint
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.quant.incoherence import derived_seed
from compress.run.job import Job
from compress.types import Plan

NOISE = "noise"  # a variant of a linear (NOISE, t)


class StoredVariants:
    """The variants of linears in a database, by the linears' full names (`VariantWeights` of prefix_tree.py)."""

    def __init__(self, skeleton: Skeleton, database: Database) -> None:
        self.prefix, self.database = f"{skeleton.blocks_name}.", database
        self.behind = len(skeleton.blocks)  # the number that the tables outside of the blocks are stored by

    def weight(self, name: str, variant: Any, original: Tensor) -> Tensor:
        """Decode the weight [out, in] of a linear or a table at an option, in the dtype of `original`."""
        is_inner = name.startswith(self.prefix)
        block = int(name.removeprefix(self.prefix).partition(".")[0]) if is_inner else self.behind
        return self.database.weight(block, name, variant, original)

    def prepare(self, index: int, block: nn.Module) -> None:
        """Bring a loaded block into the state that the transforms have left."""
        self.database.restore_state(index, block)


@dataclass(frozen=True)
class Noise:
    """Variants ("noise", t): W + t |W| G / sqrt(numel), G standard normal, of each linear its own by seed and name.

    Other variants are those of `inner`.
    """

    seed: int = 0
    inner: VariantWeights | None = None

    def weight(self, name: str, variant: Variant, original: Tensor) -> Tensor:
        if not (isinstance(variant, tuple) and len(variant) == 2 and variant[0] == NOISE):
            if self.inner is None:
                raise ValueError(f"{name}: {variant!r} is no noise, and there are no other variants")
            return self.inner.weight(name, variant, original)
        generator = torch.Generator().manual_seed(derived_seed(self.seed, NOISE, name))
        noise = torch.randn(original.shape, generator=generator).to(original.device)
        wide = original.float()
        scale = cast(float, variant[1]) * wide.norm() / math.sqrt(original.numel())
        return (wide + scale * noise).to(original.dtype)

    def prepare(self, index: int, block: nn.Module) -> None:
        prepare: Any = getattr(self.inner, "prepare", None)
        if prepare is not None:
            prepare(index, block)


def open_variants(directory: Path, job: Job, folder: Path) -> tuple[Skeleton, Noise]:
    """Return the model, transformed as a whole where the recipe says so, and its variants, noise among them."""
    skeleton, device = Skeleton(open_checkpoint(directory)), torch.device(job.device)
    for step in job.recipe.transform:
        module = plugins.load("transform", step.method)
        if module.SCOPE == "model":
            skeleton.edits = module.apply(skeleton, step.config, job.seed)
            skeleton.edits.choose(EditContext(device, None, Plan(()), 1, folder, job.max_memory, lambda _: None))
            skeleton.edits.begin(device)
    return skeleton, Noise(job.seed, StoredVariants(skeleton, Database(folder)))
