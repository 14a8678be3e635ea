"""Measure the inputs of a block's linears: static scales of those that are quantized, and which of them go unread.

A static scale is that of the largest magnitude. For activation sparsity there are thresholds, shares, and low-rank
parts for what is not read:

- Thresholds (TEAL, arXiv 2408.14690): a quantile of the scores of a linear's inputs over the calibration text, behind
  the quantized prefix. Scores are counted in bins of 0.1% of their size, so that thresholds depend neither on batches
  nor on the order of samples, and the share that is reached is exact. The first tokens of a sample are left out: their
  inputs are others than those of all later ones.
- Scores: |x_j| (TEAL), or |x_j| ||W_j|| with the norm of its column (WINA, arXiv 2505.19427). WINA also turns the
  residual so that columns become orthogonal, which takes a product of its size at run time in every block; that is not
  done here.
- Shares: alike, or TEAL's greedy search: of all linears the one is raised whose next step changes the block's output
  least, until the share weighted by sizes is reached; a step is as many weights for each. Or an evolutionary search
  that starts with equal shares and moves parts of them from one linear to another, which is ours. It is better than
  equal shares where the greedy search is worse (docs/results/sparsity.md), perhaps because a greedy step is coarse for
  small linears (keys and values of few heads); that was not tested.
- R-Sparse (arXiv 2504.19449), score rank: what is not read goes through the largest singular vectors of the weight,
  y = W (x * mask) + U S V^T (x * (1 - mask)), by WINA's scores, which are theirs with all ranks. The search is for the
  share of the multiplications that columns take, in each linear.

Searches compare outputs of the block with its original weights. That is all of what they know of other blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.calib import stats as calib_stats
from compress.formats import lowrank, transforms
from compress.model.blockwise import QUANTIZED, BlockPass, run_block
from compress.model.skeleton import Skeleton
from compress.quant import incoherence
from compress.run import sizes
from compress.run.calibration_stream import CalibrationStream
from compress.runtime.activation_quant import LargestInput
from compress.types import IN_THRESHOLD, LayerPlan, LowRank, SparseInputs, Sparsity

FIRST_TOKENS = 4  # tokens of a sample whose inputs are not counted
DROPPED_BITS = 13  # low bits of a float32 score are dropped: bins are a thousandth of it wide
STEP = 0.05  # a search raises the share of a linear by so much of the weights of the block
MOST = 0.95  # the largest share of a linear
GENERATIONS, CHILDREN = 24, 4  # the evolutionary search has so many generations, and children in each
TINY = 1e-30


class InputRange:
    """The largest magnitude of a linear's inputs, behind the operations that are stored around its weight."""

    def __init__(self, layer: LayerPlan, seed: int) -> None:
        self.layer, self.seed, self.largest = layer, seed, LargestInput()

    @property
    def top(self) -> Tensor | None:
        """The largest magnitude so far, float32 []; None before any input."""
        return self.largest.top

    def add(self, inputs: Tensor) -> None:
        """Add inputs [..., in_features]."""
        drawn = incoherence.draw_on_device(self.layer, self.seed, inputs)
        self.largest.add(transforms.apply_input(inputs, self.layer.stored.ops, drawn))

    def widen(self, top: Tensor | None) -> None:
        """Add a magnitude that another process, or another expert, has seen."""
        if top is not None:
            self.largest.add(top.reshape(1))

    def in_scale(self) -> Tensor:
        """Return the static scale, float32 [1]; NumericalError where no input came, or one that is not finite."""
        assert self.layer.stored.activations is not None, "the caller has asked for a static scale"
        return self.largest.in_scale(self.layer.stored.activations, self.layer.spec.name)


class ScoreCounts:
    """How often scores of a linear's inputs come, by their size: |x_j|, or that times weights [in]."""

    def __init__(self, weights: Tensor | None, device: torch.device | str = "cpu") -> None:
        self.weights = weights
        self.counts = torch.zeros(1 << (31 - DROPPED_BITS), dtype=torch.int64, device=device)

    def add(self, inputs: Tensor) -> None:
        """Count scores of inputs [samples, tokens, in], without the first tokens of samples; of [tokens, in], all."""
        scores = (inputs[..., FIRST_TOKENS:, :] if inputs.dim() > 2 else inputs).float().abs()
        scores = scores if self.weights is None else scores * self.weights
        bins = scores.flatten().view(torch.int32) >> DROPPED_BITS
        self.counts += torch.bincount(bins, minlength=len(self.counts))

    def threshold(self, share: float) -> tuple[float, float]:
        """Return the score from which inputs are read so that about a `share` is not; and the share that is not.

        Zeros are never read. Without any inputs the threshold is 0.
        """
        below = self.counts.cumsum(0)
        total = int(below[-1])
        if not total:
            return 0.0, 0.0
        wanted = torch.tensor(share * total, dtype=torch.float64, device=below.device)
        first = int(torch.searchsorted(below.double(), wanted).clamp(0, len(below) - 2))  # the bin of the quantile
        near = min((each for each in (first, first + 1) if each), key=lambda each: abs(int(below[each - 1]) - wanted))
        edge = torch.tensor(near << DROPPED_BITS, dtype=torch.int32).view(torch.float32)
        return float(edge), int(below[near - 1]) / total


class SparseLinear:
    """One linear of a block: the scores of its inputs, and what it stores for any share."""

    def __init__(self, layer: LayerPlan, linear: nn.Linear) -> None:
        assert layer.scheme.sparsity is not None, "the caller has asked for thresholds"
        self.layer, self.linear, self.asked = layer, linear, layer.scheme.sparsity
        weight = linear.weight.detach()
        self.norms = None if self.asked.score == "magnitude" else weight.float().norm(dim=0)
        self.scores = ScoreCounts(self.norms, weight.device)
        self._factors: tuple[Tensor, Tensor] | None = None

    def store(self, share: float, columns: float) -> SparseInputs:
        """Return what is stored at a share of unread inputs; columns: as of `Sparsity`, for the score rank."""
        edge, reached = self.scores.threshold(share)
        threshold = torch.tensor([edge], device=self.linear.weight.device)
        if self.norms is not None:
            threshold = threshold / self.norms.clamp(min=TINY)
        tensors = {IN_THRESHOLD: threshold.clamp(max=torch.finfo(torch.float32).max)}
        if not self.asked.has_rest_part:
            return SparseInputs(self.asked.for_linear(reached), tensors)
        part = LowRank(self.asked.rank(self.layer.spec.shape, columns))
        a, b = (factor[: part.rank] for factor in self._singular())
        tensors |= {lowrank.PREFIX + name: each for name, each in lowrank.pack(a, b, part).items()}
        return SparseInputs(self.asked.for_linear(reached), tensors, part)

    def _singular(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [rank, out] of all ranks, the largest singular value first."""
        if self._factors is None:
            u, s, v = torch.linalg.svd(self.linear.weight.detach().float(), full_matrices=False)
            root = s.sqrt()[:, None]
            self._factors = root * v, root * u.T
        return self._factors


Settings = dict[str, float]  # linear -> its share, or the share of its multiplications that columns take


class UnreadTrial:
    """A block on some of the calibration text, whose linears leave inputs unread."""

    def __init__(self, linears: Mapping[str, SparseLinear], run: Callable[[], Iterable[Tensor]]) -> None:
        """run: gives the block's output [samples, tokens, hidden] for each batch."""
        self.linears, self.run = linears, run
        self.targets = [output.float() for output in run()]
        self.known: dict[tuple[tuple[str, float], ...], float] = {}

    def store(self, name: str, setting: float) -> SparseInputs:
        """Return what a linear stores at a setting of the search."""
        linear = self.linears[name]
        if linear.asked.has_rest_part:
            return linear.store(linear.asked.unread(setting), setting)
        return linear.store(setting, 1.0)

    def error(self, settings: Settings) -> float:
        """Return the squared distance of the block's output from that of all inputs."""
        key = tuple(sorted(settings.items()))
        if key not in self.known:
            with _unread(self.linears, {name: self.store(name, each) for name, each in settings.items() if each}):
                outputs = list(self.run())
            pairs = zip(outputs, self.targets, strict=True)
            self.known[key] = sum(
                float((y.float() - target)[..., FIRST_TOKENS:, :].square().sum(dtype=torch.float64))
                for y, target in pairs
            )
        return self.known[key]


@contextmanager
def _unread(linears: Mapping[str, SparseLinear], stored: Mapping[str, SparseInputs]):  # type: ignore[no-untyped-def]
    """While active, linears of a block do without the inputs that what is stored says."""
    handles: list[RemovableHandle] = []
    for name, each in stored.items():
        module, rest = linears[name].linear, dict[str, Tensor]()
        threshold = each.tensors[IN_THRESHOLD]
        factors = (
            None
            if each.lowrank is None
            else lowrank.part_factors(each.tensors, each.lowrank, linears[name].layer.spec.shape, module.weight.dtype)
        )

        def before(_: nn.Module, args: tuple[Tensor], threshold=threshold, rest=rest) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
            read = torch.where(args[0].abs() < threshold, 0, args[0])
            rest["x"] = args[0] - read
            return (read,)

        def after(_: nn.Module, __: tuple[Tensor], y: Tensor, factors=factors, rest=rest) -> Tensor:  # type: ignore[no-untyped-def]
            unread = rest.pop("x")
            return y if factors is None else y + unread @ factors[0].T @ factors[1]

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class BlockInputs:
    """The inputs of a block's linears over the calibration text, behind the quantized prefix."""

    def __init__(self, stream: CalibrationStream, skeleton: Skeleton, index: int, block: nn.Module, seed: int) -> None:
        self.stream, self.skeleton, self.index, self.block, self.seed = stream, skeleton, index, block, seed

    def scales(self, layers: Sequence[LayerPlan]) -> dict[str, Tensor]:
        """Return linear -> the static scale of its inputs, float32 [1], in one pass of the stream if any has one."""
        static = {x.spec.name: x for x in layers if sizes.needs_in_scale(x)}
        if not static:
            return {}
        ranges = {name: InputRange(layer, self.seed) for name, layer in static.items()}
        self._watch({name: inputs.add for name, inputs in ranges.items()})
        for tops in self.stream.ranks.gather({name: inputs.top for name, inputs in ranges.items()}):
            for name, top in tops.items():
                ranges[name].widen(top)
        for name, layer in static.items():
            if ranges[name].top is None and layer.spec.is_expert:  # seldom chosen: as the largest of its siblings
                siblings = [other for other in static if other.rpartition(".")[2] == name.rpartition(".")[2]]
                for top in [ranges[other].top for other in siblings if static[other].spec.is_expert]:
                    ranges[name].widen(top)
        return {name: inputs.in_scale() for name, inputs in ranges.items()}

    def sparse(self, layers: Sequence[LayerPlan]) -> dict[str, SparseInputs]:
        """Return linear -> what it stores for inputs that go unread, by one pass of the stream and a search."""
        linears = {
            x.spec.name: SparseLinear(x, self.skeleton.linear(self.block, x.spec.name))
            for x in layers
            if sizes.needs_thresholds(x)
        }
        if not linears:
            return {}
        self._watch({name: each.scores.add for name, each in linears.items()})
        of_all = self.stream.ranks.gather({name: each.scores.counts.cpu() for name, each in linears.items()})
        for name, each in linears.items():
            each.scores.counts = torch.stack([counts[name] for counts in of_all]).sum(0)
        prefix = self.skeleton.block_prefix(self.index).rstrip(".")

        def run() -> Iterator[Tensor]:
            batches = self.stream.batches(self.index, self.stream.slices[:1])
            return (run_block(self.block, call, hidden, prefix) for hidden, call in batches)

        return choose(linears, run, self.seed)

    def _watch(self, actions: Mapping[str, Callable[[Tensor], None]]) -> None:
        """Give the inputs of linears to what watches each, in one pass of the stream."""
        hooks = [(self.skeleton.linear(self.block, name), action) for name, action in actions.items()]
        watched = BlockPass(QUANTIZED, None, lambda _: calib_stats.hooked(hooks))
        self.stream.forward(self.index, self.block, "calibrating", watched)


def choose(
    linears: Mapping[str, SparseLinear], run: Callable[[], Iterable[Tensor]], seed: int
) -> dict[str, SparseInputs]:
    """Return what each linear of a block stores; its scores have been counted."""
    chosen: dict[str, SparseInputs] = {}
    for asked in dict.fromkeys(each.asked for each in linears.values()):
        own = {name: each for name, each in linears.items() if each.asked == asked}
        trial = UnreadTrial(own, run) if asked.levels != "uniform" else None
        settings = dict.fromkeys(own, asked.columns if asked.has_rest_part else asked.share)
        if trial is not None:
            is_raised = asked.levels == "greedy"
            settings = raise_shares(trial, asked.share) if is_raised else evolve(trial, settings, asked, seed)
        for name, each in own.items():
            share = asked.unread(settings[name]) if asked.has_rest_part else settings[name]
            chosen[name] = each.store(share, settings[name])
    return chosen


def raise_shares(trial: UnreadTrial, share: float) -> Settings:
    """Return TEAL's shares of a block's linears, whose mean over all weights is `share`, or as near as MOST allows."""
    total = sum(each.layer.spec.numel for each in trial.linears.values())
    sizes = {name: each.layer.spec.numel / total for name, each in trial.linears.items()}
    settings, reached = dict.fromkeys(sizes, 0.0), 0.0
    while share - reached > 1e-9:
        step = min(STEP, share - reached)
        options = {
            name: {**settings, name: min(MOST, settings[name] + step / size)}
            for name, size in sizes.items()
            if settings[name] < MOST
        }
        if not options:
            break
        settings = min(options.values(), key=trial.error)
        reached = sum(sizes[name] * each for name, each in settings.items())
    return settings


def evolve(trial: UnreadTrial, settings: Settings, asked: Sparsity, seed: int) -> Settings:
    """Return the best settings of a search that changes one linear at a time, or two of which one takes what one gives.

    A child that is not better than its parent is forgotten: never worse than where it starts.
    """
    if len(trial.linears) == 1 and not asked.has_rest_part:  # nobody gives or takes
        return settings
    draw, sizes = random.Random(seed), {name: each.layer.spec.numel for name, each in trial.linears.items()}
    for _ in range(GENERATIONS):
        children = [settings]
        for _ in range(CHILDREN):
            first, second = draw.sample(sorted(sizes), 2) if len(sizes) > 1 else [*sizes] * 2
            moved = draw.choice((0.5, 1.0, 2.0)) * STEP
            if asked.has_rest_part:
                values = {first: min(1.0, max(0.05, settings[first] + draw.choice((-1, 1)) * moved))}
            else:
                room = max(0.0, MOST - settings[second]) * sizes[second] / sizes[first]
                moved = min(moved, settings[first], room)
                taken = moved * sizes[first] / sizes[second]
                values = {first: settings[first] - moved, second: settings[second] + taken}
            children.append({**settings, **values})
        settings = min(children, key=trial.error)
    return settings
