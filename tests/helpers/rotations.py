"""A rotation that is chosen, and what it is tried out with."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from compress.model import edits
from compress.model.skeleton import Skeleton
from compress.papers.transform import spin
from compress.run import plan
from compress.storage.checkpoint import open_checkpoint
from helpers.runs import Setup

CPU = torch.device("cpu")


def open_bench(
    model: Path, folder: Path, setup: Setup, config: spin.Config, tokens: Tensor, pack: bool = True
) -> tuple[spin.ChosenRotation, edits.EditContext]:
    """The rotation of a checkpoint, and what it is tried out or learned with."""
    skeleton = Skeleton(open_checkpoint(model))
    rotation = spin.apply(skeleton, config, 0)
    skeleton.edits = rotation
    made = plan.make(setup.load(), skeleton, pack)
    folder.mkdir(exist_ok=True)
    return rotation, edits.EditContext(CPU, tokens, made, 2, folder, None, lambda _: None)
