"""Merge the key/value heads of a model block by block, on calibration text, each block into a file of its own.

Two streams of hidden states go through the blocks: that of the original model, in which the moments are taken, and,
where merged blocks are trained, that behind the merged ones. The files lie in FOLDER of the run: a block that has one
is not merged again, and a run that is resumed has the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from compress import process_memory
from compress.errors import CheckpointError, UnsupportedModelError
from compress.model import blockwise
from compress.model.blockwise import FULL, QUANTIZED, BlockArgs, HiddenStates, ModelArgs
from compress.model.edits import EditContext
from compress.model.graph import Attention
from compress.model.skeleton import Skeleton
from compress.papers.transform import kv_heads, qk_pairs, reshaping
from compress.papers.transform.kv_heads import ChannelLayout, HeadMoments, HeadWeights
from compress.papers.transform.qk_pairs import ScoreChannels
from compress.transform.bases import value_rows
from compress.tune.descend import descend, is_checked
from compress.tune.held_block import Batches, HeldBlock, relative
from compress.tune.trained import Trained

BLOCKS_FOLDER = "kv-heads"  # folder inside a run's own files
TOKENS_PER_SUM = 4096  # tokens of queries, keys and values


@dataclass(frozen=True)
class MergeSettings:
    """How heads are merged, and trained behind it."""

    group: int = 2  # [key/value heads] that become one; divides their number; 1: all stay as they are
    pooling: Literal["fitted", "mean"] = "fitted"  # fitted: leading directions of what the calibration text gives
    weighed: bool = True  # directions are the leading ones of what queries and output make of them; false: of the
    # caches themselves
    order: Literal["similar", "neighbours"] = (
        "similar"  # which heads are merged: those that lose little, or as they are
    )
    samples: int = 32  # [samples] of calibration that the pass before quantizing looks at
    heal: int = 0  # [steps] in which each block's merged attention is trained; 0: none
    heal_rate: float = 0.01  # of AdamW, in units of the root mean square of each tensor
    heal_tokens: int = 2048  # [tokens] of a step, about: at least a sample, at most a batch
    heals: Literal["attention", "block"] = "attention"  # what is trained: the four projections, or all of the block

    def __post_init__(self) -> None:
        for key, least in (("group", 1), ("samples", 1), ("heal", 0), ("heal_tokens", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} {getattr(self, key)} is less than {least}")
        if not 0 < self.heal_rate < 1:
            raise ValueError(f"heal_rate {self.heal_rate} is not between 0 and 1")


def find_merged(folder: Path, blocks: int) -> list[Path] | None:
    """Return the files of all blocks, None while one is missing."""
    files = [_file(folder, index) for index in range(blocks)]
    return files if all(path.is_file() for path in files) else None


def run(skeleton: Skeleton, attentions: Sequence[Attention], config: MergeSettings, bench: EditContext) -> list[Path]:
    """Merge the heads of every block, each into a file; skeleton: of the merged model, which the files are for."""
    assert bench.tokens is not None, "the caller asks"
    original = Skeleton(skeleton.checkpoint)
    tokens = bench.tokens[: config.samples]
    merged = []
    try:
        with reshaping.both_streams(original, tokens, bench, "merge heads on") as (calls, stream):
            for index, attention in enumerate(attentions):
                bench.say(f"merging the heads of block {index + 1}")
                models = _Models(original, skeleton, calls, stream)
                merged.append(_MergingBlock(models, index, attention, config, bench).merge())
                process_memory.check(bench.max_memory)
    finally:
        original.free()
    return merged


def notes(merged: Sequence[Path], config: MergeSettings) -> list[str]:
    """Return what the report should say."""
    facts = torch.tensor([reshaping.read_facts(path) for path in merged], dtype=torch.float64)
    keys, values, moved, before, after = facts.T
    said = [
        f"merged heads lose {_range(keys)} of what queries see of the keys and {_range(values)} of what the output "
        "sees of the values"
    ]
    if moved.any():
        said.append(f"heads have changed places in {int((moved > 0).sum())} of {len(merged)} blocks")
    if config.heal:
        said.append(
            f"trained for {config.heal} steps a block: held-out error, mean over blocks, {before.mean():.3g} -> "
            f"{after.mean():.3g}"
        )
    return said


def _range(shares: Tensor) -> str:
    return f"{100 * shares.mean():.2f}% ({100 * shares.min():.2f}% to {100 * shares.max():.2f}% by block)"


def _file(folder: Path, index: int) -> Path:
    return folder / BLOCKS_FOLDER / f"{index:05d}.safetensors"


class _Models(NamedTuple):
    """The original model and the merged one, and what goes through them."""

    original: Skeleton
    merged: Skeleton
    calls: ModelArgs
    stream: HiddenStates  # sides: QUANTIZED behind merged blocks, FULL behind the original ones


class _MergingBlock:
    """One block: its moments, its merged weights, their training, and the streams that go through it."""

    def __init__(
        self, models: _Models, index: int, attention: Attention, config: MergeSettings, bench: EditContext
    ) -> None:
        self.original, self.skeleton, self.calls, self.stream = models
        self.index, self.attention, self.config, self.bench = index, attention, config, bench
        self.prefix = self.skeleton.block_prefix(index)
        self.path = _file(bench.folder, index)

    def merge(self) -> Path:
        """Write the file of the block unless it is there, and take both streams through."""
        is_new, heals = not self.path.is_file(), self.config.heal > 0
        block = self.original.load_block(self.index, self.bench.device)
        tensors, facts = self._weights(block) if is_new else ({}, [])
        if not is_new:
            self._advance(block, FULL)
        self.original.free()
        block = self.skeleton.load_block(self.index, self.bench.device) if heals else block
        if is_new:
            if heals:
                tensors, facts[3:] = self._heal(block, tensors)
            stored = {name: self._as_stored(name, tensor.cpu()) for name, tensor in tensors.items()}
            reshaping.write_parameters(self.path, self.skeleton, self.prefix, stored, facts)
        if heals:
            for name, each in reshaping.read_parameters(self.path).items():
                block.get_parameter(name).copy_(each.read())
            self._advance(block, QUANTIZED)
            self.skeleton.free()
        return self.path

    @torch.no_grad()
    def _weights(self, block: nn.Module) -> tuple[dict[str, Tensor], list[float]]:
        """Return the merged projections by path in the block, and facts; the original's stream goes on."""
        hidden, call = next(self._inputs(FULL))
        channels = qk_pairs.find(block, hidden, call)
        if channels is None:
            raise UnsupportedModelError(
                f"in {self.prefix.rstrip('.')} something else than rotary positions is between queries or keys and the "
                "scores, through which merged heads cannot pass; remove merge_kv_heads from the recipe's transform"
            )
        layout = ChannelLayout(channels.pairs, channels.free)
        moments = self._moments(block, channels, layout)
        projections = _Projections(block, self.attention, channels, self.config.group)
        weights = projections.weights_by_head()
        heads = len(weights.keys)
        moments = moments._replace(outputs=kv_heads.read_by(weights.outputs, heads))
        is_fitted, is_weighed = self.config.pooling == "fitted", self.config.weighed
        groups = kv_heads.neighbours(heads, self.config.group)
        if self.config.order == "similar":
            groups = kv_heads.similar(moments, self.config.group, is_fitted, is_weighed)
        merges = []
        for group in groups:
            part = moments.of(group)
            merges.append(kv_heads.fitted_merge(part, is_weighed) if is_fitted else kv_heads.mean_merge(part))
        lost = kv_heads.lost_of(merges, groups, moments)
        moved = sum(i != j for i, j in enumerate(h for group in groups for h in group))
        tensors = projections.put(kv_heads.merge_weights(weights, layout, groups, merges))
        return tensors, [lost.keys, lost.values, float(moved), 0.0, 0.0]

    def _moments(self, block: nn.Module, channels: ScoreChannels, layout: ChannelLayout) -> HeadMoments:
        """Take the original's stream through the block, and return the moments of its heads."""
        rows = channels.queries.rows, channels.keys.rows, value_rows(self.attention)
        names = channels.queries.name, channels.keys.name, self.attention.values
        repeats, seen, total = len(rows[0]) // len(rows[1]), dict[str, Tensor](), list[HeadMoments]()

        def note(name: str, output: Tensor) -> None:
            seen[name] = output.detach().flatten(0, -2)
            if len(seen) < len(set(names)):
                return
            heads = [seen[each][:, index.to(output.device)] for each, index in zip(names, rows, strict=True)]
            for part in zip(*(x.split(TOKENS_PER_SUM) for x in heads), strict=True):
                queries, keys, values = (x.float().cpu() for x in part)
                new = kv_heads.moments(queries, keys, values, layout, repeats)
                total[:] = [HeadMoments(*(a + b for a, b in zip(total[0], new, strict=True))) if total else new]
            seen.clear()

        hooks = [
            block.get_submodule(name).register_forward_hook(lambda _, inputs, output, name=name: note(name, output))
            for name in set(names)
        ]
        with blockwise.attached(hooks):
            self._advance(block, FULL)
        return total[0]

    def _heal(self, block: nn.Module, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[float]]:
        """Return merged weights trained in a block of the merged model, and its errors before and after."""
        for name, tensor in tensors.items():
            block.get_parameter(name).copy_(tensor)
        names, config = list(tensors), self.config
        if config.heals == "block":
            names = [name for name, parameter in block.named_parameters() if parameter.dim() < 3]
        count = -(-self.stream.samples // self.bench.batch)
        how = config.heal, config.heal_rate, config.heal_tokens
        healed = train(block, names, self._pairs, count, *how)
        return healed.parameters, [healed.before, healed.after]

    def _as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter as its file holds it; CheckpointError where the checkpoint stores it in another way."""
        group = self.skeleton.sources.get(self.prefix + name, [])
        if len(group) != 1 or group[0].shape != tuple(tensor.shape) or group[0].name in self.skeleton.split:
            raise CheckpointError(
                f"{self.prefix}{name} is not stored as a tensor of its own, as it is used, and cannot be replaced; "
                "remove merge_kv_heads from the recipe's transform"
            )
        return tensor.to(group[0].dtype).contiguous()

    def _batches(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.stream.samples, self.bench.batch):
            yield start, min(self.bench.batch, self.stream.samples - start)

    def _inputs(self, side: int) -> Iterator[tuple[Tensor, BlockArgs]]:
        for start, count in self._batches():
            hidden = self.stream.fetch(start, count, self.bench.device, side)
            yield hidden, self.calls.at(self.index, start, count, side)

    def _pairs(self) -> Iterator[tuple[Tensor, BlockArgs, Tensor]]:
        """Yield what reaches the block behind merged ones, and what the original model gives behind the original."""
        for (start, count), (hidden, call) in zip(self._batches(), self._inputs(QUANTIZED), strict=True):
            yield hidden, call, self.stream.fetch(start, count, self.bench.device, FULL)

    def _advance(self, block: nn.Module, side: int) -> None:
        """Take one side of the stream through a block."""
        name = self.prefix.rstrip(".")
        for (start, _), (hidden, call) in zip(self._batches(), self._inputs(side), strict=True):
            states, beside = blockwise.run_block_fully(block, call, hidden, name)
            self.stream.write(start, states, side)
            self.calls.keep(self.index, start, call, beside, side)


class _Projections:
    """The four linears of an attention, and where the heads are in them."""

    def __init__(self, block: nn.Module, attention: Attention, channels: ScoreChannels, group: int) -> None:
        self.group, self.names = group, (channels.queries.name, channels.keys.name, attention.values, attention.output)
        self.linears = [block.get_submodule(name) for name in self.names]
        self.heads, self.size = attention.heads, attention.head_dim
        self.rows = channels.queries.rows, channels.keys.rows, value_rows(attention)
        for name, rows, linear in zip(self.names, self.rows, self.linears, strict=False):
            count, size = rows.shape
            within = rows - size * torch.arange(count)[:, None]
            is_whole = linear.get_parameter("weight").shape[0] == rows.numel()
            if not is_whole or within.min() < 0 or (within != within[0]).any():
                raise UnsupportedModelError(
                    f"{name} has not the rows of one head behind those of another; remove merge_kv_heads from the "
                    "recipe's transform"
                )

    def weights_by_head(self) -> HeadWeights:
        """Return the weights by head, float64."""
        heads = []
        for rows, linear in zip(self.rows, self.linears, strict=False):
            weight, bias = linear.get_parameter("weight").detach().double().cpu(), getattr(linear, "bias", None)
            whole = weight if bias is None else torch.cat((weight, bias.detach().double().cpu()[:, None]), 1)
            heads.append(whole[rows])
        output = self.linears[3].get_parameter("weight").detach().double().cpu()
        queries, keys, values = heads
        return HeadWeights(queries, keys, values, output.unflatten(1, (self.heads, self.size)).transpose(0, 1))

    def put(self, weights: HeadWeights) -> dict[str, Tensor]:
        """Return merged weights as parameters, by their paths in the block, float64."""
        parameters: dict[str, Tensor] = {}
        for name, rows, linear, heads in zip(self.names, self.rows, self.linears, weights, strict=False):
            whole = torch.empty(heads.shape[0] * heads.shape[1], heads.shape[2], dtype=torch.float64)
            whole[rows[: len(heads)]] = heads
            columns = linear.get_parameter("weight").shape[1]
            parameters[f"{name}.weight"] = whole[:, :columns]
            if whole.shape[1] > columns:
                parameters[f"{name}.bias"] = whole[:, -1]
        parameters[f"{self.names[3]}.weight"] = weights.outputs.transpose(0, 1).flatten(1)
        return parameters


HELD_OUT_BATCHES = 8  # batches
CHECKS = 4  # times that the held-out error is measured


class Healed(NamedTuple):
    """Trained parameters of a block, and its error on batches that were held out, before and after."""

    parameters: dict[str, Tensor]  # path in the block -> values in the type that is stored
    before: float
    after: float


@torch.no_grad()
def train(
    block: nn.Module, names: Sequence[str], batches: Batches, count: int, steps: int, rate: float, tokens: int
) -> Healed:
    """Train these parameters of a block, which stays as it is.

    batches: `count` at every call, of hidden states, other arguments and what the block should give. rate: of AdamW, in
    units of the root mean square of each tensor. tokens: of a step, about. Raises NumericalError for a loss that is not
    finite.
    """
    held = HeldBlock(block, [], batches, count, HELD_OUT_BATCHES, tokens)
    trained = {name: Trained(held.model.get_parameter(name)) for name in names}
    stream = held.portions.endless()

    def in_stored_types() -> dict[str, Tensor]:
        return {name: each.value().to(held.own_type(name)) for name, each in trained.items()}

    def error() -> float:
        return held.error({name: value.float() for name, value in in_stored_types().items()})

    before = best = error()

    def loss(step: int) -> float:
        hidden, call, target = next(stream)
        with torch.enable_grad():
            now = {name: each.value() for name, each in trained.items()}
            states = relative(held.run(now, hidden, call), target.float()).mean()
            states.backward()
        return states.item()

    def check(step: int) -> None:
        nonlocal best
        if not is_checked(step, steps, CHECKS):
            return
        if (now := error()) < best:
            best = now
            for each in trained.values():
                each.keep()

    descend([each.moved for each in trained.values()], steps, rate, loss, check)
    for each in trained.values():
        each.restore()
    return Healed(in_stored_types(), before, best)
