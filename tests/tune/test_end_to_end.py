"""End-to-end tuning: gradients are those of the whole model, what is stored is what was measured, and never worse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from compress import api, formats, recipe
from compress.calib import reference_logprobs
from compress.errors import RecipeError
from compress.model import load as lm
from compress.model.skeleton import Skeleton
from compress.run import memory_plan, pipeline, plan, verify
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from compress.tune import end_to_end, streamed
from compress.tune.end_to_end import Config
from compress.tune.streamed import StreamedModel, TrainingText
from compress.tune.trained import DiskSizes, TuningResult, TuningWork, WholeModelSizes
from compress.types import IN_SCALE, PackedWeight
from helpers.pico import VOCAB_SIZE, save_pico
from helpers.runs import GPTQ, Setup, contents, job, report_of, stored_tensors

TOKENS = torch.randint(256, (6, 24), generator=torch.Generator().manual_seed(1))
SMALL = ("calibration.num_samples=8", "calibration.seq_len=32")
SCALED = Setup("vq2bit", (*SMALL, "state_bits=6", "out_scales=ones", "in_vector=true"))
CPU = torch.device("cpu")
MADE: dict[str, tuple[str, Setup]] = {  # family and recipe
    "integers, a packed tied table": ("llama_tied", Setup("int3", (*SMALL, "group_size=32", "two_sided=false"))),
    "a trellis, biases, a plain head": ("qwen2", Setup("vq2bit", (*SMALL, "state_bits=6", "head={keep: true}"))),
    "a trellis, scales of channels": ("llama", SCALED),
    "a trellis, scales of channels and rows": ("llama", SCALED.set("row_scales=true")),
    "codebooks, layer norms": ("gpt_neox", Setup("gptvq2bit", SMALL)),
    "experts": ("mixtral", GPTQ.set("bits=3")),
    "low rank, positions": ("opt", GPTQ.set("bits=2", "lowrank={rank: 4}")),
    "norms of 1 + w, some linears plain": ("gemma", GPTQ.set("rules=[{match: '*down_proj', keep: true}]")),
    "scales of inputs": ("llama", GPTQ.set("bits=4", "activations={bits: 8, scale: tensor}")),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """made(name) -> a model of MADE, and the packed one."""
    folder, done = tmp_path_factory.mktemp("made"), dict[str, tuple[Path, Path]]()

    def make(name: str) -> tuple[Path, Path]:
        if name not in done:
            family, setup = MADE[name]
            model, out = save_pico(family, folder / f"model{len(done)}"), folder / f"packed{len(done)}"
            api.quantize(job(model, setup, out))
            done[name] = model, out
        return done[name]

    return make


def opened(
    paths: tuple[Path, Path], folder: Path, batch: int = 4, is_held: bool = True
) -> tuple[StreamedModel, TrainingText]:
    """The packed model and a text for it, with all of the original's log-probabilities."""
    original = Skeleton(open_checkpoint(paths[0]))
    reference = reference_logprobs.load(original, TOKENS, folder, VOCAB_SIZE)
    model = StreamedModel(paths[1], CPU, is_held)
    return model, model.text(TOKENS, batch, None if is_held else folder / "states", reference)


def moved(model: StreamedModel) -> dict[str, Tensor]:
    """Numbers a little away from those that are stored."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: tensor.float() * (1 + 0.02 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in model.stored.items()
    }


def plainly(paths: tuple[Path, Path], numbers: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Divergence and gradients by autograd over the whole model, decoded at once."""
    original, packed = (lm.load_model(path, "float32") for path in paths)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in numbers.items()}
    weights: dict[str, Tensor] = {name: leaves[name] for name, _ in packed.named_parameters() if name in leaves}
    for name, module in list(packed.named_modules()):
        if isinstance(module, PackedLinear):
            changed = {k: leaves[f"{name}.{k}"] for k in module.specs if f"{name}.{k}" in leaves}
            weight = PackedWeight(module.stored, {**module.tensors, **changed}, module.shape)
            packed.set_submodule(name, module.to_linear(torch.float32))
            weights[f"{name}.weight"] = formats.decode(weight, torch.float32)
            weights = {key: value for key, value in weights.items() if key not in {f"{name}.{k}" for k in changed}}
    p = original(input_ids=TOKENS, use_cache=False).logits.detach().double().log_softmax(-1)
    q = functional_call(packed, weights, (), {"input_ids": TOKENS, "use_cache": False}).logits.double().log_softmax(-1)
    loss = (p.exp() * (p - q)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.item(), {name: each for name, each in zip(leaves, found, strict=True) if each is not None}


@pytest.mark.parametrize("name", MADE)
def test_gradients_are_those_of_the_whole_model(name: str, made: Any, tmp_path: Path) -> None:
    model, text = opened(made(name), tmp_path)
    numbers = moved(model)
    total, gradients = model.gradients(text, text.batches, numbers)
    loss, expected = plainly(made(name), numbers)
    assert total == pytest.approx(loss, rel=1e-5) == pytest.approx(model.divergence(text, text.batches, numbers))
    assert gradients.keys() == expected.keys()
    least = 1e-3 * max(gradient.norm() for gradient in expected.values())  # a bias of keys has none at all
    for key, gradient in expected.items():
        error = (gradients[key] - gradient).norm() / gradient.norm().clamp(min=least)
        assert error < 2e-4, (key, error)
    on_disk = stored_tensors(made(name)[1])
    for key, tensor in model.stored.items():
        assert torch.equal(tensor, on_disk[key]) and tensor.dtype == on_disk[key].dtype, key
    tables = ("embed", "lm_head.", "wte", "wpe")
    rest = {key for key, tensor in on_disk.items() if tensor.dtype in streamed.FLOATS and key not in model.stored}
    assert all(any(word in key for word in tables) or key.endswith((IN_SCALE, "weight", "like")) for key in rest), rest
    assert not any(on_disk[key].dim() == 1 and key.endswith("norm.weight") for key in rest)


def test_neither_batches_nor_files_change_more_than_the_order_of_sums(made: Any, tmp_path: Path) -> None:
    paths = made("integers, a packed tied table")
    found = []
    for batch, is_held in ((6, True), (6, False), (1, False), (4, True)):
        model, text = opened(paths, tmp_path, batch, is_held)
        found.append(model.gradients(text, text.batches, moved(model)))
        text.stream.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][key]) for key, tensor in found[0][1].items())
    for total, gradients in found[2:]:
        assert total == pytest.approx(found[0][0], rel=1e-5)
        assert all(torch.allclose(g, found[0][1][key], rtol=1e-3, atol=1e-5) for key, g in gradients.items())


def tuned(
    paths: tuple[Path, Path], folder: Path, config: Config, tokens: Tensor = TOKENS, batch: int = 2
) -> TuningResult:
    before = contents(paths[1])
    said: list[str] = []
    work = TuningWork(paths[1], open_checkpoint(paths[0]), tokens, CPU, batch, folder, False, said.append)
    result = end_to_end.train(config, work)
    assert contents(paths[1]) == before and any("step 1 of" in text for text in said)
    return result


def test_what_is_kept_is_what_was_measured(made: Any, tmp_path: Path) -> None:
    paths, config = made("integers, a packed tied table"), Config(12, 0.02, 0.02, 48, VOCAB_SIZE, 3)
    result = tuned(paths, tmp_path, config)
    first, last = (float(word) for word in result.note.split("text ")[1].split(";")[0].split(" -> "))
    assert last < 0.97 * first
    model, text = opened(paths, tmp_path)
    held = [slice(4, 6)]
    for numbers, measured in ((model.stored, first), ({**model.stored, **result.tensors}, last)):
        text = model.text(TOKENS, 2, None, text.reference)
        floats = {name: tensor.float() for name, tensor in numbers.items()}
        assert model.divergence(text, held, floats) / 48 == pytest.approx(measured, abs=6e-5)
    assert all(tensor.dtype == model.stored[name].dtype for name, tensor in result.tensors.items())
    again = tuned(paths, tmp_path, config)
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in result.tensors.items())


@pytest.mark.parametrize("count", [1, 6])
def test_steps_that_bring_nothing_leave_no_trace(
    count: int, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rising = itertools.count(1.0)
    monkeypatch.setattr(StreamedModel, "divergence", lambda *_: next(rising))
    config = Config(4, 0.1, 0.1, 48, 16)
    result = tuned(made("experts"), tmp_path, config, TOKENS[:count])
    assert result.tensors == {} and "no better, so they stay as they were" in result.note


@pytest.mark.parametrize(
    ("found", "patience", "said"),
    [
        ([9, 8, 7, 7.5, 6, 7, 6.5, 0], 2, "for 6 steps of 10, then stopped in"),
        ([9, 8, 7, 7.5, 6, 7, 5, 0], 3, "for 10 steps in"),
        ([9, 10], 1, "for 1 steps of 10, then stopped in"),
        ([9] * 11, 0, "for 10 steps in"),
    ],
)
def test_training_stops_when_patience_is_at_an_end(
    found: list[float], patience: int, said: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that are taken are the same, and what was best is kept."""
    measured = iter([*found, *[8.0] * 10])
    monkeypatch.setattr(StreamedModel, "divergence", lambda *_: 48 * next(measured))
    monkeypatch.setattr(end_to_end, "CHECKS", 10)
    result = tuned(made("experts"), tmp_path, Config(10, 0.1, 0.1, 48, 16, 3, patience))
    assert said in result.note
    taken = int(result.note.split(" for ")[1].split(" ")[0])
    best = min(range(taken + 1), key=lambda check: found[check] if check < len(found) else 8.0)
    assert bool(result.tensors) == (best > 0)
    if best:
        measured = iter([*[9.0] * best, *[1.0] * 11])
        until = tuned(made("experts"), tmp_path, Config(10, 0.1, 0.1, 48, 16, 3)).tensors
        assert until.keys() == result.tensors.keys()
        assert all(torch.equal(tensor, until[name]) for name, tensor in result.tensors.items())


@pytest.mark.parametrize("top_k", [16, VOCAB_SIZE])
def test_its_files_are_counted(top_k: int, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in its folder when the original's predictions are written, and behind that, is less than was said."""
    seen: list[int] = []
    write, measure = reference_logprobs.write_shard, StreamedModel.divergence

    def size() -> int:
        return sum(path.stat().st_size for path in tmp_path.iterdir())

    def writing(*arguments: Any) -> Any:
        result = write(*arguments)
        seen.append(size())
        return result

    def measuring(*arguments: Any) -> Any:
        seen.append(size())
        return measure(*arguments)

    monkeypatch.setattr(reference_logprobs, "write_shard", writing)
    monkeypatch.setattr(StreamedModel, "divergence", measuring)
    config, paths = Config(1, batch_tokens=480, top_k=top_k, held_out=3), made("experts")
    work = TuningWork(paths[1], open_checkpoint(paths[0]), TOKENS, CPU, 2, tmp_path, True, lambda _: None)
    end_to_end.train(config, work)
    said = end_to_end.disk(config, DiskSizes(6, 24, 64, VOCAB_SIZE, 0))
    assert 0.9 * said < seen[0] < said + 2048 and len(seen) > 1 and max(seen[1:]) < seen[0]  # a header
    assert end_to_end.disk(config, DiskSizes(6, 24, 64, VOCAB_SIZE, 10)) == said + 80
    few = end_to_end.disk(Config(1, batch_tokens=24, top_k=top_k, held_out=6), DiskSizes(60, 24, 64, VOCAB_SIZE, 0))
    assert few == (1 + 10) * said // 6


@pytest.mark.slow
def test_a_run_asks_for_the_room_of_its_files(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what lies there from an interrupted one is not asked for again."""
    model, plain = made("integers, a packed tied table")[0], MADE["integers, a packed tied table"][1]
    asked: list[int] = []
    monkeypatch.setattr(pipeline, "check_space", lambda folder, nbytes: asked.append(nbytes))
    setup = plain.set("tune={method: end_to_end, steps: 2, batch_tokens: 64}")
    api.quantize(job(model, plain, tmp_path / "plain"))

    def stop(self: StreamedModel, *_: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StreamedModel, "divergence", stop)
        api.quantize(job(model, setup, tmp_path / "out"))
    api.quantize(job(model, setup, tmp_path / "out"))
    tokens, k = 2 * 64 + 32, min(512, VOCAB_SIZE)
    teacher = 2 * tokens * (8 * k + (4 if k < VOCAB_SIZE else 0)) + 4 * tokens * 64
    assert asked[1] > asked[0] + teacher
    assert asked[2] < asked[1] - asked[0] // 2 - teacher // 3


def test_rates_of_zero_leave_numbers_alone(made: Any, tmp_path: Path) -> None:
    paths = made("experts")
    vectors = StreamedModel(paths[1], CPU, True).vectors
    norms = tuned(paths, tmp_path, Config(8, 0.0, 0.01, 48, VOCAB_SIZE, 3)).tensors
    others = tuned(paths, tmp_path, Config(8, 0.01, 0.0, 48, VOCAB_SIZE, 3)).tensors
    assert norms and norms.keys() <= vectors and others and not others.keys() & vectors
    assert "model.norm.weight" in norms


def test_steps_have_the_same_samples_whatever_fits_into_memory(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that are held out are not among them."""
    seen: list[list[int]] = []
    real = StreamedModel.gradients

    def note(self: StreamedModel, text: TrainingText, batches: list[slice], numbers: Any) -> Any:
        seen.append([text.first + sample for samples in batches for sample in range(samples.start, samples.stop)])
        return real(self, text, batches, numbers)

    monkeypatch.setattr(StreamedModel, "gradients", note)
    for batch in (1, 3, 8):
        tuned(made("experts"), tmp_path, Config(2, batch_tokens=48, top_k=16, held_out=6), batch=batch)
        assert seen == [[0, 1], [2, 3]]
        seen.clear()
    tuned(made("experts"), tmp_path, Config(2, batch_tokens=480, top_k=16, held_out=3))
    assert seen == [[0, 1, 2, 3]] * 2


def test_blocks_that_hand_each_other_more_are_said(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingText, "is_separable", property(lambda self: False))
    work = TuningWork(made("experts")[1], open_checkpoint(made("experts")[0]), TOKENS, CPU, 2, tmp_path, True, print)
    result = end_to_end.train(Config(), work)
    assert result == TuningResult(
        "not tuned end to end: blocks of this model hand each other more than hidden states", {}
    )


BOTH = "tune=[{method: blockwise, steps: 6, between: 3}, {method: end_to_end, steps: 8, batch_tokens: 64}]"


def test_a_recipe_with_both_scopes(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "llama", dtype=torch.bfloat16)
    once = GPTQ.set("bits=2", *SMALL, "tune={method: blockwise, steps: 6, between: 3}")
    for name, setup in (("once", once), ("both", GPTQ.set("bits=2", *SMALL, BOTH))):
        api.quantize(job(model, setup, tmp_path / name))
    verify.verify(tmp_path / "both")
    notes = report_of(tmp_path / "both")["notes"]
    assert "stored numbers tuned end to end for 8 steps" in notes["end-to-end tuning"][0]
    assert "held-out error" in notes["model.layers.0"][-1]
    before, after = (stored_tensors(tmp_path / name) for name in ("once", "both"))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed and all(before[name].dtype in streamed.FLOATS for name in changed)
    assert {name: tensor.dtype for name, tensor in before.items()} == {n: tensor.dtype for n, tensor in after.items()}
    assert recipe.load(str(tmp_path / "both" / "recipe.yaml")).tune == GPTQ.set(BOTH).load().tune


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tune=[{method: end_to_end, stepps: 3}]", "stepps"),
        ("tune={method: end_to_end, steps: 0}", "must be positive"),
        ("tune={method: end_to_end, norm_rate: 1.5}", "norm_rate 1.5 is not at least 0 and below 1"),
        ("tune={method: end_to_end, held_out: 1}", "nothing would be trained on"),
        ("tune={method: end_to_end, patience: -1}", "patience -1 is negative; 0 takes all steps"),
        ("tune=[{steps: 3}]", "tune needs a method, one of .*blockwise, end_to_end"),
        ("tune=[{method: end_to_end}, {method: end_to_end}]", "end_to_end tunes the whole model already"),
        ("tune=[{method: blockwise}, {method: blockwise}]", "blockwise tunes blocks already"),
        ("tune=[{method: end_to_end}, {method: blockwise}]", "put it before end_to_end"),
    ],
)
def test_settings_that_cannot_be(override: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe.load("int4", [override])


def test_a_recipe_keeps_its_tuning(tmp_path: Path) -> None:
    for text, count in ((BOTH, 2), ("tune={method: end_to_end, steps: 7}", 1), ("tune=[]", 0)):
        loaded = recipe.load("int4", [text])
        assert len(loaded.tune) == count
        (tmp_path / "r.yaml").write_text(recipe.dump(loaded))
        assert recipe.load(str(tmp_path / "r.yaml")) == loaded
    assert loaded == recipe.load("int4") and loaded.tuning("model") is None


def test_the_plan_counts_its_time(made: Any, tmp_path: Path) -> None:
    """Of forward passes of the whole text, and four for each token of a step."""
    assert end_to_end.positions(Config(10, batch_tokens=64), 20, 32) == 4 * 10 * 64 + 20 * 32 + 6 * 2 * 32
    model, setup = made("integers, a packed tied table")[0], MADE["integers, a packed tied table"][1]
    tuned = setup.set("tune={method: end_to_end, steps: 9999}")
    plans = [api.plan(job(model, each, tmp_path / "out")) for each in (setup, tuned)]
    times = [planned[2] for planned in plans if isinstance(planned, tuple)]
    assert len(times) == 2 and times[1] > times[0] + 1


def test_what_tuning_takes_is_counted(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "TOKENIZING_NBYTES", 0)
    skeleton = Skeleton(open_checkpoint(made("experts")[0]))
    planned = plan.make(MADE["experts"][1].load(), skeleton)
    given: list[tuple[WholeModelSizes, int, bool]] = []

    def whole(sizes: WholeModelSizes, batch: int, is_spilled: bool) -> int:
        given.append((sizes, batch, is_spilled))
        return 1 << 30

    extras = memory_plan.MemoryDemands(model_tuning=whole)
    arranged = memory_plan.arrange(planned, skeleton, 8, 32, 1 << 40, extras)
    assert arranged.peak_nbytes > (1 << 30) + memory_plan.TRAINING_NBYTES
    sizes, batch, is_spilled = given[0]
    assert (batch, is_spilled, sizes.tokens, sizes.seq_len) == (8, False, 256, 32)
    model = StreamedModel(made("experts")[1], CPU, True)
    assert sizes.trained == sum(t.numel() for name, t in model.stored.items() if name not in model.vectors)
    assert len(sizes.packed) == 2 and sizes.hidden == 64
    held, spilled = (end_to_end.workspace(Config(), sizes, 8, each) for each in (False, True))
    assert held - spilled == sum(sizes.packed) - max(sizes.packed) + 4 * 256 * 64
    assert end_to_end.workspace(Config(batch_tokens=4096), sizes, 8, False) == held + 4 * 4 * 2048 * 64
