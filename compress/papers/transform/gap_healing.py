"""Refit the last projection before each gap that dropped blocks leave, by least squares (the idea of arXiv 2505.02819).

Behind the kept block before a gap the hidden states are x = y + W a: what its last projection W adds to the rest y of
the block, from inputs a. Behind the gap the original model has states z. With e = z - x for the W that is stored, the
change D of W with the least sum over tokens of |e - D a|^2 / |z|^2 + ridge |D|^2 is

    D = C (H + ridge I)^-1,   H = sum of a a^T / |z|^2,   C = sum of e a^T / |z|^2

and the checkpoint stays plain. ReplaceMe fits a matrix T of hidden size behind the projection, W' = T W, to the same
states: a part of the matrices that are reached here. Tokens count by 1 / |z|^2, as a norm stands before everything that
reads them: a few tokens with huge states would decide everything otherwise. The inputs are those behind the gaps and
refits before, the states z are the original model's. `rank` limits D to the rank that is nearest in the metric of H
(reduced-rank regression): fewer numbers to be fitted to few tokens.

The last quarter of the samples is held out. It decides between RIDGES, times the mean of H's diagonal, and whether
there is any change. A gap at the front has no block before it and stays.

What is not done: blocks behind a gap are not refitted; biases stay; a block whose last step is not a linear on its way
into the states (a norm behind it, experts) stays as it is, which the notes say. H and C of one projection are in memory
twice, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress import process_memory
from compress.model import blockwise
from compress.model.block_calls import BlockArgs
from compress.model.blockwise import FULL, QUANTIZED, HiddenStates, ModelArgs
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.numerics import linalg
from compress.papers.transform.reshaping import both_streams, read_facts, read_parameters, write_parameters

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # times the mean of the diagonal
HELD_OUT = 4  # one of so many samples is held out
TOLERANCE = 0.02  # [fraction] by which the output of a block may differ from what was added to it


@dataclass
class Moments:
    """The sums over tokens that a least-squares change of a projection [out, in] needs."""

    inputs: Tensor  # H [in, in] float64
    cross: Tensor  # C [out, in] float64
    squares: float = 0.0  # of e
    states: float = 0.0  # the number of tokens, |z|^2 being one for each

    @classmethod
    def of(cls, shape: Sequence[int], device: torch.device) -> Moments:
        out, width = shape
        inputs, cross = (torch.zeros(n, width, dtype=torch.float64, device=device) for n in (width, out))
        return cls(inputs, cross)

    def add(self, inputs: Tensor, states: Tensor, targets: Tensor) -> None:
        """Add tokens: inputs [tokens, in] of the projection, states and targets [tokens, out]."""
        scale = targets.float().norm(dim=1, keepdim=True).clamp(min=1e-12)
        a, e = inputs.float() / scale, (targets.float() - states.float()) / scale
        self.inputs += a.T @ a
        self.cross += e.T @ a
        self.squares += e.double().square().sum().item()
        self.states += len(a)

    def error(self, change: Tensor | None) -> float:
        """Return the mean of |e - D a|^2 / |z|^2."""
        if change is None:
            return self.squares / self.states
        less = 2 * (change * self.cross).sum() - ((change @ self.inputs) * change).sum()
        return (self.squares - less.item()) / self.states


class Fit(NamedTuple):
    """A change [out, in] float64 of a projection, None for none, and held-out errors without and with it."""

    change: Tensor | None
    before: float
    after: float


def fit(seen: Moments, held_out: Moments, rank: int = 0) -> Fit:
    """Return the change that is fitted to `seen` with the ridge that is best on `held_out`; rank: 0 for a full one."""
    before = held_out.error(None)
    best: Fit = Fit(None, before, before)
    for ridge in RIDGES:
        change = solve(seen, ridge)
        if rank:
            part = linalg.truncate_rank(change, seen.inputs, min(rank, *change.shape))
            change = (part.left.double() @ part.right.double()).to(change.device)
        after = held_out.error(change)
        if after < best.after:
            best = Fit(change, before, after)
    return best


def solve(seen: Moments, ridge: float) -> Tensor:
    """Return C (H + ridge mean(diag H) I)^-1 [out, in], float64."""
    mean = seen.inputs.diagonal().mean().clamp(min=1e-30)
    damped = seen.inputs + ridge * mean * torch.eye(len(seen.inputs), dtype=torch.float64, device=seen.inputs.device)
    return torch.cholesky_solve(seen.cross.T, torch.linalg.cholesky(damped)).T


@torch.no_grad()
def find_last_projection(block: nn.Module, call: BlockArgs, hidden: Tensor, name: str) -> str | None:
    """Return the path of the linear whose output is added to what a block gives, unchanged; of several the widest."""
    usual = blockwise.run_block(block, call, hidden, name).float()
    width = usual.shape[-1]
    added = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(usual) * usual.std()
    matching = dict[str, int]()
    for path, linear in block.named_modules():
        if not isinstance(linear, nn.Linear) or linear.out_features != width:
            continue
        with blockwise.attached([linear.register_forward_hook(lambda _, inputs, y: y + added.to(y.dtype))]):
            moved = blockwise.run_block(block, call, hidden, name).float() - usual
        if (moved - added).norm() <= TOLERANCE * added.norm() * moved[..., 0].numel() ** 0.5:
            matching[path] = linear.in_features
    return max(matching, key=lambda path: matching[path], default=None)


class GapHealing:
    """Refit the blocks before all gaps of one choice; each into a file, so that an interrupted run goes on."""

    def __init__(self, original: Skeleton, kept: Sequence[int], rank: int, bench: EditContext, folder: Path) -> None:
        self.original, self.kept, self.rank, self.bench = original, kept, rank, bench
        self.files = {before: folder / f"{before:05d}.safetensors" for before in find_edges(kept, len(original.blocks))}

    @property
    def is_done(self) -> bool:
        return all(path.is_file() for path in self.files.values())

    @torch.no_grad()
    def run(self, tokens: Tensor) -> None:
        """Take both models through tokens [samples, seq_len] int64, and write the files that are missing."""
        bench, end = self.bench, blockwise.computing_in(self.original, torch.float32)
        try:
            with both_streams(self.original, tokens, bench, "refit projections on") as (calls, stream):
                for index in range(len(self.original.blocks)):
                    if index in self.kept:
                        self._through(index, calls, stream)
                        process_memory.check(bench.max_memory)
        finally:
            end()

    def _through(self, index: int, calls: ModelArgs, stream: HiddenStates) -> None:
        """Take the shorter model through a kept block, the original through it and those that are dropped behind it."""
        bench, following = self.bench, [each for each in self.kept if each > index]
        stop = min(following, default=len(self.original.blocks))
        first = 0 if index == min(self.kept) else index
        self.bench.say(f"taking samples through block {index + 1}")
        for each in range(first, stop):
            sides = FULL, FULL
            blockwise.propagate(self.original, each, calls, stream, bench.batch, bench.device, sides)
        block = self.original.load_block(index, bench.device)
        if (path := self.files.get(index)) is not None:
            if not path.is_file():
                self._refit(index, block, calls, stream)
            for name, stored in read_parameters(path).items():
                block.get_parameter(name).copy_(stored.read())
        name = self.original.block_prefix(index).rstrip(".")
        for start, hidden, call in self._batches(index, calls, stream):
            stream.write(start, blockwise.run_block(block, call, hidden, name), QUANTIZED)
        self.original.free()

    def _batches(self, index: int, calls: ModelArgs, stream: HiddenStates) -> Iterator[tuple[int, Tensor, BlockArgs]]:
        for start in range(0, stream.samples, self.bench.batch):
            count = min(self.bench.batch, stream.samples - start)
            yield start, stream.fetch(start, count, self.bench.device, QUANTIZED), calls[index][count]

    def _refit(self, index: int, block: nn.Module, calls: ModelArgs, stream: HiddenStates) -> None:
        name = self.original.block_prefix(index).rstrip(".")
        _, hidden, call = next(self._batches(index, calls, stream))
        path = find_last_projection(block, call, hidden, name)
        if path is None:
            write_parameters(self.files[index], self.original, f"{name}.", {}, ())
            return
        linear = block.get_submodule(path)
        weight, seen_inputs = linear.get_parameter("weight"), list[Tensor]()
        self.bench.say(f"refitting {name}.{path}")
        parts = [Moments.of(weight.shape, self.bench.device) for _ in range(2)]
        held = stream.samples - max(1, stream.samples // HELD_OUT)
        hook = linear.register_forward_pre_hook(lambda _, inputs: seen_inputs.append(inputs[0]))
        with blockwise.attached([hook]):
            for start, hidden, call in self._batches(index, calls, stream):
                states = blockwise.run_block(block, call, hidden, name)
                targets = stream.fetch(start, len(hidden), self.bench.device, FULL)
                inputs = seen_inputs.pop()
                for row, (a, x, z) in enumerate(zip(inputs, states, targets, strict=True), start):
                    parts[row >= held and stream.samples > 1].add(a, x, z)
        result = fit(parts[0], parts[1], self.rank) if parts[1].states else Fit(None, 0.0, 0.0)
        healed = weight if result.change is None else weight + result.change.to(weight)
        tensors, errors = {f"{path}.weight": healed}, (result.before, result.after)
        write_parameters(self.files[index], self.original, f"{name}.", tensors, errors)

    def notes(self) -> list[str]:
        """Return what the report should say."""
        errors = {index: read_facts(path) for index, path in self.files.items()}
        parts = ", ".join(f"block {index}: {each[0]:.3g} -> {each[1]:.3g}" for index, each in errors.items() if each)
        left = ", ".join(str(index) for index, each in errors.items() if not each)
        said = {
            f"refitted before gaps, held-out error a token in parts of the states' squares, {parts}": parts,
            f"not refitted before gaps, as the last step into the hidden states is not one linear: blocks {left}": left,
        }
        return [line for line, holds in said.items() if holds]


def find_edges(kept: Sequence[int], layers: int) -> list[int]:
    """Return the kept blocks behind which some are dropped."""
    return [each for each in kept if each + 1 < layers and each + 1 not in kept]
