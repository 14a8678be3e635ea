"""What a transform of the whole model is to the rest: changes to weights as they are loaded, block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from compress.types import Plan, WeightTransforms


class Edits(Protocol):
    """Changes to parameters as they are loaded, in place, and what they leave to run time."""

    online: dict[str, WeightTransforms]  # linear -> transforms of what it reads, if it is packed
    samples: int  # of the calibration text that `choose` looks at; 0: none

    def choose(self, bench: Workbench) -> list[str]:
        """Called once, before `begin`: decide between possible edits; what the report should say of it."""

    def begin(self, device: torch.device) -> None:
        """Called once, before anything is loaded."""

    def head(self) -> Callable[[Tensor], Tensor]:
        """What happens to rows [rows, hidden] of the output head."""

    def rest(self, model: nn.Module) -> None:
        """What lies outside the blocks, except the output head."""

    def block(self, index: int, block: nn.Module) -> None:
        """One decoder block, its experts unfused."""


class Workbench(NamedTuple):
    """What a transform of the whole model can try itself out with, before anything is quantized."""

    device: torch.device
    tokens: Tensor | None  # the calibration text [samples, seq_len], int64; None: there is none
    plan: Plan
    batch: int  # samples in a forward pass
    folder: Path  # of the run's own files; its file `rotation` stays for a resumed run, `stream` does not
    max_memory: int | None  # bytes
    say: Callable[[str], None]  # shows what is being done
