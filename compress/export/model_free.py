"""Quantize a checkpoint tensor by tensor, without the class of its model: for models that transformers does not know.

What is a linear is told by names and shapes (compress/model/told_linears.py). Each weight is rounded by itself when
it is written, in the format of an engine that knows the model (compress/export/targets). One tensor, or one expert of a
fused one, is in memory at a time, beside the file of weights that is being filled.

What is lost against a run with the class: statistics of the inputs (no Hessian, no feedback of errors, no static scales
of inputs), transforms, allocation by measured damage, and every check of outputs. Packed weights are compared with the
original as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.errors import ExportError, UnsupportedModelError
from compress.export import convert, rounded_linears
from compress.export.rounded_linears import RoundedWeight
from compress.export.source import PackedSource
from compress.importers import companions
from compress.importers.source import CheckpointSource
from compress.model import told_linears
from compress.model.told_linears import EXPERT, NUMBER
from compress.process_memory import show
from compress.progress import Progress, note, silent
from compress.run import source
from compress.run.job import Job
from compress.storage.checkpoint import Checkpoint, read_header
from compress.types import Scheme, Stored

TARGETS = ("compressed-tensors", "modelopt")  # the first where the recipe names none
USUAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
LOST = (
    "without the model's class there is no Hessian (weights are rounded one by one), and no logits have been compared: "
    "score the result in the engine that runs it"
)


@dataclass(frozen=True)
class RuledSource(PackedSource):
    """A checkpoint whose linears are told by names and shapes."""

    skeleton: Any = None
    fused: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()

    def first_readers(self) -> Mapping[str, str]:
        """Return a linear -> the first of those that engines multiply as one with it."""
        groups = rounded_linears.fused_groups(weight.module for weight in self.packed)
        return {name: group[0] for group in groups for name in group}

    def heads(self) -> set[str]:
        """Return what has no matrix of its own: a head that may be tied, and experts that stay in one tensor."""
        fused = {n.rpartition(".")[0] for n, each in self.plain.items() if len(each.shape) == 3 and "expert" in n}
        parts = ("", *(f".0.{part}" for part in USUAL.values()))  # engines ask for the module, or for its first expert
        return {"lm_head", *(f"{parent}{part}" for parent in fused for part in parts)}

    def looked_up(self) -> set[str]:
        """Return the modules with the names of tables that are looked up."""
        names = (name.removesuffix(".weight") for name in self.plain)
        return {name for name in names if told_linears.reason_of_name(name) == told_linears.LOOKED_UP}

    def draft_names(self) -> set[str]:
        """Return the tensors that are kept because their names are those of draft heads."""
        return {name for name in self.plain if told_linears.is_further(name.removesuffix(".weight"), self.config)}

    def kept_in_float32(self, names: Iterable[str], dtype: torch.dtype) -> set[str]:
        """Return no tensor: all keep the type that they are stored in."""
        return set()


@dataclass(frozen=True)
class RoundedCheckpoint:
    """What has been written, or would be."""

    target: str
    nbytes: int  # of all files; 0: nothing is written
    source_nbytes: int
    linears: int
    bpw: float  # stored bits of a packed weight
    whole_bpw: float  # of all stored numbers
    kept: dict[str, str]  # module, or tensor of more than one dimension -> why it stays as it is
    errors: dict[str, float]  # weight -> |W - Q|^2 / |W|^2
    notes: tuple[str, ...]

    def lines(self, out: Path) -> Iterator[str]:
        """Yield in words what has been written."""
        what = f"{self.target}, {show(self.nbytes)}" if self.nbytes else f"{self.target}, not written"
        yield f"{out}: {what} (the original: {show(self.source_nbytes)})"
        yield f"{self.linears} linears packed, {self.bpw:.3f} bits a weight, {self.whole_bpw:.3f} over all numbers"
        if self.errors:
            worst = max(self.errors, key=lambda name: self.errors[name])
            mean = sum(self.errors.values()) / len(self.errors)
            yield f"relative squared error of a weight: {mean:.2g} on average, {self.errors[worst]:.2g} of {worst}"
        names: dict[tuple[str, str], int] = {}
        for name, reason in self.kept.items():
            kind = NUMBER.sub("*", name), reason
            names[kind] = names.get(kind, 0) + 1
        for (name, reason), count in names.items():
            yield f"kept as it is: {name}{f' ({count} times)' if count > 1 else ''}: {reason}"
        yield LOST


def quantize(job: Job, dry_run: bool = False, progress: Progress = silent) -> RoundedCheckpoint:
    """Round the checkpoint of a job by its recipe, and write it at `job.out`, whole or not at all.

    dry_run: only say what would be written. Raises RecipeError for a recipe that does more than to round,
    CheckpointError, UnsupportedModelError where no tensor looks like a linear, ExportError for what the target cannot
    hold, NumericalError for weights that cannot be rounded.
    """
    rounded_linears.check(job.recipe)
    run, target = rounded_linears.Run(job), job.recipe.export or TARGETS[0]
    if target not in TARGETS:
        raise ExportError(
            f"--model-free writes {' or '.join(TARGETS)}, not {target}; other formats need the model's class"
        )
    checkpoint = source.open_original(job)
    for remark in companions.notes(checkpoint):
        note(remark)
    ruled, kept = _open(checkpoint, run)
    held, rest = (sum(tensor.nbytes for tensor in part) for part in (ruled.packed, ruled.plain.values()))
    numel, plain = (sum(math.prod(tensor.shape) for tensor in part) for part in (ruled.packed, ruled.plain.values()))
    if dry_run:
        notes, nbytes = tuple(convert.prepare(ruled, target).notes), 0
    else:
        written = convert.write(lambda: convert.prepare(ruled, target), target, job.out, job.overwrite, progress)
        notes, nbytes = written.notes, written.nbytes
        held = _stored_nbytes(job.out, ruled)
    bpw, whole = 8 * held / numel, 8 * (held + rest) / (numel + plain)
    return RoundedCheckpoint(target, nbytes, checkpoint.nbytes, len(ruled.packed), bpw, whole, kept, run.errors, notes)


def _open(checkpoint: Checkpoint, run: rounded_linears.Run) -> tuple[RuledSource, dict[str, str]]:
    """Return a checkpoint with the weights that will be packed, and what stays as it is with the reasons."""
    matrices, kept = told_linears.tell(checkpoint)
    model_dtype = CheckpointSource(checkpoint.directory, checkpoint.config, {}, {}).dtype
    scale_dtype = "float16" if model_dtype == torch.float16 else "bfloat16"  # with the range of the model's type
    chosen: dict[str, tuple[Scheme, Stored]] = {}
    for name, matrix in matrices.items():
        choice = rounded_linears.choose(run.job.recipe.scheme_for(name), matrix.shape, scale_dtype)
        if isinstance(choice, str):
            kept[name] = choice
        else:
            chosen[name] = choice
    for group in rounded_linears.fused_groups(matrices):
        torn = [name for name in group if name not in chosen or not _has_whole_blocks(chosen[name][1], matrices[name])]
        for name in set(group) & chosen.keys() if torn else ():
            kept[name] = f"engines multiply it as one with {torn[0]}"
            del chosen[name]
    if not chosen:
        examples = "".join(f"; {name}: {reason}" for name, reason in [*kept.items()][:1])
        raise UnsupportedModelError(
            f"{checkpoint.directory} has no matrix that is named and shaped like a linear to be packed{examples}"
        )
    taken = {matrices[name].stored.name for name in chosen}
    if torn := [name for name, each in matrices.items() if each.stored.name in taken and name not in chosen]:
        raise UnsupportedModelError(
            f"{torn[0]} is kept ({kept[torn[0]]}) and lies in one tensor with weights that are packed; keep all of "
            "them, or none"
        )
    shapes = {name: matrices[name].shape for name in chosen}
    chosen, reason = rounded_linears.settle_zero_points(chosen, shapes, scale_dtype)
    dropped = () if reason is None else (f"weights have no zero points: {reason}",)
    for name in chosen:
        matrix = matrices[name]
        run.sharing.setdefault((name.rpartition(".")[0], matrix.shape[1]), []).append(matrix)
    packed = tuple(
        RoundedWeight(
            *(name, matrices[name].shape, stored),
            is_expert=EXPERT.search(name) is not None,
            module=_usual_name(name),
            matrix=matrices[name],
            scheme=scheme,
            run=run,
        )
        for name, (scheme, stored) in chosen.items()
    )
    plain = {name: stored for name, stored in checkpoint.tensors.items() if name not in taken}
    config = source.without_code(checkpoint.config)
    return RuledSource(checkpoint.directory, config, packed, plain, model_dtype, dropped=dropped), kept


def _has_whole_blocks(stored: Stored, matrix: told_linears.Matrix) -> bool:
    """Return whether another matrix can lie below this one with scales of its own."""
    return matrix.shape[0] % max(1, getattr(stored.params, "block_rows", 1)) == 0


def _usual_name(name: str) -> str:
    """Return the name of a linear with that of an expert's part as transformers has it."""
    parent, dot, last = name.rpartition(".")
    return f"{parent}{dot}{USUAL.get(last, last)}" if EXPERT.search(name) else name


def _stored_nbytes(out: Path, ruled: RuledSource) -> int:
    """Return the bytes of all that a written directory stores for packed weights."""
    held = {weight.name for weight in ruled.packed}
    tensors = [stored for file in sorted(out.glob("*.safetensors")) for stored in read_header(file).values()]
    return sum(each.nbytes for each in tensors if each.name.rpartition(".")[0] in held and each.name not in ruled.plain)
