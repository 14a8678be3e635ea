"""Packed levels: every linear at every option, on disk, to be decoded one at a time.

    DIR/run.json             what it was made of: model, options, calibration, seed
    DIR/levels/00003.safetensors   all linears of block 3: <linear>@<level>.<tensor>
    DIR/levels/00003.json    how each is stored, and what was measured of it; written after the tensors
    DIR/levels/00003.state.safetensors   the block as the transforms have left it, where the recipe has any in blocks
    DIR/sensitivity.json     the table that was last chosen from, for whoever wants to read it
    DIR/search-*, DIR/teacher*   what searches and comparisons keep

A level is the number of an option, or "fixed": what a rule of the recipe decides, whatever is allocated.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compress import formats
from compress.errors import CheckpointError, OutputError
from compress.formats import stored
from compress.storage.checkpoint import StoredTensor, read_header, read_json, write_shard, write_text
from compress.storage.workdir import writing
from compress.types import PackedWeight

FIXED = "fixed"
RUN, TABLE = "run.json", "sensitivity.json"
VERSION = 1


class Database:
    """The levels in a folder. Reading needs nothing but the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.levels = folder, folder / "levels"
        self._records: dict[int, dict[str, Any]] = {}
        self._tensors: dict[int, dict[str, StoredTensor]] = {}

    @contextmanager
    def opened(self, identity: Mapping[str, Any]) -> Iterator[Database]:
        """Create it, or go on with one of this identity; held by one process at a time. Raises OutputError."""
        with writing(self.folder, "--measurements"):
            self.levels.mkdir(parents=True, exist_ok=True)
            with (self.folder / "lock").open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise OutputError(f"{self.folder} is in use by another run; wait, or give another folder") from None
                self._check(identity)
                for part in self.levels.glob("*.part"):
                    part.unlink()
                for left in [*self.folder.glob("candidates-*"), *self.folder.glob("text/candidates-*")]:
                    shutil.rmtree(left, ignore_errors=True)  # of a killed run
                yield self

    def _check(self, identity: Mapping[str, Any]) -> None:
        wanted = {"version": VERSION, **identity}
        path = self.folder / RUN
        if not path.exists():
            if any(self.levels.iterdir()):
                raise OutputError(f"{self.folder} has levels but no {RUN}; give another folder, or remove it")
            write_text(path, json.dumps(wanted, indent=1) + "\n")
            return
        try:
            known = read_json(path)
        except CheckpointError as error:
            raise OutputError(f"{path} is damaged; remove {self.folder} to measure anew") from error
        changed = sorted(key for key in {*known, *wanted} if known.get(key) != wanted.get(key))
        if changed:
            raise OutputError(
                f"{self.folder} was measured with another {', '.join(changed)}; give another folder for the "
                "measurements, or remove this one"
            )

    def first(self, arrangement: Mapping[str, Any]) -> dict[str, Any]:
        """How the first run into this folder was arranged."""
        path = self.folder / "arrangement.json"
        if not path.is_file():
            write_text(path, json.dumps(dict(arrangement)))
        try:
            found = read_json(path)
        except CheckpointError as error:
            raise OutputError(f"{path} is damaged; remove {self.folder} to measure anew") from error
        if found.keys() != dict(arrangement).keys():
            raise OutputError(f"{path} is not of this version; remove {self.folder} to measure anew")
        return found

    def finished(self) -> int:
        """Blocks that are done, from the first on."""
        count = 0
        while (self.levels / f"{count:05d}.json").is_file():
            count += 1
        return count

    def add(self, block: int, packed: Mapping[str, PackedWeight], measured: Mapping[str, Any]) -> None:
        """Store a block's levels, "<linear>@<level>" -> weight, and what was measured."""
        tensors = {f"{key}.{part}": tensor for key, weight in packed.items() for part, tensor in weight.tensors.items()}
        write_shard(self.levels / f"{block:05d}.safetensors", tensors)
        forms = {
            key: {**stored.to_dict(weight.stored), "shape": weight.shape, "tensors": list(weight.tensors)}
            for key, weight in packed.items()
        }
        write_text(self.levels / f"{block:05d}.json", json.dumps({"stored": forms, "measured": measured}))

    def add_state(self, block: int, state: Mapping[str, Tensor]) -> None:
        write_shard(self.levels / f"{block:05d}.state.safetensors", state)

    def restore_state(self, block: int, module: nn.Module) -> None:
        """Make a loaded block what the transforms have made of it; nothing where there are none."""
        path = self.levels / f"{block:05d}.state.safetensors"
        if path.is_file():
            parameters = dict(module.named_parameters())
            for name, tensor in read_header(path).items():
                parameters[name].data.copy_(tensor.read())

    def measured(self, block: int) -> dict[str, Any]:
        """What was measured of a finished block."""
        return dict(self._record(block)["measured"])

    def weight(self, block: int, name: str, level: int | str, original: Tensor) -> Tensor:
        """The effective weight [out, in] of a linear at a level, in the dtype and on the device of `original`."""
        key = f"{name}@{level}"
        try:
            form = dict(self._record(block)["stored"][key])
            if block not in self._tensors:
                self._tensors[block] = read_header(self.levels / f"{block:05d}.safetensors")
            tensors = {part: self._tensors[block][f"{key}.{part}"].read() for part in form.pop("tensors")}
        except KeyError as error:
            raise CheckpointError(f"{self.folder} has no level {level!r} of {name}; measure again") from error
        shape = tuple(form.pop("shape"))
        packed = PackedWeight(stored.from_dict(form, name), tensors, shape)
        return formats.decode(packed, original.dtype).to(original.device)

    @property
    def nbytes(self) -> int:
        """Of all levels on disk."""
        return sum(path.stat().st_size for path in self.levels.glob("*.safetensors"))

    def _record(self, block: int) -> dict[str, Any]:
        if block not in self._records:
            self._records[block] = read_json(self.levels / f"{block:05d}.json")
        return self._records[block]
