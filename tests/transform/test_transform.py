"""Transforms in whole runs: to plain checkpoints, under quantization, interrupted and resumed, in any arrangement."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api
from compress.formats import transforms
from compress.quant import incoherence
from compress.run import calibration_text, memory_plan, prepare, verify
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.hf import CompressConfig, scheme
from compress.storage import checkpoint
from compress.types import NO_TRANSFORMS, WeightTransforms
from helpers.pico import PICO
from helpers.runs import (
    GPTQ,
    RTN,
    Setup,
    cli,
    command,
    contents,
    interrupt,
    job,
    one_line,
    report_of,
    stored_tensors,
)

IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
ROTATE = RTN.set("transform=[{method: rotate}]")
SMALL = ("calibration.num_samples=4", "calibration.seq_len=32")
BOTH = RTN.set("transform=[{method: rotate}, {method: smooth}]", *SMALL)
PAIRED = GPTQ.set("bits=8", "calibration.target_correction=0.5", "transform=[{method: smooth}]", *SMALL)
STATIC = BOTH.set("activations={bits: 8, scale: tensor}")
MIX, HADAMARD = WeightTransforms(input=("head_mix/16",)), WeightTransforms(input=("hadamard",))
IN_BLOCK_1 = interrupt("compress.transform.smooth", "apply", 2)


def load(directory: Path) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model


@torch.no_grad()
def logits(directory: Path) -> Tensor:
    return load(directory)(IDS).logits.double()


def distance(a: Path, b: Path) -> float:
    """Of the logits of two checkpoints, relative."""
    x, y = logits(a), logits(b)
    return ((x - y).norm() / x.norm()).item()


def typical(a: Path, b: Path) -> float:
    """The same of a typical token: few are sent to other experts, by differences however small."""
    x, y = logits(a), logits(b)
    return ((x - y).norm(dim=-1) / x.norm(dim=-1)).median().item()


def transform_command(model: Path, setup: Setup, out: Path) -> list[str]:
    return ["transform", *command(model, setup, out)[1:]]


def transformed(model: Path, setup: Setup, out: Path) -> dict[str, Any]:
    return api.quantize(dataclasses.replace(job(model, setup, out), pack=False))


def ops_of(directory: Path) -> dict[str, WeightTransforms]:
    """Packed linear -> its operations, as config.json has them."""
    config = CompressConfig(**json.loads((directory / "config.json").read_text())["quantization_config"])
    return {name: scheme(config, name).ops for name in config.modules}


# ---------------------------------------------------------------- the command


def test_the_command_writes_a_plain_checkpoint(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source, out = pico_dir("llama", shards=True), tmp_path / "out"
    result = cli(*transform_command(source, BOTH, out), "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report == report_of(out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert report["layers"] == [] and report["products"] == {} and report["nbytes"]["quantized linears"] == 0
    assert report["nbytes"]["total"] == report["source_nbytes"] == sum(t.nbytes for t in stored_tensors(out).values())
    assert set(report["notes"]) == {"model.layers.0", "model.layers.1"}
    assert report["self_check"] == "passed"
    verify.verify(out)
    assert "in full precision" in (out / "README.md").read_text()
    assert distance(source, out) < 1e-5
    api.quantize(job(out, RTN, tmp_path / "packed"))  # and can be quantized like any other
    assert 0 < distance(source, tmp_path / "packed") < 0.05


def test_the_command_says_what_it_has_done(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    result = cli(*transform_command(pico_dir("llama"), ROTATE, tmp_path / "out"))
    assert result.code == 0, result.err
    assert str(tmp_path / "out") in result.out and "transformed, in full precision" in result.out


def test_a_recipe_without_transforms_is_refused(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    result = cli("transform", str(pico_dir("llama")), "--recipe", "int8", "--out", str(tmp_path / "out"))
    assert result.code == 1
    assert one_line(result) == "recipe 'int8' has no transform to apply; give one that has, or use quantize"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", ["smooth", "rotate"])
def test_rotate_must_come_first(first: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"quantize: {{method: rtn}}\ntransform:\n  - method: {first}\n  - method: rotate\n")
    for name in ("transform", "quantize"):
        result = cli(name, str(pico_dir("llama")), "--recipe", str(path), "--out", str(tmp_path / "out"))
        assert result.code == 1
        assert one_line(result).startswith(f"{path}, line 4: rotate must be the first transform")


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (
            "[{method: spun}]",
            "unknown transform plugin 'spun'; known: awq, prune_experts, rotate, smooth, clover, drop_blocks, merge_",
        ),
        (
            "[{residual: false}]",
            "a transform needs a method, one of awq, prune_experts, rotate, smooth, clover, drop_blocks, merge_",
        ),
        ("[{method: rotate, resid: false}]", "resid"),
        ("[{method: rotate, values: 1}]", "values"),
    ],
)
def test_transforms_that_cannot_be(steps: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # recipes are read before models
    result = cli("transform", str(tmp_path), "--recipe", "int8", "--set", f"transform={steps}")
    assert result.code == 1 and line in one_line(result)


def test_a_family_that_cannot_be_rotated_is_one_line(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    result = cli(*command(pico_dir("gemma2"), ROTATE, tmp_path / "out"))
    assert result.code == 1 and "set `residual: auto` for rotate" in one_line(result)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- quantized


WRITERS = {
    "llama": {"self_attn.o_proj": MIX, "mlp.down_proj": HADAMARD},
    "opt": {"self_attn.out_proj": MIX, "fc2": HADAMARD},
    "mixtral": {"self_attn.o_proj": MIX, **{f"mlp.experts.{i}.down_proj": HADAMARD for i in range(4)}},
}


@pytest.fixture(scope="module")
def quantized(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """quantized(name, setup) -> a packed checkpoint, made once."""
    made: dict[tuple[str, Setup], Path] = {}

    def directory(name: str, setup: Setup = ROTATE) -> Path:
        if (name, setup) not in made:
            made[name, setup] = tmp_path_factory.mktemp(name) / "out"
            api.quantize(job(pico_dir(name), setup, made[name, setup]))
        return made[name, setup]

    return directory


@pytest.mark.parametrize("name", WRITERS)
def test_a_rotated_model_is_quantized(name: str, quantized: Callable[..., Path], pico_dir: Callable[..., Path]) -> None:
    """What writes to the stream, and nothing else, has an operation left to run time."""
    out = quantized(name)
    prefixes = ["model.decoder.layers.0.", "model.decoder.layers.1."] if name == "opt" else []
    prefixes = prefixes or ["model.layers.0.", "model.layers.1."]
    expected = {prefix + linear: around for prefix in prefixes for linear, around in WRITERS[name].items()}
    found = ops_of(out)
    assert {linear: around for linear, around in found.items() if around} == expected and len(found) > len(expected)
    report = report_of(out)
    tensors = stored_tensors(out)
    assert report["nbytes"]["total"] == sum(t.nbytes for t in tensors.values())
    assert {r["name"]: r["ops"] for r in report["layers"]} == {
        n: {"input": list(around.input), "output": []} for n, around in found.items()
    }
    assert 0 < typical(pico_dir(name), out) < (0.05 if name == "mixtral" else 0.03)


def test_without_online_operations(quantized: Callable[..., Path], pico_dir: Callable[..., Path]) -> None:
    out = quantized("llama", RTN.set("transform=[{method: rotate, online: false}]"))
    assert set(ops_of(out).values()) == {NO_TRANSFORMS}
    assert 0 < typical(pico_dir("llama"), out) < 0.03
    out = quantized("llama", RTN.set("transform=[{method: rotate, values: false}]"))  # o may take all channels then
    assert ops_of(out)["model.layers.0.self_attn.o_proj"] == HADAMARD
    assert 0 < typical(pico_dir("llama"), out) < 0.03


def test_an_incoherent_layer_has_its_own_basis_alone(
    quantized: Callable[..., Path], pico_dir: Callable[..., Path]
) -> None:
    """Another Hadamard transform of the same input would undo the first."""
    out = quantized("llama", ROTATE.set("rules=[{match: '*.down_proj', incoherence: true}]"))
    found = ops_of(out)
    assert {around for name, around in found.items() if name.endswith("down_proj")} == {incoherence.OPS}
    assert {around for name, around in found.items() if name.endswith("o_proj")} == {MIX}
    assert 0 < typical(pico_dir("llama"), out) < 0.03


def test_a_kept_linear_is_rotated_and_left_without_operations(
    quantized: Callable[..., Path], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    kept = "model.layers.0.self_attn.o_proj"
    out = quantized("llama", ROTATE.set(f"ignore=['{kept}', '*.1.mlp.up_proj']"))
    found = ops_of(out)
    assert kept not in found and len(found) == 12
    assert set(report_of(out)["kept"]) == {kept, "model.layers.1.mlp.up_proj"}
    transformed(pico_dir("llama"), ROTATE, tmp_path / "plain")
    weights, plain = stored_tensors(out), stored_tensors(tmp_path / "plain")
    for name in weights.keys() & plain.keys():  # embeddings, norms and head, too
        assert torch.equal(weights[name], plain[name]), name
    assert f"{kept}.weight" in weights.keys() & plain.keys()
    assert 0 < typical(pico_dir("llama"), out) < 0.03


@pytest.mark.parametrize(
    "ignored",
    ["model.layers.1.mlp.experts.2.down_proj", "model.layers.0.mlp.experts.*"],
    ids=["one", "all of a block"],
)
def test_kept_experts_are_rotated(ignored: str, quantized: Callable[..., Path], pico_dir: Callable[..., Path]) -> None:
    out = quantized("mixtral", ROTATE.set(f"ignore=['{ignored}']"))
    dense = [row for row in report_of(out)["layers"] if row["format"] == "dense"]
    assert len(dense) == (1 if ignored.endswith("down_proj") else 12)
    assert all(row["ops"] == {"input": [], "output": []} and row["weight_error"] == 0 for row in dense)
    experts = [m for m in load(out).modules() if isinstance(m, Experts) or is_fused_experts(m)]
    assert len(experts) == 2
    original = {name: p for name, p in PICO["mixtral"]().named_parameters()}
    fused = original[f"{dense[0]['name'].split('.experts')[0]}.experts.down_proj"]
    (stored,) = (t for n, t in stored_tensors(out).items() if n.startswith(f"{dense[-1]['name']}."))
    assert min((stored - weight).norm() / stored.norm() for weight in fused) > 0.5
    assert 0 < typical(pico_dir("mixtral"), out) < 0.05


def test_operations_that_do_not_fit_are_one_line(quantized: Callable[..., Path], tmp_path: Path) -> None:
    """A checkpoint whose config.json names heads that are none."""
    for path in quantized("llama").iterdir():
        text = path.read_bytes()
        (tmp_path / path.name).write_bytes(
            text.replace(b"head_mix/16", b"head_mix/17") if "config" in path.name else text
        )
    result = cli("verify", str(tmp_path))
    assert result.code == 1 and "head_mix/17" in one_line(result) or "config.json" in one_line(result)
    (tmp_path / checkpoint.MANIFEST).unlink()
    with pytest.raises(Exception, match="head_mix/17: 64 channels are no heads of 17") as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(caught.value).__name__ == "CheckpointError" and "\n" not in str(caught.value)


def test_the_report_of_quantized_activations(quantized: Callable[..., Path], pico_dir: Callable[..., Path]) -> None:
    out = quantized("llama", STATIC)
    report = report_of(out)
    assert sum(report["products"].values()) == len(report["layers"]) == 14
    for i in range(2):
        (note,) = report["notes"][f"model.layers.{i}"]
        assert note.startswith("4 of 4 sites are smoothed; the largest scale is ")
    tensors = stored_tensors(out)
    scales = [tensors[f"{row['name']}.in_scale"] for row in report["layers"]]
    assert all(scale.shape == (1,) and scale.dtype == torch.float32 and scale > 0 for scale in scales)
    assert 0 < typical(pico_dir("llama"), out) < 0.1


def test_static_scales_are_those_of_what_is_rounded(
    quantized: Callable[..., Path], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Of inputs behind rotation, smoothing and the operations left to run time; block 0 sees them exact."""
    asked = dataclasses.replace(job(pico_dir("llama"), BOTH, tmp_path / "plain"), pack=False)
    api.quantize(asked)
    calibration = calibration_text.calibration(asked, prepare.prepare(asked), lambda *args: None)
    assert calibration is not None
    stored, model = stored_tensors(quantized("llama", STATIC)), load(tmp_path / "plain")
    for name, around in (("q_proj", NO_TRANSFORMS), ("o_proj", MIX), ("down_proj", HADAMARD)):
        path = next(n for n, _ in model.named_modules() if n.startswith("model.layers.0.") and n.endswith(name))
        given: list[Tensor] = []
        hook = model.get_submodule(path).register_forward_pre_hook(lambda _, x, given=given: given.append(x[0]))
        with torch.no_grad():
            model(calibration.tokens)
        hook.remove()
        largest = transforms.apply_input(given[0], around, {}).abs().max()
        assert stored[f"{path}.in_scale"].item() == pytest.approx(largest.item() / 127, rel=1e-4), name
        assert not around or largest.item() != pytest.approx(given[0].abs().max().item(), rel=0.01)


# ---------------------------------------------------------------- interrupted


KILLED = {
    "quantize llama": ("llama", STATIC, True),
    "asymmetric and smoothed": ("llama", PAIRED, True),
    "transform llama": ("llama", BOTH, False),
    "transform mixtral": ("mixtral", BOTH, False),
    "quantize mixtral with kept experts": ("mixtral", STATIC.set("ignore=['*.0.mlp.experts.*', '*.q_proj']"), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KILLED)
def test_killed_and_resumed(case: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    name, setup, pack = KILLED[case]
    words = (command if pack else transform_command)(pico_dir(name), setup, tmp_path / "out")
    api.quantize(dataclasses.replace(job(pico_dir(name), setup, tmp_path / "whole"), pack=pack))
    assert cli(*words, prepare=IN_BLOCK_1).code == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    result = cli(*words)
    assert result.code == 0, result.err
    report, whole = report_of(tmp_path / "out"), report_of(tmp_path / "whole")
    assert report["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert report["notes"] == whole["notes"] != {}
    assert report["products"] == whole["products"]
    assert [{**row, "seconds": 0} for row in report["layers"]] == [{**row, "seconds": 0} for row in whole["layers"]]
    assert typical(pico_dir(name), tmp_path / "out") < (0.1 if pack else 1e-5)


def test_a_transform_does_not_go_on_as_a_quantization(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = pico_dir("llama")
    assert cli(*transform_command(model, BOTH, tmp_path / "out"), prepare=IN_BLOCK_1).code == -signal.SIGKILL
    result = cli(*command(model, BOTH, tmp_path / "out"))
    assert result.code == 1 and "an unfinished run with another command; give --restart" in one_line(result)


# ---------------------------------------------------------------- arrangements


@pytest.mark.slow
@pytest.mark.parametrize("setup", [BOTH, STATIC], ids=["transform", "quantize"])
def test_an_arrangement_changes_sums_in_the_last_bits_only(
    setup: Setup, pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = memory_plan.arrange

    def run(name: str, **changes: Any) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(memory_plan, "arrange", lambda *given: dataclasses.replace(real(*given), **changes))
            report = api.quantize(dataclasses.replace(job(pico_dir("llama"), setup, tmp_path / name), pack=packed))
        assert {key: report["arrangement"][key] for key in changes} == changes
        return tmp_path / name

    packed = setup == STATIC
    whole, parts = run("whole", batch=4), run("parts", batch=3)  # 3 samples and 1
    assert contents(run("spilled", batch=4, spill=True)) == contents(whole)
    assert distance(whole, parts) < (5e-3 if packed else 1e-6)
    exact, other = stored_tensors(whole), stored_tensors(parts)
    assert exact.keys() == other.keys()
    for name, tensor in exact.items():
        if tensor.is_floating_point():
            assert torch.allclose(tensor, other[name], rtol=1e-2 if packed else 1e-4, atol=1e-6), name


def test_a_limit_of_memory(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The limit is what such a run is predicted to take; the bytes are those without one."""
    model = pico_dir("llama")
    result = cli(*transform_command(model, BOTH, tmp_path / "out"), "--max-memory", "2GiB", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)["memory"]
    assert report["limit"] == 2 << 30 and report["measured_peak"] <= 2 << 30
    transformed(model, BOTH, tmp_path / "free")
    assert distance(tmp_path / "out", tmp_path / "free") < 1e-6
    result = cli(*transform_command(model, BOTH, tmp_path / "small"), "--max-memory", "100MiB")
    assert result.code == 1 and "100" in one_line(result)


def test_statistics_of_a_rotated_model(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """GPTQ behind a rotation, asymmetric and weighted: everything together, and again with the same bytes."""
    setup = GPTQ.set(
        "transform=[{method: rotate}, {method: smooth}]",
        "calibration.target_correction=0.5",
        "calibration.importance=attention",
        "activations={bits: 8}",
    )
    for name in ("one", "two"):
        report = api.quantize(job(pico_dir("llama"), setup, tmp_path / name))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert all(row["output_error"] < 0.1 for row in report["layers"])
    assert report["notes"] == report_of(tmp_path / "one")["notes"] != {}
    assert distance(pico_dir("llama"), tmp_path / "one") < 0.6
