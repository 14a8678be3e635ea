"""Streamed Hessians: exact sums, independence of batches, safe with few tokens, hooks that go away."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from compress.calib import stats as module
from compress.calib.stats import HessianSum, InputsSeenError, PassEnd, collect, expect, shrink, undo_shrinking
from compress.errors import NumericalError, UnsupportedModelError
from compress.runtime.expert_layouts import PROJECTIONS
from compress.runtime.experts import Experts
from compress.types import Stats
from helpers import problems
from helpers.pico import PICO


def summed(batches: list[Tensor], chunk: int) -> Stats:
    total = HessianSum(batches[0].shape[-1], torch.device("cpu"))
    for batch in batches:
        total.add(batch, chunk)
    return total.finish("layer")


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def test_sum_over_tokens() -> None:
    x = problems.inputs(96, 24)
    result = summed([x.view(4, 24, 24)], 24)
    assert result.hessian.dtype == torch.float32 and result.count == 96
    assert relative(result.hessian, x.double().T @ x.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_taken_in_float32(dtype: torch.dtype) -> None:
    """Half-precision inputs of 1000 would overflow float16 and lose 8 bits in bfloat16."""
    x = (problems.random(64, 16) * 1000).to(dtype)
    result = summed([x], 64)
    assert relative(result.hessian, x.double().T @ x.double()) < 1e-6


def test_batch_size_does_not_change_a_bit() -> None:
    x = problems.inputs(8 * 16, 40).view(8, 16, 40)  # windows of 16 tokens
    whole = summed([x], 16)
    for sizes in ([1] * 8, [3, 5], [4, 4], [7, 1]):
        split = summed(list(x.split(sizes)), 16)
        assert torch.equal(split.hessian, whole.hessian) and split.count == whole.count == 128
    for chunk in (1, 7, 16 * 8, 1000):
        other = summed([x], chunk)
        assert relative(other.hessian, whole.hessian) < 1e-5 and other.count == 128


def test_shards_add_up() -> None:
    x = problems.inputs(64, 20)
    whole, first, second = summed([x], 64), summed([x[:40]], 64), summed([x[40:]], 64)
    assert relative(first.hessian + second.hessian, whole.hessian) < 1e-6 and first.count + second.count == whole.count


@pytest.mark.parametrize(("columns", "panel"), [(20, 4), (22, 4), (41, 4), (3, 4), (300, 256)])
def test_panels_are_mirrored_exactly(monkeypatch: pytest.MonkeyPatch, columns: int, panel: int) -> None:
    x = problems.inputs(50, columns)
    monkeypatch.setattr(module, "MIN_PANEL", panel)
    result = summed([x, x[:7]], 16)
    assert torch.equal(result.hessian, result.hessian.T)
    exact = x.double().T @ x.double() + x[:7].double().T @ x[:7].double()
    size = exact.diagonal().sqrt()
    assert ((result.hessian - exact) / torch.outer(size, size)).abs().max() < 1e-6


def test_no_tokens() -> None:
    result = summed([torch.zeros(0, 12)], 16)
    assert result.count == 0 and not result.hessian.any()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_values_that_are_not_finite_name_the_layer(value: float) -> None:
    x = problems.random(32, 12)
    x[3, 5] = value  # 1e30 is finite, its square is not
    total = HessianSum(12, torch.device("cpu"))
    total.add(x, 8)
    with pytest.raises(NumericalError, match=r"model\.layers\.3\.q_proj are not finite"):
        total.finish("model.layers.3.q_proj")


@pytest.mark.parametrize("count", [0, 12, 13, 100])
def test_enough_tokens_or_none_are_left_alone(count: int) -> None:
    given = Stats(problems.damped(torch.eye(12), 0.5).float(), count)
    before = given.hessian.clone()
    result, note = shrink(given)
    assert note is None and result.count == count and torch.equal(result.hessian, before)


@pytest.mark.parametrize("count", [1, 3, 11])
def test_few_tokens_shrink_towards_the_identity(count: int) -> None:
    x = problems.inputs(count, 12)
    plain = problems.stats(x)
    before = plain.hessian.clone()
    result, note = shrink(plain)
    share = 1 - count / 12
    expected = problems.damped(before, share)
    assert relative(result.hessian, expected) < 1e-6 and result.count == count
    assert note is not None and f"only {count} calibration tokens for 12 inputs" in note and f"{share:.2f}" in note
    torch.linalg.cholesky(result.hessian.double())  # raises if it is still singular
    assert relative(undo_shrinking(result), before.diagonal()) < 1e-6


# ---------------------------------------------------------------- drift


def drifted(pairs: list[tuple[Tensor, Tensor]], chunk: int) -> Stats:
    """Statistics of batches (full-precision inputs, inputs)."""
    total = HessianSum(pairs[0][1].shape[-1], torch.device("cpu"), paired=True)
    for full, inputs in pairs:
        total.expect(full)
        total.add(inputs, chunk)
    return total.finish("layer")


def test_drift_is_the_cross_moment_less_the_hessian() -> None:
    y, x = problems.inputs(96, 24), problems.inputs(96, 24, seed=5)
    result = drifted([(y.view(4, 24, 24), x.view(4, 24, 24))], 24)
    assert result.drift is not None and result.drift.dtype == torch.float32 and result.count == 96
    assert relative(result.drift, y.double().T @ x.double() - x.double().T @ x.double()) < 1e-6
    assert torch.equal(result.hessian, summed([x.view(4, 24, 24)], 24).hessian)
    assert summed([x], 24).drift is None


def test_batch_size_does_not_change_a_bit_of_the_drift() -> None:
    y, x = (problems.inputs(8 * 16, 40, seed=seed).view(8, 16, 40) for seed in (0, 5))
    whole = drifted([(y, x)], 16).drift
    assert whole is not None
    for sizes in ([1] * 8, [3, 5], [4, 4], [7, 1]):
        split = drifted(list(zip(y.split(sizes), x.split(sizes), strict=True)), 16).drift
        assert split is not None and torch.equal(split, whole)
    for chunk in (1, 7, 1000):
        other = drifted([(y, x)], chunk).drift
        assert other is not None and relative(other, whole) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_that_agree_have_no_drift(dtype: torch.dtype) -> None:
    x = problems.inputs(64, 20).to(dtype)
    drift = drifted([(x.clone(), x)], 16).drift
    assert drift is not None and not drift.any()


def test_inputs_that_cannot_be_paired_have_no_drift_from_then_on() -> None:
    x = problems.inputs(64, 20)
    assert drifted([(x[:32], x[:32]), (x[:31], x[32:])], 16).drift is None
    assert drifted([(x[:31], x[:32]), (x[32:], x[32:])], 16).drift is None
    total = HessianSum(20, torch.device("cpu"), paired=True)
    total.add(x, 16)  # nothing was expected: no full-precision token came here
    result = total.finish("layer")
    assert result.drift is None and torch.equal(result.hessian, summed([x], 16).hessian)


def test_expected_inputs_may_be_written_over() -> None:
    y, x = problems.inputs(32, 20), problems.inputs(32, 20, seed=5)
    total, given = HessianSum(20, torch.device("cpu"), paired=True), y.clone()
    total.expect(given)
    given.zero_()
    total.add(x, 32)
    found, expected = total.finish("layer").drift, drifted([(y, x)], 32).drift
    assert found is not None and expected is not None and torch.equal(found, expected)


# ---------------------------------------------------------------- weights


def weighted(batches: list[Tensor], weights: list[Tensor], chunk: int, full: list[Tensor] | None = None) -> Stats:
    """Statistics of inputs with the weights of their tokens, and their drift from the full-precision inputs."""
    total = HessianSum(batches[0].shape[-1], torch.device("cpu"), paired=full is not None)
    for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        if full is not None:
            total.expect(full[i])
        total.add(batch, chunk, weight)
    return total.finish("layer")


def importance(*shape: int) -> Tensor:
    return problems.random(*shape, seed=9).abs() + 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_sums(dtype: torch.dtype) -> None:
    y, x = (problems.inputs(96, 24, seed=seed).view(4, 24, 24).to(dtype) for seed in (0, 5))
    r = importance(4, 24)
    found = weighted([x], [r], 24, [y])
    rows, full = x.reshape(-1, 24).double(), y.reshape(-1, 24).double()
    assert found.hessian.dtype == torch.float32 and found.count == 96  # the weights do not change the count
    assert relative(found.hessian, (rows * r.view(-1, 1)).T @ rows) < 1e-6
    assert found.drift is not None and relative(found.drift, ((full - rows) * r.view(-1, 1)).T @ rows) < 1e-6


def test_a_token_of_weight_two_is_that_token_twice() -> None:
    y, x, r = problems.inputs(40, 20), problems.inputs(40, 20, seed=5), torch.ones(40)
    r[7] = 2.0
    found = weighted([x], [r], 16, [y])
    twice = drifted([(torch.cat([y, y[7:8]]), torch.cat([x, x[7:8]]))], 16)
    assert relative(found.hessian, twice.hessian) < 1e-6 and found.count == twice.count - 1
    assert found.drift is not None and twice.drift is not None and relative(found.drift, twice.drift) < 1e-6


def test_equal_weights_change_no_bit() -> None:
    y, x = problems.inputs(40, 20), problems.inputs(40, 20, seed=5)
    found, plain = weighted([x], [torch.ones(40)], 16, [y]), drifted([(y, x)], 16)
    assert found.drift is not None and plain.drift is not None
    assert torch.equal(found.hessian, plain.hessian) and torch.equal(found.drift, plain.drift)


def test_batch_size_does_not_change_a_bit_of_weighted_sums() -> None:
    y, x = (problems.inputs(8 * 16, 40, seed=seed).view(8, 16, 40) for seed in (0, 5))
    r = importance(8, 16)
    whole = weighted([x], [r], 16, [y])
    for sizes in ([1] * 8, [3, 5], [4, 4], [7, 1]):
        split = weighted(list(x.split(sizes)), list(r.split(sizes)), 16, list(y.split(sizes)))
        assert torch.equal(split.hessian, whole.hessian) and split.count == whole.count == 128
        assert split.drift is not None and whole.drift is not None and torch.equal(split.drift, whole.drift)


@torch.no_grad()
def test_weights_of_other_tokens_are_refused() -> None:
    total = HessianSum(20, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="reads 10 rows of a batch of 11 tokens"):
        total.add(problems.inputs(10, 20), 16, torch.ones(11))
    experts = mixture()
    sums = {"0.gate_proj": HessianSum(64, torch.device("cpu"))}
    linears = {"0.gate_proj": experts.get_submodule("0.gate_proj")}
    inputs = (problems.random(6, 64), torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1))
    with collect(linears, sums, 6, torch.ones(7), {"0.gate_proj": (experts, 0)}):  # noqa: SIM117
        with pytest.raises(UnsupportedModelError, match="6 rows of a batch of 7 tokens"):
            experts(*inputs)
    plain, others = (HessianSum(64, torch.device("cpu")) for _ in range(2))
    with collect(linears, {"0.gate_proj": plain}, 6):
        experts(*inputs)
    options = {"experts": {"0.gate_proj": (experts, 0)}, "is_weight_needed": False}
    with collect(linears, {"0.gate_proj": others}, 6, torch.ones(7), **options):
        experts(*inputs)
    assert plain.count == others.count == 6
    assert torch.equal(plain.finish("plain").hessian, others.finish("others").hessian)


def mixture() -> Experts:
    return Experts.from_fused(PICO["mixtral"]().get_submodule("model.layers.0.mlp.experts"))


@torch.no_grad()
def test_experts_get_the_weights_of_their_tokens() -> None:
    experts, tokens = mixture(), 2 * 12
    x, r = problems.random(tokens, 64), importance(2, 12)
    shares, route = problems.random(tokens, 4, seed=4).topk(2)
    route[route == 3] = 0  # nothing goes to the last, and some tokens go to the first twice
    keys = [f"{i}.{projection}" for i in range(4) for projection in PROJECTIONS]
    linears = {key: experts.get_submodule(key) for key in keys}
    sums = {key: HessianSum(linear.in_features, torch.device("cpu")) for key, linear in linears.items()}
    with collect(linears, sums, 12, r, {key: (experts, int(key[0])) for key in keys}):
        experts(x, route, shares)
    assert not experts._forward_pre_hooks
    for i in range(4):
        weight = r.flatten().double() * (route == i).sum(1)
        seen = experts.get_submodule(str(i))
        inner = (nn.functional.silu(seen["gate_proj"](x)) * seen["up_proj"](x)).double()
        for projection, inputs in zip(PROJECTIONS, (x.double(), x.double(), inner), strict=True):
            found = sums[f"{i}.{projection}"].finish(projection)
            expected = (inputs * weight[:, None]).T @ inputs
            assert found.count == (route == i).sum()
            assert (found.hessian - expected).abs().max() <= 1e-6 * expected.abs().max()


class Layer(nn.Module):
    """Two linears that share an input, one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        mixed = self.q(x) + self.k(x)
        if fail:
            raise RuntimeError("out of memory")
        return self.o(mixed)


@torch.no_grad()
def test_collect_sums_the_inputs_of_each_key() -> None:
    layer, x = Layer(), problems.random(4, 3, 6)
    before = layer(x)
    sums = {"qkv": HessianSum(6, torch.device("cpu")), "o": HessianSum(5, torch.device("cpu"))}
    with collect({"qkv": layer.q, "o": layer.o, "not asked for": layer.k}, sums, 3):
        assert torch.equal(layer(x), before)
        layer(x[:2])
    layer(x)  # after the block: not counted
    seen = torch.cat([x, x[:2]]).reshape(-1, 6)
    inner = (layer.q(seen) + layer.k(seen)).double()
    assert sums["qkv"].count == sums["o"].count == 18
    assert relative(sums["qkv"].finish("qkv").hessian, seen.double().T @ seen.double()) < 1e-6
    assert relative(sums["o"].finish("o").hessian, inner.T @ inner) < 1e-6


@torch.no_grad()
def test_collect_weights_the_tokens_of_the_batch() -> None:
    layer, x, r = Layer(), problems.random(4, 3, 6), importance(4, 3)
    sums = {"qkv": HessianSum(6, torch.device("cpu")), "o": HessianSum(5, torch.device("cpu"))}
    for part in (slice(0, 3), slice(3, 4)):
        with collect({"qkv": layer.q, "o": layer.o}, sums, 3, r[part]):
            layer(x[part])
    rows = x.reshape(-1, 6)
    inner = (layer.q(rows) + layer.k(rows)).double()
    assert relative(sums["qkv"].finish("qkv").hessian, (rows.double() * r.view(-1, 1)).T @ rows.double()) < 1e-6
    assert relative(sums["o"].finish("o").hessian, (inner * r.view(-1, 1)).T @ inner) < 1e-6


class Tail(Layer):
    """A layer with something behind its last input, which is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.passed += 1
        return out


@torch.no_grad()
@pytest.mark.parametrize("keys", [("qkv", "o"), ("qkv", "none")])
def test_a_pass_ends_when_all_inputs_are_collected(keys: tuple[str, str]) -> None:
    """The sums are the same to the bit; an input that no batch reaches lets all batches run to their end."""
    layer, x, unused = Tail(), problems.random(4, 3, 6), nn.Linear(5, 5)
    linears = {"qkv": layer.q, "o": layer.o, "none": unused}
    found = []
    for pass_end in (None, PassEnd(keys)):
        sums = {key: HessianSum(linears[key].in_features, torch.device("cpu")) for key in keys}
        for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
            with suppress(InputsSeenError), collect(linears, sums, 3, pass_end=pass_end):
                layer(x[rows])
        found.append({key: total.finish(key).hessian for key, total in sums.items()})
    assert all(torch.equal(found[0][key], found[1][key]) for key in keys)
    assert layer.passed == 3 + (1 if "o" in keys else 3)


@torch.no_grad()
def test_both_streams_are_watched_in_turn() -> None:
    layer, full, x = Layer(), problems.random(4, 3, 6), problems.random(4, 3, 6, seed=1)
    linears = {"qkv": layer.q, "o": layer.o}
    sums = {"qkv": HessianSum(6, torch.device("cpu"), paired=True), "o": HessianSum(5, torch.device("cpu"))}
    for rows in (slice(0, 3), slice(3, 4)):
        with expect(linears, sums):
            layer(full[rows])
        with collect(linears, sums, 3):
            layer(x[rows])
    layer(full)
    found = {key: total.finish(key) for key, total in sums.items()}
    y, z = full.reshape(-1, 6).double(), x.reshape(-1, 6).double()
    assert found["qkv"].count == found["o"].count == 12 and found["o"].drift is None
    assert found["qkv"].drift is not None and relative(found["qkv"].drift, (y - z).T @ z) < 1e-6
    assert relative(found["qkv"].hessian, z.T @ z) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("fail", [True, False])
def test_hooks_are_removed(fail: bool) -> None:
    layer, sums = Layer(), {"qkv": HessianSum(6, torch.device("cpu"))}
    with pytest.raises(RuntimeError, match="out of memory"), collect({"qkv": layer.q}, sums, 8):
        assert layer.q._forward_pre_hooks
        layer(problems.random(2, 6), fail=fail)
        raise RuntimeError("out of memory")
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in layer.modules())
    layer(problems.random(2, 6))
    assert sums["qkv"].count == 2
