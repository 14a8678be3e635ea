"""Damages and scores of the table, each measured when an allocator first asks for it, and kept for every later budget.

weight, hessian, output come with the levels (compress/allocate/quantize_options.py). What takes passes of the whole
model is here: each unit at each option alone (swap), the slope of the divergence in noise (noise), gradients (gradient,
fisher), what blocks do to the stream (lim), how weights are spread (zd), and where tokens are routed (share, routing,
expert). Every result is a file measured-<name>.json of the folder, written block by block where it takes long.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import plugins, process_memory
from compress.allocate import block_scores, groups, joint_kl, prepare_options, quantize_options, table
from compress.allocate.metrics import MEASURES
from compress.allocate.problem import Entry, Unit
from compress.allocate.table import Table
from compress.allocate.variants import FIXED, Database
from compress.calib.data import Calibration, token_windows
from compress.errors import CalibrationError, NotMeasuredError, RecipeError
from compress.model import edits, load
from compress.model.skeleton import Skeleton
from compress.progress import Progress
from compress.recipe.schema import KEEP
from compress.run import job, prepare
from compress.storage.checkpoint import open_checkpoint, read_json, write_text
from compress.types import LinearSpec, Plan

WITH_LEVELS = ("weight", "relative", "hessian", "output")  # measured as the levels are made


class Measured:
    """The measurements in a folder, and the means to make those that are missing."""

    def __init__(
        self, opened: prepare_options.Options, database: Database, calibration: Calibration, progress: Progress
    ) -> None:
        self.opened, self.database, self.calibration, self.progress = opened, database, calibration, progress
        self.skeleton = opened.prepared.skeleton
        self.samples = min(opened.allocation.samples, calibration.tokens.shape[0])
        self.seconds: dict[str, float] = {}
        # the model anew, for what works on it by itself
        self.source = partial(build, prepare.resolve(opened.asked.model), opened.asked, database.folder)
        self._candidates: joint_kl.Candidates | None = None
        self._others: list[joint_kl.Candidates] = []
        specs = {x.spec.name: x.spec for found in opened.levels.values() for x in found.values()}
        open_specs = [spec for name, spec in specs.items() if FIXED not in opened.levels[name]]
        self.groups = groups.groups(self.skeleton, open_specs, opened.allocation.units)

    def say(self, text: str) -> None:
        self.progress(text, 0, 0)

    def close(self) -> None:
        for one in filter(None, [self._candidates, *self._others]):
            one.close()
        self._candidates, self._others = None, []

    def judge(self) -> joint_kl.Candidates:
        """Choices on the first `samples` calibration sequences; made once."""
        if self._candidates is None:
            self._candidates = self.scored_on(self.calibration.tokens[: self.samples], self.database.folder)
        return self._candidates

    def scored_on(self, tokens: Tensor, folder: Path) -> joint_kl.Candidates:
        """Choices on tokens [samples, seq_len]; the teacher's predictions are kept in a folder."""
        asked = self.opened.asked
        limit = asked.max_memory  # each process has the program itself in memory, too
        if limit is not None:
            limit = max(0, limit - asked.processes * process_memory.resident())
        means = joint_kl.Means(asked.device, asked.processes, max_memory=limit)
        return joint_kl.Candidates(self.source, tokens, folder, means, self.say)

    def other_text(self, text: str, tokens: int) -> joint_kl.Candidates:
        """Choices on the first tokens of a text that is not the calibration's."""
        vocabulary = self.skeleton.config.get_text_config().vocab_size
        tokenizer = load.load_tokenizer(self.skeleton.checkpoint.directory)
        seq_len = self.opened.prepared.seq_len
        windows, available = token_windows(text, tokenizer, seq_len, vocabulary, document_tokens=max(tokens, seq_len))
        if not len(windows):
            raise CalibrationError(f"{text} has only {available} tokens, one window needs {seq_len}; give more text")
        folder = self.database.folder / "text"
        folder.mkdir(exist_ok=True)
        self.close()  # each takes all the memory there is
        self._others.append(self.scored_on(windows[: max(1, tokens // seq_len)], folder))
        return self._others[-1]

    def table(self, needs: frozenset[str]) -> Table:
        """The table with these damages and scores, measured now where they are not known yet."""
        known = {*WITH_LEVELS}
        damages: dict[str, dict[str, list[float]]] = {}  # name -> unit -> by level
        scores: dict[str, dict[str, float]] = {}  # name -> unit -> score
        for path in sorted(self.database.folder.glob("measured-*.json")):
            self._take(path, damages, scores)
        for name in sorted(needs - known - damages.keys() - scores.keys()):
            if name not in MEASURES:
                raise RecipeError(f"there is no measurement {name!r}; known: {', '.join([*WITH_LEVELS, *MEASURES])}")
            if not self.opened.asked.measures:
                raise NotMeasuredError(f"{self.database.folder} has no {name}")
            started = time.monotonic()
            MEASURES[name](self)
            self.seconds[name] = round(time.monotonic() - started, 2)
            for path in sorted(self.database.folder.glob("measured-*.json")):
                self._take(path, damages, scores)
        made = self._assemble(damages, scores)
        table.save(made, self.database.folder)
        return made

    def _take(self, path: Path, damages: dict[str, Any], scores: dict[str, Any]) -> None:
        """Add what a file of measurements holds."""
        content = read_json(path)
        if content.get("samples", self.samples) == self.samples and content.get("complete"):
            damages.update(content.get("damages", {}))
            scores.update(content.get("scores", {}))

    def keep(self, name: str, complete: bool = True, **content: Any) -> None:
        """Write a file of measurements. damages, scores: by name, then unit; samples: that they were taken on."""
        path = self.database.folder / f"measured-{name}.json"
        write_text(path, json.dumps({"complete": complete, **content}, indent=1) + "\n")

    def kept(self, name: str) -> dict[str, Any]:
        """An unfinished file of measurements of as many samples, {} without one."""
        path = self.database.folder / f"measured-{name}.json"
        content = read_json(path) if path.is_file() else {}
        return content if content.get("samples") == self.samples else {}

    def options(self, group: groups.Group) -> list[int]:
        """Numbers of the options that all members of a unit have; a kept one always is."""
        return prepare_options.offered(self.opened, group.members)

    def assignment(self, group: groups.Group, option: int) -> dict[str, str]:
        """Linear -> level, with only this unit changed."""
        return {} if self.opened.names[option] == KEEP else {member.name: str(option) for member in group.members}

    def nbytes(self, group: groups.Group, option: int) -> int:
        """Of a unit at an option."""
        return prepare_options.nbytes(self.opened, group.members, option)

    def originals(self, skeleton: Skeleton, index: int) -> dict[str, Tensor]:
        """Linear -> weight [out, in] float32 of the units of a block, before they are quantized."""
        block = skeleton.load_block(index, torch.device("cpu"))
        names = [member.name for group in self.groups for member in group.members if member.block == index]
        found = {name: skeleton.linear(block, name).weight.detach().float().clone() for name in names}
        skeleton.free()
        return found

    def change(self, spec: LinearSpec, option: int, original: Tensor) -> Tensor:
        """What an option adds to a weight [out, in] float32."""
        return self.database.weight(spec.block, spec.name, option, original) - original

    def relative_errors(self) -> dict[str, list[float]]:
        """Unit -> ||W - Q||^2 / ||W||^2 at every option, all its linears together; nan where there is no level."""
        measured = dict(quantize_options.linears(self.opened, self.database))
        return {
            group.name: [self._relative(group, o, measured) for o in range(len(self.opened.names))]
            for group in self.groups
        }

    def _relative(self, group: groups.Group, option: int, measured: Mapping[str, Any]) -> float:
        rows = [measured[member.name].get(str(option)) for member in group.members]
        if any(row is None for row in rows):
            return math.nan
        norms = [row["weight"] / row["relative"] if row["relative"] > 0 else 0.0 for row in rows]
        total = sum(norms)
        return sum(row["weight"] for row in rows) / total if total > 0 else 0.0

    def _assemble(self, damages: Mapping[str, Any], scores: Mapping[str, Any]) -> Table:
        measured = dict(quantize_options.linears(self.opened, self.database))
        made = []
        for group in self.groups:
            entries: list[Entry] = []
            for option in self.options(group):
                given = {
                    name: by_unit[group.name][option] for name, by_unit in damages.items() if group.name in by_unit
                }
                entries.append(self._entry(group, option, measured, given))
            entries.sort(key=lambda entry: entry.nbytes)
            own = {name: by_unit[group.name] for name, by_unit in scores.items() if group.name in by_unit}
            first = group.members[0]
            numel = sum(member.numel for member in group.members)
            members = tuple(member.name for member in group.members)
            made.append(Unit(group.name, members, first.block, numel, tuple(entries), first.is_expert, own))
        plan = self.opened.prepared.plan
        fixed = [levels[FIXED] for levels in self.opened.levels.values() if FIXED in levels]
        return Table(
            tuple(made),
            tuple(self.opened.names),
            sum(layer.nbytes for layer in fixed),
            sum(layer.spec.numel for layer in fixed),
            sum(plan.kept_nbytes.values()),
            self.skeleton.checkpoint.nbytes,
            self.calibration.tokens.numel(),
            {"scored_tokens": self.samples * self.opened.prepared.seq_len, "seconds": self.seconds},
        )

    def _entry(
        self, group: groups.Group, option: int, measured: Mapping[str, Any], given: Mapping[str, float]
    ) -> Entry:
        name = self.opened.names[option]
        if name == KEEP:
            nbytes = sum(self.opened.dense_nbytes[member.name] for member in group.members)
            bits = 8.0 * group.members[0].dtype.itemsize
            return Entry(name, nbytes, bits, {**dict.fromkeys(WITH_LEVELS, 0.0), **given})
        rows = [measured[member.name][str(option)] for member in group.members]
        nbytes = sum(row["nbytes"] for row in rows)
        bits = 8 * nbytes / sum(member.numel for member in group.members)
        sums = {key: sum(row[key] for row in rows) for key in WITH_LEVELS}
        return Entry(name, nbytes, bits, {**sums, **given})


class _Levels:
    """The weights of a database, for `Candidates`."""

    def __init__(self, skeleton: Skeleton, database: Database) -> None:
        self.prefix, self.database = f"{skeleton.blocks_name}.", database

    def weight(self, name: str, level: Any, original: Tensor) -> Tensor:
        block = int(name.removeprefix(self.prefix).partition(".")[0])
        return self.database.weight(block, name, level, original)

    def prepare(self, index: int, block: nn.Module) -> None:
        self.database.restore_state(index, block)


def build(directory: Path, asked: job.Job, folder: Path) -> tuple[Skeleton, block_scores.Noise]:
    """The model and its levels, noise among them, in whatever process."""
    skeleton, device = Skeleton(open_checkpoint(directory)), torch.device(asked.device)
    for step in asked.recipe.transform:
        module = plugins.load("transform", step.method)
        if module.SCOPE == "model":
            skeleton.edits = module.apply(skeleton, step.config, asked.seed)
            skeleton.edits.choose(
                edits.EditContext(device, None, Plan(()), 1, folder, asked.max_memory, lambda _: None)
            )
            skeleton.edits.begin(device)
    return skeleton, block_scores.Noise(asked.seed, _Levels(skeleton, Database(folder)))
