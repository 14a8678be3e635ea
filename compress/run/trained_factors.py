"""Train the low-rank parts of a written checkpoint together, so that a killed run goes on from either side of it.

    OUT.partial/blocks/trained.safetensors   the factors from before training ("before.<name>") and after it
    OUT.partial/blocks/trained.json          its hash and what is to be said of the training; written last

A resumed run puts the former factors back into the shards: these are then what was recorded of each block, and the
blocks are replayed as those of any other run. After that it puts the trained ones in again, and trains nothing.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.progress import Progress
from compress.run import report, verify
from compress.run.job import RunState
from compress.storage import manifest
from compress.storage.checkpoint import Readable, StoredTensor, read_header, sha256, write_shard
from compress.storage.json_text import TEXT
from compress.storage.workdir import Output
from compress.tune import low_rank

STAGE = "trained"
FILE = "trained.safetensors"
BEFORE, AFTER = "before.", "after."
RECORD = {"note": TEXT, "sha256": (str, type(None))}


class Training(NamedTuple):
    """A training that has ended."""

    note: str
    factors: dict[str, Tensor]  # by their names on disk; none if training brought nothing


def train(output: Output, run: RunState, progress: Progress) -> list[str]:
    """Train the low-rank parts of the checkpoint if the recipe asks for it and no former run has done so.

    Training starts from what gives the run's probes. Return the hashes of the blocks' outputs with the trained parts,
    and add a note to the run.
    """
    prepared, directory, blocks = run.prepared, output.model, len(run.prepared.skeleton.blocks)
    settings = low_rank.requested({layer.spec.name: layer.scheme.lowrank for layer in prepared.plan.layers})
    if settings is None or run.calibration is None:
        return run.probes
    device = torch.device(run.job.device)
    verify.self_check(directory, run.hashes, run.probes, device, progress, run.start)
    training = _restore(output)
    if training is None:
        source, tokens = prepared.skeleton.checkpoint.directory, run.calibration.tokens
        with manifest.unfinished():
            result, factors = low_rank.train_model(
                directory, source, tokens, settings, run.job.device, lambda text: progress(text, blocks, blocks)
            )
        training = _keep(output, result.note, factors)
    run.notes["low-rank parts"] = [training.note]
    if not training.factors:
        return run.probes
    probes = verify.replay(directory, device, progress, training.factors, run.start)
    run.hashes.update(put_in(output, training))
    return probes


def intact_blocks(output: Output, count: int) -> list[dict[str, Any]]:
    """Return the records of the finished blocks up to the first whose shard is not the file that was recorded.

    The rest of the `count` blocks is forgotten, and computed again.
    """
    records = list(takewhile(lambda record: _is_intact(output, record), output.finished_blocks(report.RECORD)))
    if len(records) < count:
        output.forget_from(len(records))
    return records


def _is_intact(output: Output, record: dict[str, Any]) -> bool:
    """Return whether a shard is the recorded one; put the factors from before training back into it if need be."""
    path = output.model / record["file"]
    if not path.is_file():
        return False
    if sha256(path) == record["sha256"]:
        return True
    stage = output.finished_stage(STAGE, RECORD)
    if stage is None or not _has_file(output, stage):
        return False
    try:
        low_rank.write_factors(path, _factors(output, stage, BEFORE))
    except CheckpointError:  # its header is damaged
        return False
    return sha256(path) == record["sha256"]


def _keep(output: Output, note: str, factors: dict[str, Tensor]) -> Training:
    """Record trained factors; the shards still have the former ones."""
    digest = None
    if factors:
        shards = [read_header(path) for path in sorted(output.model.glob("model-*.safetensors"))]
        both: dict[str, Tensor | Readable] = {AFTER + name: tensor for name, tensor in factors.items()}
        both.update({BEFORE + name: shard[name] for shard in shards for name in shard if name in factors})
        digest = write_shard(output.blocks / FILE, both)
    output.finish_stage(STAGE, {"note": note, "sha256": digest})
    return Training(note, factors)


def _restore(output: Output) -> Training | None:
    """Return what a former run has trained, None if it has not or if the file is damaged."""
    record = output.finished_stage(STAGE, RECORD)
    if record is None or not _has_file(output, record):
        return None
    return Training(record["note"], {name: stored.read() for name, stored in _factors(output, record, AFTER).items()})


def put_in(output: Output, training: Training) -> dict[str, str]:
    """Give the shards the trained factors; return file -> sha256 of those that have any."""
    paths = sorted(output.model.glob("model-*.safetensors"))
    hashes = {path.name: low_rank.write_factors(path, training.factors) for path in paths}
    return {name: digest for name, digest in hashes.items() if digest is not None}


def _has_file(output: Output, record: dict[str, Any]) -> bool:
    path = output.blocks / FILE
    return record["sha256"] is None or (path.is_file() and sha256(path) == record["sha256"])


def _factors(output: Output, record: dict[str, Any], side: str) -> dict[str, StoredTensor]:
    """Return the factors on one side of training, which are read when they are needed."""
    tensors = {} if record["sha256"] is None else read_header(output.blocks / FILE)
    return {name.removeprefix(side): stored for name, stored in tensors.items() if name.startswith(side)}
