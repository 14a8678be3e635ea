"""What training of low-rank parts changes in a run's shards, kept so that a killed run goes on from either side of it.

    OUT.partial/blocks/trained.safetensors   the factors from before training ("before.<name>") and after it
    OUT.partial/blocks/trained.json          its hash and what is to be said of the training; written last

A resumed run puts the former factors back into the shards: these are then what was recorded of each block, and the
blocks are replayed as those of any other run. After that it puts the trained ones in again, and trains nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from compress.errors import CheckpointError
from compress.storage.checkpoint import StoredTensor, read_header, sha256, write_shard
from compress.storage.workdir import Output
from compress.tune import low_rank

STAGE = "trained"
FILE = "trained.safetensors"
BEFORE, AFTER = "before.", "after."


class Kept(NamedTuple):
    """A training that has ended."""

    note: str
    factors: dict[str, Tensor]  # by their names on disk; none if training brought nothing


def keep(output: Output, note: str, factors: dict[str, Tensor]) -> Kept:
    """Record trained factors; the shards still have the former ones."""
    digest = None
    if factors:
        shards = [read_header(path) for path in sorted(output.model.glob("model-*.safetensors"))]
        both: dict[str, Tensor | StoredTensor] = {AFTER + name: tensor for name, tensor in factors.items()}
        both.update({BEFORE + name: shard[name] for shard in shards for name in shard if name in factors})
        digest = write_shard(output.blocks / FILE, both)
    output.finish_stage(STAGE, {"note": note, "sha256": digest})
    return Kept(note, factors)


def kept(output: Output) -> Kept | None:
    """What a former run has trained, None if it has not or if the file is damaged."""
    record = output.finished_stage(STAGE)
    if record is None or not _has_file(output, record):
        return None
    return Kept(record["note"], {name: stored.read() for name, stored in _factors(output, record, AFTER).items()})


def put_in(output: Output, kept: Kept) -> None:
    """Give the shards the trained factors."""
    for path in sorted(output.model.glob("model-*.safetensors")):
        low_rank.write_factors(path, kept.factors)


def is_intact(output: Output, record: dict[str, Any]) -> bool:
    """Whether a block's shard is the recorded one, if need be after the factors from before training are put back."""
    path = output.model / record["file"]
    if not path.is_file():
        return False
    if sha256(path) == record["sha256"]:
        return True
    stage = output.finished_stage(STAGE)
    if stage is None or not _has_file(output, stage):
        return False
    try:
        low_rank.write_factors(path, _factors(output, stage, BEFORE))
    except CheckpointError:  # its header is damaged
        return False
    return sha256(path) == record["sha256"]


def _has_file(output: Output, record: dict[str, Any]) -> bool:
    path = output.blocks / FILE
    return record["sha256"] is None or (path.is_file() and sha256(path) == record["sha256"])


def _factors(output: Output, record: dict[str, Any], side: str) -> dict[str, StoredTensor]:
    """The factors on one side of training, which are read when they are needed."""
    found = {} if record["sha256"] is None else read_header(output.blocks / FILE)
    return {name.removeprefix(side): stored for name, stored in found.items() if name.startswith(side)}
