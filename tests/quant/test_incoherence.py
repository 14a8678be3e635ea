"""Runs in a random rotated basis: what a method is given, what is stored, what a reloaded model computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api, formats, process_memory, recipe
from compress.errors import CheckpointError, RecipeError
from compress.formats import transforms
from compress.model.skeleton import Skeleton
from compress.quant import gptq, incoherence, rtn
from compress.run import memory_plan, plan, prepare, report, verify
from compress.run.report import from_dict
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from compress.types import NO_TRANSFORMS, LinearSpec, PackedWeight, Quantized, Stats
from helpers.pico import PICO
from helpers.runs import GPTQ, RTN, Setup, contents, job, report_of, stored_tensors

ROTATED = GPTQ.set("incoherence=true")
ROTATED_RTN = RTN.set("incoherence=true")
LAYER = "model.layers.{}.self_attn.{}_proj.{}_signs"
IDS = torch.arange(60).view(2, 30)


@pytest.fixture(scope="module")
def run(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """run(architecture) -> a finished rotated checkpoint, made once."""
    made: dict[str, Path] = {}

    def finished(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "out"
            api.quantize(job(pico_dir(name), ROTATED, made[name]))
        return made[name]

    return finished


# ---------------------------------------------------------------- from run to reloaded model


@pytest.mark.parametrize("name", ["llama", "mixtral", "phi3"])
def test_a_reloaded_model_equals_the_decoded_one(
    name: str, run: Callable[[str], Path], pico_dir: Callable[..., Path]
) -> None:
    out = run(name)
    report, tensors = report_of(out), stored_tensors(out)
    assert report["self_check"] == "passed" and verify.verify(out)["blocks"] == 2
    prepared = prepare.prepare(job(pico_dir(name), ROTATED, out.with_name("other")))
    assert report["nbytes"]["total"] == prepared.plan.nbytes == sum(t.nbytes for t in tensors.values())
    assert all(row["ops"] == dataclasses.asdict(incoherence.OPS) | row["ops"] for row in report["layers"])
    assert all(row["format"].endswith(" hadamard") for row in report["plan"])
    model = AutoModelForCausalLM.from_pretrained(out)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == len(report["layers"]) and all(layer.stored.ops == incoherence.OPS for layer in layers)
    with torch.no_grad():
        packed, original = model(IDS).logits, PICO[name]()(IDS).logits
        decoded = model.dequantize(torch.float32)(IDS).logits
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert (packed - decoded).abs().max() < 1e-4 * float(decoded.abs().max())
    assert (decoded - original).square().mean() < 0.25 * original.square().mean()


def test_errors_are_those_of_the_weight_that_is_decoded(run: Callable[[str], Path]) -> None:
    """weight_error, from the original weight and the effective one."""
    out, source = run("llama"), PICO["llama"]()
    tensors = stored_tensors(out)
    for row in report_of(out)["layers"]:
        layer = from_dict(row)
        own = {key: tensors[f"{layer.name}.{key}"] for key in formats.specs(layer.stored, layer.shape)}
        weight = source.get_submodule(row["name"]).get_parameter("weight").detach()
        decoded = formats.decode(PackedWeight(layer.stored, own, layer.shape), torch.float32)
        error = float((decoded - weight).square().sum() / weight.square().sum())
        assert error == pytest.approx(row["weight_error"], rel=1e-4) and 0 < error < 0.03
        assert row["nbytes"] == sum(t.nbytes for t in own.values()) and 0 < row["output_error"] < 0.02


def test_saved_again_it_stays_the_same(run: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run("mixtral"))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_configuration_of_a_newer_version_is_one_clear_line(run: Callable[[str], Path], tmp_path: Path) -> None:
    for path in run("llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["default"]["ops"]["input"].append("spin")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="transform 'spin' is unknown to this version; upgrade compress"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# ---------------------------------------------------------------- draws


def test_linears_that_share_an_input_share_its_signs(run: Callable[[str], Path]) -> None:
    tensors = stored_tensors(run("llama"))
    q, k, v, o = (tensors[LAYER.format(0, part, "in")] for part in "qkvo")
    assert torch.equal(q, k) and torch.equal(q, v) and not torch.equal(q, o)
    assert not torch.equal(q, tensors[LAYER.format(1, "q", "in")])
    k_out, v_out = (tensors[LAYER.format(0, part, "out")] for part in "kv")
    assert not torch.equal(k_out, v_out)


def test_draws_depend_on_seed_and_names_alone() -> None:
    one = LinearSpec("m.q", (4096, 640), torch.float32, 0, "m.q")
    two = dataclasses.replace(one, name="m.k", shape=(800, 640))
    first, second = incoherence.draw(one, 1), incoherence.draw(two, 1)
    assert torch.equal(first["in_signs"], second["in_signs"])
    assert not torch.equal(first["out_signs"][:100], second["out_signs"])
    assert not torch.equal(incoherence.draw(one, 2)["in_signs"], first["in_signs"])
    torch.rand(3)  # the global generator has no part in it
    assert all(torch.equal(first[key], tensor) for key, tensor in incoherence.draw(one, 1).items())
    signs = transforms.unpack_signs(first["out_signs"], 4096, torch.float32)
    assert abs(float(signs.mean())) < 4 / 4096**0.5
    seeds = {incoherence.derived_seed(s, what, name) for s in (0, 1) for what in ("a", "b") for name in ("x", "y")}
    assert len(seeds) == 8 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_an_outlier_is_spread_over_the_weight() -> None:
    spec = LinearSpec("m.q", (64, 96), torch.float32, 0, "m.q")
    weight = torch.zeros(64, 96)
    weight[5, 7] = 1
    rotated = transforms.rotate(weight, incoherence.OPS, incoherence.draw(spec, 0))
    assert torch.allclose(rotated.abs(), torch.full((64, 96), (64 * 96) ** -0.5), atol=1e-6)


# ---------------------------------------------------------------- what methods are given


def test_methods_get_the_rotated_problem(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weight and statistics rotated alike, the statistics once for each input."""
    given: list[tuple[Tensor, Stats]] = []
    measured: dict[str, tuple[Tensor, Stats]] = {}
    rotations: list[Any] = []
    real_prepare, real_measure, real_rotate = gptq.prepare, report.measure, transforms.rotate_hessian

    def prepare(weight: Tensor, stats: Stats, config: gptq.Config) -> gptq.Rounding:
        given.append((weight.clone(), Stats(stats.hessian.clone(), stats.count)))
        return real_prepare(weight, stats, config)

    def measure(layer: Any, weight: Tensor, packed: Any, stats: Stats, notes: Any, metric: Any) -> Any:
        measured[layer.spec.name] = (weight.clone(), Stats(stats.hessian.clone(), stats.count))
        return real_measure(layer, weight, packed, stats, notes, metric)

    def rotate(*words: Any) -> Tensor:
        rotations.append(words)
        return real_rotate(*words)

    monkeypatch.setattr(gptq, "prepare", prepare)
    monkeypatch.setattr(report, "measure", measure)
    monkeypatch.setattr(transforms, "rotate_hessian", rotate)
    api.quantize(job(pico_dir("llama"), ROTATED, tmp_path / "out"))
    assert len(rotations) == 2 * 4 and len(given) == len(measured) == 2 * 7
    for (weight, stats), (original, unrotated) in zip(given, measured.values(), strict=True):
        assert stats.count == unrotated.count
        here = ((original @ unrotated.hessian) * original).sum()
        assert torch.allclose(((weight @ stats.hessian) * weight).sum(), here, rtol=1e-4)
        assert not torch.allclose(weight, original, atol=0.01)
        assert torch.allclose(weight.norm(), original.norm(), rtol=1e-4)


def test_each_linear_has_a_seed_of_its_own(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seeds = rtn.quantize, list[int]()

    def quantize(weight: Tensor, stats: Stats | None, config: rtn.Config, seed: int) -> Quantized:
        seeds.append(seed)
        return real(weight, stats, config, seed)

    monkeypatch.setattr(rtn, "quantize", quantize)
    api.quantize(job(pico_dir("llama"), RTN.set("incoherence=true"), tmp_path / "out"))
    assert len(set(seeds)) == len(seeds) == 2 * 7


def test_only_layers_that_ask_for_it_are_rotated(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """A rule for one of three linears with one input; each is what it is alone."""
    rule = 'rules=[{match: "*.k_proj", incoherence: true}, {match: "*.down_proj", keep: true}]'
    api.quantize(job(pico_dir("llama"), GPTQ.set(rule), tmp_path / "mixed"))
    api.quantize(job(pico_dir("llama"), GPTQ, tmp_path / "plain"))
    mixed, plain = stored_tensors(tmp_path / "mixed"), stored_tensors(tmp_path / "plain")
    signed = {key.rsplit(".", 1)[0] for key in mixed if key.endswith("_signs")}
    assert signed == {f"model.layers.{i}.self_attn.k_proj" for i in (0, 1)}
    first = [key for key in plain if key.startswith("model.layers.0.self_attn.")]  # block 0: on the same inputs
    same = {key for key in first if torch.equal(mixed[key], plain[key])}
    assert same == {key for key in first if "k_proj" not in key}


def test_methods_without_statistics_are_rotated_too(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    report = api.quantize(job(pico_dir("phi3"), ROTATED_RTN, tmp_path / "out"))
    assert all(row["ops"] == incoherence.OPS or row["ops"]["input"] for row in report["layers"])
    assert all(0 < row["weight_error"] < 1e-4 and row["output_error"] is None for row in report["layers"])


def test_sizes_without_a_hadamard_matrix_are_noted(pico_dir: Callable[..., Path]) -> None:
    layer = plan.make(ROTATED.load(), Skeleton(open_checkpoint(pico_dir("llama")))).layers[0]
    assert incoherence.notes(layer) == () and layer.stored.ops == incoherence.OPS
    odd = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, shape=(50, 33)))
    assert incoherence.notes(odd) == (
        "no Hadamard matrix of size 50 is known here: a Hartley matrix of 25 is used",
        "no Hadamard matrix of size 33 is known here: a Hartley matrix of 33 is used",
    )
    assert incoherence.notes(dataclasses.replace(odd, stored=dataclasses.replace(odd.stored, ops=NO_TRANSFORMS))) == ()


# ---------------------------------------------------------------- plans


def test_what_cannot_be_for_a_shape_names_the_layer(
    pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = Skeleton(open_checkpoint(pico_dir("llama")))

    def refuse(config: rtn.Config, shape: tuple[int, int]) -> None:
        raise ValueError(f"bits {config.bits} are too many")

    monkeypatch.setattr(rtn, "plan_params", refuse)
    with pytest.raises(RecipeError) as caught:
        plan.make(RTN.load(), skeleton)
    assert str(caught.value) == (
        "model.layers.0.self_attn.q_proj (64 x 64): bits 8 are too many; change the setting, or give this linear a "
        "rule of its own"
    )


def test_a_size_without_a_transform_names_the_layer(
    pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.numerics.hadamard.LARGEST_TABLE", 2)
    incoherence.hadamard.order.cache_clear()
    try:
        with pytest.raises(RecipeError, match=r"gate_proj \(192 x 64\): no Hadamard .* 192: .* incoherence: false"):
            plan.make(ROTATED.load(), Skeleton(open_checkpoint(pico_dir("llama"))))
    finally:
        incoherence.hadamard.order.cache_clear()


def test_rotation_is_counted_in_memory(pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = Skeleton(open_checkpoint(pico_dir("llama")))
    monkeypatch.setattr(memory_plan, "TOKENIZING_NBYTES", 0)
    monkeypatch.setattr(process_memory, "resident", lambda: 0)

    def peak(setup: Setup) -> int:
        return memory_plan.arrange(plan.make(setup.load(), skeleton), skeleton, 1, 1, 1 << 40).peak_nbytes

    weight, hessian = 4 * 64 * 192, 4 * 192**2  # of the largest layer, down_proj
    assert peak(ROTATED) - peak(GPTQ) > weight + hessian
    large = LinearSpec("m.q", (4096, 2048), torch.bfloat16, 0, "m.q")
    layer = dataclasses.replace(plan.make(ROTATED.load(), skeleton).layers[0], spec=large)
    buffers = 4 * incoherence.BUFFERS * incoherence.CHUNK
    assert incoherence.workspace(layer, False) == 4 * 4096 * 2048
    assert incoherence.workspace(layer, True) == 4 * (4096 * 2048 + 2048**2)
    assert incoherence.turning(layer, True) == incoherence.turning(layer, False) == buffers
    bare = dataclasses.replace(layer, stored=dataclasses.replace(layer.stored, ops=NO_TRANSFORMS))
    assert incoherence.workspace(bare, True) == 0


# ---------------------------------------------------------------- resumed


def test_a_resumed_run_writes_the_same_bytes(
    run: Callable[[str], Path], pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in block 1; killed processes are the matter of test_resume.py."""
    out, calls = run("llama").with_name("resumed"), 0
    real = gptq.prepare

    def prepare(*words: Any) -> gptq.Rounding:
        nonlocal calls
        calls += 1
        if calls == 10:  # of seven linears a block
            raise KeyboardInterrupt
        return real(*words)

    asked = job(pico_dir("llama"), ROTATED, out)
    monkeypatch.setattr(gptq, "prepare", prepare)
    with pytest.raises(KeyboardInterrupt):
        api.quantize(asked)
    assert not out.exists()
    report = api.quantize(asked)
    assert report["resumed_blocks"] == 1 and calls == 10 + 7
    assert contents(out) == contents(run("llama"))
    rows = [[{**row, "seconds": 0} for row in report_of(where)["layers"]] for where in (out, run("llama"))]
    assert rows[0] == rows[1]


def test_other_settings_are_another_run(pico_dir: Callable[..., Path]) -> None:
    prints = {recipe.fingerprint(setup.load()) for setup in (GPTQ, ROTATED, GPTQ.set("incoherence=false"))}
    assert len(prints) == 2
