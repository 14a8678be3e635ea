"""Describe a job: what the user asked for, what is decided before a weight is read, what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch

from compress.calib import prefix
from compress.calib.data import Calibration
from compress.calib.prefix import Prefix
from compress.errors import one_line
from compress.model.fingerprint import fingerprint, versions
from compress.model.skeleton import Skeleton
from compress.recipe import Recipe
from compress.recipe import fingerprint as recipe_fingerprint
from compress.run import expert_pruning
from compress.run.memory_plan import Arrangement
from compress.run.sizes import GradientSizes
from compress.run.verify import ProbeStart
from compress.storage import manifest, paths
from compress.storage.checkpoint import MANIFEST, Checkpoint, sha256, write_text
from compress.types import LayerReport, Plan, Pruning


@dataclass(frozen=True)
class Job:
    """A user's request."""

    model: str  # directory or hub id
    recipe: Recipe
    out: Path
    _: KW_ONLY
    adapter: Path | None = None  # directory of a LoRA that is merged into the model
    base_model: str | None = None  # hub id of the original, for the model card; None: the one that `model` is, if it is
    calib: str | None = None  # None: text that the model generates itself
    imatrix: Path | None = None  # importance matrix of llama.cpp, in the place of text; None: text
    max_memory: int | None = None  # bytes
    device: str = "cpu"
    dtype: str | None = None  # that the model is loaded, and so calibrated, in: a name of torch; None: its own
    seed: int = 0
    overwrite: bool = False
    restart: bool = False
    work: Path | None = None  # folder for unfinished work, from which files are copied to `out`; None: beside `out`
    allow_partial: bool = False  # whether less than half of the linear weights may be packed, and packed ones be lost
    pack: bool = True  # False: only the recipe's transforms, to a full-precision checkpoint
    measurements: Path | None = None  # folder of what an allocation is made from; None: beside the output
    measures: bool = True  # False: what an allocation needs and is not in that folder is an error (NotMeasuredError)
    budget: float | None = None  # seconds for the run, by which an allocation chooses how to measure; None: not told
    processes: int = 1  # that measure choices side by side; changes no result
    allocation: Mapping[str, Any] | None = None  # how the recipe's bits were allocated, for the report
    quick: bool = False  # little effort was asked for, for the report

    @property
    def model_name(self) -> str:
        """The last part of the model's path or hub id, printable."""
        return one_line(self.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(paths.GGUF))

    @property
    def is_paired(self) -> bool:
        """Whether the stream of the full-precision model is carried beside that of the quantized prefix."""
        return self.pack and (self.recipe.calibration.target_correction > 0 or self.recipe.tuning("block") is not None)


@dataclass(frozen=True)
class Prepared:
    """The model's skeleton, the plan for it, and how the run fits into memory."""

    skeleton: Skeleton
    plan: Plan
    arrangement: Arrangement
    samples: int  # calibration samples asked for; 0: the recipe needs no data
    seq_len: int  # tokens of each
    prefix: Prefix = prefix.NONE  # what each sample begins with
    gradients: GradientSizes | None = None  # of taking those at outputs of linears; None: none are needed
    text_choice: str = ""  # how much calibration text was chosen, and why; "" where the recipe says how much

    @property
    def messages(self) -> tuple[str, ...]:
        """What is to be known of the plan, and of a transform of the whole model, before anything is done."""
        edits = self.skeleton.edits
        begun: tuple[str, ...] = (self.prefix.sentence,) if self.prefix.sentence else ()
        begun = (self.text_choice, *begun) if self.text_choice else begun
        begun += (self.gradients.sentence,) if self.gradients is not None else ()
        one_sided = (self.plan.one_sided,) if self.plan.one_sided else ()
        return (*self.plan.messages, *one_sided, *(edits.says if edits is not None else ()), *begun)


@dataclass
class RunState:
    """A run: what is decided of it, and what has come of its blocks so far."""

    job: Job
    prepared: Prepared
    calibration: Calibration | None = None
    replayed: int = 0  # blocks taken over from an interrupted run
    layers: list[LayerReport] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)  # of the blocks computed in this run
    notes: dict[str, list[str]] = field(default_factory=dict)  # block name -> what is to be said of it as a whole
    experts: dict[str, dict[str, Any]] = field(default_factory=dict)  # experts module -> its routing, where pruned
    start: ProbeStart | None = None  # what the original embeddings make of the probe, where these are packed
    probes: list[str] = field(default_factory=list)  # hash of each quantized block's output on the probe tokens
    hashes: dict[str, str] = field(default_factory=dict)  # file of the checkpoint -> sha256 of what was written into it

    @property
    def prunings(self) -> dict[str, Pruning]:
        """Experts module -> what it is pruned with."""
        config = self.job.recipe.pruning
        return expert_pruning.choose_prunings(self.experts, config, self.layers) if config is not None else {}


def identity(job: Job, checkpoint: Checkpoint, calibration: Calibration | None) -> dict[str, Any]:
    """Return what decides the bytes of the result; a run may be resumed only if all of it is the same."""
    return {
        "model": fingerprint(checkpoint),
        "adapter": checkpoint.base_settings.get("adapter"),
        "recipe": recipe_fingerprint(job.recipe),
        "calibration text": calibration.sha256 if calibration is not None else None,
        **({} if job.imatrix is None else {"importance matrix": sha256(job.imatrix)}),
        "seed": job.seed,
        "command": "quantize" if job.pack else "transform",
        "device": torch.device(job.device).type,
        "dtype": job.dtype,
        "software versions": versions(),
    }


def write_manifest(directory: Path, job: Job, source: Checkpoint) -> None:
    """Write the manifest of a finished checkpoint: hash and size of every file, and what it was made of."""
    values = {
        **manifest.entries(directory),
        "source": {"model": job.model_name, "fingerprint": fingerprint(source), "base": source.base or None},
        "recipe": recipe_fingerprint(job.recipe),
        "seed": job.seed,
        "versions": versions(),
    }
    write_text(directory / MANIFEST, json.dumps(values, indent=1) + "\n")
