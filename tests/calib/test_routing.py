"""What routing shows of experts, against plain loops in float64 and whatever the batch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compress.calib import expert_routing
from compress.calib.expert_routing import Routing, measure, output_changes, scores, setting, thresholds
from compress.errors import UnsupportedModelError
from compress.model.blockwise import BlockArgs, BlockInputs
from compress.runtime.expert_layouts import PROJECTIONS
from compress.runtime.experts import Experts, is_fused_experts
from compress.types import ExpertPruning, Pruning
from helpers.pico import VOCAB_SIZE, build

SAMPLES, LENGTH = 6, 20
TOKENS = SAMPLES * LENGTH
WHERE, NAME = "model.layers.1", "model.layers.1.mlp.experts"
CONFIG = ExpertPruning(prune=True, layers=1, protected=0.1)
KINDS = ["mixtral", "qwen3_moe", "not normalised"]


class Made:
    """The second block of a model, its experts taken apart, and what reaches it."""

    def __init__(self, kind: str) -> None:
        changes = {"num_experts_per_tok": 3, "norm_topk_prob": False} if kind == "not normalised" else {}
        model = build("qwen3_moe" if changes else kind, changes).requires_grad_(False)
        model.set_experts_implementation("eager")
        self.top_k, self.normalised = model.config.num_experts_per_tok, not changes
        tokens = torch.randint(2, VOCAB_SIZE, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))
        self.block = model.get_submodule(WHERE)
        caught: list[tuple[Tensor, BlockArgs]] = []
        inputs: list[Tensor] = []
        handles = [
            self.block.register_forward_pre_hook(
                lambda _, args, kwargs: caught.append((args[0], BlockArgs(args[1:], kwargs))), with_kwargs=True
            ),
            self.block.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1))),
        ]
        out: list[Tensor] = []
        handles.append(self.block.register_forward_hook(lambda _, args, output: out.append(output)))
        model(input_ids=tokens, use_cache=False)
        for handle in handles:
            handle.remove()
        (self.hidden, self.call), self.x, self.out = caught[0], inputs[0], out[0].flatten(0, 1)
        for name, module in list(self.block.named_modules()):
            if is_fused_experts(module):
                self.block.set_submodule(name, Experts.from_fused(module))
        self.experts: Experts = self.block.mlp.experts
        self.probabilities = (self.x.double() @ self.block.mlp.gate.weight.double().T).softmax(1)
        self.chosen, self.index = self.probabilities.topk(self.top_k)
        self.weights = self.chosen / self.chosen.sum(1, keepdim=True) if self.normalised else self.chosen

    def batches(self, size: int = SAMPLES) -> BlockInputs:
        return lambda: [(part, self.call) for part in self.hidden.split(size)]

    def output(self, weights: dict[str, Tensor], index: Tensor, routed: Tensor) -> Tensor:
        """The experts' output in float64, token by token; weights: those of linears that are other ones."""
        out = torch.zeros_like(self.x, dtype=torch.float64)
        for e in range(len(self.experts)):
            own = {p: f"{NAME}.{e}.{p}" for p in PROJECTIONS}
            gate, up, down = (
                weights.get(full, self.experts.get_parameter(f"{e}.{p}.weight")).double() for p, full in own.items()
            )
            for t, slot in torch.nonzero(index == e).tolist():
                x = self.x[t].double()
                out[t] += routed[t, slot] * (down @ (nn.functional.silu(gate @ x) * (up @ x)))
        return out


@pytest.fixture(scope="module")
def made() -> Callable[[str], Made]:
    found: dict[str, Made] = {}

    def get(kind: str) -> Made:
        if kind not in found:
            found[kind] = Made(kind)
        return found[kind]

    return get


def noisy(m: Made, expert: int, projections: tuple[str, ...] = PROJECTIONS, scale: float = 0.1) -> dict[str, Tensor]:
    """Weights of an expert, not quite its own."""
    generator = torch.Generator().manual_seed(expert)
    own = {p: m.experts.get_parameter(f"{expert}.{p}.weight") for p in projections}
    return {
        f"{NAME}.{expert}.{p}": w + scale * w.std() * torch.randn(w.shape, generator=generator) for p, w in own.items()
    }


# ---------------------------------------------------------------- routing


@pytest.mark.parametrize("kind", KINDS)
def test_counts_probabilities_ratios_and_magnitudes(made: Callable[[str], Made], kind: str) -> None:
    m = made(kind)
    got = measure(m.block, WHERE, m.batches())
    assert set(got) == {NAME}
    stats = got[NAME]
    experts = len(m.experts)
    counts = [sum(e in row for row in m.index.tolist()) for e in range(experts)]
    mass = [sum(float(p[row.index(e)]) for p, row in zip(m.chosen, m.index.tolist(), strict=True) if e in row)
            for e in range(experts)]  # fmt: skip
    assert stats.counts.tolist() == counts and stats.tokens == TOKENS and stats.top_k == m.top_k
    assert stats.is_softmax and stats.harm is None
    np.testing.assert_allclose(stats.mass.numpy(), mass, rtol=1e-5)
    np.testing.assert_allclose(stats.share.numpy(), np.array(counts) / (TOKENS * m.top_k), rtol=1e-12)
    np.testing.assert_allclose(stats.routing.numpy(), np.array(mass) / sum(mass), rtol=1e-5)
    np.testing.assert_allclose(stats.ratios.numpy(), m.chosen[:, -1] / m.chosen[:, 0], rtol=1e-5)
    np.testing.assert_allclose(stats.magnitudes.numpy(), m.x.double().abs().sum(1), rtol=1e-5)
    if m.normalised:  # the weights would say something else
        assert abs(stats.mass.sum() - TOKENS) > 0.05 * TOKENS
    assert len(m.experts._forward_pre_hooks) == 0 and not m.block.mlp.gate._forward_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_batch_size_and_order_of_samples_do_not_count(made: Callable[[str], Made], kind: str) -> None:
    m = made(kind)
    whole = measure(m.block, WHERE, m.batches(), CONFIG)[NAME]
    for size in (1, 4):
        parts = measure(m.block, WHERE, lambda size=size: list(m.batches(size)())[::-1], CONFIG)[NAME]
        assert torch.equal(parts.counts, whole.counts)
        torch.testing.assert_close(parts.mass, whole.mass, rtol=1e-5, atol=0)
        torch.testing.assert_close(parts.ratios.sort().values, whole.ratios.sort().values)
        assert parts.dropped == pytest.approx(whole.dropped, abs=1.01 / (TOKENS * m.top_k))  # a token at the median
        assert parts.harm == pytest.approx(whole.harm, rel=0.02)
        assert parts.taken == pytest.approx(whole.taken, abs=0.02)


class Other(nn.Module):
    """A block of nothing but experts, with a router of another kind."""

    def __init__(self, kind: str, top_k: int = 2) -> None:
        super().__init__()
        self.kind, self.top_k = kind, top_k
        self.router = nn.Linear(64, 4)
        fused = build("mixtral").get_submodule("model.layers.0.mlp.experts")
        self.experts = Experts.from_fused(fused)
        self.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.flatten(0, 1)
        logits = self.router(x)
        scores = logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1)
        if self.kind == "other choice":  # the softmax weighs, something else chooses
            index = (-scores).topk(self.top_k).indices
        else:
            index = scores.topk(self.top_k, sorted=False).indices
        weights = scores.gather(1, index)
        out = self.experts(hidden_states=x, top_k_weights=weights, top_k_index=index)
        return hidden + out.view_as(hidden)


def stream(samples: int = 3) -> BlockInputs:
    hidden = torch.randn(samples, 10, 64, generator=torch.Generator().manual_seed(1))
    return lambda: [(part, BlockArgs((), {})) for part in hidden.split(1)]


@pytest.mark.parametrize(
    ("kind", "top_k", "is_softmax"),
    [("softmax", 2, True), ("softmax", 1, True), ("sigmoid", 2, False), ("other choice", 2, False)],
)
def test_other_routers_give_their_weights(kind: str, top_k: int, is_softmax: bool) -> None:
    torch.manual_seed(0)
    block = Other(kind, top_k)
    stats = measure(block, "b", stream())["b.experts"]
    x = torch.cat([hidden.flatten(0, 1) for hidden, _ in stream()()])
    logits = block.router(x)
    given = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
    index = (-given if kind == "other choice" else given).topk(top_k).indices
    expected = torch.zeros(4).index_add_(0, index.flatten(), given.gather(1, index).flatten())
    assert stats.is_softmax == is_softmax and stats.top_k == top_k
    torch.testing.assert_close(stats.mass.float(), expected)


def test_a_block_without_experts() -> None:
    block = build("llama").get_submodule(WHERE)
    assert measure(block, WHERE, lambda: pytest.fail("no pass is needed"), CONFIG) == {}


# ---------------------------------------------------------------- output changes


@pytest.mark.parametrize("kind", KINDS)
def test_output_changes_are_those_of_running_all_experts(made: Callable[[str], Made], kind: str) -> None:
    m = made(kind)
    changes = {
        "all": noisy(m, 0),
        "same expert": noisy(m, 0, scale=0.3),
        "gate and up": noisy(m, 1, PROJECTIONS[:2]),
        "down": noisy(m, 2, PROJECTIONS[2:]),
        "none": noisy(m, 3, scale=0.0),
    }
    original = m.output({}, m.index, m.weights)
    got = output_changes(m.block, WHERE, m.batches(), changes)
    for key, change in changes.items():
        norms = (m.output(change, m.index, m.weights) - original).norm(dim=1)
        assert got[key] == pytest.approx((norms.sum().item(), norms.square().sum().item()), rel=1e-4)
        alone = output_changes(m.block, WHERE, m.batches(4), {key: change})
        assert list(alone) == [key] and alone[key] == pytest.approx(got[key], rel=1e-5)
    assert got["none"] == (0, 0) and got["same expert"].norms > 2 * got["all"].norms > 0


@torch.no_grad()
def test_output_changes_in_bfloat16_are_not_lost_in_rounding(made: Callable[[str], Made]) -> None:
    m = made("mixtral")
    block = copy.deepcopy(m.block).bfloat16()
    rotary = {"position_embeddings": tuple(t.bfloat16() for t in m.call.kwargs["position_embeddings"])}
    call = m.call._replace(kwargs={**m.call.kwargs, **rotary})
    small = {
        f"{NAME}.0.up_proj": block.mlp.experts.get_parameter("0.up_proj.weight").float() * (1 + 2**-12)
    }  # less than bfloat16 can say
    got = output_changes(block, WHERE, lambda: [(m.hidden.bfloat16(), call)], {0: small})[0].norms
    other = Experts.from_fused(m.experts.fuse(torch.float32))
    original = {f"{NAME}.0.up_proj": other.get_parameter("0.up_proj.weight") * (1 + 2**-12)}
    expected = output_changes(m.block, WHERE, m.batches(), {0: original})[0].norms
    assert got == pytest.approx(expected, rel=0.05)  # routing in bfloat16 is a little different


def test_an_expert_without_tokens_changes_nothing() -> None:
    block = Other("softmax")
    block.router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -100.0]))
    name = "b.experts.3.up_proj"
    assert output_changes(block, "b", stream(), {1: {name: torch.ones(96, 64)}}) == {1: (0.0, 0.0)}
    stats = measure(block, "b", stream())
    assert stats["b.experts"].counts[3] == 0 and scores(stats)["b.experts.3"] == {"share": 0.0, "routing": 0.0}


@pytest.mark.parametrize(
    "names",
    [(f"{NAME}.0.up_proj", f"{NAME}.1.up_proj"), (f"{WHERE}.mlp.gate",), ("model.layers.0.mlp.experts.0.up_proj",)],
)
def test_linears_that_are_not_of_one_expert(made: Callable[[str], Made], names: tuple[str, ...]) -> None:
    m = made("mixtral")
    with pytest.raises(UnsupportedModelError, match="are not linears of one expert of model.layers.1"):
        output_changes(m.block, WHERE, m.batches(), {0: dict.fromkeys(names, torch.ones(1))})


# ---------------------------------------------------------------- pruning


@pytest.mark.parametrize("kind", KINDS)
def test_harm_is_that_of_running_without_the_dropped_experts(made: Callable[[str], Made], kind: str) -> None:
    m = made(kind)
    stats = measure(m.block, WHERE, m.batches(), CONFIG)[NAME]
    pruning = setting(stats, CONFIG)
    ratios, magnitudes = stats.ratios.double().numpy(), stats.magnitudes.numpy()
    assert pruning.threshold == pytest.approx(np.median(ratios), rel=1e-6)
    protected = magnitudes >= pruning.protected
    assert protected.sum() == int(0.1 * TOKENS)
    index = m.index.clone()
    index[:, -1][torch.from_numpy((ratios < pruning.threshold) & ~protected)] = 1000
    original, energy = m.output({}, m.index, m.weights), m.out.double().square().sum(1)

    def harm(taken: float) -> float:
        weights = m.weights.clone()
        for t in torch.nonzero(index[:, -1] == 1000).flatten():
            weights[t] *= 1 + taken * weights[t, -1] / weights[t, :-1].sum()
        return float(((m.output({}, index, weights) - original).square().sum(1) / energy).mean())

    assert pruning.taken == stats.taken and 0 <= stats.taken <= 1
    assert stats.harm == pytest.approx(harm(stats.taken), rel=1e-4) and stats.harm > 1e-4
    assert all(stats.harm <= harm(other) * (1 + 1e-5) for other in (0.0, stats.taken + 0.05, 1.0))
    assert stats.taken == 0 or stats.harm <= harm(stats.taken - min(0.05, stats.taken)) * (1 + 1e-5)
    assert stats.dropped == (index == 1000).sum() / index.numel() and 0.4 / m.top_k < stats.dropped < 0.5 / m.top_k
    assert m.experts.pruning is None


def made_up(harm: float | None, top_k: int = 2, tokens: int = 101) -> Routing:
    ratios = torch.linspace(0.0, 0.8, tokens)
    counts, mass = torch.tensor([tokens, tokens]), torch.tensor([60.0, 40.0]).double()
    return Routing(top_k, counts, mass, True, ratios, torch.arange(1, tokens + 1).float(), harm)


def test_thresholds_of_the_least_sensitive_blocks() -> None:
    harms = [0.4, 0.1, None, 0.3, 0.2]
    stats = {f"b{i}": made_up(harm) for i, harm in enumerate(harms)}
    stats["one"] = made_up(0.0, top_k=1)
    stats["zero"] = replace(made_up(0.0), ratios=torch.zeros(101))

    def chosen(layers: int, protected: float, prune: bool = True) -> dict[str, Pruning]:
        config = ExpertPruning(prune, layers, protected)
        return thresholds({name: (one.harm, setting(one, config)) for name, one in stats.items()}, config)

    got = chosen(3, 0.05)
    assert list(got) == ["b1", "b3", "b4"] and set(got.values()) == {got["b1"]}
    assert got["b1"].threshold == pytest.approx(0.4) and got["b1"].protected == 97.0
    assert chosen(1, 0.0) == {"b1": replace(got["b1"], protected=None)}
    assert list(chosen(10, 0.02)) == ["b0", "b1", "b3", "b4"]
    assert chosen(10, 0.02, prune=False) == {} and thresholds({}, ExpertPruning(True)) == {}


@pytest.mark.parametrize("count", [1, 2, 7, 8])
@pytest.mark.parametrize("q", [0.0, 0.05, 0.5, 1.0])
def test_quantiles_are_numpys(count: int, q: float) -> None:
    values = torch.rand(count, generator=torch.Generator().manual_seed(count))
    assert expert_routing._quantile(values, q) == pytest.approx(np.quantile(values.double().numpy(), q), rel=1e-12)


def test_facts_and_scores(made: Callable[[str], Made]) -> None:
    m = made("mixtral")
    stats = measure(m.block, WHERE, m.batches(), CONFIG)
    facts: dict[str, Any] = json.loads(json.dumps(stats[NAME].facts()))
    assert facts["counts"] == stats[NAME].counts.tolist() and facts["ratios"] == sorted(facts["ratios"])
    assert facts["harm"] == stats[NAME].harm and facts["tokens"] == TOKENS
    found = scores(stats)
    assert set(found) == {f"{NAME}.{e}" for e in range(4)}
    assert sum(row["share"] for row in found.values()) == pytest.approx(1)
    assert sum(row["routing"] for row in found.values()) == pytest.approx(1)
