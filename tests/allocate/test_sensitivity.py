"""Gradients against the whole model, scores against their definitions, slopes against lines that are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress.allocate.joint_kl import JointKL
from compress.allocate.kl_shares import Slope, slope, slopes
from compress.allocate.prefix_tree import Resources
from compress.allocate.variant_source import Noise
from compress.calib import fisher
from compress.calib.backward_pass import BackwardPass
from compress.errors import NumericalError
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.storage.checkpoint import open_checkpoint
from compress.transform import rotate

TOKENS = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def skeleton_of(directory: Path) -> Skeleton:
    return Skeleton(open_checkpoint(directory))


def whole(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto", experts_implementation="eager")


def grad(model: Any, name: str) -> Tensor:
    """The gradient of a linear's weight in a whole model, where experts are fused."""
    path, _, projection = name.rpartition(".")
    if ".experts." not in name:
        return model.get_submodule(name).weight.grad.clone()
    fused, number = model.get_submodule(path.rpartition(".")[0]), int(path.rpartition(".")[2])
    width = fused.gate_up_proj.shape[1] // 2
    rows = {"gate_proj": slice(0, width), "up_proj": slice(width, None)}
    if projection == "down_proj":
        return fused.down_proj.grad[number].clone()
    return fused.gate_up_proj.grad[number, rows[projection]].clone()


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("spill", [False, True])
def test_gradients_of_the_whole_model(
    name: str, spill: bool, pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kl, "LOGITS_NBYTES", 4 * 264 * 5)
    directory = pico_dir(name)
    skeleton = skeleton_of(directory)
    names = [spec.name for spec in skeleton.linears()[0]]
    total, squares = ({name: torch.zeros(()) for name in names} for _ in range(2))
    model = whole(directory)
    for sample in TOKENS:
        model.zero_grad()
        logits = model(sample[None]).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, sample[1:]).backward()
        for linear in names:
            total[linear] = total[linear] + grad(model, linear)
            squares[linear] = squares[linear] + grad(model, linear) ** 2
    seen = []
    for index, found in fisher.gradients(skeleton, TOKENS, tmp_path / "states" if spill else None):
        seen.append(index)
        for linear, gradient in found.items():
            for mine, theirs in ((gradient.total, total.pop(linear)), (gradient.squares, squares.pop(linear))):
                assert mine.dtype == torch.float32 and mine.shape == theirs.shape
                assert torch.allclose(mine, theirs, rtol=1e-3, atol=2e-5 * float(theirs.abs().max())), linear
                assert name == "mixtral" or mine.abs().max() > 0
    assert seen == [1, 0] and not total
    assert all(p.is_meta for p in skeleton.model.parameters()) and not list(tmp_path.iterdir())


def test_gradients_in_a_rotated_basis(pico_dir: Callable[..., Path]) -> None:
    """The loss is the same function of the weights in another basis: g' = g Q^T for what reads the residual stream."""
    plain, turned = skeleton_of(pico_dir("llama_tied")), skeleton_of(pico_dir("llama_tied"))
    turned.edits = rotation = rotate.apply(turned, rotate.Config(values=False, online=False), 0)
    rotation.begin(CPU)
    assert rotation.basis is not None
    reader = "model.layers.1.mlp.up_proj"
    norm = whole(pico_dir("llama_tied")).model.layers[1].post_attention_layernorm.weight.detach()
    before, after = (dict(fisher.gradients(s, TOKENS))[1][reader].total for s in (plain, turned))
    assert torch.allclose(after, rotation.basis.forward(before / norm), atol=1e-4 * float(before.abs().max()))


def test_small_gradients_in_float16(pico_dir: Callable[..., Path]) -> None:
    """float16 has no numbers below 6e-8."""
    half, full = (
        dict(fisher.gradients(skeleton_of(pico_dir("llama", dtype=dtype)), TOKENS[:1]))[0]
        for dtype in (torch.float16, torch.float32)
    )
    for linear, gradient in full.items():
        assert torch.allclose(
            half[linear].total, gradient.total, rtol=0.05, atol=0.02 * float(gradient.total.abs().max())
        )


def test_gradients_that_are_not_finite(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = BackwardPass._of_loss
    monkeypatch.setattr(BackwardPass, "_of_loss", lambda *given: real(*given) * float("inf"))
    skeleton = skeleton_of(pico_dir("llama"))
    with pytest.raises(NumericalError, match="the gradient of model.layers.1.* is not finite"):
        next(fisher.gradients(skeleton, TOKENS))
    assert all(p.is_meta for p in skeleton.model.parameters())


def test_noise_is_as_large_as_asked_and_its_own_everywhere() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(2)) * 0.02 + 0.01
    kept = weight.clone()
    noise = Noise(3)
    for t in (0.03, 0.2):
        error = noise.weight("a", ("noise", t), weight) - weight
        assert error.norm() / weight.norm() == pytest.approx(t, rel=0.01)
        assert abs(error.mean()) < 4 * error.std() / math.sqrt(error.numel())
    assert torch.equal(weight, kept) and torch.equal(noise.weight("a", ("noise", 0.2), weight), weight + error)
    other = noise.weight("b", ("noise", 0.2), weight) - weight
    reseeded = Noise(4).weight("a", ("noise", 0.2), weight) - weight
    for one in (other, reseeded):
        assert abs(torch.nn.functional.cosine_similarity(one.flatten(), error.flatten(), dim=0)) < 0.02
    assert noise.weight("a", ("noise", 0.1), weight.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="a: 4 is no noise"):
        noise.weight("a", 4, weight)

    class Halved:
        prepared: list[int] = []

        def weight(self, name: str, level: Any, original: Tensor) -> Tensor:
            return original / level

        def prepare(self, index: int, block: Any) -> None:
            self.prepared.append(index)

    both = Noise(3, Halved())
    assert torch.equal(both.weight("a", 2, weight), weight / 2)
    both.prepare(5, torch.nn.Identity())
    noise.prepare(6, torch.nn.Identity())
    assert Halved.prepared == [5]


def test_a_line_through_the_origin() -> None:
    assert slope({0.1: 0.3, 0.01: 0.03}) == Slope(pytest.approx(3), pytest.approx(1), ((0.01, 0.03), (0.1, 0.3)))
    points = {0.1: 0.5, 0.2: 0.8, 0.4: 2.1}
    x, y = torch.tensor(list(points), dtype=torch.float64), torch.tensor(list(points.values()), dtype=torch.float64)
    alpha = torch.linalg.lstsq(x[:, None], y[:, None]).solution.item()
    found = slope(points)
    assert found.alpha == pytest.approx(alpha)
    assert found.r2 == pytest.approx((1 - (y - alpha * x).square().sum() / y.square().sum()).item()) and found.r2 < 1
    assert slope({0.1: 0.0}).r2 == 1.0
    for bad in ({}, {0.0: 1.0}):
        with pytest.raises(ValueError, match="a slope needs"):
            slope(bad)


def test_slopes_of_units_and_of_blocks(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Small noise: on a line, and the slope of a block is about the sum of those of its linears."""
    directory = pico_dir("llama")
    specs = skeleton_of(directory).linears()[0]
    units = {spec.name: [spec.name] for spec in specs}
    blocks = {f"block {i}": [spec.name for spec in specs if spec.block == i] for i in range(2)}
    source = partial(lambda: (skeleton_of(directory), Noise()))
    with JointKL(source, TOKENS, tmp_path, Resources(top_k=300)) as candidates:
        found = slopes(candidates, units | blocks, range(3), (0.001, 0.003, 0.005))
        assert candidates.forwards < len(found) * 3 * TOKENS.numel()
        again = slopes(candidates, {"block 1": blocks["block 1"]}, range(3), (0.005, 0.003, 0.001))
    assert again == {"block 1": found["block 1"]} and list(found) == [*units, *blocks]
    assert all(line.alpha > 0 and line.r2 > 0.98 for line in found.values())
    for block, members in blocks.items():
        assert found[block].alpha == pytest.approx(sum(found[name].alpha for name in members), rel=0.3)
