"""Search a trellis on a GPU: the integers of compress/quant/viterbi.py, one program a sequence, one launch a search.

Costs stay in registers from step to step, a decision is one byte, and the way back is walked in the same launch. The
kernel is in compress/kernels/triton/_viterbi.py.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from compress.kernels.dispatch import LEAST_CAPABILITY
from compress.kernels.loops.viterbi import Limits

DECISIONS = 1 << 30  # bytes of the decisions of one launch
PER_THREAD = 8  # nodes
MOST_WARPS = 16


class Costs(NamedTuple):
    """How the integers of the search are made; the names are those of compress/quant/viterbi.py."""

    farthest: int  # magnitude of a difference
    shift: int  # of a squared difference
    limits: Limits


class TritonSearch:
    """The search through one trellis."""

    def __init__(self, symbol_bits: int, emitted: Tensor, costs: Costs) -> None:
        """Take what states emit, emitted [states, dim] int32 of at most 16 bits, on the device of the search."""
        self.symbol_bits, self.costs = symbol_bits, costs
        self.nodes, self.dim = emitted.shape[0] >> symbol_bits, emitted.shape[1]
        self.tops = emitted.abs().amax(0)
        self.emitted = emitted.T.to(torch.int16).contiguous()  # [dim, states]

    def search(self, values: Tensor, seam: Tensor | None) -> Tensor:
        """Return states [sequences, steps] int64; values [sequences, steps, dim] int32, seam [sequences] int64 or None.

        seam: the node where each path starts and ends.
        """
        from compress.kernels.triton import _viterbi

        count, steps, _ = values.shape
        values, device, limits = values.contiguous(), values.device, self.costs.limits
        states = torch.empty(count, steps, dtype=torch.int64, device=device)
        some = max(1, min(count, DECISIONS // (steps * self.nodes)))
        decisions = torch.empty(some * steps * self.nodes, dtype=torch.uint8, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            for first in range(0, count, some):
                part = slice(first, min(first + some, count))
                _viterbi.paths[(part.stop - first,)](
                    values[part], states if seam is None else seam[part], self.emitted, self.tops, decisions,
                    states[part], steps, SYMBOL_BITS=self.symbol_bits, REST=self.nodes >> self.symbol_bits,
                    DIM=self.dim, FARTHEST=self.costs.farthest, SHIFT=self.costs.shift, MOST=limits.most,
                    KNEE=limits.knee, PERIOD=limits.period, FAR=limits.far, SEAMED=seam is not None,
                    num_warps=warps(self.nodes),
                )  # fmt: skip
        return states


def warps(nodes: int) -> int:
    """Return the warps of a program."""
    return max(1, min(MOST_WARPS, nodes // (32 * PER_THREAD)))


def is_available(device: torch.device) -> bool:
    """Return whether kernels can be compiled for this device: a GPU of NVIDIA that is not too old."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
