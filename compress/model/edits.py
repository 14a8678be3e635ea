"""Define how a transform of the whole model changes weights as they are loaded, block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from compress.types import NO_TRANSFORMS, Plan, WeightTransforms


class Edits(Protocol):
    """Changes to parameters as they are loaded, in place, and the operations that they leave to run time."""

    online: dict[str, WeightTransforms]  # linear -> transforms of what it reads, if it is packed
    samples: int  # of the calibration text that `choose` looks at; 0: none
    says: tuple[str, ...]  # what is to be known of them before anything is done; the notes begin with it

    def choose(self, bench: EditContext) -> list[str]:
        """Decide between possible edits, once and before `begin`; return notes for the report."""

    def begin(self, device: torch.device) -> None:
        """Prepare, once and before anything is loaded."""

    def table_ops(self) -> WeightTransforms | str:
        """Return the operations at run time with which embeddings and output head stay one table, as it was.

        A reason, which goes on behind "because", where there are none.
        """

    def table_tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors of these operations, on the CPU, once `choose` has decided."""

    def head(self) -> Callable[[Tensor], Tensor]:
        """Return the change of rows [rows, hidden] of the output head."""

    def rest(self, model: nn.Module) -> None:
        """Change all outside the blocks except the output head."""

    def block(self, index: int, block: nn.Module) -> None:
        """Change one decoder block, whose experts are unfused."""


class EditContext(NamedTuple):
    """Data and limits by which a transform of the whole model chooses its edits, before anything is quantized."""

    device: torch.device
    tokens: Tensor | None  # the calibration text [samples, seq_len], int64; None: there is none
    plan: Plan
    batch: int  # samples in a forward pass
    folder: Path  # of the run's own files; its file `rotation` stays for a resumed run, `stream` does not
    max_memory: int | None  # bytes
    say: Callable[[str], None]  # shows what is being done


class WeightEdits:
    """What edits do that only give the skeleton other sources: nothing once `choose` has decided."""

    online: dict[str, WeightTransforms] = {}

    def begin(self, device: torch.device) -> None:
        """Prepare nothing."""

    def table_ops(self) -> WeightTransforms:
        """Return no operations: tables stay as they are."""
        return NO_TRANSFORMS

    def table_tensors(self) -> dict[str, Tensor]:
        return {}

    def head(self) -> Callable[[Tensor], Tensor]:
        """Return that the output head stays as it is."""
        return lambda rows: rows

    def rest(self, model: nn.Module) -> None:
        """Change nothing outside the blocks."""

    def block(self, index: int, block: nn.Module) -> None:
        """Change nothing: blocks are loaded as they are to be."""
