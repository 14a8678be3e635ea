"""A job: what the user asked for, and everything that is decided about it before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.calib.data import Calibration
from compress.model.skeleton import Skeleton
from compress.recipe import Recipe
from compress.run import expert_pruning
from compress.run.memory_plan import Arrangement
from compress.types import LayerReport, Plan, Pruning


@dataclass(frozen=True)
class Job:
    """What the user asked for."""

    model: str  # directory or hub id
    recipe: Recipe
    out: Path
    calib: str | None = None  # None: text that the model generates itself
    max_memory: int | None = None  # bytes
    device: str = "cpu"
    seed: int = 0
    overwrite: bool = False
    restart: bool = False
    pack: bool = True  # False: only the recipe's transforms, to a full-precision checkpoint
    measurements: Path | None = None  # folder of what an allocation is made from; None: beside the output
    measures: bool = True  # False: what an allocation needs and is not in that folder is an error (NotMeasuredError)
    processes: int = 1  # that measure choices side by side; changes no result
    allocation: Mapping[str, Any] | None = None  # how the recipe's bits were allocated, for the report


@dataclass(frozen=True)
class Prepared:
    """The model's skeleton, the plan for it, and how the run fits into memory."""

    skeleton: Skeleton
    plan: Plan
    arrangement: Arrangement
    samples: int  # calibration samples asked for; 0: the recipe needs no data
    seq_len: int  # tokens of each


@dataclass(frozen=True)
class Facts:
    """What the loop hands over when all blocks are done."""

    job: Job
    prepared: Prepared
    calibration: Calibration | None
    layers: list[LayerReport]
    block_seconds: list[float]  # of the blocks computed in this run
    replayed: int  # blocks taken over from an interrupted run
    notes: dict[str, list[str]]  # block name -> what is to be said of it as a whole
    experts: dict[str, dict[str, Any]]  # experts module -> its routing, where the recipe prunes experts

    @property
    def prunings(self) -> dict[str, Pruning]:
        """Experts module -> what it is pruned with."""
        config = self.job.recipe.pruning
        return expert_pruning.chosen(self.experts, config, self.layers) if config is not None else {}
