"""Keep every linear at every option, packed on disk, and decode one at a time.

    DIR/run.json             what it was made of (model, options, calibration, seed) and how the first run was arranged
    DIR/levels/00003.safetensors   all linears of block 3: <linear>@<option>.<tensor>
    DIR/levels/00003.json    how each is stored, and what was measured of it; written after the tensors
    DIR/levels/00008...      (behind the last block) embeddings and output head at their options, where it has any
    DIR/levels/00003.state.safetensors   the block as the transforms have left it, where the recipe has any in blocks
    DIR/sensitivity.json     the table that was last chosen from, for whoever wants to read it
    DIR/search-*, DIR/teacher*   what searches and comparisons keep

An option is given by its number, or is "fixed": what a rule of the recipe decides, whatever is allocated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import formats, plugins
from compress.allocate.kl_shares import Noise
from compress.errors import CheckpointError, OutputError
from compress.formats import stored
from compress.importers import open_checkpoint
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.run.job import Job
from compress.storage.checkpoint import StoredTensor, read_header, write_shard, write_text
from compress.storage.files import make_folder
from compress.storage.json_text import OBJECT
from compress.storage.workdir import WorkDirectory, writing
from compress.types import PackedWeight, Plan

FIXED = "fixed"
TABLE = "sensitivity.json"
VERSION = 1


class Database(WorkDirectory):
    """The options in a folder. Reading needs nothing but the folder."""

    option = "--measurements"
    holds = "was measured with"
    keep = "another folder for the measurements"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "levels")
        self.start_over = f"remove {folder} to measure anew"
        self.arrangement: dict[str, Any] = {}  # of the first run into this folder, once it is open
        self._contents: dict[int, dict[str, Any]] = {}
        self._tensors: dict[int, dict[str, StoredTensor]] = {}

    @contextmanager
    def opened(self, identity: Mapping[str, Any], arrangement: Mapping[str, Any]) -> Iterator[Database]:
        """Create it, or go on with one of this identity; held by one process at a time. Raises OutputError."""
        busy = f"{self.folder} is in use by another run; wait, or give another folder"
        with writing(self.folder, self.option), self._take_lock(busy):
            if self.is_begun and self.records.is_dir():
                self._forget_empty()
            make_folder(self.records)
            if not self.is_begun and any(self.records.iterdir()):
                raise OutputError(f"{self.folder} has levels but no run.json; give another folder, or remove it")
            opened = False
            try:
                self._upgrade()
                self.arrangement = self.begin({"version": VERSION, **identity}, dict(arrangement))
                opened = True
                self._remove_parts(self.records)
                for left in [*self.folder.glob("candidates-*"), *self.folder.glob("text/candidates-*")]:
                    shutil.rmtree(left, ignore_errors=True)  # of a killed run
                yield self
            finally:
                if not opened:
                    with suppress(OSError):  # a run.json that is not ours, or levels
                        self.records.rmdir()
                elif self._forget_empty():
                    with suppress(OSError):  # there is something else in it, or another run waits for the lock
                        (self.folder / "lock").unlink()
                        self.folder.rmdir()

    def _forget_empty(self) -> bool:
        """Remove what a run left that finished no block, so that it binds no other run; tell whether it was so."""
        if any(self.records.glob("*.json")):
            return False
        with suppress(OSError):  # what cannot be removed is left to the next run
            for path in [*self.records.iterdir(), self.run]:
                path.unlink(missing_ok=True)
            self.records.rmdir()
        return True

    def _upgrade(self) -> None:
        """Bring `run.json` of before 2026-12, which lay beside its arrangement, into its present form."""
        arrangement = self.folder / "arrangement.json"
        if arrangement.is_file() and "identity" not in (identity := self._read(self.run)):
            write_text(self.run, json.dumps({"identity": identity, "arrangement": self._read(arrangement)}, indent=1))

    def add(self, block: int, packed: Mapping[str, PackedWeight], measured: Mapping[str, Any]) -> None:
        """Store a block's options, "<linear>@<option>" -> weight, and what was measured."""
        tensors = {f"{key}.{part}": tensor for key, weight in packed.items() for part, tensor in weight.tensors.items()}
        write_shard(self.records / f"{block:05d}.safetensors", tensors)
        forms = {
            key: {**stored.to_dict(weight.stored), "shape": weight.shape, "tensors": list(weight.tensors)}
            for key, weight in packed.items()
        }
        self.finish_block(block, {"stored": forms, "measured": measured})

    def add_state(self, block: int, state: Mapping[str, Tensor]) -> None:
        write_shard(self.records / f"{block:05d}.state.safetensors", state)

    def restore_state(self, block: int, module: nn.Module) -> None:
        """Give a loaded block the weights that the transforms have made; do nothing where there are none."""
        path = self.records / f"{block:05d}.state.safetensors"
        if path.is_file():
            parameters = dict(module.named_parameters())
            for name, tensor in read_header(path).items():
                if name not in parameters or tuple(parameters[name].shape) != tensor.shape:
                    raise CheckpointError(f"{path}: the block has no {name} of shape {tensor.shape}; measure again")
                parameters[name].data.copy_(tensor.read())

    def measured(self, block: int) -> dict[str, Any]:
        """Return what was measured of a finished block."""
        return dict(self._record(block)["measured"])

    def weight(self, block: int, name: str, level: int | str, original: Tensor) -> Tensor:
        """Return the weight [out, in] of a linear at option `level`, of the dtype and on the device of `original`."""
        key = f"{name}@{level}"
        try:
            form = dict(self._record(block)["stored"][key])
            if block not in self._tensors:
                self._tensors[block] = read_header(self.records / f"{block:05d}.safetensors")
            tensors = {part: self._tensors[block][f"{key}.{part}"].read() for part in form.pop("tensors")}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.folder} has no level {level!r} of {name}; {self.start_over}") from error
        shape = tuple(form.pop("shape"))
        packed = PackedWeight(stored.from_dict(form, name), tensors, shape)
        formats.check(packed, f"{self.folder}: {key}")
        return formats.decode(packed, original.dtype).to(original.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all options on disk."""
        return sum(path.stat().st_size for path in self.records.glob("*.safetensors"))

    def _record(self, block: int) -> dict[str, Any]:
        if block not in self._contents:
            self._contents[block] = self._read(self._block(block), {"stored": OBJECT, "measured": OBJECT})
        return self._contents[block]


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
