"""Block-wise tuning: gradients through every format, a block that is never worse for it, codes that stay."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress import api, formats, plugins, recipe
from compress.errors import RecipeError
from compress.model.blockwise import BlockArgs
from compress.model.skeleton import Skeleton
from compress.run import memory_plan, plan
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from compress.tune import adamw8bit, blockwise
from compress.tune.blockwise import BlockTuning, Config
from compress.tune.held_block import BlockSizes
from compress.types import Activations, PackedWeight, Stored, WeightTransforms
from helpers.pico import round_to_nearest, save_pico
from helpers.runs import GPTQ, Setup, cli, contents, job, report_of, stored_tensors
from helpers.small_block import killed_behind_a_block
from helpers.stored import samples

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALL_INTEGERS = {"exponents", "grid", "zero"}  # lossless, MX types, nothing: some weights store nothing that is trained
SMALL = ("calibration.num_samples=8", "calibration.seq_len=32")
TUNED = ("tune.method=blockwise", "tune.steps=12", "tune.between=6", "tune.rate=0.01", "tune.weights_rate=0.01")
AROUND = WeightTransforms(input=("signs", "hadamard"), output=("hadamard", "channel_scale"))


def weights(name: str) -> Iterator[PackedWeight]:
    """Stored weights of a format, plain and rotated."""
    for packed in samples(name, (16, 128)):
        yield packed
        around = {
            "in_signs": torch.full((16,), 0xA5, dtype=torch.uint8),
            "out_channel_scale": torch.linspace(0.5, 2, 16),
        }
        specs = formats.specs(Stored(name, packed.params, AROUND), packed.shape)
        tensors = {**packed.tensors, **{key: around[key] for key in specs if key in around}}
        if tensors.keys() == specs.keys():
            yield PackedWeight(Stored(name, packed.params, AROUND), tensors, packed.shape)


@pytest.mark.parametrize("name", plugins.names("formats"))
def test_gradients_go_through_every_format(name: str) -> None:
    """Decoded from float32 copies of what is stored a weight is the same, and its gradient is the slope of a step."""
    for packed in weights(name):
        floats = {key: tensor for key, tensor in packed.tensors.items() if tensor.dtype in FLOATS}
        if not floats:
            assert name in ALL_INTEGERS
            continue
        if name == "nested" and packed.params.has_original:
            continue  # the whole weight reads none of the lower parts
        leaves = {key: tensor.float().requires_grad_() for key, tensor in floats.items()}

        def decoded(changed: dict[str, Tensor], packed: PackedWeight = packed) -> Tensor:
            tensors = {**packed.tensors, **changed}
            return formats.decode(PackedWeight(packed.stored, tensors, packed.shape), torch.float32)

        weight = decoded(leaves)
        assert torch.allclose(weight, formats.decode(packed, torch.float32), rtol=1e-5, atol=1e-7)
        mixing = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad((weight * mixing).sum(), list(leaves.values()))
        for (key, start), gradient in zip(floats.items(), gradients, strict=True):
            step = gradient * (1e-3 * start.float().norm() / gradient.norm().clamp(min=1e-20))
            ends = [decoded({key: start.float() + side * step}).double().detach() for side in (1, -1)]
            slope = ((ends[0] - ends[1]) * mixing).sum() / 2
            assert slope.item() == pytest.approx((gradient.double() * step).sum().item(), rel=0.02), (name, key)


class Toy(nn.Module):
    """A norm and three linears, the last of which hears of the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(32)
        self.up, self.gate, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 32] -> [..., 32]."""
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


def inputs(block: nn.Module, count: int = 4) -> Callable[[], Iterator[tuple[Tensor, BlockArgs, Tensor]]]:
    x = torch.randn(count, 4, 8, 32, generator=torch.Generator().manual_seed(2))
    return lambda: ((batch, BlockArgs((), {}), block(batch)) for batch in x)


def quantized(block: nn.Module, config: Config, count: int = 4, bits: int = 2) -> tuple[BlockTuning, Any]:
    tuning = BlockTuning(block, ["up", "gate", "down"], inputs(block, count), count, config)
    for group in (["up", "gate"], ["down"]):
        tuning.between()
        for name in group:
            tuning.add(name, round_to_nearest(tuning.weight(name), bits, 16))
    return tuning, tuning.finish()


def test_the_error_falls_stage_by_stage() -> None:
    block = Toy().requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    tuning, (packed, vectors, note) = quantized(block, Config(steps=40, between=40, rate=0.01, weights_rate=0.01))
    assert len(tuning.stages) == 2 and all(stage.after < stage.before for stage in tuning.stages)
    assert f"{tuning.stages[-1].after:.3g}" in note
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items()), "the block moved"
    assert vectors.keys() == {"norm.weight", "norm.bias", "up.bias", "gate.bias"}
    plain = quantized(block, Config(steps=0, between=0))[0]
    assert tuning.stages[-1].after < 0.8 * error(plain)
    assert tuning.stages[-1].after == pytest.approx(error(tuning), rel=1e-6)
    for name, weight in packed.items():  # what is stored is what was measured
        decoded = formats.decode(weight, torch.float32)
        assert torch.equal(decoded, tuning.model.get_parameter(f"{name}.weight"))


def test_states_of_eight_bits_tune_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw8bit, "SMALLEST", 1)
    wide, small = (
        quantized(Toy().requires_grad_(False), Config(steps=40, between=40, rate=0.01, optimizer_states=states))[0]
        for states in ("32bit", "8bit")
    )
    assert small.stages[-1].after == pytest.approx(wide.stages[-1].after, rel=0.1)
    assert small.stages[-1].after != wide.stages[-1].after
    wide_nbytes, small_nbytes = (
        blockwise.workspace(Config(optimizer_states=states), BlockSizes(10**8, 0, 0, 4, 512))
        for states in ("32bit", "8bit")
    )
    assert small_nbytes < 0.9 * wide_nbytes


def error(tuning: BlockTuning) -> float:
    return tuning.error({})


def test_inputs_are_quantized_as_at_run_time() -> None:
    block = Toy().requires_grad_(False)
    tuning = BlockTuning(block, ["up", "gate", "down"], inputs(block), 4, Config())
    inside = copy.deepcopy(block)
    for name in ("up", "gate", "down"):
        packed = round_to_nearest(tuning.weight(name), 4, 16)
        stored = dataclasses.replace(packed.stored, activations=Activations(bits=4))
        packed = PackedWeight(stored, packed.tensors, packed.shape)
        tuning.add(name, packed)
        inside.set_submodule(name, PackedLinear.from_packed(packed, block.get_submodule(name).bias))
    batch, _, expected = next(inputs(block)())  # the one that is held out
    wanted = ((inside(batch) - expected).square().sum(-1) / expected.square().sum(-1)).mean()
    assert error(tuning) == pytest.approx(wanted.item(), rel=1e-4)


def test_codes_stay_what_they_are() -> None:
    block = Toy().requires_grad_(False)
    tuning = BlockTuning(
        block, ["up", "gate", "down"], inputs(block), 4, Config(steps=20, rate=0.01, weights_rate=0.01)
    )
    given = {name: round_to_nearest(tuning.weight(name), 3, 16, symmetric=False) for name in ("up", "gate", "down")}
    for name, weight in given.items():
        tuning.add(name, weight)
    packed = tuning.finish()[0]
    for name, weight in given.items():
        assert packed[name].stored == weight.stored and packed[name].nbytes == weight.nbytes
        for key, tensor in weight.tensors.items():
            found = packed[name].tensors[key]
            assert found.dtype == tensor.dtype and torch.equal(found, tensor) != (tensor.dtype in FLOATS)


@pytest.mark.parametrize("count", [1, 4])
def test_steps_that_bring_nothing_leave_no_trace(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block, errors = Toy().requires_grad_(False), itertools.count(1.0)
    plain = quantized(block, Config(steps=0, between=0), count)[1]
    monkeypatch.setattr(BlockTuning, "error", lambda self, parameters: next(errors))
    wild = quantized(block, Config(steps=9, between=9, rate=0.1), count)[1]
    for name, weight in plain[0].items():
        assert all(torch.equal(tensor, wild[0][name].tensors[key]) for key, tensor in weight.tensors.items())
    assert all(torch.equal(tensor, wild[1][name]) for name, tensor in plain[1].items())


def test_a_single_batch_is_trained_on() -> None:
    tuning = quantized(
        Toy().requires_grad_(False), Config(steps=20, between=20, rate=0.01, weights_rate=0.01), count=1
    )[0]
    assert all(stage.after < stage.before for stage in tuning.stages)


def test_held_out_batches_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    block = Toy().requires_grad_(False)
    batches = list(inputs(block, 6)())
    tuning = BlockTuning(block, ["up"], lambda: iter(batches), 6, Config(steps=9, held_out=3))
    run = BlockTuning.run

    def note(self: BlockTuning, parameters: Any, hidden: Tensor, call: BlockArgs) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(next(i for i, batch in enumerate(batches) if batch[0] is hidden))
        return run(self, parameters, hidden, call)

    monkeypatch.setattr(BlockTuning, "run", note)
    tuning.add("up", round_to_nearest(tuning.weight("up"), 3, 16))
    tuning.finish()
    assert seen == [1, 2, 4, 5, 1, 2, 4, 5, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("model") / "llama", dtype=torch.bfloat16)


@pytest.mark.parametrize("setup", [GPTQ, Setup("vq2bit", ("state_bits=6",)), Setup("gptvq2bit")], ids=lambda s: s.name)
def test_a_tuned_model(setup: Setup, model: Path, tmp_path: Path) -> None:
    plain, tuned = (setup.set(*SMALL, *more) for more in ((), TUNED))
    api.quantize(job(model, plain, tmp_path / "plain"))
    result = cli("quantize", str(model), *tuned.options(), "--out", str(tmp_path / "out"))
    assert result.code == 0, result.err
    report = report_of(tmp_path / "out")
    assert report["nbytes"] == report_of(tmp_path / "plain")["nbytes"]
    assert all("held-out error" in report["notes"][f"model.layers.{index}"][-1] for index in range(2))
    before, after = (stored_tensors(tmp_path / name) for name in ("plain", "out"))
    norms = [name for name in before if "layers" in name and "norm" in name]
    assert norms and any(not torch.equal(before[name], after[name]) for name in norms)
    assert {name: tensor.dtype for name, tensor in before.items()} == {n: tensor.dtype for n, tensor in after.items()}


@pytest.mark.slow
@pytest.mark.parametrize("codes", ["fixed", "straight_through"])
def test_a_killed_run_goes_on_with_the_same_bytes(
    codes: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = GPTQ.set(*SMALL, *TUNED, f"tune.codes={codes}")
    api.quantize(job(model, setup, tmp_path / "whole"))
    with killed_behind_a_block(monkeypatch, BlockTuning):
        api.quantize(job(model, setup, tmp_path / "out"))
    report = api.quantize(job(model, setup, tmp_path / "out"))
    assert report["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_tuning_takes_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = Skeleton(open_checkpoint(model))
    made = plan.make(GPTQ.load(), skeleton)
    monkeypatch.setattr(memory_plan, "TOKENIZING_NBYTES", 0)
    sizes = BlockSizes(numel=1000, states=40, hidden=10, batch=4, seq_len=512)
    given = blockwise.workspace(Config(), sizes)
    assert given == 1000 * (8 + 24) + 40 + 2 * 2 * 10
    assert blockwise.workspace(Config(codes="signs"), sizes) == given + 1000 * 12
    assert blockwise.workspace(Config(tokens=2048), sizes) == given + 2 * 40
    extras = (memory_plan.MemoryDemands(), memory_plan.MemoryDemands(block_tuning=lambda *sizes: 1 << 30))
    plain, tuned = (memory_plan.arrange(made, skeleton, 8, 32, 1 << 40, each) for each in extras)
    assert tuned.block_nbytes - (1 << 30) > memory_plan.TRAINING_NBYTES and tuned.peak_nbytes > plain.peak_nbytes + (
        1 << 30
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tune={steps: 3}", "tune needs a method, one of .*blockwise, end_to_end"),
        ("tune={method: blokwise}", "blokwise"),
        ("tune={method: blockwise, stepps: 3}", "stepps"),
        ("tune={method: blockwise, steps: -1}", "must not be negative"),
        ("tune={method: blockwise, rate: 1.5}", "is not between 0 and 1"),
        ("tune={method: blockwise, weights_rate: 0}", "weights_rate 0.0 is not between 0 and 1"),
        ("tune={method: blockwise, held_out: 1}", "nothing would be trained on"),
        ("tune={method: blockwise, codes: sings}", "did you mean 'signs'"),
        ("tune={method: blockwise, codes_rate: 0}", "codes_rate 0.0 is not between 0 and 16"),
        ("tune={method: blockwise, tokens: 0}", "tokens 0 is not positive"),
        ("tune={method: blockwise, start: middle}", "start"),
    ],
)
def test_settings_that_cannot_be(override: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe.load("int4", [override])


def test_tuning_needs_something_to_tune() -> None:
    with pytest.raises(RecipeError, match="tune needs quantize"):
        recipe.load("kv4", ["tune={method: blockwise}"])


def test_a_recipe_keeps_its_tuning(tmp_path: Path) -> None:
    loaded = recipe.load("int4", ["tune.method=blockwise", "tune.steps=7"])
    assert [step.config for step in loaded.tune] == [Config(steps=7)]
    (tmp_path / "r.yaml").write_text(recipe.dump(loaded))
    assert recipe.load(str(tmp_path / "r.yaml")) == loaded
    assert len({recipe.fingerprint(x) for x in (loaded, recipe.load("int4"))}) == 2
