"""What errors of the weights matter to the model's loss: the Fisher diagonal, as a weight for each row and column.

F[i, j] is the mean over sequences of the squared gradient of a sequence's loss (batch 1). Kept of it are the roots of
its means over rows and over columns, as in LQ-LoRA (arXiv 2311.12023): the weighted problem then still has an exact
solution (compress/lowrank/factors.py). A row or column that hardly any gradient reaches weighs at least SMALLEST of the
heaviest one, so that nothing is left without a measure.

The gradients are those of the original model on the first `samples` calibration samples: a forward and a backward pass
over the whole model, block by block (compress/allocate/block_scores.py), before the first block is rounded. The paper
takes 10000 sequences of 1024 tokens.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import torch
from torch import Tensor

from compress.allocate.block_scores import gradients
from compress.model.skeleton import Skeleton
from compress.types import Fisher

SMALLEST = 1e-3  # weight of a row or column against the heaviest one
SAMPLES = 64  # calibration samples at most


def weights(
    skeleton: Skeleton, tokens: Tensor, names: Set[str], file: Path | None = None, device: torch.device | str = "cpu"
) -> dict[str, Fisher]:
    """Linear -> its weights, for those in `names`; tokens [samples, seq_len]. `file`: where hidden states may spill."""
    found = {}
    for _, block in gradients(skeleton, tokens[:SAMPLES], file, device):
        found.update({name: reduced(gradient.squares) for name, gradient in block.items() if name in names})
    return found


def reduced(squares: Tensor) -> Fisher:
    """Squared gradients [out, in] -> the weights of rows and columns; all ones if there is no gradient."""
    sides = [squares.double().mean(axis).sqrt() for axis in (1, 0)]
    if not sides[0].max() > 0:
        return Fisher(*(torch.ones_like(side).float() for side in sides))
    rows, columns = (side.clamp(min=SMALLEST * side.max().item()) for side in sides)
    return Fisher((rows / rows.mean()).float(), (columns / columns.mean()).float())
