"""Describe what tuning of a whole packed model is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compress.storage.checkpoint import Checkpoint


class TuningWork(NamedTuple):
    """A packed checkpoint, and what it is tuned with."""

    directory: Path
    original: Checkpoint
    tokens: Tensor  # [samples, seq_len] int64, on the CPU
    device: torch.device
    batch: int  # samples that go through a block together; changes no more than the order of sums
    folder: Path  # for the file of the original's predictions, and for hidden states where they spill
    is_spilled: bool  # hidden states go to files, and packed weights are read again whenever they are needed
    say: Callable[[str], None]


class TuningResult(NamedTuple):
    """What has come of tuning."""

    note: str
    tensors: dict[str, Tensor]  # by their names on disk, as they are stored; none if nothing is better


class WholeModelSizes(NamedTuple):
    """Numbers of elements, and bytes, that the memory of tuning depends on."""

    rest: int  # parameters outside of the blocks
    tables: int  # bytes of those that are packed
    block: int  # parameters of the largest block
    linear: int  # of the largest linear
    packed: tuple[int, ...]  # bytes of each block as it is stored
    trained: int  # numbers
    hidden: int  # of a token
    vocabulary: int
    states: int  # of a token in a block: what linears read and write, and the residual stream
    tokens: int  # of the text
    seq_len: int


class DiskSizes(NamedTuple):
    """What the files that tuning leaves in its folder depend on."""

    samples: int  # of the text
    seq_len: int
    hidden: int  # numbers of a token between blocks
    vocabulary: int
    trained: int  # numbers, of packed weights
