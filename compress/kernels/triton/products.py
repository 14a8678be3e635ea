"""Products of a few rows of activations with a stored weight on a GPU, split along their columns.

Each part writes its sums (float32) to the workspace and counts itself in; the last one adds them in the order of the
parts, so that results do not depend on which part came last, and sets the counter back to zero.

Every stream of a device has a workspace of its own, allocated before its first launch and kept: kernels that run at
once on two streams would mix their parts. CUDA graphs hold the address of another one, which is allocated with the
first of the device, because nothing that lasts can be allocated inside a graph. All graphs of a device share it: they
are to be replayed one after another, on whatever streams.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.contract import Prepared

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


GRAPHS = -1  # takes the place of a stream: what is captured runs on a stream that is not known yet
_WORKSPACES: dict[tuple[torch.device, int], Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """Return the workspace of the current stream of a device, or that of its CUDA graphs.

    RuntimeError if it would have to be allocated inside a CUDA graph.
    """
    stream = _stream(device)
    known = _WORKSPACES.get((device, stream))
    if known is not None:
        return known
    if stream == GRAPHS:
        raise RuntimeError("no kernel has run on this device yet: run one step before capturing a CUDA graph")
    if device.type == "cuda" and (device, GRAPHS) not in _WORKSPACES:
        _WORKSPACES.setdefault((device, GRAPHS), _allocate(device))
        torch.cuda.current_stream(device).synchronize()  # graphs run on other streams than the one that sets zeros
    return _WORKSPACES.setdefault((device, stream), _allocate(device))


def forget() -> None:
    """Let go of all workspaces; no CUDA graph may be replayed after that."""
    _WORKSPACES.clear()


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return GRAPHS if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def _allocate(device: torch.device) -> Workspace:
    return Workspace(
        torch.empty(FLOATS, dtype=torch.float32, device=device),
        torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


@cache
def properties(device: torch.device) -> Device:
    """Return what configurations depend on; for the interpreter a small device, on which products are split too."""
    if device.type != "cuda":
        return Device(4, 1 << 18)
    known = torch.cuda.get_device_properties(device)
    shared = getattr(known, "shared_memory_per_block_optin", known.shared_memory_per_block)
    return Device(known.multi_processor_count, shared, known.major)


def count(tiles: int, steps: int, slots: int, size: int) -> int:
    """Return the parts of each of `tiles` tiles of `size` sums and `steps` steps, for `slots` programs at once."""
    return max(1, min(steps // LEAST_STEPS, slots // tiles, FLOATS // (tiles * size)))


class Grid(NamedTuple):
    """How a product is cut up before its columns are split."""

    tiles: int  # of the outputs
    steps: int  # along the columns
    sums: int  # of a tile
    occupancy: int  # programs that a multiprocessor holds


def launch(
    kernel: Any, tensors: Sequence[Tensor], out: Tensor, sizes: Sequence[int], grid: Grid, **constants: Any
) -> None:
    """Run kernel(*tensors, out, partials, counters, *sizes, steps, parts, SPLIT=..., **constants) for all parts."""
    slots = properties(out.device).multiprocessors * grid.occupancy
    parts = count(grid.tiles, grid.steps, slots, grid.sums)
    kernel[grid.tiles, parts](
        *tensors, out, *workspace(out.device), *sizes, grid.steps, parts, SPLIT=parts > 1, **constants
    )


class GpuProduct(Prepared):
    """A stored weight that a Triton kernel of its format multiplies and decodes."""

    most = 16  # rows of activations: two tiles of 8

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.shape[1])
        out = torch.empty(rows.shape[0], self.shape[0], dtype=x.dtype, device=x.device)
        self.multiply(rows, out)
        return out.view(*x.shape[:-1], self.shape[0])

    @abstractmethod
    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Write x [rows, in], contiguous, times the weight to out [rows, out] of the type of x."""

    def most_rows(self, dtype: torch.dtype) -> int:
        """Return `most`, whatever the type."""
        return self.most

    def stored(self, name: str, absent: Tensor) -> Tensor:
        """Return a stored tensor, `absent` in its place where the weight has none: kernels take a pointer anyway."""
        return self.tensors.get(name, absent)


def tile_rows(rows: int) -> int:
    """Return the rows of activations that a program multiplies: the width of an operand of tensor cores."""
    return 8 if rows <= 8 else 16
