"""Training of low-rank parts alone, with only the packed model in memory: exact gradients, and nothing else moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from compress import api, formats
from compress.calib import reference_logprobs
from compress.model import load as lm
from compress.model.skeleton import Skeleton
from compress.run import plan, sizes
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from compress.tune import end_to_end
from compress.tune.end_to_end import Config
from compress.tune.stored_linear import StoredLinear
from compress.tune.streamed import StreamedModel
from compress.tune.trained import TuningWork, WholeModelSizes
from compress.types import PackedWeight
from helpers.pico import VOCAB_SIZE, save_pico
from helpers.runs import GPTQ, job, report_of, stored_tensors

TOKENS = torch.randint(256, (6, 24), generator=torch.Generator().manual_seed(1))
SMALL = ("bits=2", "calibration.num_samples=8", "calibration.seq_len=32", "lowrank={rank: 4}")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["opt", "llama, turned"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the packed one: with biases, or with transforms around its matrices."""
    folder = tmp_path_factory.mktemp("made")
    model = save_pico(request.param.split(",")[0], folder / "model")
    setup = GPTQ.set(*SMALL, *(["incoherence=true"] if "turned" in request.param else []))
    api.quantize(job(model, setup, folder / "packed"))
    return model, folder / "packed"


def slowly(paths: tuple[Path, Path]) -> tuple[float, dict[str, Tensor]]:
    """Divergence and gradients by autograd over the whole model, its weights decoded with gradients."""
    original, packed = (lm.load_model(path, "float32") for path in paths)
    leaves, weights = dict[str, Tensor](), dict[str, Tensor]()
    for name, module in list(packed.named_modules()):
        if isinstance(module, PackedLinear) and module.stored.lowrank is not None:
            own = {key: module.tensors[key].detach().float().requires_grad_() for key in ("lowrank_a", "lowrank_b")}
            leaves.update({f"{name}.{key}": tensor for key, tensor in own.items()})
            weight = PackedWeight(module.stored, {**module.tensors, **own}, module.shape)
            packed.set_submodule(name, module.to_linear(torch.float32))
            weights[f"{name}.weight"] = formats.decode(weight, torch.float32)
    p = original(input_ids=TOKENS, use_cache=False).logits.detach().double().log_softmax(-1)
    q = functional_call(packed, weights, (), {"input_ids": TOKENS, "use_cache": False}).logits.double().log_softmax(-1)
    loss = (p.exp() * (p - q)).sum()
    return loss.item(), dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("is_held", [True, False])
def test_gradients_are_those_of_the_whole_model(made: tuple[Path, Path], is_held: bool, tmp_path: Path) -> None:
    reference = reference_logprobs.load(Skeleton(open_checkpoint(made[0])), TOKENS, tmp_path, VOCAB_SIZE)
    model = StreamedModel(made[1], CPU, is_held, is_low_rank=True)
    text = model.text(TOKENS, 4, None if is_held else tmp_path / "states", reference)
    numbers = {name: tensor.float() for name, tensor in model.stored.items()}
    total, gradients = model.gradients(text, text.batches, numbers)
    text.stream.close()
    loss, expected = slowly(made)
    assert total == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == expected.keys() == model.stored.keys() and not model.vectors
    least = 1e-3 * max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() < 2e-4 * gradient.norm().clamp(min=least), name


def test_no_matrix_has_a_gradient(made: tuple[Path, Path]) -> None:
    """Factors are read by `forward` itself, also where transforms lie around the codes."""
    model = lm.load_model(made[1], "float32")
    packed = [module.packed() for module in model.modules() if isinstance(module, PackedLinear)]
    with_part = [weight for weight in packed if weight.stored.lowrank is not None]
    assert with_part
    for weight in with_part:
        linear = StoredLinear(weight.stored, weight.shape, False, ("lowrank_a", "lowrank_b"))
        assert linear.direct == linear.adapter == ("lowrank_a", "lowrank_b")
        other = StoredLinear(weight.stored, weight.shape, False, ("lowrank_a", "lowrank_b", "scales"))
        assert other.adapter == ()


def test_factors_move_and_nothing_else(made: tuple[Path, Path], tmp_path: Path) -> None:
    config = Config(12, rate=0.02, batch_tokens=96, top_k=VOCAB_SIZE, held_out=3, trains="low_rank")
    work = TuningWork(made[1], open_checkpoint(made[0]), TOKENS.repeat(2, 1), CPU, 2, tmp_path, True, lambda _: None)
    result = end_to_end.train(config, work)
    assert result.tensors and all("lowrank_" in name for name in result.tensors)
    before, after = result.note.split("text ")[1].split(";")[0].split(" -> ")
    assert float(after) < float(before)
    stored = stored_tensors(made[1])
    assert all(tensor.dtype == stored[name].dtype for name, tensor in result.tensors.items())


@pytest.mark.parametrize("part", [(), ("lowrank={rank: 4, bits: 8}",)], ids=["none", "8 bits"])
def test_a_model_without_low_rank_parts_is_left_alone(part: tuple[str, ...], tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    setup = GPTQ.set("bits=2", *SMALL[1:3], *part, "tune={method: end_to_end, steps: 2, trains: low_rank}")
    api.quantize(job(model, setup, tmp_path / "out"))
    assert "there is no low-rank part in 16 bits" in str(report_of(tmp_path / "out")["notes"])


def test_memory_counts_factors_alone(tmp_path: Path) -> None:
    skeleton = Skeleton(open_checkpoint(save_pico("llama", tmp_path / "model")))
    planned = plan.make(GPTQ.set(*SMALL).load(), skeleton)
    factors = sum(4 * sum(layer.spec.shape) for layer in planned.layers)
    assert factors == sizes.lowrank_parameters(planned.layers, "rank")
    few = WholeModelSizes(0, 0, 1, 1, (1,), 50 + factors, 1, 1, 1, 64, 32, low_rank=factors)
    every, low_rank = (end_to_end.workspace(config, few, 1, False) for config in (Config(), Config(trains="low_rank")))
    assert every - low_rank == 50 * end_to_end.MASTERS
