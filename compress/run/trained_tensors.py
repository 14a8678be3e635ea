"""Train stored tensors of a written checkpoint all together, so that a killed run goes on from either side of it.

There are two such trainings, in this order: that of low-rank parts ("trained"), and tuning of the whole model
("tuned"). Each leaves

    OUT.partial/blocks/STAGE.safetensors   the tensors from before it ("before.<name>") and after it ("after.<name>")
    OUT.partial/blocks/STAGE.json          its hash and what is to be said of the training; written last

A resumed run puts the tensors from before all training back into the shards: these are then what was recorded of each
block, and the blocks are replayed as those of any other run. After that it puts the trained ones in again, and trains
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress import plugins, process_memory
from compress.errors import CheckpointError
from compress.progress import Progress
from compress.run import verify
from compress.run.job import RunState
from compress.storage import manifest
from compress.storage.checkpoint import Readable, StoredTensor, read_header, sha256, write_shard
from compress.storage.json_text import TEXT
from compress.storage.workdir import Output
from compress.tune import low_rank
from compress.tune.trained import TuningWork

LOW_RANK, WHOLE = "trained", "tuned"
STAGES = (LOW_RANK, WHOLE)
NOTE_TITLES = {LOW_RANK: "low-rank parts", WHOLE: "end-to-end tuning"}
BEFORE, AFTER = "before.", "after."
RECORD = {"note": TEXT, "sha256": (str, type(None))}


class TrainedTensors(NamedTuple):
    """A training that has ended."""

    note: str
    tensors: dict[str, Tensor]  # by their names on disk; none if training brought nothing


def train(output: Output, run: RunState, progress: Progress) -> list[str]:
    """Train what the recipe asks for and no former run has trained, and put it into the shards.

    Each training starts from what gives the probes of the run, or of the training before it. Return the hashes of the
    blocks' outputs with the trained tensors, and add notes to the run.
    """
    directory, device, probes = output.model, torch.device(run.job.device), run.probes
    for stage, make in _wanted_trainings(output, run, progress):
        verify.self_check(directory, run.hashes, probes, device, progress, run.start)
        training = _restore(output, stage)
        if training is None:
            with manifest.without_hashes():
                training = _keep(output, stage, make())
        run.notes[NOTE_TITLES[stage]] = [training.note]
        if training.tensors:
            probes = verify.replay(directory, device, progress, training.tensors, run.start)
            run.hashes.update(put_into_shards(output, training))
    return probes


def _wanted_trainings(
    output: Output, run: RunState, progress: Progress
) -> Iterator[tuple[str, Callable[[], TrainedTensors]]]:
    """Yield each training that the recipe asks for, and what does it."""
    if run.calibration is None:
        return
    job, prepared, tokens = run.job, run.prepared, run.calibration.tokens
    blocks = len(prepared.skeleton.blocks)

    def say(text: str) -> None:
        progress(text, blocks, blocks)
        process_memory.check(job.max_memory)

    if (settings := low_rank.find_request({x.spec.name: x.scheme.lowrank for x in prepared.plan.layers})) is not None:

        def low_rank_parts() -> TrainedTensors:
            source = prepared.skeleton.checkpoint.directory
            result, factors = low_rank.train_model(output.model, source, tokens, settings, job.device, say)
            return TrainedTensors(result.note, factors)

        yield LOW_RANK, low_rank_parts
    if (step := job.recipe.tuning("model")) is not None and job.pack:

        def whole_model() -> TrainedTensors:
            device, arrangement = torch.device(job.device), prepared.arrangement
            how = arrangement.batch, output.blocks, arrangement.spill, say
            work = TuningWork(output.model, prepared.skeleton.checkpoint, tokens, device, *how)
            return TrainedTensors(*plugins.load("tune", step.method).train(step.config, work))

        yield WHOLE, whole_model


def is_intact(output: Output, name: str, digest: str) -> bool:
    """Return whether a shard is the recorded one; put the tensors from before training back into it if need be."""
    path = output.model / name
    if not path.is_file():
        return False
    if sha256(path) == digest:
        return True
    before: dict[str, StoredTensor] = {}
    for stage in reversed(STAGES):  # what was before the first training of a tensor stays
        record = output.finished_stage(stage, RECORD)
        if record is not None and _has_file(output, stage, record):
            before.update(_tensors(output, stage, record, BEFORE))
    try:
        return write_into(path, before) == digest
    except CheckpointError:  # its header is damaged
        return False


def _keep(output: Output, stage: str, training: TrainedTensors) -> TrainedTensors:
    """Record what was trained; the shards still have the former tensors."""
    digest, tensors = None, training.tensors
    if tensors:
        shards = [read_header(path) for path in sorted(output.model.glob("model-*.safetensors"))]
        both: dict[str, Tensor | Readable] = {AFTER + name: tensor for name, tensor in tensors.items()}
        both.update({BEFORE + name: shard[name] for shard in shards for name in shard if name in tensors})
        digest = write_shard(_file(output, stage), both)
    output.finish_stage(stage, {"note": training.note, "sha256": digest})
    return training


def _restore(output: Output, stage: str) -> TrainedTensors | None:
    """Return what a former run has trained, None if it has not or if the file is damaged."""
    record = output.finished_stage(stage, RECORD)
    if record is None or not _has_file(output, stage, record):
        return None
    after = _tensors(output, stage, record, AFTER)
    return TrainedTensors(record["note"], {name: stored.read() for name, stored in after.items()})


def put_into_shards(output: Output, training: TrainedTensors) -> dict[str, str]:
    """Give the shards the trained tensors; return file -> sha256 of those that have any."""
    paths = sorted(output.model.glob("model-*.safetensors"))
    hashes = {path.name: write_into(path, training.tensors) for path in paths}
    return {name: digest for name, digest in hashes.items() if digest is not None}


def write_into(path: Path, tensors: Mapping[str, Tensor | Readable]) -> str | None:
    """Put those of these that a shard has in the place of its tensors of the same names.

    Return the sha256 of the shard, None if it has none of them and is left alone.
    """
    stored: dict[str, Tensor | Readable] = dict(read_header(path))
    if changed := {name: tensor for name, tensor in tensors.items() if name in stored}:
        return write_shard(path, {**stored, **changed})
    return None


def _file(output: Output, stage: str) -> Path:
    return output.blocks / f"{stage}.safetensors"


def _has_file(output: Output, stage: str, record: dict[str, Any]) -> bool:
    path = _file(output, stage)
    return record["sha256"] is None or (path.is_file() and sha256(path) == record["sha256"])


def _tensors(output: Output, stage: str, record: dict[str, Any], side: str) -> dict[str, StoredTensor]:
    """Return the tensors on one side of training, which are read when they are needed."""
    tensors = {} if record["sha256"] is None else read_header(_file(output, stage))
    return {name.removeprefix(side): stored for name, stored in tensors.items() if name.startswith(side)}
