"""Measure where a mixture of experts routes tokens, what each expert is worth, and which can be left out.

MC-MoE, Huang et al. 2024, arXiv:2410.06270. For the allocation of bits (PMQ) it takes of every expert i: phi_i, the
share of the routed (token, expert) pairs that it gets; w_i, the sum of its routing probabilities over its tokens, from
the softmax over all experts, before the weights of the chosen ones are brought to a sum of 1; and epsilon_i(o), how far
the output of the experts goes off when only expert i is stored as option o. That output is a sum over experts, weighted
by the router, which sees none of the change: epsilon is the weight times the change of the expert's own output, and no
other expert has to run. For pruning while the model runs (ODP) it takes the ratio of the smallest to the largest weight
of a token: its median over the tokens is the threshold beta below which the expert of the smallest weight is dropped,
in the blocks that this harms least, except for the tokens of the largest importance.

Where we differ. epsilon is a sum of norms over tokens, not of Frobenius norms over batches, which would depend on the
batch size. w is taken from a router's softmax only where that explains its weights; of other routers (sigmoid) the
weights are summed as they are, as `Routing.is_softmax` tells (with one expert a token its weight is no evidence). The
order of blocks comes from how much pruning changes the block's own output, which calibration shows, not from whole runs
with a block pruned. The experts that stay take over the share of a dropped weight that changes the output least; the
paper gives them all of it, which is right where experts resemble each other (small_moe of benchmarks/, all blocks
pruned, 24% of the pairs dropped: KL 0.0123 with all of it, 0.0086 with none, 0.0082 with the shares found, 0.13 to
0.21). A token's importance is ||h||_1 where the paper multiplies it by the mean attention that later tokens pay to it:
attention is not there where experts run, and that of later tokens would make a token depend on what follows. (The
released code, in a batch of one, sums attention over keys, which is 1 for each query: there, too, only ||h||_1 and the
position decide.) The largest 2% are found by a threshold on ||h||_1, from calibration, not within the sequence at hand.
In the same model 2% protected by ||h||_1, by attention times ||h||_1 or by chance gave the same KL to 1%.

Everything is a sum or a set over tokens: the batch size changes rounding only. What it does not do: it needs experts
that are told the routing (`Experts` of compress/runtime/experts.py itself), and thresholds are those of the calibration
text.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.model.blockwise import BlockInputs, attached, run_block
from compress.runtime.expert_layouts import ROUTED
from compress.runtime.experts import Experts, magnitude, prune
from compress.types import ExpertPruning, Pruning

RATIO_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)  # they go into the report
EXPLAINED = 0.02  # largest difference of weights that a softmax explains; bfloat16 has 0.004 of the value


class OutputChange(NamedTuple):
    """Sums over tokens of the change of the experts' output F(x)."""

    norms: float  # ||F(x) - F_changed(x)||_2: the paper's epsilon
    squares: float  # ||F(x) - F_changed(x)||_2^2


Key = TypeVar("Key", bound=Hashable)
Routed = Callable[[Tensor, Tensor, Tensor], None]  # hidden [tokens, hidden], index and weights [tokens, top_k]


@dataclass(frozen=True)
class Routing:
    """Figures of one experts module: what its router did with the calibration tokens."""

    top_k: int
    counts: Tensor  # [experts] int64, tokens that each expert got
    mass: Tensor  # [experts] float64, the sum of its probabilities over these tokens
    is_softmax: bool  # whether they are the probabilities of all experts, or else the weights after top-k
    ratios: Tensor  # [tokens] float32, smallest weight / largest
    magnitudes: Tensor  # [tokens] float32, ||h||_1
    harm: float | None = None  # of pruning: mean over tokens of ||change||^2 / ||block output||^2; None: not measured
    taken: float | None = None  # share of a dropped weight that the others best take over
    dropped: float | None = None  # share of the pairs that pruning drops

    @property
    def tokens(self) -> int:
        return self.ratios.numel()

    @property
    def share(self) -> Tensor:
        """phi [experts] float64: share of all (token, expert) pairs; sums to 1."""
        return self.counts.double() / max(1, int(self.counts.sum()))

    @property
    def routing(self) -> Tensor:
        """w [experts] float64, normalised to a sum of 1."""
        total = self.mass.sum()
        return self.mass / total if total > 0 else self.mass

    def facts(self) -> dict[str, Any]:
        """Return JSON values for the report; ratios: at the QUANTILES."""
        quantiles = [_quantile(self.ratios, q) for q in RATIO_QUANTILES]
        return {
            "tokens": self.tokens,
            "top_k": self.top_k,
            "counts": self.counts.tolist(),
            "share": self.share.tolist(),
            "routing": self.routing.tolist(),
            "is_softmax": self.is_softmax,
            "ratios": quantiles,
            "harm": self.harm,
            "taken": self.taken,
            "dropped": self.dropped,
        }


def scores(stats: Mapping[str, Routing]) -> dict[str, dict[str, float]]:
    """Return expert (model.layers.0.mlp.experts.3) -> its "share" and "routing"."""
    return {
        f"{name}.{i}": {"share": share, "routing": weight}
        for name, routing in stats.items()
        for i, (share, weight) in enumerate(zip(routing.share.tolist(), routing.routing.tolist(), strict=True))
    }


# ---------------------------------------------------------------- pruning


def setting(routing: Routing, config: ExpertPruning) -> Pruning | None:
    """Return what to prune a module with; None where a token has one expert only, or weights that say nothing."""
    median = _quantile(routing.ratios, 0.5)
    if routing.top_k < 2 or not median > 0:
        return None
    count = int(config.protected * routing.tokens)
    cutoff = routing.magnitudes.topk(count).values[-1].item() if count else 0.0
    taken = 1.0 if routing.taken is None else routing.taken
    return Pruning(min(median, 1.0), cutoff if cutoff > 0 else None, taken)


def thresholds(found: Mapping[str, tuple[float | None, Pruning | None]], config: ExpertPruning) -> dict[str, Pruning]:
    """Choose the `layers` modules that pruning harms least; return them in model order with what each is pruned with.

    found: experts module, of all blocks -> its `Routing.harm`, measured with the same config, and its `setting`.
    """
    harms = {name: harm for name, (harm, pruning) in found.items() if harm is not None and pruning is not None}
    chosen = set(sorted(harms, key=lambda name: harms[name])[: config.layers if config.prune else 0])
    return {name: pruning for name, (_, pruning) in found.items() if name in chosen and pruning is not None}


# ---------------------------------------------------------------- measuring


@torch.no_grad()
def measure(
    block: nn.Module, where: str, batches: BlockInputs, config: ExpertPruning | None = None
) -> dict[str, Routing]:
    """Return experts module (full name) -> its routing; a second pass measures the harm of pruning by `config`.

    block: with its experts unfused and not pruned; where: its full name; {} if it has no experts.
    """
    modules = experts_of(block, where)
    if not modules:
        return {}
    sums = {name: _Sum(module) for name, module in modules.items()}
    with _outputs(block, {len(module) + module.layout.identities for module in modules.values()}) as outputs:

        def noting(name: str) -> Routed:
            return lambda hidden, index, weights: sums[name].add(hidden, index, weights, outputs)

        with watch_experts({module: noting(name) for name, module in modules.items()}):
            for hidden, call in batches():
                run_block(block, call, hidden, where)
                outputs.clear()
    stats = {name: total.finish() for name, total in sums.items()}
    if config is None or not config.prune:
        return stats
    wanted = {name: pruning for name in stats if (pruning := setting(stats[name], config)) is not None}
    harms = _harm(block, where, batches, wanted)
    return {name: replace(stats[name], **harms.get(name, {})) for name in stats}


class _Sum:
    """The running sums of one experts module."""

    def __init__(self, module: Experts) -> None:
        self.experts, self.top_k, self.is_softmax = len(module), 0, True
        self.counts = torch.zeros(self.experts, dtype=torch.int64)
        self.weights = torch.zeros(self.experts + 1, dtype=torch.float64)
        self.probabilities = torch.zeros_like(self.weights)
        self.ratios: list[Tensor] = []
        self.magnitudes: list[Tensor] = []

    def add(self, hidden: Tensor, index: Tensor, weights: Tensor, outputs: Iterable[Tensor]) -> None:
        """Add one routing: hidden [tokens, hidden], index and weights [tokens, top_k]; outputs: of modules before."""
        index, weights = index.cpu(), weights.float().cpu()
        self.top_k = index.shape[1]
        flat = index.flatten().clamp(max=self.experts)  # what lies behind is no expert
        self.counts += flat.bincount(minlength=self.experts + 1)[:-1]
        self.weights.index_add_(0, flat, weights.flatten().double())
        probabilities = _probabilities(outputs, index, weights) if self.is_softmax else None
        self.is_softmax = probabilities is not None
        if probabilities is not None:
            self.probabilities.index_add_(0, flat, probabilities.flatten().double())
        largest = weights.amax(1)
        self.ratios.append(torch.where(largest > 0, weights.amin(1) / largest, 1.0))
        self.magnitudes.append(magnitude(hidden).cpu())

    def finish(self) -> Routing:
        mass = (self.probabilities if self.is_softmax else self.weights)[:-1]
        none = torch.zeros(0)
        ratios, magnitudes = (torch.cat([none, *parts]) for parts in (self.ratios, self.magnitudes))
        return Routing(self.top_k, self.counts, mass, self.is_softmax, ratios, magnitudes)


def _probabilities(outputs: Iterable[Tensor], index: Tensor, weights: Tensor) -> Tensor | None:
    """Return probabilities [tokens, top_k] of the chosen experts: softmax of an output that explains the weights."""
    relative = weights / weights.sum(1, keepdim=True)
    for output in outputs:
        if output.numel() % output.shape[-1] or output.numel() // output.shape[-1] != index.shape[0]:
            continue
        probabilities = output.reshape(index.shape[0], -1).float().cpu().softmax(1)
        chosen, largest = probabilities.gather(1, index), probabilities.topk(index.shape[1]).values
        sums = chosen.sum(1, keepdim=True)
        errors = (largest.sum(1, keepdim=True) - sums).abs().max(), (chosen / sums - relative).abs().max()
        if max(errors) <= EXPLAINED:
            return chosen
    return None


@torch.no_grad()
def _harm(
    block: nn.Module, where: str, batches: BlockInputs, prunings: Mapping[str, Pruning]
) -> dict[str, dict[str, Any]]:
    """Return experts module -> `harm`, `taken` and `dropped` of pruning it alone.

    Where the others take over the share s of a dropped weight, the output is off by a + s b, a being off by the dropped
    part and b by all that the others can gain: the best s follows from the sums of |a|^2, ab and |b|^2.
    """
    modules = {name: module for name, module in experts_of(block, where).items() if name in prunings}
    products: dict[str, Tensor] = {}  # [3, tokens] float32 of the present batch: |a|^2, ab, |b|^2
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in modules}
    dropped, pairs, tokens = dict.fromkeys(modules, 0), dict.fromkeys(modules, 0), 0

    def noting(name: str, module: Experts) -> Routed:
        def note(hidden: Tensor, index: Tensor, weights: Tensor) -> None:
            left, rest = prune(hidden, index, weights, replace(prunings[name], taken=0.0), len(module))
            without = module.forward(hidden, left, rest).float()
            gain = (weights - rest).float().sum(1, keepdim=True) / rest.float().sum(1, keepdim=True)
            a, b = without - module.forward(hidden, index, weights).float(), without * gain
            products[name] = torch.stack([(a * a).sum(1), (a * b).sum(1), (b * b).sum(1)])
            dropped[name] += int((left != index).sum())
            pairs[name] += index.numel()

        return note

    with watch_experts({module: noting(name, module) for name, module in modules.items()}):
        for hidden, call in batches():
            out = run_block(block, call, hidden, where)
            energy = out.float().square().sum(-1).flatten().clamp(min=torch.finfo(torch.float32).tiny)
            tokens += energy.numel()
            for name, found in products.items():
                sums[name] += (found / energy).double().sum(1).cpu()
    stats: dict[str, dict[str, Any]] = {}
    for name, (aa, ab, bb) in ((name, total.tolist()) for name, total in sums.items() if tokens):
        taken = min(max(-ab / bb, 0.0), 1.0) if bb > 0 else 1.0
        harm = max(aa + 2 * taken * ab + taken**2 * bb, 0.0) / tokens
        stats[name] = {"harm": harm, "taken": taken, "dropped": dropped[name] / pairs[name]}
    return stats


@torch.no_grad()
def output_changes(
    block: nn.Module, where: str, batches: BlockInputs, changes: Mapping[Key, Mapping[str, Tensor]]
) -> dict[Key, OutputChange]:
    """Return how far each change alone moves the experts' output, in one pass; every change is held in memory.

    changes: linear (full name, all of one expert) -> its weight [out, in], decoded; linears not named stay as they are.
    The expert's outputs are computed in float32 whatever the model's type, as their difference is small.
    """
    modules = experts_of(block, where)
    sums = dict.fromkeys(changes, OutputChange(0.0, 0.0))
    by_expert: dict[tuple[str, int], list[Key]] = {}
    for key, change in changes.items():
        owners = {name.rpartition(".")[0] for name in change}
        module, _, number = owners.pop().rpartition(".") if len(owners) == 1 else ("", "", "")
        if module not in modules or not number.isdigit():
            raise UnsupportedModelError(f"{sorted(change)} are not linears of one expert of {where}")
        by_expert.setdefault((module, int(number)), []).append(key)

    def noting(name: str, module: Experts) -> Routed:
        mine = {number: keys for (owner, number), keys in by_expert.items() if owner == name}

        def note(hidden: Tensor, index: Tensor, weights: Tensor) -> None:
            for number, keys in mine.items():
                token, position = torch.where(index == number)
                x, weight = hidden[token].float(), weights[token, position].float()
                linears = dict(module.get_submodule(str(number)).named_children())
                original = {name: linear.get_parameter("weight") for name, linear in linears.items()}
                expected = _output(module, number, x, original)
                for key in keys:
                    changed = {linear.rpartition(".")[2]: value for linear, value in changes[key].items()}
                    change = _output(module, number, x, {**original, **changed}).sub_(expected)
                    norms = (change.norm(dim=-1) * weight.abs()).double()  # [tokens of the expert]
                    sums[key] = OutputChange(
                        sums[key].norms + norms.sum().item(), sums[key].squares + norms.square().sum().item()
                    )

        return note

    names = {name for name, _ in by_expert}
    with watch_experts({module: noting(name, module) for name, module in modules.items() if name in names}):
        for hidden, call in batches() if names else ():
            run_block(block, call, hidden, where)
    return sums


def _output(experts: Experts, number: int, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the output of an expert with these weights, and its own biases, for x [tokens, hidden] float32."""

    def project(name: str, x: Tensor) -> Tensor:
        y = x @ weights[name].to(x.device, x.dtype).T
        bias = experts.get_submodule(f"{number}.{name}").bias
        return y + bias.to(y.dtype) if isinstance(bias, Tensor) else y

    return experts.compute(number, x, project)


# ---------------------------------------------------------------- watching a block


def experts_of(block: nn.Module, where: str) -> dict[str, Experts]:
    """Return the modules of experts in a block, by their full names.

    Raises UnsupportedModelError for one whose routing is not seen.
    """
    modules = {f"{where}.{name}": m for name, m in block.named_modules() if isinstance(m, Experts)}
    for name, module in modules.items():
        if module.layout.call != ROUTED:
            raise UnsupportedModelError(
                f"{name} is not told which experts a token goes to: experts cannot be weighed or pruned; remove "
                "`experts` from the recipe, and take other units than experts to allocate"
            )
    return modules


def watch_experts(actions: Mapping[Experts, Routed]) -> AbstractContextManager[None]:
    """While active, call each action with the arguments of its module of experts."""

    def hook(action: Routed) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            action(*args, *(kwargs[key] for key in ("hidden_states", "top_k_index", "top_k_weights") if key in kwargs))

        return call

    return attached([m.register_forward_pre_hook(hook(act), with_kwargs=True) for m, act in actions.items()])


@contextmanager
def _outputs(block: nn.Module, widths: set[int]) -> Iterator[list[Tensor]]:
    """While active, list the outputs of the block's modules that are as wide as there are experts."""
    outputs: list[Tensor] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        outputs.extend(
            p for p in parts if isinstance(p, Tensor) and p.is_floating_point() and p.dim() and p.shape[-1] in widths
        )

    within = {part for module in block.modules() if isinstance(module, Experts) for part in module.modules()}
    with attached([module.register_forward_hook(note) for module in block.modules() if module not in within]):
        yield outputs


def _quantile(values: Tensor, q: float) -> float:
    """Interpolate between neighbours, as numpy does; 0 of nothing. torch's own takes 2^24 values at most."""
    if not values.numel():
        return 0.0
    ordered, position = values.double().sort().values, q * (values.numel() - 1)
    low = int(position)
    high = min(low + 1, values.numel() - 1)
    return float(ordered[low] + (position - low) * (ordered[high] - ordered[low]))
