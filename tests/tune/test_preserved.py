"""Saliency-aware partial retraining: the term by hand, what it holds back, and a run that takes gradients for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from compress import api, recipe
from compress.calib import fisher
from compress.errors import RecipeError
from compress.model.blockwise import BlockArgs
from compress.model.skeleton import Skeleton
from compress.run import plan, sizes
from compress.storage.checkpoint import open_checkpoint
from compress.tune import blockwise
from compress.tune.blockwise import BlockTuning, Config, Preserved
from compress.tune.held_block import BlockSizes
from compress.types import Fisher
from helpers.pico import round_to_nearest, save_pico
from helpers.runs import GPTQ, Setup, contents, job, stored_tensors
from helpers.small_block import killed_behind_a_block

SMALL = ("calibration.num_samples=8", "calibration.seq_len=32", "quantize.bits=2", "quantize.lowrank={rank: 4}")
TUNED = "tune={{method: blockwise, codes: clips, steps: {}, between: 0, rate: 0.01, preserve: {}}}"


class Pair(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 32] -> [..., 32]."""
        return x + self.down(torch.sigmoid(self.up(x)))


def sides(*shape: int, seed: int) -> Fisher:
    generator = torch.Generator().manual_seed(seed)
    return Fisher(*(torch.randn(size, generator=generator).exp() for size in shape))


def test_the_term_is_that_of_the_formula() -> None:
    """One entry after the other, in float64."""
    block = Pair()
    given = {"up": sides(48, 32, seed=0)}  # entries of the other count alike
    held = Preserved(block, ["up", "down"], given)
    changes = {name: 0.1 * torch.randn(getattr(block, name).weight.shape) for name in ("up", "down")}
    now = {f"{n}.weight": (getattr(block, n).weight.detach() + c).requires_grad_() for n, c in changes.items()}
    error = held.error({**now, "up.bias": torch.ones(48)})
    error.backward()
    wanted = 0.0
    for name, change in changes.items():
        weight, top, size = getattr(block, name).weight.detach().double(), 0.0, 0.0
        rows, columns = (s.double().tolist() for s in given.get(name, tuple(map(torch.ones, weight.shape))))
        for i, row in enumerate(weight.tolist()):
            for j, entry in enumerate(row):
                saliency = (rows[i] * columns[j]) ** 2
                top, size = top + saliency * change[i, j].item() ** 2, size + saliency * entry**2
        wanted += top / size / 2
        gradient = now[f"{name}.weight"].grad
        slope = 2 * change[3, 5].item() * (rows[3] * columns[5]) ** 2 / size / 2
        assert gradient is not None and gradient[3, 5].item() == pytest.approx(slope, rel=1e-4)
    assert error.item() == pytest.approx(wanted, rel=1e-5)


def test_sizes_drop_out() -> None:
    """The paper's normalization of g^2, and the unit of weights, change nothing."""
    block, changed = Pair().requires_grad_(False), Pair().requires_grad_(False)
    weights = {"up.weight": block.up.weight + 0.1 * torch.randn(48, 32)}
    plain = Preserved(block, ["up"], {"up": (pair := sides(48, 32, seed=2))}).error(weights)
    changed.up.weight.mul_(7)
    scaled = Preserved(changed, ["up"], {"up": Fisher(3 * pair.rows, 0.1 * pair.columns)})
    assert scaled.error({"up.weight": 7 * weights["up.weight"]}).item() == pytest.approx(plain.item(), rel=1e-5)
    assert Preserved(block, ["up"], {}).error({"up.weight": block.up.weight}).item() == 0
    changed.up.weight.zero_()
    assert Preserved(changed, ["up"], {}).error({"up.weight": torch.zeros(48, 32)}).item() == 0


def drift(preserve: float, given: Mapping[str, Fisher]) -> tuple[Tensor, float]:
    """How far each column of a weight ends from the original, and the error of the block."""
    block, x = Pair().requires_grad_(False), torch.randn(4, 16, 8, 32, generator=torch.Generator().manual_seed(2))
    config = Config(steps=60, between=0, rate=0.01, codes="straight_through", tokens=128, preserve=preserve)
    tuning = BlockTuning(block, ["up"], lambda: ((b, BlockArgs((), {}), block(b)) for b in x), 4, config)
    tuning.fisher.update(given)
    tuning.add("up", round_to_nearest(tuning.weight("up"), 2, 32))
    tuning.finish()
    return (tuning.model.up.weight - block.up.weight).square().mean(0), tuning.stages[-1].after  # type: ignore


def test_salient_weights_are_held() -> None:
    salient = Fisher(torch.ones(48), torch.where(torch.arange(32) < 8, 10.0, 0.1))
    free, error = drift(0, {"up": salient})
    held, held_error = drift(1.0, {"up": salient})
    assert held[:8].mean() < 0.95 * free[:8].mean()
    assert held[8:].mean() / held[:8].mean() > 1.05 * free[8:].mean() / free[:8].mean()
    assert error < held_error  # which is what that costs
    assert torch.equal(free, drift(0, {})[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("model") / "llama", dtype=torch.bfloat16)


def tuned(steps: int, preserve: float) -> Setup:
    return GPTQ.set(*SMALL, TUNED.format(steps, preserve))


class Held(NamedTuple):
    """A run with the term, the weights of linears that its gradients gave, and those that the last block saw."""

    out: Path
    given: list[dict[str, Fisher]]
    seen: dict[str, Fisher]


@pytest.fixture(scope="module")
def held(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Held:
    run = Held(tmp_path_factory.mktemp("held") / "out", [], {})
    make, weights = Preserved.__init__, fisher.weights

    def noted(self: Preserved, block: nn.Module, names: Any, given: Any) -> None:
        run.seen.update(given)
        make(self, block, names, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preserved, "__init__", noted)
        patch.setattr(fisher, "weights", lambda *args: run.given.append(weights(*args)) or run.given[-1])
        api.quantize(job(model, tuned(8, 0.5), run.out))
    return run


def test_a_run_takes_the_gradients_of_all_linears(held: Held) -> None:
    [given] = held.given
    assert len(given) == 14
    assert held.seen.keys() == {name.split(".", 3)[3] for name in given}
    for name, pair in held.seen.items():
        assert torch.equal(pair.rows, given[f"model.layers.1.{name}"].rows)


def test_a_killed_run_goes_on_with_the_same_bytes(
    held: Held, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_behind_a_block(monkeypatch, BlockTuning):
        api.quantize(job(model, tuned(8, 0.5), tmp_path / "out"))
    assert api.quantize(job(model, tuned(8, 0.5), tmp_path / "out"))["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(held.out)


def test_gradients_do_not_change_what_is_tuned(held: Held, model: Path, tmp_path: Path) -> None:
    """A low-rank part goes by the inputs, as its metric says, though gradients are there."""
    for name, preserve in (("with", 0.5), ("without", 0)):
        api.quantize(job(model, tuned(0, preserve), tmp_path / name))
    start, plain = (stored_tensors(tmp_path / name) for name in ("with", "without"))
    assert start.keys() == plain.keys() and all(torch.equal(plain[name], tensor) for name, tensor in start.items())
    assert any(not torch.equal(plain[name], tensor) for name, tensor in stored_tensors(held.out).items())


def test_what_it_takes_is_counted(model: Path) -> None:
    of_block = BlockSizes(1000, 50, 40, 4, 512)
    settings = [Config(codes="clips", between=0, preserve=preserve) for preserve in (0, 0.1)]
    needs = [blockwise.workspace(config, of_block) for config in settings]
    assert needs[1] - needs[0] == 1000 * blockwise.PRESERVED_NBYTES
    layers = plan.make(GPTQ.load(), Skeleton(open_checkpoint(model))).layers
    assert sizes.gradient_nbytes(layers, 2, every=False) == 0
    assert sizes.gradient_nbytes(layers, 2, every=True) == 10 * sum(layer.spec.numel for layer in layers)
    asks = [sizes.tuning_needs_gradients(tuned(8, preserve).load()) for preserve in (0, 0.1)]
    assert asks == [False, True] and not sizes.tuning_needs_gradients(GPTQ.load())


@pytest.mark.parametrize("preserve", ["-0.1", ".inf", ".nan"])
def test_settings_that_cannot_be(preserve: str) -> None:
    with pytest.raises(RecipeError, match="preserve"):
        recipe.load("int4", [f"tune={{method: blockwise, preserve: {preserve}}}"])


def test_weights_that_a_transform_changes_later_have_no_gradients(model: Path, tmp_path: Path) -> None:
    setup = GPTQ.set("transform=[{method: smooth}]", TUNED.format(8, 0.1))
    with pytest.raises(RecipeError, match="preserve goes by gradients of weights that smooth changes later"):
        api.quantize(job(model, setup, tmp_path / "out"))
