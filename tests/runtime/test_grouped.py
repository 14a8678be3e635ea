"""Experts that run together give what their decoded weights give in float64, wherever tokens go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Barrier, Thread
from time import sleep
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig, MixtralForCausalLM

from compress.kernels import dispatch
from compress.kernels.cpu import emitter
from compress.runtime.expert_layouts import PROJECTIONS
from compress.runtime.experts import Experts
from compress.runtime.grouped import ExpertRunner, run_in_turn
from compress.runtime.linear import PackedLinear
from compress.types import Activations, WeightTransforms
from helpers.pico import round_to_nearest

HIDDEN, INNER, COUNT = 128, 192, 8
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
KINDS = ("int4", "bits that differ", "own signs", "shared signs", "biases")

Made = Callable[[str], tuple[list[list[PackedLinear]], ExpertRunner]]
PARAMS = round_to_nearest(torch.ones(16, HIDDEN), 4, 32).params

pytestmark = pytest.mark.skipif(
    dispatch.supported("cpu", "int", PARAMS, SHAPES["up_proj"]) is None, reason="nothing is compiled for this CPU"
)


def weight(seed: int, shape: tuple[int, int], kind: str, bias: bool) -> PackedLinear:
    generator = torch.Generator().manual_seed(seed)
    bits = 3 + seed % 2 if kind == "bits that differ" else 4
    packed = round_to_nearest(torch.randn(shape, generator=generator) / shape[1] ** 0.5, bits, 32, seed % 2 == 0)
    if kind == "int4":
        packed = round_to_nearest(torch.randn(shape, generator=generator) / shape[1] ** 0.5, bits, 32)
    if "signs" in kind:
        if kind == "shared signs":
            generator = torch.Generator().manual_seed(0)
        sides = [torch.randint(0, 256, (size // 8,), dtype=torch.uint8, generator=generator) for size in shape]
        ops = WeightTransforms(input=("signs", "hadamard"), output=("hadamard", "signs"))
        packed = replace(packed, stored=replace(packed.stored, ops=ops))
        packed.tensors.update(out_signs=sides[0], in_signs=sides[1])
    values = torch.randn(shape[0], generator=generator) if bias else None
    return PackedLinear.from_packed(packed, values)


def experts(kind: str) -> list[list[PackedLinear]]:
    return [
        [weight(10 * e + i, shape, kind, kind == "biases") for i, shape in enumerate(SHAPES.values())]
        for e in range(COUNT)
    ]


def gate(opened: Tensor, up: Tensor) -> Tensor:
    return F.silu(opened) * up


def decode(linears: list[list[PackedLinear]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Matrices and biases in float64."""
    zero = torch.zeros((), dtype=torch.float64)
    return [
        [(linear.dequantize(torch.float64), zero if linear.bias is None else linear.bias.double()) for linear in each]
        for each in linears
    ]


def weighted(decoded: list[list[tuple[Tensor, Tensor]]], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sums in float64, expert by expert."""
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for number, each in enumerate(decoded):
        opened, up, (down, bias) = each
        inner = gate(*(F.linear(x.double(), matrix) + bias for matrix, bias in (opened, up)))
        share = torch.where(ids == number, weights.double(), 0).sum(-1, keepdim=True)
        out += (inner @ down.T + bias) * share
    return out


def exact(linears: list[list[PackedLinear]], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return weighted(decode(linears), x, ids, weights)


def routing(tokens: int, top: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts, and weights; with few of a token, experts 3 and 6 get none."""
    generator = torch.Generator().manual_seed(seed)
    used = torch.arange(COUNT) if top == COUNT else torch.tensor([0, 1, 2, 4, 5, 7])
    ids = used[torch.rand(tokens, len(used), generator=generator).argsort(-1)[:, :top]]
    x = torch.randn(tokens, HIDDEN, generator=generator).half()
    return x, ids, torch.rand(tokens, ids.shape[1], generator=generator)


def apart(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).abs().max() / wanted.abs().max()).item()


@pytest.fixture(scope="module")
def made() -> Made:
    known = {}

    def make(kind: str) -> tuple[list[list[PackedLinear]], ExpertRunner]:
        if kind not in known:
            linears = experts(kind)
            known[kind] = linears, ExpertRunner(linears, torch.float16)
        return known[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_as_decoded_weights_in_float64(kind: str, made: Made) -> None:
    linears, runner = made(kind)
    assert runner.together is not None, runner.reason
    run, decoded = partial(runner.together.run, gate=gate), decode(linears)
    for tokens, top in ((1, 1), (1, 8), (2, 2), (5, 8), (16, 2), (33, 1), (64, 2)):
        x, ids, weights = routing(tokens, top)
        together = run(x, (ids, weights))
        assert apart(together, weighted(decoded, x, ids, weights)) < 2e-3
        for other in (-1, COUNT, 1 << 40):  # experts of other processes, or none
            foreign = torch.where(ids % 4 == 0, other, ids)
            assert apart(run(x, (foreign, weights)), weighted(decoded, x, foreign, weights)) < 2e-3
        if kind == "int4":
            alone = [run(x[i, None], (ids[i, None], weights[i, None])) for i in range(tokens)]
            assert apart(torch.cat(alone), together.double()) < 1e-3, "a token's result depends on the others"


@torch.no_grad()
def test_many_tokens_of_one_expert(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a kernel is good for: weights are decoded."""
    linears, runner = made("int4")
    assert runner.together is not None
    x, ids, weights = routing(70, 2)
    ids[3:9] = -1
    for product in (*runner.together._first, runner.together._last):
        monkeypatch.setattr(product._group, "most", 4)
    assert apart(runner.together.run(x, (ids, weights), gate), exact(linears, x, ids, weights)) < 2e-3


@torch.no_grad()
def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter, "THREAD", 1)
    x, ids, weights = routing(5, 2)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            runner = ExpertRunner(experts("int4"), torch.float16)
            assert runner.together is not None
            results += [runner.together.run(x, (ids, weights), gate) for _ in range(3)]
            assert runner.together._last._group._forms(5)[0][1].is_shared == (threads > 1)
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(each, results[0]) for each in results)


def test_threads_that_begin_together_share_what_is_prepared(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared is kept by addresses: none may be made twice."""
    _, runner = made("int4")
    assert runner.together is not None
    group, prepared, begin = runner.together._last._group, list[int](), Barrier(3)
    make = type(group)._form

    def make_slowly(self: Any, rows: int, threads: int) -> Any:
        prepared.append(rows)
        sleep(0.01)
        return make(self, rows, threads)

    def ask() -> None:
        begin.wait()
        group._layout(4, 8)

    monkeypatch.setattr(type(group), "_form", make_slowly)
    monkeypatch.setattr(group, "_known", {})
    monkeypatch.setattr(group, "_layouts", {})
    asking = [Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert sorted(prepared) == [1, 2, 3, 4]


def test_no_tokens(made: Made) -> None:
    _, runner = made("own signs")
    assert runner.together is not None
    x, ids, weights = routing(0, 2)
    assert runner.together.run(x, (ids, weights), gate).shape == (0, HIDDEN)


@torch.no_grad()
def test_weights_of_inputs(made: Made) -> None:
    linears, runner = made("int4")
    assert runner.together is not None
    x, ids, weights = routing(6, 1)
    wanted = exact(linears, x * weights.half(), ids, torch.ones_like(weights))
    assert apart(runner.together.run(x, (ids, weights), gate, weighs_inputs=True), wanted) < 2e-3


@torch.no_grad()
def test_in_turn_gives_the_same(made: Made) -> None:
    """The way of formats without such a kernel on a GPU: no shape depends on the ids, and foreign ones count for
    nothing."""
    linears, _ = made("int4")

    def compute(number: int, x: Tensor) -> Tensor:
        opened, up, down = linears[number]
        return down(gate(opened(x), up(x)))

    x, ids, weights = routing(5, 2)
    ids[1, 0], ids[2, 1] = -1, COUNT
    assert apart(run_in_turn(x, (ids, weights), COUNT, compute), exact(linears, x, ids, weights)) < 2e-3
    x[3] = float("inf")  # what others compute of it stays with it
    assert run_in_turn(x, (ids, weights), COUNT, compute)[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activations": Activations(8)}, "inputs that are rounded or unread, or low-rank parts"),
        ({"ops": WeightTransforms(input=("hadamard",))}, "transforms that differ"),
    ],
)
def test_what_is_run_one_by_one(change: dict[str, Any], reason: str) -> None:
    linears = experts("int4")
    packed = linears[2][2].packed()
    linears[2][2] = PackedLinear.from_packed(replace(packed, stored=replace(packed.stored, **change)))
    runner = ExpertRunner(linears, torch.float16)
    assert runner.together is None and runner.reason == reason


def module(kind: str = "int4") -> Experts:
    """A module of transformers with packed experts."""
    config = MixtralConfig(
        vocab_size=32, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=COUNT,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    made = Experts.from_fused(model.get_submodule("model.layers.0.mlp.experts"))
    for number, each in enumerate(experts(kind)):
        for name, linear in zip(PROJECTIONS, each, strict=True):
            made.set_submodule(f"{number}.{name}", linear)
    return made.eval()


def linears_of(made: Experts) -> list[list[PackedLinear]]:
    return [[made.get_submodule(f"{i}.{name}") for name in PROJECTIONS] for i in range(COUNT)]  # type: ignore[misc]


def runner_of(made: Experts) -> ExpertRunner:
    (runner,) = made.__dict__["_runners"].values()
    return cast(ExpertRunner, runner)


@torch.no_grad()
def test_a_module_runs_its_experts_together_while_they_are_what_they_were() -> None:
    made = module()
    x, ids, weights = routing(5, 2)
    wanted = exact(linears_of(made), x, ids, weights)
    for _ in range(2):
        assert apart(made(x, ids, weights), wanted) < 2e-3
    runner = runner_of(made)
    assert runner.together is not None
    other = copy.deepcopy(made)
    assert runner_of(other) is None and torch.equal(other(x, ids, weights), made(x, ids, weights))
    assert made(x, ids, weights) is not None and runner_of(made) is runner
    made.set_submodule("0.up_proj", weight(99, SHAPES["up_proj"], "int4", False))
    assert apart(made(x, ids, weights), exact(linears_of(made), x, ids, weights)) < 2e-3
    linear = made.get_submodule("1.down_proj")
    linear.scales = nn.Parameter(linear.scales * 2, requires_grad=False)
    assert apart(made(x, ids, weights), exact(linears_of(made), x, ids, weights)) < 2e-3
    seen = list[str]()
    hook = linear.register_forward_hook(lambda *_: seen.append("seen"))
    made(x, torch.ones_like(ids), weights)
    hook.remove()
    made(x, torch.ones_like(ids), weights)
    assert seen == ["seen"], "a linear that is watched is called"
    assert runner_of(made).together is not None, runner_of(made).reason


def test_gradients_pass() -> None:
    made = module()
    x, ids, weights = routing(3, 2)
    x = x.requires_grad_()
    made(x, ids, weights).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@torch.no_grad()
def test_compiled_as_one_graph() -> None:
    made = module()
    x, ids, weights = routing(5, 2)
    wanted = made(x, ids, weights)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager", dynamic=True)
    assert apart(compiled(x, ids, weights), wanted.double()) < 1e-3
    x, ids, weights = routing(9, 2)
    assert apart(compiled(x, ids, weights), made(x, ids, weights).double()) < 1e-3
    torch._dynamo.reset()


@torch.no_grad()
def test_shapes_without_data(made: Made) -> None:
    _, runner = made("int4")
    assert runner.together is not None
    product = runner.together._last
    with FakeTensorMode():
        x, ids = torch.empty(3, INNER, dtype=torch.float16), torch.empty(6, dtype=torch.int64)
        y = torch.ops.compress.grouped(x, ids, [], product._number, HIDDEN)
        assert y.shape == (6, HIDDEN) and y.dtype == torch.float16
    x, ids = torch.empty(3, INNER, device="meta"), torch.empty(6, dtype=torch.int64, device="meta")
    y = torch.ops.compress.grouped(x, ids, [], product._number, HIDDEN)
    assert y.shape == (6, HIDDEN) and y.is_meta
