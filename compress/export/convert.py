"""Export a checkpoint to a target: ask what the target can hold, refuse or go on, write, and put in place.

Linears are exported as they are stored or not at all. Embeddings and output head, which most recipes pack, are written
as plain numbers where the target cannot hold them packed, and a line says what that costs.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress import plugins
from compress.errors import ExportError, RecipeError
from compress.export.place import ExportPlace
from compress.export.source import CACHE_NOTE, PackedSource, open_source
from compress.export.weights import EMBEDDINGS, HEAD, StoredWeight
from compress.importers.source import Decoded
from compress.model import told_linears
from compress.process_memory import show
from compress.progress import Progress, silent
from compress.storage import paths
from compress.storage.checkpoint import Readable, StoredTensor
from compress.storage.workdir import check_space

KIND = "export"
DIRECTORY = ""  # SUFFIX of a target that writes one
# DRAFT_HEADS of a target: what becomes of draft heads; without it their packed linears become plain numbers
DRAFTS_PLAIN, DRAFTS_HELD, DRAFTS_LEFT_OUT = "plain", "held", "left out"
TIED = "tie_word_embeddings"


class Wishes(NamedTuple):
    """What users may ask some targets for."""

    int8_inputs: bool = False  # products whose inputs are rounded to 8 bits
    split_size: int = 0  # [bytes] of each of several files; 0: one file


NONE = Wishes()
NOT_TAKEN = {
    "int8_inputs": "--int8-inputs; leave it out (recipes quantize inputs by `activations`)",
    "split_size": "--split-size; leave it out (what is written as a directory is in several files anyway)",
}


@dataclass
class Export:
    """What a target is to write."""

    source: PackedSource
    held: tuple[StoredWeight, ...]  # the weights that the target holds as they are stored, in the order of the model
    tables: tuple[StoredWeight, ...]  # packed tables, and linears of odd widths, that become plain numbers
    dtype: torch.dtype  # of these, and of the model that is written
    is_chosen: bool = False  # the user has named that type, which all plain numbers are to have
    notes: list[str] = field(default_factory=list)  # for the user, a line each
    progress: Progress = silent
    wishes: Wishes = NONE

    def plain(self) -> dict[str, Readable]:
        """Return all tensors that are written as plain numbers by their published names, decoded when they are read."""
        tensors = dict(self.source.plain)
        for table in self.tables:
            for role, name in self.places(table).items():
                tensors[f"{name}.weight"] = dense_tensor(table, f"{name}.weight", self.dtype, role)
        return tensors

    def places(self, table: StoredWeight) -> dict[str, str]:
        """Return role -> module under whose name a table is written: one for both where the rows are the same."""
        if table.tied and not table.is_one_table:
            return {EMBEDDINGS: table.name, HEAD: table.tied}
        return {table.roles[0] if table.roles else "": table.name}

    def plain_linears(self) -> list[str]:
        """Return the modules whose matrices are plain numbers: linears that are kept, routers, the output head."""
        heads, looked_up = self.source.heads(), self.source.looked_up()
        matrices = [name.removesuffix(".weight") for name, stored in self.plain().items() if len(stored.shape) == 2]
        patterns = self._draft_patterns() if not any(weight.is_draft for weight in self.held) else ()
        return sorted({*matrices, *heads, *patterns} - looked_up - {weight.name for weight in self.held})

    def _draft_patterns(self) -> set[str]:
        """Return patterns of all modules of plain draft heads, as engines write them: one of them knows each."""
        starts = {start for name in self.source.draft_names() if (start := told_linears.start_of_head(name))}
        return {pattern for start in starts for pattern in (f"{start}*", f"re:^{re.escape(start)}.*")}

    def check_packed(self) -> None:
        """Raise ExportError if the target holds no weight of this checkpoint."""
        if not self.held:
            directory = self.source.directory
            raise ExportError(
                f"{directory} has no packed linears; quantize it first (compress quantize {directory}), or export it "
                "--to dense"
            )

    def config(self) -> dict[str, Any]:
        """Return config.json without how the weights are packed, and with what has changed of the rest."""
        changes: dict[str, Any] = {} if self.dtype == self.source.dtype else {"dtype": dtype_name(self.dtype)}
        if any(len(self.places(table)) > 1 for table in self.tables):
            changes[TIED] = False
        config = self.source.config
        nested = {
            name: {**part, **{key: value for key, value in changes.items() if key in part}}
            for name, part in config.items()
            if isinstance(part, dict)
        }
        return {**config, **nested, **changes}


@dataclass(frozen=True)
class ExportResult:
    """What has been written."""

    nbytes: int  # of all files
    source_nbytes: int  # of the tensors of the checkpoint
    is_packed: bool  # whether any of them is packed
    notes: tuple[str, ...]


def target_named(name: str) -> ModuleType:
    """Return the target that a user has named; ExportError with what there is for an unknown one."""
    try:
        return plugins.load(KIND, name.lower().replace("-", "_"))
    except RecipeError as error:
        raise ExportError(plugins.unknown("export target", name, target_names())) from error


def target_names() -> list[str]:
    """Return the targets as users name them."""
    return [name.replace("_", "-") for name in plugins.names(KIND)]


def prepare(source: PackedSource, name: str, dtype: torch.dtype | None = None, wishes: Wishes = NONE) -> Export:
    """Return what a target is to write; ExportError for linears that it cannot hold, with the first of them.

    dtype: of all plain numbers; None: as they are stored, and decoded tables in the type of the model.
    wishes: ExportError for those that the target does not take.
    """
    target = target_named(name)
    for wish, value in wishes._asdict().items():
        if value and wish not in getattr(target, "TAKES", ()):
            raise ExportError(f"{name} takes no {NOT_TAKEN[wish]}")
    source, notes = _with_drafts(source, getattr(target, "DRAFT_HEADS", DRAFTS_PLAIN))
    reasons = {weight.name: target.refuses(weight) for weight in source.packed}
    if not hasattr(target, "DRAFT_HEADS"):
        reasons |= {weight.name: "" for weight in source.packed if weight.is_draft}
    decodes = getattr(target, "decodes", lambda weight: bool(weight.roles))
    refused = [
        weight
        for weight in source.packed
        if reasons[weight.name] is not None and not weight.is_draft and not decodes(weight)
    ]
    if refused:
        others = f" (and {len(refused) - 1} others)" if len(refused) > 1 else ""
        raise ExportError(f"{name} cannot hold {refused[0].name}{others}: {reasons[refused[0].name]}")
    held = tuple(weight for weight in source.packed if reasons[weight.name] is None)
    tables = tuple(weight for weight in source.packed if reasons[weight.name] is not None)
    export = Export(source, held, tables, dtype or source.dtype, dtype is not None, [*source.dropped, *notes])
    if CACHE_NOTE in export.notes and hasattr(target, "CACHE"):
        export.notes.append(f"its own smaller cache, with other numbers than ours: {target.CACHE}")
    export.wishes = wishes
    if hasattr(target, "check"):
        target.check(export)
    export.notes += _say_plain_drafts(export)
    for table in [table for table in tables if reasons[table.name] and not table.is_draft]:
        plain = sum(tensor.nbytes for name, tensor in export.plain().items() if name not in source.plain)
        cost = f"{show(plain)} in place of {show(table.nbytes)}"
        export.notes.append(
            f"{table.name} is written as plain {dtype_name(export.dtype)}, {cost}: {reasons[table.name]}"
        )
    return export


def _with_drafts(source: PackedSource, how: str) -> tuple[PackedSource, list[str]]:
    """Return the source without its draft heads where a target has no place for them, and a line that says so."""
    names = source.draft_names()
    drafts = tuple(weight for weight in source.packed if weight.is_draft)
    if how != DRAFTS_LEFT_OUT or not names:
        return source, []
    plain = {name: stored for name, stored in source.plain.items() if name not in names}
    packed = tuple(weight for weight in source.packed if not weight.is_draft)
    nbytes = sum(source.plain[name].nbytes for name in names & source.plain.keys()) + sum(x.nbytes for x in drafts)
    line = f"the draft heads are left out, {show(nbytes)}: what reads this format does not draft with them"
    return dataclasses.replace(source, packed=packed, plain=plain), [line]


def _say_plain_drafts(export: Export) -> list[str]:
    """Say in a line which packed linears of draft heads become plain numbers."""
    drafts = [weight for weight in export.tables if weight.is_draft]
    if not drafts:
        return []
    plain = sum(weight.shape[0] * weight.shape[1] for weight in drafts) * export.dtype.itemsize
    cost = f"{show(plain)} in place of {show(sum(weight.nbytes for weight in drafts))}"
    return [f"{len(drafts)} linears of draft heads are written as plain {dtype_name(export.dtype)}, {cost}"]


def export(
    directory: Path,
    name: str,
    out: Path,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
    wishes: Wishes = NONE,
) -> ExportResult:
    """Write a checkpoint of ours at `out` in the format of a target; nothing is left behind if that fails.

    dtype, wishes: as `prepare` has them.
    Raises ExportError for what the target cannot hold, OutputError for what is in the way.
    """
    suffix = DIRECTORY if wishes.split_size else target_named(name).SUFFIX
    if not suffix:
        paths.check_apart(out, directory)

    def open_and_prepare() -> Export:
        return prepare(open_source(directory), name, dtype, wishes)

    return write(open_and_prepare, name, out, overwrite, progress, suffix)


def write(
    prepared_export: Callable[[], Export],
    name: str,
    out: Path,
    overwrite: bool = False,
    progress: Progress = silent,
    suffix: str | None = None,
) -> ExportResult:
    """Write what `prepared_export` returns, once the place is locked, at `out` in the format of a target, or nothing.

    suffix: of the name of what is written; None: the target's. Raises ExportError and OutputError as `export`.
    """
    target = target_named(name)
    suffix = target.SUFFIX if suffix is None else suffix
    with ExportPlace(out, suffix, overwrite) as place:
        prepared = prepared_export()
        prepared.progress = progress
        check_space(out.parent, _written_nbytes(prepared, target))
        target.write(prepared, place.new)
        place.publish()
    files = [out] if suffix else [path for path in out.rglob("*") if path.is_file()]
    nbytes = sum(os.path.getsize(path) for path in files)
    is_packed = bool(prepared.held or prepared.tables)
    return ExportResult(nbytes, prepared.source.nbytes, is_packed, tuple(prepared.notes))


def _written_nbytes(export: Export, target: ModuleType) -> int:
    """Return about how many bytes a target will write: packed weights in their own size, unless it says otherwise."""
    held = sum(target.nbytes(export, each) if hasattr(target, "nbytes") else each.nbytes for each in export.held)
    return held + sum(
        torch.Size(tensor.shape).numel() * (export.dtype if export.is_chosen else tensor.dtype).itemsize
        for tensor in export.plain().values()
    )


def dense_tensor(weight: StoredWeight, name: str, dtype: torch.dtype, role: str = "") -> Decoded:
    """Return a packed weight as a tensor that is decoded when it is read, turned as published checkpoints have it."""

    def make() -> Tensor:
        matrix = weight.dense(dtype, role)
        if not matrix.isfinite().all():
            raise _out_of_range(name, dtype)
        return matrix.T.contiguous() if weight.is_turned else matrix

    shape = weight.shape[::-1] if weight.is_turned else weight.shape
    return lazy_tensor(name, dtype, shape, make, weight)


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values in another type; ExportError where that would make a finite one infinite."""
    made = values.to(dtype)
    if not made.isfinite().all() and not made.isfinite()[values.float().isfinite()].all():
        raise _out_of_range(name, dtype)
    return made


def _out_of_range(name: str, dtype: torch.dtype) -> ExportError:
    return ExportError(
        f"{name} has values outside of the range of {dtype_name(dtype)}; set --dtype bfloat16 or float32"
    )


def lazy_tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Tensor], weight: StoredWeight
) -> Decoded:
    """Return a tensor of one weight that is made, whole, when it is read."""
    sources: tuple[StoredTensor, ...] = tuple(s for tensor in (weight.tensors or {}).values() for s in tensor.sources)
    return Decoded(name, dtype, shape, sources, partial(_rows, make), max(1, shape[0]))


def _rows(make: Callable[[], Tensor], start: int, stop: int) -> Tensor:
    return make()[start:stop]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as configurations have it."""
    return str(dtype).removeprefix("torch.")
