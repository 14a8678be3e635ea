"""Narrow the heads of keys, and train attention behind it (DiffQKV of Sigma, arXiv 2501.13629).

DiffQKV compresses keys more than values: heads of keys are fewer and narrower, queries keep their width (the paper
widens them), and the model is trained like that from the start. Here a trained model is brought there: of each head of
keys the rotary pairs of channels with the least weight in scores are set to zero, in keys and in the queries that read
them, and `heal` trains each block's attention (or all of it) behind the narrowed blocks before it against what the
original model gives (kv_head_pass.py). Rows that are zero on both sides have no gradient, so that they stay zero.

The checkpoint stays plain, with zeros in it. The cache codec `key_pairs` with the same `keep` then leaves out only
zeros, and so loses nothing more: keys take `keep` of their bytes, values all. That holds where positions turn all
channels of a head, the two halves in pairs; elsewhere `key_pairs` takes other channels for pairs, and loses some.

The weight of a pair is the mean square of what it adds to scores, as in compress/papers/codecs/key_pairs.py. Channels
that no position turns stay.

Differences from the paper: a trained model is changed, instead of one trained from scratch; heads of keys stay as many
(merge_kv_heads merges keys with values); queries are trained but not widened, for which transformers' classes have no
width of their own. Values that are read for the largest scores alone are compress/papers/sparse/selective_values.py.

Outside the core because narrower keys, untrained, cost more than fewer bits at the same bytes
(docs/results/kv_heads.md). What training brings was not measured.

Refused: anything but scales and rotary positions between the projections and the scores, as norms of queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from compress import process_memory
from compress.errors import CalibrationError, UnsupportedModelError
from compress.model import blockwise
from compress.model.blockwise import FULL, QUANTIZED, BlockArgs, HiddenStates, ModelArgs
from compress.model.edits import EditContext, WeightEdits
from compress.model.skeleton import Skeleton
from compress.papers.transform import kv_head_pass, qk_pairs, reshaping
from compress.papers.transform.qk_pairs import ScoreChannels

SCOPE = "model"
FOLDER = "narrow-keys"  # inside a run's own files
ADVICE = "remove narrow_keys from the recipe's transform"


@dataclass(frozen=True)
class Config:
    """Settings of narrower keys."""

    keep: float = 0.5  # [share] of the pairs of channels of each head of keys that stay
    samples: int = 32  # [samples] of calibration that the pass before quantizing looks at
    heal: int = 0  # [steps] in which each block is trained; 0: none
    heal_rate: float = 0.01  # of AdamW, in units of the root mean square of each tensor
    heal_tokens: int = 2048  # [tokens] of a step, about: at least a sample, at most a batch
    heals: Literal["attention", "block"] = "attention"  # what is trained: linears that attention reads and writes, or
    # all of the block

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep {self.keep} is not above 0 and at most 1")
        for key, least in (("samples", 1), ("heal", 0), ("heal_tokens", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} {getattr(self, key)} is less than {least}")
        if not 0 < self.heal_rate < 1:
            raise ValueError(f"heal_rate {self.heal_rate} is not between 0 and 1")


def apply(skeleton: Skeleton, config: Config, seed: int) -> KeyNarrowing:
    """Give the skeleton narrower keys once `choose` has run; no weight is read."""
    skeleton.sources = dict(skeleton.sources)
    return KeyNarrowing(skeleton, config)


class KeyNarrowing(WeightEdits):
    """Gives a model the narrowed weights that are in the files that `choose` writes."""

    def __init__(self, skeleton: Skeleton, config: Config) -> None:
        self.skeleton, self.config, self.samples = skeleton, config, config.samples
        self.says: tuple[str, ...] = (
            f"each head of keys keeps {config.keep:.0%} of its rotary pairs, the rest is zero",
        )

    def choose(self, bench: EditContext) -> list[str]:
        """Narrow the keys of all blocks that an interrupted run has not narrowed; return the notes for the report."""
        if bench.tokens is None:
            raise CalibrationError("narrow_keys looks at a calibration text, and there is none; give --calib")
        original = Skeleton(self.skeleton.checkpoint)
        files = []
        try:
            with reshaping.both_streams(original, bench.tokens[: self.samples], bench, "narrow keys on") as streams:
                for index in range(len(original.blocks)):
                    bench.say(f"narrowing the keys of block {index + 1}")
                    files.append(_NarrowedBlock(original, index, streams, self.config, bench).make())
                    process_memory.check(bench.max_memory)
        finally:
            original.free()
        for index, path in enumerate(files):
            reshaping.replace_parameters(path, self.skeleton, self.skeleton.block_prefix(index))
        lost, before, after = torch.tensor([reshaping.read_facts(path) for path in files]).mean(0).tolist()
        notes = [*self.says, f"pairs that were left out have {lost:.2%} of the mean squares of scores"]
        if self.config.heal:
            notes.append(
                f"trained for {self.config.heal} steps a block: held-out error, mean over blocks, {before:.3g} -> "
                f"{after:.3g}"
            )
        return notes


class _PairWeights(NamedTuple):
    """Where the channels of scores are, and what each pair adds to scores."""

    channels: ScoreChannels
    weights: Tensor  # [heads of keys, pairs] float64


class _NarrowedBlock:
    """One block: the weights of its pairs, its narrowed parameters, their training, and the streams through it."""

    def __init__(
        self,
        original: Skeleton,
        index: int,
        streams: tuple[ModelArgs, HiddenStates],
        config: Config,
        bench: EditContext,
    ) -> None:
        self.original, self.index, self.config, self.bench = original, index, config, bench
        self.calls, self.stream = streams
        self.prefix = original.block_prefix(index)
        self.path = bench.folder / FOLDER / f"{index:05d}.safetensors"

    def make(self) -> Path:
        """Write the file of the block unless it is there, and take both streams through."""
        block = self.original.load_block(self.index, self.bench.device)
        if self.path.is_file():
            self._advance(block, FULL)
        else:
            pair_weights = self._weigh(block)
            tensors, lost = self._zero_pairs(block, pair_weights)
            errors = [0.0, 0.0]
            if self.config.heal:
                tensors, errors = self._heal(block, tensors)
            reshaping.write_parameters(self.path, self.original, self.prefix, tensors, [lost, *errors])
        if self.config.heal:
            for name, each in reshaping.read_parameters(self.path).items():
                block.get_parameter(name).data.copy_(each.read())
            self._advance(block, QUANTIZED)
        self.original.free()
        return self.path

    @torch.no_grad()
    def _weigh(self, block: nn.Module) -> _PairWeights:
        """Return the weights of all pairs; the original's stream goes on."""
        hidden, call = next(self._inputs(FULL))
        channels = qk_pairs.find(block, hidden, call)
        if channels is None:
            raise UnsupportedModelError(
                f"in {self.prefix.rstrip('.')} something else than rotary positions is between queries or keys and the "
                f"scores; {ADVICE}"
            )
        squares: dict[str, Tensor] = {}

        def note(name: str, output: Tensor) -> None:
            new = output.detach().flatten(0, -2).double().square().sum(0).cpu()
            squares[name] = squares[name] + new if name in squares else new

        names = {channels.queries.name, channels.keys.name}
        hooks = [
            block.get_submodule(name).register_forward_hook(lambda _, inputs, output, name=name: note(name, output))
            for name in names
        ]
        with blockwise.attached(hooks):
            self._advance(block, FULL)
        q, k = (squares[x.name][x.rows][:, channels.pairs].sum(-1) for x in (channels.queries, channels.keys))
        return _PairWeights(channels, k * q.unflatten(0, (len(k), -1)).sum(1))

    @torch.no_grad()
    def _zero_pairs(self, block: nn.Module, pair_weights: _PairWeights) -> tuple[dict[str, Tensor], float]:
        """Return the parameters with zeros by path in the block, and the share of the weights that is lost."""
        channels, weights = pair_weights
        count, pairs = weights.shape
        kept = max(1, round(self.config.keep * pairs))
        dropped = weights.argsort(dim=1, descending=True, stable=True)[:, kept:]  # of each head
        share = float(weights.gather(1, dropped).sum() / weights.sum().clamp(min=torch.finfo(torch.float64).tiny))
        repeats = len(channels.queries.rows) // count
        tensors: dict[str, Tensor] = {}
        for heads, each in ((channels.queries, dropped.repeat_interleave(repeats, 0)), (channels.keys, dropped)):
            places = channels.pairs[each].flatten(1)  # head -> channels
            rows = heads.rows.gather(1, places).flatten()
            for name, parameter in block.get_submodule(heads.name).named_parameters():
                full = f"{heads.name}.{name}"
                tensors.setdefault(full, parameter.detach().clone())[rows.to(parameter.device)] = 0
        return tensors, share

    def _heal(self, block: nn.Module, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[float]]:
        """Return parameters trained in the block, and its errors before and after."""
        for name, tensor in tensors.items():
            block.get_parameter(name).data.copy_(tensor)
        names = [name for name, parameter in block.named_parameters() if parameter.dim() < 3]
        if self.config.heals == "attention":
            owners = {name.rpartition(".")[0].rpartition(".")[0] for name in tensors}
            names = [name for name in names if name.rpartition(".")[0].rpartition(".")[0] in owners]
        count, config = -(-self.stream.samples // self.bench.batch), self.config
        healed = kv_head_pass.train(block, names, self._pairs, count, config.heal, config.heal_rate, config.heal_tokens)
        return healed.parameters, [healed.before, healed.after]

    def _inputs(self, side: int) -> Iterator[tuple[Tensor, BlockArgs]]:
        for start in range(0, self.stream.samples, self.bench.batch):
            count = min(self.bench.batch, self.stream.samples - start)
            hidden = self.stream.fetch(start, count, self.bench.device, side)
            yield hidden, self.calls.at(self.index, start, count, side)

    def _pairs(self) -> Iterator[tuple[Tensor, BlockArgs, Tensor]]:
        """Yield what reaches the block behind narrowed ones, and what the original model gives behind the original."""
        start = 0
        for hidden, call in self._inputs(QUANTIZED):
            yield hidden, call, self.stream.fetch(start, len(hidden), self.bench.device, FULL)
            start += len(hidden)

    def _advance(self, block: nn.Module, side: int) -> None:
        """Take one side of the stream through a block."""
        name, start = self.prefix.rstrip("."), 0
        for hidden, call in self._inputs(side):
            states, beside = blockwise.run_block_fully(block, call, hidden, name)
            self.stream.write(start, states, side)
            self.calls.keep(self.index, start, call, beside, side)
            start += len(hidden)
