"""Store the sensitivity of a model: damages of units at options, and scores of units, one JSON file a measurement.

A damage is the increase of a loss that storing a unit at an option causes, estimated in one of several ways. weight,
relative, hessian and output errors are measured while options are quantized (compress/allocate/quantize_options.py).
What takes passes over the whole model (compress/allocate/metrics.py) is kept here as measured-<name>.json, written
block by block where it takes long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.allocate import expert_options, prepare_options, table
from compress.allocate.evaluators import Evaluators
from compress.allocate.table import UnitLinears
from compress.allocate.variants import Database
from compress.errors import CheckpointError
from compress.model.skeleton import Skeleton
from compress.recipe.allocation import RENAMED_ESTIMATORS
from compress.recipe.schema import KEEP
from compress.storage import json_text
from compress.storage.checkpoint import read_json, write_text
from compress.storage.json_text import NUMBER
from compress.types import LinearSpec

WITH_OPTIONS = ("weight", "relative", "hessian", "output")  # measured as the options are made
MEASURED_LAYOUT: dict[str, Any] = {  # a file: by name and unit
    **{"damages": {str: {str: [NUMBER]}}, "scores": {str: {str: NUMBER}}, "slopes": {str: [NUMBER]}},
    "forwards": NUMBER,
    "options": NUMBER,  # that are measured, of a metric that goes option by option
}
NOTHING: dict[str, Any] = {"damages": {}, "scores": {}, "slopes": {}, "forwards": 0, "options": 0}


class Measurements:
    """The measurements in a folder, and access to all that a metric measures."""

    def __init__(self, opened: prepare_options.Options, database: Database, evaluators: Evaluators) -> None:
        self.opened, self.database, self.evaluators = opened, database, evaluators
        self.calibration, self.progress = evaluators.calibration, evaluators.progress
        self.skeleton = opened.prepared.skeleton
        self.samples = min(opened.allocation.samples, self.calibration.tokens.shape[0])
        self.seconds: dict[str, float] = {}
        self.groups = table.open_groups(opened)

    def source(self) -> Skeleton:
        """Open the model anew, for a metric that works on it by itself."""
        return self.evaluators.source()[0]

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return damages (name -> unit -> by option) and scores (name -> unit -> score) of all that is finished.

        Those that every linear is measured by as its options are made are not among them (`WITH_OPTIONS`).
        """
        tokens = self.calibration.tokens.numel()
        damages, scores = expert_options.damages_and_scores(self.opened, self._rows(), tokens)
        for path in sorted(self.database.folder.glob("measured-*.json")):
            content = _read_measurements(path)
            if content.get("samples", self.samples) == self.samples and content.get("complete"):
                damages |= {
                    RENAMED_ESTIMATORS.get(name, name): rows for name, rows in content.get("damages", {}).items()
                }
                scores |= content.get("scores", {})
        return damages, scores

    def keep(self, name: str, complete: bool = True, **content: Any) -> None:
        """Write a file of measurements. damages, scores: by name, then unit; samples: that they were taken on."""
        path = self.database.folder / f"measured-{name}.json"
        write_text(path, json.dumps({"complete": complete, **content}, indent=1) + "\n")

    def read_unfinished(self, name: str) -> dict[str, Any]:
        """Return an unfinished file of measurements on as many samples, {} without one."""
        path = self.database.folder / f"measured-{name}.json"
        content = _read_measurements(path) if path.is_file() else {}
        return content if content.get("samples") == self.samples else {}

    def options(self, group: UnitLinears) -> list[int]:
        """Return the numbers of the options that all members of a unit have; a kept one always is among them."""
        return prepare_options.options_of(self.opened, group.members)

    def assignment(self, group: UnitLinears, option: int) -> dict[str, str]:
        """Return linear -> variant with only this unit changed."""
        return {} if self.opened.names[option] == KEEP else {member.name: str(option) for member in group.members}

    def originals(self, skeleton: Skeleton, index: int) -> dict[str, Tensor]:
        """Return linear -> weight [out, in] float32 of the units of a block, before they are quantized."""
        block = skeleton.load_block(index, torch.device("cpu"))
        names = [member.name for group in self.groups for member in group.members if member.block == index]
        weights = {name: skeleton.linear(block, name).weight.detach().float().clone() for name in names}
        skeleton.free()
        return weights

    def change(self, spec: LinearSpec, option: int, original: Tensor) -> Tensor:
        """Return what an option adds to a weight [out, in] float32."""
        return self.database.weight(spec.block, spec.name, option, original) - original

    def relative_errors(self) -> dict[str, list[float]]:
        """Return unit -> ||W - Q||^2 / ||W||^2 at every option, all its linears together; nan where not offered."""
        rows = self._rows()
        options = range(len(self.opened.names))
        return {
            g.name: [_relative([rows[m.name].get(str(o)) for m in g.members]) for o in options] for g in self.groups
        }

    def table(self) -> table.SensitivityTable:
        """Assemble all that is measured."""
        rows, options = self._rows(), range(len(self.opened.names))
        damages, scores = self.read()
        for key in WITH_OPTIONS:
            damages[key] = {
                g.name: [sum(rows[m.name].get(str(o), {}).get(key, 0.0) for m in g.members) for o in options]
                for g in self.groups
            }
        facts = {"scored_tokens": self.samples * self.opened.prepared.seq_len, "seconds": self.seconds}
        return table.assemble(self.opened, damages, scores, self.calibration.tokens.numel(), facts)

    def _rows(self) -> dict[str, dict[str, Any]]:
        """Return linear -> option number -> the errors measured when the options were made; experts module -> units."""
        blocks = range(len(self.opened.prepared.skeleton.blocks))
        return {name: row for index in blocks for name, row in self.database.measurements_of(index).items()}


def _relative(rows: Sequence[Mapping[str, float] | None]) -> float:
    """Return the relative squared error of linears together; nan where one lacks the option."""
    measured = [row for row in rows if row is not None]
    if len(measured) < len(rows):
        return math.nan
    norms = [row["weight"] / row["relative"] if row["relative"] > 0 else 0.0 for row in measured]
    total = sum(norms)
    return sum(row["weight"] for row in measured) / total if total > 0 else 0.0


def _read_measurements(path: Path) -> dict[str, Any]:
    """Return a file of measurements; CheckpointError unless it is one."""
    content = read_json(path)
    if wrong := json_text.mismatch({**NOTHING, **content}, MEASURED_LAYOUT):
        raise CheckpointError(f"{path} is damaged, or of another version ({wrong}); remove it to measure anew")
    return content
