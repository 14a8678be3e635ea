"""Keep every linear at every option in a folder, packed, and decode one at a time.

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

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress import formats, recipe
from compress.errors import CheckpointError, OutputError
from compress.formats import stored
from compress.recipe.schema import Allocation, Recipe
from compress.run import source
from compress.run.job import Job
from compress.storage import paths
from compress.storage.checkpoint import StoredTensor, read_header, write_shard, write_text
from compress.storage.files import make_folder
from compress.storage.json_text import OBJECT
from compress.storage.workdir import WorkDirectory, writing
from compress.types import PackedWeight

FIXED = "fixed"
TABLE = "sensitivity.json"
VERSION = 1
MAX_NAME_CHARACTERS = 150  # the model's and the recipe's name in that of a folder


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
    def hold(self, identity: Mapping[str, Any], arrangement: Mapping[str, Any]) -> Iterator[Database]:
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

    def measurements_of(self, block: int) -> dict[str, Any]:
        """Return what was measured of a finished block."""
        return dict(self._record(block)["measured"])

    def writing(self) -> AbstractContextManager[None]:
        """Turn the system's errors at files in the folder into one clear line."""
        return writing(self.folder, self.option)

    def weight(self, block: int, name: str, level: int | str, original: Tensor) -> Tensor:
        """Return the weight [out, in] of a linear at option `level`, of the dtype and on the device of `original`."""
        return formats.decode(self.read_packed(block, name, level), original.dtype).to(original.device)

    def read_packed(self, block: int, name: str, level: int | str) -> PackedWeight:
        """Return a linear at option `level` as it is stored."""
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
        return packed

    @property
    def nbytes(self) -> int:
        """Bytes of all options on disk."""
        return sum(path.stat().st_size for path in self.records.glob("*.safetensors"))

    def _record(self, block: int) -> dict[str, Any]:
        if block not in self._contents:
            self._contents[block] = self._read(self._block(block), {"stored": OBJECT, "measured": OBJECT})
        return self._contents[block]


# ---------------------------------------------------------------- the folder


def folder_of(job: Job) -> Path:
    """Return where measurements are kept by default: beside the output, one folder for all targets.

    Its name tells the model, and what else is measured: options, calibration and seed.
    """
    paths.check_name(job.out)
    known = [*source.locate(job), job.calib, job.seed, recipe_fingerprint(job.recipe, job.recipe.allocate)]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:8]
    name = Path(job.model.rstrip("/")).name or "model"
    name = re.sub(r"[^\w.-]+", "-", f"{name}-{job.recipe.name}")[:MAX_NAME_CHARACTERS]
    return job.out.with_name(f"{name}-{digest}.measured")


def recipe_fingerprint(whole: Recipe, allocation: Allocation | None) -> str:
    """Return the fingerprint of a recipe as far as it is measured: without target, allocator, cache and pruning."""
    if allocation is not None:
        former: Any = "swap"  # as folders that were measured before its renaming spell the default cache_estimator
        allocation = Allocation(
            "",
            _Nothing(),
            allocation.options,
            units=allocation.units,
            samples=0,
            cache_estimator=former,
            tables=allocation.tables,
        )
    return recipe.fingerprint(dataclasses.replace(whole, experts=None, kv_cache=None, allocate=allocation))


@dataclasses.dataclass(frozen=True)
class _Nothing:
    """The settings of no allocator."""
