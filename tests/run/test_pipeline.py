"""The whole run on every architecture: bytes planned = bytes stored = bytes reported, and what is loaded is what was
computed, to the bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, formats, process_memory, recipe
from compress.calib import data
from compress.formats.stored import params_from_dict
from compress.quant import gptq
from compress.run import calibration_text, prepare, report
from compress.run.report import from_dict, to_dict
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight, Stats, Stored
from helpers.pico import PICO
from helpers.runs import GPTQ, RTN, TEXT, Setup, contents, job, report_of, stored_tensors

IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
SETUPS = {"rtn": RTN, "gptq": GPTQ}
MOE = {"mixtral": 4, "qwen3_moe": 8}  # experts of a block
Q = "model.layers.0.self_attn.q_proj"
Run = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def run(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Setup], Run]:
    """run(architecture, setup) -> (output directory, report), each made once."""
    made: dict[tuple[str, Setup], Run] = {}

    def make(name: str, setup: Setup) -> Run:
        if (name, setup) not in made:
            out = tmp_path_factory.mktemp(name) / "out"
            report = api.quantize(job(pico_dir(name), setup, out))
            made[name, setup] = (out, report_of(out))
            assert json.loads(json.dumps(report)) == report_of(out)
        return made[name, setup]

    return make


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def load(directory: Path) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of all blocks, experts taken apart in place."""
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            model.set_submodule(name, Experts.from_fused(module))
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}


def own(tensors: Mapping[str, Tensor], row: Mapping[str, Any]) -> dict[str, Tensor]:
    """The stored tensors of a reported layer's weight."""
    params = params_from_dict(row["format"], row["params"])
    return {key: tensors[f"{row['name']}.{key}"] for key in formats.get(row["format"]).specs(params, row["shape"])}


def in_memory(name: str, tensors: Mapping[str, Tensor], layers: list[dict[str, Any]]) -> PreTrainedModel:
    """The original model with the reported layers' linears replaced by what is stored."""
    model = PICO[name]()
    found = linears(model)
    for row in layers:
        params = params_from_dict(row["format"], row["params"])
        packed = PackedWeight(Stored(row["format"], params), own(tensors, row), tuple(row["shape"]))
        model.set_submodule(row["name"], PackedLinear.from_packed(packed, found[row["name"]].bias))
    return model


def test_the_rows_of_a_report_keep_their_keys(run: Callable[[str, Setup], Run]) -> None:
    _, found = run("llama", GPTQ)
    keys = ["name", "shape", "method", "format", "params", "bpw", "nbytes", "weight_error", "output_error", "tokens"]
    keys += ["seconds", "notes", "ops", "activations", "lowrank"]
    for row in found["layers"]:
        assert list(row) == keys and row["ops"] == {"input": [], "output": []}
        assert json.loads(json.dumps(to_dict(from_dict(row)))) == row


# ---------------------------------------------------------------- every architecture


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", PICO)
def test_every_architecture(
    name: str, setup: str, run: Callable[[str, Setup], Run], pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    out, report = run(name, SETUPS[setup])
    plan = prepare.prepare(job(pico_dir(name), SETUPS[setup], tmp_path / "out")).plan
    tensors, source = stored_tensors(out), stored_tensors(pico_dir(name))
    check_bytes(out, tensors, plan.nbytes, report)
    rows = {row["name"]: row for row in report["layers"]}
    assert {layer.spec.name: layer.nbytes for layer in plan.layers} == {n: row["nbytes"] for n, row in rows.items()}
    assert rows.keys() == linears(PICO[name]()).keys() and not report["kept"]
    assert plan.quantized_nbytes == report["nbytes"]["quantized linears"] == sum(r["nbytes"] for r in rows.values())
    assert (
        plan.bpw
        == report["bpw"]
        == 8 * plan.quantized_nbytes / sum(r["shape"][0] * r["shape"][1] for r in rows.values())
    )
    packed = {f"{row['name']}.{key}" for row in rows.values() for key in own(tensors, row)}
    for key in tensors.keys() - packed:  # everything else is as it was
        assert torch.equal(tensors[key], source[key]), key

    assert rows.keys() == json.loads((out / "config.json").read_text())["quantization_config"]["modules"].keys()
    expected = logits(in_memory(name, tensors, report["layers"]))
    assert torch.equal(logits(load(out)), expected)
    error = (expected - logits(PICO[name]())).norm() / expected.norm()
    assert 0 < error < (0.05 if setup == "rtn" else 0.6), error
    assert report["self_check"] == "passed" and report["resumed_blocks"] == 0


def check_bytes(out: Path, tensors: Mapping[str, Tensor], planned: int, report: Mapping[str, Any]) -> None:
    """Bytes on disk are those planned and reported: in tensors, layer by layer, and in whole files."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total == planned == report["nbytes"]["total"]
    assert total == sum(nbytes for kind, nbytes in report["nbytes"].items() if kind != "total")
    for row in report["layers"]:
        assert row["nbytes"] == sum(tensor.nbytes for tensor in own(tensors, row).values())
        assert row["bpw"] == 8 * row["nbytes"] / (row["shape"][0] * row["shape"][1])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total and index["weight_map"].keys() == tensors.keys()
    files = [out / file for file in sorted(set(index["weight_map"].values()))]
    assert files == sorted(out.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert total + headers == sum(file.stat().st_size for file in files)


# ---------------------------------------------------------------- mixtures of experts


@pytest.mark.parametrize("name", MOE)
def test_rarely_routed_experts_are_reported(name: str, run: Callable[[str, Setup], Run]) -> None:
    out, report = run(name, GPTQ)
    experts = [row for row in report["layers"] if ".experts." in row["name"]]
    calibration = report["calibration"]
    tokens = calibration["num_samples"] * calibration["seq_len"]
    for block in range(2):
        counts = [row["tokens"] for row in experts if f"layers.{block}." in row["name"] and "down_proj" in row["name"]]
        assert len(counts) == MOE[name] and sum(counts) == 2 * tokens  # each token goes to two experts
    rare = {row["name"] for row in experts if row["tokens"] < row["shape"][1]}
    assert 0 < len(rare) < len(experts)
    assert set(report["fallbacks"]) == rare
    for row in experts:
        assert report["fallbacks"].get(row["name"], []) == row["notes"]
    assert all(
        f"only {next(r for r in experts if r['name'] == n)['tokens']} calib" in report["fallbacks"][n][0] for n in rare
    )


def test_an_expert_that_no_token_reaches(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    few = GPTQ.set("calibration.num_samples=1", "calibration.seq_len=2", "sweeps=0")
    report = api.quantize(job(pico_dir("qwen3_moe"), few, tmp_path / "out"))
    unreached = {row["name"] for row in report["layers"] if row["tokens"] == 0}
    assert len(unreached) >= 3 * (8 - 4)
    for name in unreached:
        assert report["fallbacks"][name] == ["no calibration token reached this input: rounded to nearest"]


# ---------------------------------------------------------------- rules


def test_a_kept_linear(run: Callable[[str, Setup], Run]) -> None:
    out, report = run("llama", RTN.set(f"rules=[{{match: {Q}, keep: true}}]"))
    assert report["kept"] == {Q: "kept by the recipe"}
    assert len(report["layers"]) == 13
    tensors = stored_tensors(out)
    assert torch.equal(tensors[f"{Q}.weight"], PICO["llama"]().get_parameter(f"{Q}.weight"))
    assert torch.equal(logits(load(out)), logits(in_memory("llama", tensors, report["layers"])))
    check_bytes(out, tensors, report["nbytes"]["total"], report)


def test_a_kept_expert_is_stored_as_it_is(run: Callable[[str, Setup], Run]) -> None:
    """The experts of a block are packed together: one that is kept is stored in the `dense` format."""
    kept = "model.layers.1.mlp.experts.2.down_proj"
    out, report = run("mixtral", RTN.set(f"ignore=['{kept}']"))
    row = next(row for row in report["layers"] if row["name"] == kept)
    assert (row["format"], row["bpw"], row["weight_error"], row["notes"]) == ("dense", 32.0, 0.0, [])
    assert [r["name"] for r in report["layers"] if r["format"] == "dense"] == [kept]
    tensors = stored_tensors(out)
    (stored,) = own(tensors, row).values()
    assert torch.equal(stored, linears(PICO["mixtral"]())[kept].weight)
    assert torch.equal(logits(load(out)), logits(in_memory("mixtral", tensors, report["layers"])))
    check_bytes(out, tensors, report["nbytes"]["total"], report)


def test_experts_that_are_all_kept_stay_fused(run: Callable[[str, Setup], Run]) -> None:
    out, report = run("qwen3_moe", RTN.set("ignore=['model.layers.0.mlp.experts.*']"))
    assert len(report["kept"]) == 24 and len(report["layers"]) == 8 + 24
    model = load(out)
    assert is_fused_experts(model.get_submodule("model.layers.0.mlp.experts"))
    assert isinstance(model.get_submodule("model.layers.1.mlp.experts"), Experts)
    check_bytes(out, stored_tensors(out), report["nbytes"]["total"], report)


def test_several_methods_in_one_recipe(run: Callable[[str, Setup], Run]) -> None:
    setup = GPTQ.set("rules=[{match: '*.v_proj', method: rtn, bits: 8}, {match: '*.down_proj', bits: 2}]")
    out, report = run("llama", setup)
    bits = {row["name"].rsplit(".", 1)[1]: (row["method"], row["params"]["bits"]) for row in report["layers"]}
    assert bits["v_proj"] == ("rtn", 8) and bits["down_proj"] == ("gptq", 2) and bits["q_proj"] == ("gptq", 4)
    errors = {row["name"]: row["output_error"] for row in report["layers"]}
    assert all((error is None) == name.endswith("v_proj") for name, error in errors.items())
    assert torch.equal(logits(load(out)), logits(in_memory("llama", stored_tensors(out), report["layers"])))


@pytest.mark.parametrize("setup", SETUPS)
def test_a_group_size_that_does_not_divide(setup: str, run: Callable[[str, Setup], Run]) -> None:
    """Groups of 100 over 64 and 96 columns: padding, with the bytes that were planned."""
    out, report = run("mixtral", SETUPS[setup].set("group_size=100"))
    tensors = stored_tensors(out)
    check_bytes(out, tensors, report["nbytes"]["total"], report)
    assert torch.equal(logits(load(out)), logits(in_memory("mixtral", tensors, report["layers"])))


# ---------------------------------------------------------------- calibration


def test_a_recipe_without_statistics_reads_no_text(
    pico_dir: Callable[..., Path], run: Callable[[str, Setup], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("calibration text was read")

    monkeypatch.setattr(data, "calibration", fail)
    monkeypatch.setattr(data, "self_generated", fail)
    for calib in (str(tmp_path / "missing.txt"), None):
        out = tmp_path / str(calib is None)
        asked = dataclasses.replace(job(pico_dir("llama"), RTN, out), calib=calib)
        report = api.quantize(asked)
        assert report["calibration"] is None
        assert all(row["tokens"] == 0 and row["output_error"] is None for row in report["layers"])
        assert contents(out) == contents(run("llama", RTN)[0])
    with pytest.raises(AssertionError, match="was read"):
        api.quantize(job(pico_dir("llama"), GPTQ, tmp_path / "out"))


def test_the_model_writes_its_own_text(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    asked = dataclasses.replace(job(pico_dir("llama"), GPTQ, tmp_path / "out"), calib=None)
    report = api.quantize(asked)
    assert report["calibration"]["self_generated"] and report["calibration"]["num_samples"] == 8
    assert {row["tokens"] for row in report["layers"]} == {8 * 32}


def test_too_little_text_for_all_samples_is_noted(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x" * 100)
    asked = dataclasses.replace(job(pico_dir("llama"), GPTQ, tmp_path / "out"), calib=str(tmp_path / "text.txt"))
    report = api.quantize(asked)
    assert report["calibration"]["num_samples"] == 3 and "8 samples" in report["calibration"]["notes"][0]
    assert {row["tokens"] for row in report["layers"]} == {96}


@contextmanager
def inputs(model: PreTrainedModel, name: str) -> Iterator[list[Tensor]]:
    """The inputs of a linear, [tokens, in] for each pass."""
    found: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, x: found.append(x[0].flatten(0, 1)))
    yield found
    hook.remove()


def test_a_block_is_calibrated_on_what_the_quantized_ones_before_it_give(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hessian of block 1 is that of the inputs in the finished model, of block 0 that in the original one."""
    seen: dict[str, Stats] = {}
    real_measure, real_prepare = report.measure, gptq.prepare

    def prepare_linear(weight: Tensor, stats: Stats | None, config: gptq.Config) -> gptq.Rounding:
        assert stats is not None
        kept.append(Stats(stats.hessian.clone(), stats.count))
        return real_prepare(weight, stats, config)

    def measure(layer: Any, *rest: Any) -> Any:
        seen[layer.spec.name] = kept.pop()
        return real_measure(layer, *rest)

    kept: list[Stats] = []
    monkeypatch.setattr(gptq, "prepare", prepare_linear)
    monkeypatch.setattr(report, "measure", measure)
    asked = job(pico_dir("llama"), GPTQ, tmp_path / "out")
    api.quantize(asked)
    tokens = calibration_text.calibration(asked, prepare.prepare(asked), lambda *args: None)
    assert tokens is not None
    original, finished = load(pico_dir("llama")), load(tmp_path / "out")
    for name, model in {
        "model.layers.0.self_attn.o_proj": original,
        "model.layers.0.mlp.down_proj": original,
        "model.layers.1.self_attn.q_proj": finished,
    }.items():
        with inputs(model, name) as found, torch.no_grad():
            model(tokens.tokens)
        expected = found[0].double().T @ found[0].double()
        assert seen[name].count == len(found[0])
        assert (seen[name].hessian - expected).norm() < 1e-5 * expected.norm(), name
        with inputs(original if model is finished else finished, name) as others, torch.no_grad():
            (original if model is finished else finished)(tokens.tokens)
        assert (others[0] - found[0]).norm() > 1e-3 * found[0].norm(), name  # the test can tell the two apart


# ---------------------------------------------------------------- the same bytes


def test_equal_runs_give_equal_bytes(
    pico_dir: Callable[..., Path], run: Callable[[str, Setup], Run], tmp_path: Path
) -> None:
    """Whether the source is one file or many, whatever the global random state."""
    out, report = run("llama", GPTQ)
    torch.manual_seed(12345)
    api.quantize(job(pico_dir("llama", shards=True), GPTQ, tmp_path / "again"))
    files, others = contents(out), contents(tmp_path / "again")
    assert {name for name in files if files[name] != others[name]} == {"README.md"}  # names the source directory
    again = report_of(tmp_path / "again")
    assert {k for k in report if report[k] != again[k]} <= {"model", "seconds", "memory", "arrangement", "layers"}
    for row, other in zip(report["layers"], again["layers"], strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


def test_another_seed_takes_other_samples(
    pico_dir: Callable[..., Path], run: Callable[[str, Setup], Run], tmp_path: Path
) -> None:
    asked = dataclasses.replace(job(pico_dir("llama"), GPTQ, tmp_path / "out"), seed=1)
    report = api.quantize(asked)
    assert report["seed"] == 1
    assert report["calibration"]["sha256"] != run("llama", GPTQ)[1]["calibration"]["sha256"]
    assert contents(tmp_path / "out") != contents(run("llama", GPTQ)[0])


def test_a_checkpoint_in_bfloat16(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = api.quantize(job(pico_dir("qwen3", True, torch.bfloat16), GPTQ, out))
    model = load(out)
    assert model.dtype == torch.bfloat16 and torch.isfinite(logits(model)).all()
    check_bytes(out, stored_tensors(out), report["nbytes"]["total"], report)


# ---------------------------------------------------------------- what else is written


def test_the_output_directory(run: Callable[[str, Setup], Run], pico_dir: Callable[..., Path]) -> None:
    out, report = run("llama", GPTQ)
    names = {path.name for path in out.iterdir()}
    assert {path.name for path in pico_dir("llama").iterdir()} - names == {"model.safetensors"}
    assert {"README.md", "recipe.yaml", "report.json", "report.html", "compress_manifest.json"} < names
    assert not [path for path in out.parent.iterdir() if path != out]
    resolved = recipe.load(str(out / "recipe.yaml"))
    assert resolved == GPTQ.load()
    manifest = json.loads((out / "compress_manifest.json").read_text())
    assert manifest["files"].keys() == manifest["sizes"].keys() == names - {"compress_manifest.json", "report.html"}
    assert "4.500 stored bits" in (out / "README.md").read_text()
    for path in (out / name for name in names):
        assert str(pico_dir("llama").parent).encode() not in path.read_bytes(), f"{path.name} holds a local path"
    assert str(TEXT.parent).encode() not in (out / "report.json").read_bytes()


def test_progress_goes_forward_to_the_end(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    told: list[tuple[str, float, float]] = []
    api.quantize(job(pico_dir("llama"), GPTQ, tmp_path / "out"), lambda *now: told.append(now))
    blocks = [(text, done) for text, done, total in told if text.startswith("block ") and total == 2]
    assert [done for _, done in blocks] == sorted(done for _, done in blocks)
    assert blocks[0][1] == 0 and blocks[-1][1] == 2
    assert {text.partition(":")[0] for text, _ in blocks} == {"block 1/2", "block 2/2"}
    assert any("down_proj" in text for text, _ in blocks)
    assert all(0 <= done <= total for _, done, total in told if total)


def test_the_report_of_memory_and_time(run: Callable[[str, Setup], Run]) -> None:
    _, report = run("llama", GPTQ)
    used, took = report["memory"], report["seconds"]
    assert used["limit"] is None and 0 < used["measured_peak"] <= 1.2 * process_memory.peak()
    assert 0 < took["quantize"] <= took["total"] and took["predicted_quantize"] > 0
    assert report["blocks"] == 2 and report["source_nbytes"] > report["nbytes"]["total"]
