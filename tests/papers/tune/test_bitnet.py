"""BitNet b1.58: rounding in float64, gradients straight through, and whole models that are trained and stored."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compress import api, formats
from compress.errors import RecipeError
from compress.formats import ternary
from compress.model import load
from compress.papers.quant import bitnet as rounding
from compress.papers.tune.bitnet import Config, TernaryLinear, Training, disk, positions, workspace
from compress.run import verify
from compress.tune.trained import DiskSizes, WholeModelSizes
from compress.types import Activations, Stored
from helpers import problems
from helpers.pico import save_pico
from helpers.runs import GPTQ, SMALL, Setup, contents, job, report_of, stored_tensors

STORED = Stored("ternary", ternary.Params("base3", -1, "float32", True), activations=Activations(8, "token"))
TRAINED = Setup("bitnet1.58", (*SMALL, "tune.steps=30", "tune.rate=0.01", "tune.batch_tokens=64", "tune.held_out=4"))


def slow(weight: Tensor, scale: str) -> Tensor:
    sizes = [abs(w) for w in weight.double().flatten().tolist()]
    size = statistics.fmean(sizes) if scale == "mean" else sorted(sizes)[(len(sizes) - 1) // 2]
    size = float(torch.tensor(size).half())
    return torch.tensor([size * min(1, max(-1, round(w / size))) for w in weight.double().flatten().tolist()])


@pytest.mark.parametrize("scale", ["mean", "median"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 40)])
def test_rounding_is_the_papers(shape: tuple[int, int], scale: str) -> None:
    weight = problems.random(*shape, seed=4)
    config = rounding.Config(scale=scale)  # type: ignore[arg-type]
    packed = rounding.quantize(weight, None, config).weight
    wanted = slow(weight, scale).view(shape)
    torch.testing.assert_close(problems.decoded(packed), wanted.double(), rtol=1e-6, atol=0)
    assert packed.nbytes == formats.nbytes(Stored("ternary", rounding.plan_params(config, shape)), shape)


def test_zeros_and_bits() -> None:
    assert not problems.decoded(rounding.quantize(torch.zeros(16, 20), None, rounding.Config()).weight).any()
    sparse = torch.zeros(16, 20).index_fill_(1, torch.arange(8), 0.5)  # the median is 0: the mean counts, 0.2
    wanted = sparse.sign().double() * float(torch.tensor(0.2).half())
    assert torch.equal(problems.decoded(rounding.quantize(sparse, None, rounding.Config()).weight), wanted)
    tiny = rounding.quantize(torch.full((4, 4), 1e-20), None, rounding.Config()).weight  # float16 does not hold it
    assert torch.equal(problems.decoded(tiny), torch.full((4, 4), 1e-20).double())
    params = rounding.plan_params(rounding.Config(), (4096, 4096))
    assert 1.6 <= 8 * formats.nbytes(Stored("ternary", params), (4096, 4096)) / 4096**2 < 1.602


def linear(scale: str = "median") -> TernaryLinear:
    torch.manual_seed(0)
    return TernaryLinear(nn.Linear(40, 24), Config(scale=scale), STORED)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", ["mean", "median"])
def test_a_linear_computes_with_ternary_weights_and_integers(scale: str) -> None:
    layer, x = linear(scale), problems.random(6, 40)
    steps = x.double().abs().amax(1, keepdim=True) / 127
    expected = (x.double() / steps).round() * steps @ slow(layer.weight.detach(), scale).view(24, 40).double().T
    torch.testing.assert_close(layer(x).double(), expected + layer.bias.double(), rtol=1e-4, atol=1e-5)


def test_gradients_pass_straight_through_both_roundings() -> None:
    """They are those of the product of what the operands have become."""
    layer, x = linear(), problems.random(6, 40).requires_grad_()
    pulled = problems.random(6, 24, seed=5)
    layer(x).backward(pulled)
    weight = slow(layer.weight.detach(), "median").view(24, 40).float()
    torch.testing.assert_close(x.grad, pulled @ weight, rtol=1e-4, atol=1e-5)
    steps = x.detach().abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(
        layer.weight.grad, pulled.T @ ((x.detach() / steps).round() * steps), rtol=1e-4, atol=1e-5
    )


def test_a_share_of_the_way_lies_between() -> None:
    layer, x = linear(), problems.random(6, 40)
    ends = []
    for layer.share in (0.0, 1.0):
        ends.append(layer.weight + layer.share * (slow(layer.weight.detach(), "median").view(24, 40) - layer.weight))
    layer.share, layer.activations = 0.25, None
    wanted = nn.functional.linear(x, 0.75 * ends[0] + 0.25 * ends[1].float(), layer.bias)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)


def trained(model: Path, out: Path, *settings: str) -> tuple[float, float]:
    """Train a model; return the held-out loss before and behind."""
    api.quantize(job(model, TRAINED.set(*settings), out))
    note = report_of(out)["notes"]["end-to-end tuning"][0]
    first, last = note.split("text ")[1].split(" nats")[0].split(" -> ")
    return float(first), float(last)


@pytest.mark.parametrize(("family", "start"), [("llama", "checkpoint"), ("llama_tied", "random"), ("opt", "random")])
def test_what_is_stored_is_what_was_trained(
    family: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, unseen, run = save_pico(family, tmp_path / "model"), tmp_path / "out", list[Tensor](), Training.run

    def noted(self: Training) -> None:
        unseen.append(self.unseen)
        run(self)

    monkeypatch.setattr(Training, "run", noted)
    first, last = trained(model, out, f"tune.start={start}", "tune.ramp=0.5")
    assert last < 0.95 * first
    verify.verify(out)
    scales = {name: tensor for name, tensor in stored_tensors(out).items() if name.endswith(".scales")}
    assert len(scales) >= 8 and all(tensor.shape == (1, 1) for tensor in scales.values())
    packed = load.load_model(out, torch.float32)
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(packed(row[None]).logits[0, :-1], row[1:]) for row in unseen[0]]
    assert abs(float(torch.stack(losses).mean()) - last) < 0.02 * last  # norms and tables have the model's type


@pytest.mark.slow
def test_equal_runs_give_equal_bytes_and_random_weights_are_not_the_checkpoints(tmp_path: Path) -> None:
    model, short = save_pico("llama", tmp_path / "model"), ("tune.steps=2", "tune.start=random")
    for name in ("a", "b"):
        trained(model, tmp_path / name, *short)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    trained(model, tmp_path / "c", "tune.steps=2")
    kinds = (stored_tensors(tmp_path / "a"), stored_tensors(tmp_path / "c"), stored_tensors(model))
    random, tuned, original = (tensors["model.embed_tokens.weight"].float() for tensors in kinds)
    assert (tuned - original).norm() < 0.1 * original.norm() < (random - original).norm()


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, short = save_pico("llama", tmp_path / "model"), ("tune.steps=2",)
    trained(model, tmp_path / "whole", *short)

    def stop(self: Training) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Training, "run", stop)
        trained(model, tmp_path / "out", *short)
    trained(model, tmp_path / "out", *short)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    setup = GPTQ.set("tune={method: bitnet, steps: 1}")
    with pytest.raises(RecipeError, match="^tune: bitnet trains what method: bitnet of `quantize` has written"):
        api.quantize(job(save_pico("llama", tmp_path / "model"), setup, tmp_path / "out"))


def test_what_it_takes_is_counted() -> None:
    sizes = WholeModelSizes(100, 0, 50, 20, (1, 1), 7, 8, 30, 40, 1000, 10)
    assert workspace(Config(), sizes, 4, False) == 24 * 200 + 4 * 4 * 10 * 40 * 2 + 4 * 4 * 10 * 30
    assert positions(Config(steps=5, batch_tokens=20, held_out=4), 8, 10) == 3 * 5 * 20 + 6 * 2 * 10
    assert disk(Config(), DiskSizes(1, 1, 1, 1, 1)) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 0}, "steps 0 is less than 1"),
        ({"rate": 1.0}, "rate 1.0 is not between 0 and 1"),
        ({"batch_tokens": 0}, "batch_tokens 0 is not positive"),
        ({"ramp": 1.5}, "ramp 1.5 is not between 0 and 1"),
        ({"held_out": 1}, "held_out 1 is less than 2"),
    ],
)
def test_bad_settings(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        Config(**settings)  # type: ignore[arg-type]


def test_other_packings_are_refused() -> None:
    with pytest.raises(ValueError, match="^packing 'binary'"):
        rounding.Config(packing="binary")
