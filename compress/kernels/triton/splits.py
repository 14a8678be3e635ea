"""Products split along their columns: how many parts, and the memory in which the parts meet.

Each part writes its sums (float32) to the workspace and counts itself in; the last one adds them in the order of the
parts, so that results do not depend on which part came last, and sets the counter back to zero. A device has one
workspace, allocated before the first launch and kept: CUDA graphs hold its address. It serves one stream at a time:
kernels that run at once on two streams of a device would mix their parts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

FLOATS = 1 << 22  # 16 MB: four times what a device of 132 multiprocessors fills with the shipped configurations
COUNTERS = 1 << 14
LEAST_STEPS = 2  # of a part: fewer would not fill the pipeline


class Workspace(NamedTuple):
    partials: Tensor  # float32 [FLOATS]
    counters: Tensor  # int32 [COUNTERS], zero between launches


class Device(NamedTuple):
    multiprocessors: int
    shared: int  # bytes of shared memory that one program can have
    major: int = 9  # compute capability


@cache
def workspace(device: torch.device) -> Workspace:
    """The workspace of a device. RuntimeError if it would have to be allocated inside a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("no kernel has run on this device yet: run one step before capturing a CUDA graph")
    return Workspace(
        torch.empty(FLOATS, dtype=torch.float32, device=device),
        torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


@cache
def properties(device: torch.device) -> Device:
    """What configurations depend on; for the interpreter a small device, on which products are split too."""
    if device.type != "cuda":
        return Device(4, 1 << 18)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Device(found.multi_processor_count, shared, found.major)


def count(tiles: int, steps: int, slots: int, size: int) -> int:
    """Parts for each of `tiles` tiles of `size` sums and `steps` steps, so that `slots` programs run at once."""
    return max(1, min(steps // LEAST_STEPS, slots // tiles, FLOATS // (tiles * size)))
