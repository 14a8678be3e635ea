"""Compute weights for another shape of a model from two streams through it, and keep them, a file for each block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CheckpointError
from compress.model import blockwise
from compress.model.blockwise import FULL, HiddenStates, ModelArgs
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import StoredTensor, read_header, write_shard
from compress.storage.files import make_folder

FOLDER = "reshaped"  # inside a run's own files: what such a transform keeps there
FACTS = "facts"  # float64, beside the parameters in a file


@contextmanager
def both_streams(
    original: Skeleton, tokens: Tensor, bench: EditContext, purpose: str
) -> Iterator[tuple[ModelArgs, HiddenStates]]:
    """Give what blocks are called with, and the embedded tokens [samples, seq_len] on both sides of a stream.

    Its sides: QUANTIZED for what goes behind changed blocks, FULL behind the original ones.
    """
    stream = HiddenStates(tokens.shape[0], bench.folder / "stream", 2)
    try:
        bench.say(f"embedding samples to {purpose}")
        calls = blockwise.record_inputs(original, tokens, bench.batch, stream, bench.device)
        stream.write(0, stream.read(0, stream.samples), FULL)
        calls.split()
        yield calls, stream
    finally:
        stream.close()


def write_parameters(
    path: Path, skeleton: Skeleton, prefix: str, tensors: Mapping[str, Tensor], facts: Sequence[float]
) -> None:
    """Write parameters of a block, by their paths in it, in the types that they are stored in, with facts about them.

    prefix: of the block in the skeleton. Raises CheckpointError for one that is not stored as a tensor of its own.
    """
    contents: dict[str, Any] = {FACTS: torch.tensor(facts, dtype=torch.float64)}
    for name, tensor in tensors.items():
        group = skeleton.sources.get(prefix + name, [])
        if len(group) != 1 or group[0].name in skeleton.split or len(group[0].shape) != tensor.dim():
            raise CheckpointError(f"{prefix}{name} is not stored as a tensor of its own and cannot be replaced")
        contents[name] = tensor.detach().to("cpu", group[0].dtype).contiguous()
    make_folder(path.parent)
    write_shard(path, contents)


def read_parameters(path: Path) -> dict[str, StoredTensor]:
    """Return the parameters that `write_parameters` has written, by their paths in the block."""
    return {name: stored for name, stored in read_header(path).items() if name != FACTS}


def read_facts(path: Path) -> list[float]:
    """Return the facts that were written with them."""
    facts: list[float] = read_header(path)[FACTS].read().tolist()
    return facts


def replace_parameters(path: Path, skeleton: Skeleton, prefix: str) -> None:
    """Let a skeleton read the written parameters in the place of those that it has; prefix: of the block in it."""
    for name, stored in read_parameters(path).items():
        skeleton.sources[prefix + name] = [stored.renamed(skeleton.sources[prefix + name][0].name)]
