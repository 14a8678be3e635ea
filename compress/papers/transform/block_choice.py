"""Choose the decoder blocks that a model does without, on calibration text.

- `even`: blocks at even distances; the first and the last stay (unified layer skipping, arXiv 2404.06954; no text).
- `angular`: consecutive blocks over which hidden states turn least: the mean over tokens of arccos(cosine) / pi between
  what enters the first and what leaves the last of them (arXiv 2403.17887, which takes the last token of each text).
- `influence`: the blocks with the least influence each, 1 - the mean cosine between what enters and what leaves one
  (ShortGPT, arXiv 2403.03853).
- `kl`: one after the other the block without which the divergence of the predictions is least.
- `evolve`: EvoPress's search (arXiv 2410.14649). Offspring swap up to three dropped blocks for kept ones. All of a
  generation are measured on a quarter of the samples, the best SURVIVORS of them on all, where the best takes the place
  of a parent that is worse. The start is the best of the first three rules, in the paper the best of random sets. What
  has been measured is not measured again.

The first and the last block are candidates like others everywhere but in `even`, as in the papers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from compress import process_memory
from compress.calib import reference_logprobs
from compress.errors import CalibrationError
from compress.model import blockwise, lm_head
from compress.model.blockwise import HiddenStates
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.numerics import kl as divergences
from compress.storage.checkpoint import Checkpoint, read_json, write_text
from compress.storage.files import make_folder

Dropped = frozenset[int]  # numbers of blocks
Rule = Literal["angular", "influence", "even", "kl", "evolve"]
SURVIVORS = 2  # [choices] of a generation that are measured on all samples
MAX_SWAPS = 3
STATES_NBYTES = 1 << 30
TRIES = 100  # random changes for an offspring, of which one is to be new


@dataclass
class BlockChoice:
    """The blocks to be dropped so far, and what has been measured on the way; kept in a file."""

    dropped: list[int]
    kl: float | None = None  # on all samples, nats a token
    generation: int = 0
    block_tokens: int = 0  # computed so far: tokens through one block each
    is_done: bool = False
    trace: list[list[float]] = field(default_factory=list)  # tokens through the whole model so far, and the divergence
    tried: list[list[int]] = field(default_factory=list)  # sets that have been measured


class Choosing:
    """One choice among `candidates` of the blocks of a checkpoint; a folder keeps how far it has come."""

    def __init__(
        self, original: Skeleton, candidates: range, count: int, bench: EditContext | None, file: Path, samples: int
    ) -> None:
        self.original, self.candidates, self.count, self.bench = original, candidates, count, bench
        self.file, self.samples = file, samples

    def choose(self, rule: Rule, generations: int, offspring: int, seed: int) -> BlockChoice:
        """Return the blocks to be dropped by a rule, in their order; goes on where an interrupted run has stopped."""
        state = BlockChoice([])
        if self.file.is_file():
            state = BlockChoice(**read_json(self.file))
        if state.is_done:
            return state
        if rule == "even":
            state.dropped = choose_evenly(len(self.original.blocks), self.candidates, self.count)
        elif rule in ("angular", "influence"):
            measured = self._similarities(self.count if rule == "angular" else 1)
            state.dropped = (choose_window if rule == "angular" else choose_least)(
                measured, self.candidates, self.count
            )
        else:
            self._search(state, rule == "kl", (generations, offspring, seed))
        state.is_done = True
        self._save(state)
        return state

    def _tokens(self) -> Tensor:
        if self.bench is None or self.bench.tokens is None:
            raise CalibrationError("drop_blocks looks at a calibration text, and there is none; give --calib")
        return self.bench.tokens[: self.samples]

    def _save(self, state: BlockChoice) -> None:
        make_folder(self.file.parent)
        write_text(self.file, json.dumps(asdict(state)))

    def _similarities(self, length: int) -> dict[int, tuple[float, float]]:
        """Return first of `length` blocks -> mean cosine and mean angle / pi between what enters and leaves them."""
        tokens, bench = self._tokens(), self.bench
        assert bench is not None, "there are tokens"
        sides, means = length + 1, dict[int, tuple[float, float]]()
        stream = HiddenStates(tokens.shape[0], bench.folder / "stream", sides)
        try:
            bench.say("embedding samples to compare blocks on")
            calls = blockwise.record_inputs(self.original, tokens, bench.batch, stream, bench.device)
            for index in range(len(self.original.blocks)):
                bench.say(f"comparing what enters and leaves block {index + 1}")
                here, behind = index % sides, (index + 1) % sides
                blockwise.propagate(self.original, index, calls, stream, bench.batch, bench.device, (here, behind))
                first = index + 1 - length
                if first >= 0:
                    pairs = [
                        _compare(stream.read(sample, 1, first % sides), stream.read(sample, 1, behind))
                        for sample in range(tokens.shape[0])
                    ]
                    cosine, angle = torch.stack(pairs).mean(0).tolist()
                    means[first] = cosine, angle
        finally:
            stream.close()
            self.original.free()
        return means

    def _search(self, state: BlockChoice, is_greedy: bool, how: tuple[int, int, int]) -> None:
        tokens, starts = self._tokens(), list[Dropped]()
        assert self.bench is not None, "there are tokens"
        if not is_greedy and state.kl is None:
            window = choose_window(self._similarities(self.count), self.candidates, self.count)
            least = choose_least(self._similarities(1), self.candidates, self.count)
            evenly = choose_evenly(len(self.original.blocks), self.candidates, self.count)
            starts = [frozenset(each) for each in (window, least, evenly)]
        make_folder(self.file.parent)
        evaluator = DroppedKL(self.original.checkpoint, tokens, self.bench, self.file.parent)
        try:
            if is_greedy:
                self._greedy(state, evaluator)
            else:
                self._evolve(state, starts, evaluator, how)
        finally:
            evaluator.close()

    def _greedy(self, state: BlockChoice, evaluator: DroppedKL) -> None:
        while len(state.dropped) < self.count:
            sets = [frozenset({*state.dropped, each}) for each in self.candidates if each not in state.dropped]
            kls = self._measure(state, evaluator, sets, range(evaluator.samples))
            state.kl, best = min((kl, sorted(each)) for kl, each in zip(kls, sets, strict=True))
            state.dropped = best
            self._finish(state, f"{len(best)} of {self.count} blocks are dropped")

    def _evolve(
        self, state: BlockChoice, starts: Sequence[Dropped], evaluator: DroppedKL, how: tuple[int, int, int]
    ) -> None:
        generations, offspring, seed = how
        every = range(evaluator.samples)
        if state.kl is None:
            kls = self._measure(state, evaluator, starts, every)
            state.kl, state.dropped = min((kl, sorted(each)) for kl, each in zip(kls, starts, strict=True))
            self._finish(state, "the search begins")
        while state.generation < generations:
            rng = Random(f"{seed} {state.generation}")
            children = self._children(state, offspring, rng)
            if not children:
                break
            some = sorted(rng.sample(every, max(1, len(every) // 4)))
            kls = self._measure(state, evaluator, children, some)
            order = sorted(range(len(children)), key=lambda i: (kls[i], sorted(children[i])))
            best = [children[i] for i in order[:SURVIVORS]]
            kls = self._measure(state, evaluator, best, every)
            kl, winner = min((kl, sorted(each)) for kl, each in zip(kls, best, strict=True))
            if kl < state.kl:
                state.kl, state.dropped = kl, winner
            state.generation += 1
            self._finish(state, f"generation {state.generation} of {generations}")

    def _children(self, state: BlockChoice, count: int, rng: Random) -> list[Dropped]:
        """Return sets that have not been measured, with a few swaps each."""
        known, children = {frozenset(each) for each in state.tried}, dict[Dropped, None]()
        for _ in range(TRIES * count):
            if len(children) == count:
                break
            child = set(state.dropped)
            for _ in range(min(rng.randint(1, MAX_SWAPS), rng.randint(1, MAX_SWAPS))):
                child.remove(rng.choice(sorted(child)))
                child.add(rng.choice([each for each in self.candidates if each not in child]))
            if frozenset(child) not in known:
                children[frozenset(child)] = None
        return list(children)

    def _measure(
        self, state: BlockChoice, evaluator: DroppedKL, sets: Sequence[Dropped], samples: Sequence[int]
    ) -> list[float]:
        before = evaluator.block_tokens
        kls = evaluator.divergence(sets, samples)
        state.block_tokens += evaluator.block_tokens - before
        state.tried += [sorted(each) for each in sets if sorted(each) not in state.tried]
        return kls

    def _finish(self, state: BlockChoice, what: str) -> None:
        assert state.kl is not None and self.bench is not None, "it has been measured"
        state.trace.append([state.block_tokens / len(self.original.blocks), state.kl])
        self._save(state)
        self.bench.say(f"{what}: KL {state.kl:.5f}")


def choose_evenly(layers: int, candidates: range, count: int) -> list[int]:
    """Return blocks so that the candidates that stay lie at even distances, the first and the last among them."""
    stay = len(candidates) - count
    kept = {candidates.start + (i * (len(candidates) - 1) + (stay - 1) // 2) // max(1, stay - 1) for i in range(stay)}
    return [each for each in candidates if each not in kept]


def choose_window(measured: dict[int, tuple[float, float]], candidates: range, count: int) -> list[int]:
    """Return the `count` consecutive candidates over which the angle is least; measured: first block -> (_, angle)."""
    firsts = [first for first in measured if first in candidates and first + count - 1 in candidates]
    first = min(firsts, key=lambda each: (measured[each][1], each))
    return list(range(first, first + count))


def choose_least(measured: dict[int, tuple[float, float]], candidates: range, count: int) -> list[int]:
    """Return the `count` candidates whose cosine is largest; measured: block -> (cosine, _)."""
    order = sorted(candidates, key=lambda each: (-measured[each][0], each))
    return sorted(order[:count])


def _compare(before: Tensor, after: Tensor) -> Tensor:
    """Return the mean cosine, and the mean angle / pi, between states of the same token, float64 [2]."""
    cosines = functional.cosine_similarity(before.double(), after.double(), dim=-1).clamp(-1, 1)
    return torch.stack((cosines.mean(), cosines.arccos().mean() / math.pi))


# ---------------------------------------------------------------- divergences


class DroppedKL:
    """An evaluator of sets of dropped blocks on tokens [samples, seq_len] int64, with files in `folder`.

    Blocks are loaded one at a time. Sets that have the same blocks up to one share its hidden states, which are
    computed once; a dropped block costs nothing. Samples go through together as far as their states fit into
    STATES_NBYTES. A result depends on the set and its samples alone: each sample is run by itself, in float32, and sums
    are exact.
    """

    def __init__(self, checkpoint: Checkpoint, tokens: Tensor, bench: EditContext, folder: Path) -> None:
        self.skeleton, self.tokens, self.bench = Skeleton(checkpoint), tokens, bench
        self.samples, self.seq_len = tokens.shape
        self.block_tokens = 0  # computed so far: tokens through one block each
        self.end = blockwise.computing_in(self.skeleton, torch.float32)
        self.embedded = HiddenStates(self.samples, folder / "embedded")
        self.reference = reference_logprobs.load(self.skeleton, tokens, folder, device=bench.device, say=bench.say)
        self.calls = blockwise.record_inputs(self.skeleton, tokens, 1, self.embedded, bench.device)

    def close(self) -> None:
        """Free memory, and remove the file of hidden states."""
        self.end()
        self.embedded.close()

    def divergence(self, sets: Sequence[Dropped], samples: Sequence[int]) -> list[float]:
        """Return KL(original || without these blocks) of each set, the mean over these samples, nats a token."""
        return [math.fsum(row) / len(row) for row in self.per_sample(sets, samples).tolist()]

    @torch.no_grad()
    def per_sample(self, sets: Sequence[Dropped], samples: Sequence[int]) -> Tensor:
        """Return the same of each sample, float64 [sets, samples]."""
        distinct = list(dict.fromkeys(sets))
        nbytes = self.seq_len * self.skeleton.config.get_text_config().hidden_size * 4
        window = max(1, STATES_NBYTES // (nbytes * len(distinct)))
        parts = [self._window(distinct, samples[start : start + window]) for start in range(0, len(samples), window)]
        kls = dict(zip(distinct, torch.cat(parts, 1), strict=True))
        return torch.stack([kls[each] for each in sets])

    def _window(self, sets: Sequence[Dropped], samples: Sequence[int]) -> Tensor:
        start = [self.embedded.read(sample, 1).to(self.bench.device) for sample in samples]
        states: dict[Dropped, list[Tensor]] = {frozenset(): start}  # dropped so far -> hidden states of each sample
        for index in range(len(self.skeleton.blocks)):
            sides = {(each & frozenset(range(index)), index in each) for each in sets}
            skipped = {before | {index}: states[before] for before, is_dropped in sides if is_dropped}
            run = [before for before, is_dropped in sides if not is_dropped]
            states = skipped | {before: states[before] for before in run}
            if run:
                block, name = self.skeleton.load_block(index, self.bench.device), self.skeleton.block_prefix(index)
                for before in run:
                    call = self.calls[index][1]
                    states[before] = [blockwise.run_block(block, call, hidden, name) for hidden in states[before]]
                self.skeleton.free()
            self.block_tokens += len(run) * len(samples) * self.seq_len
            process_memory.check(self.bench.max_memory)
        with lm_head.logits_of(self.skeleton, self.bench.device) as logits:
            rows = [self._compare(states[each], samples, logits) for each in sets]
        return torch.tensor(rows, dtype=torch.float64)

    def _compare(
        self, states: Sequence[Tensor], samples: Sequence[int], logits: Callable[[Tensor], Tensor]
    ) -> list[float]:
        parts = divergences.slices(self.seq_len, self.skeleton.vocab_size)
        values = []
        for sample, hidden in zip(samples, states, strict=True):
            row = self.reference.row(sample, self.bench.device)
            sums = [reference_logprobs.divergence(row, part, logits(hidden[:, part])) for part in parts]
            values.append(math.fsum(sums) / self.seq_len)
        return values
