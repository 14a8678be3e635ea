"""Take the gradients of the loss before the first block is quantized, where a recipe needs them.

Gradients of weights are for low-rank parts and tuning that go by them (compress/calib/fisher.py). Gradients at outputs
of linears are for two-sided rounding and scales by sensitivity (compress/calib/output_gradients.py). They are kept in a
folder, beside the output, or in that of `--work` or `--measurements`, and read by every run that needs them of the same
model and text. That takes the first samples of the text, of `calibration.gradient_tokens` tokens together.

A transform of the whole model keeps its function, and may change what linears give. The gradients are then those of the
transformed model, in a folder of their own. With a transform of blocks, which is chosen while they are quantized, the
plan goes without any (compress/run/plan.py). Where they cannot be had of a model, rounding is one-sided, and scales go
by the weights alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress import plugins, process_memory, ranks
from compress.calib import fisher, gradient_pass
from compress.calib.backward_pass import linear_widths
from compress.calib.gradient_store import GradientStore
from compress.calib.output_gradients import GradientRows, OutputGradients
from compress.model import fingerprint
from compress.model.skeleton import Skeleton
from compress.recipe.schema import fingerprint as recipe_fingerprint
from compress.recipe.schema import plain_step
from compress.run import sizes
from compress.run.job import Job
from compress.types import Fisher, LayerPlan

Reader = Callable[[LayerPlan], OutputGradients | None]  # returns what is known at the outputs of a linear

MAX_NAME_CHARACTERS = 150  # the model's name in that of a folder


def fisher_weights(
    skeleton: Skeleton, tokens: Tensor, names: Set[str], file: Path | None, device: torch.device
) -> dict[str, Fisher]:
    """Return linear -> what its rows and columns weigh; tokens and file as of `output_gradients`."""

    def take() -> dict[str, Fisher]:
        if skeleton.edits is not None:
            skeleton.edits.begin(device)
        return fisher.weights(skeleton, tokens, names, file, device)

    return ranks.by_main(take)


def samples(gradient_tokens: int, count: int, seq_len: int) -> int:
    """Return how many of the calibration samples [count, seq_len] the pass takes."""
    return min(count, -(-gradient_tokens // max(1, seq_len)))


def output_gradients(
    job: Job, skeleton: Skeleton, tokens: Tensor, file: Path | None, say: Callable[[str], None]
) -> GradientStore:
    """Return the gradients at the outputs of all linears, taken now where they are not there yet.

    Where they cannot be had, the store says why. tokens [samples, seq_len]: the calibration text. file: where hidden
    states may spill.
    """
    store, used = _open(job, skeleton, tokens)
    if ranks.current().is_main and store.known_failure() is None:
        item = gradient_pass.computed_dtype(skeleton, job.device).itemsize
        store.check_space(sizes.output_gradient_sizes(skeleton, len(used), used.shape[1], item).stored)

    def report(text: str) -> None:
        say(text)
        process_memory.check(job.max_memory)

    with process_memory.reusing():
        gradient_pass.make(skeleton, used, store, job.seed, file, job.device, report)
    return store


def known_gradients(job: Job, skeleton: Skeleton, tokens: Tensor) -> GradientStore:
    """Return what `output_gradients` does after a run that has used them: nothing is taken, `failure` is as it was."""
    store, _ = _open(job, skeleton, tokens)
    store.failure = ranks.by_main(store.known_failure)
    return store


def _open(job: Job, skeleton: Skeleton, tokens: Tensor) -> tuple[GradientStore, Tensor]:
    """Return the gradients as they are, and the tokens of which they are."""
    used = tokens[: samples(job.recipe.calibration.gradient_tokens, *tokens.shape)]
    identity = _identity(job, skeleton, tokens, used)
    return GradientStore(folder_of(job, identity), identity, linear_widths(skeleton)), used


def describe(failure: str) -> str:
    """Return what is to be said where gradients cannot be had, for this reason; not what other recipes could do."""
    why = failure.partition("; ")[0]
    return f"rounding is one-sided: the loss's gradients at outputs of linears cannot be taken ({why})"


class TimedGradients:
    """Gradients of no tokens, for a block that is only timed."""

    failure = None

    def __init__(self, skeleton: Skeleton) -> None:
        self.widths = {name: width for block in linear_widths(skeleton) for name, width in block.items()}

    def read(self, index: int) -> TimedGradients:
        """Return those of a block."""
        return self

    def of(self, name: str, device: torch.device) -> OutputGradients:
        """Return those of a linear."""
        return OutputGradients(0, GradientRows.join([], self.widths[name], device))


def reader(
    store: GradientStore | TimedGradients | None, index: int, layers: Sequence[LayerPlan], device: torch.device
) -> Reader:
    """Return what reads the gradients at the outputs of a block's linears.

    None for those that need none, and for all if there are none. Raises CheckpointError if they are damaged.
    """
    needs_any = any(map(sizes.needs_output_gradients, layers))
    block = store.read(index) if store is not None and store.failure is None and needs_any else None

    def read(layer: LayerPlan) -> OutputGradients | None:
        is_read = block is not None and sizes.needs_output_gradients(layer)
        return block.of(layer.spec.name, device) if is_read and block is not None else None

    return read


def folder_of(job: Job, identity: dict[str, Any]) -> Path:
    """Return the folder of the gradients that are decided by `identity`.

    It lies beside unfinished work, as the output may be in an object store, where nothing can be renamed.
    """
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]
    if job.measurements is not None:
        return job.measurements / f"gradients-{digest}"
    name = re.sub(r"[^\w.-]+", "-", Path(job.model.rstrip("/")).name or "model")[:MAX_NAME_CHARACTERS]
    return (job.work or job.out.parent) / f"{name}-{digest}.gradients"


def _identity(job: Job, skeleton: Skeleton, tokens: Tensor, used: Tensor) -> dict[str, Any]:
    """Return all that decides the gradients over `used` of all tokens."""
    edits, dtype = skeleton.edits, gradient_pass.computed_dtype(skeleton, job.device)
    steps = [step for step in job.recipe.transform if plugins.load("transform", step.method).SCOPE == "model"]
    chosen = [_sha256(tokens), recipe_fingerprint(job.recipe)] if edits is not None and edits.samples else None
    return {
        "model": fingerprint.fingerprint(skeleton.checkpoint),
        "adapter": skeleton.checkpoint.base_settings.get("adapter"),
        "tokens": _sha256(used),
        "samples": list(used.shape),
        "seed": job.seed,
        "computed": [torch.device(job.device).type, str(dtype), str(skeleton.dtype) if edits is not None else None],
        "transform": [plain_step(step) for step in steps],
        "chosen by": chosen,  # where a transform searches or learns: the text, and what is rounded
        "software versions": fingerprint.versions(),
    }


def _sha256(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
