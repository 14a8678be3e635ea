"""Every recipe on every kind of model: what was computed is what is stored, what is counted, what a reload computes.

All built-in recipes run on three architectures: dense with grouped queries, experts, fused linears with biases; plain
runs have a recipe of most methods of the core on experts. On each
of the others runs one low-bit method, in turn, beside the plain ones of tests/run/test_pipeline.py; one recipe of every
method is slow there. Searches are cut short (`SMALL`) where that leaves what is stored as it is. A new recipe or method
enters by itself.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, formats, plugins, recipe
from compress.formats import transforms as ops
from compress.recipe.schema import plain_step
from compress.run import verify
from compress.run.report import from_dict
from compress.runtime import activation_quant
from compress.runtime.experts import Experts, is_fused_experts
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight, WeightTransforms
from helpers.pico import ODD, PICO, build, save_pico
from helpers.runs import KEEP_TABLES, Setup, cli, command, contents, interrupt, job, report_of, stored_tensors

CALIBRATION = ("calibration.num_samples=8", "calibration.seq_len=32")
SMALL = {  # method -> settings of a short search
    "trellis": ("state_bits=8", "sweeps=0"),
    "gptvq": ("iterations=2", "sweeps=1"),
    "vptq": ("iterations=2", "sweeps=1"),
    "glvq": ("iterations=1", "sweeps=1"),
    "e8p": ("sweeps=1",),
    "pvq": ("sweeps=0",),
    "ternary": ("sweeps=1",),
    "gptq": ("sweeps=1",),
}
SMALL_TRANSFORM = {"awq": ("transform.0.ratios=2",), "outlier_suppression": ("transform.0.thresholds=2",)}
ALL = {name: recipe.load(name) for name in recipe.names()}
BINARY = {"ptq161", "bitnet", "ternary"}  # more bits than 1.9 on small weights
LOSSLESS = {"lossless"}  # no error at all
RESHAPED = {"prune_experts", "drop_blocks", "prune_width"}  # to models of other shapes, which have own tests
SPECIAL = {"lord", "structured", "nf"}  # low rank: what they store, and which linears, is tested in files of their own
METHOD = {
    name: r.quantize.method
    for name, r in ALL.items()
    if r.kv_cache is None and r.allocate is None and r.quantize.lowrank is None and r.quantize.method not in SPECIAL
    if not RESHAPED & {step.method for step in r.transform}
}
NARROW = {"q2_k": "grid_gptq", "q4_k": "gptq"}  # -> the method for inputs that are no super-blocks of 256
PLAIN = {name: method for name, method in METHOD.items() if not recipe.load(name).transform}
FIRST = {method: name for name, method in reversed(PLAIN.items())}  # one recipe of each method
NEW = [name for method, name in FIRST.items() if method != "gptq" and "hessian" in plugins.load("quant", method).NEEDS]
LONG = {"aqlm", "bitnet", "decoupleq", "e8p", "matquant", "vptq"}  # several seconds on experts
WHOLE = ("llama", "mixtral", "gpt_neox")
TURN = list(zip([model for model in PICO if model not in WHOLE], itertools.cycle(NEW)))  # noqa: B905 (endless)
ROUTED = ("mixtral", "w4a4-tuned")  # a step of a 4-bit input sends a token to another expert, here or there
PAIRS = [
    *((WHOLE[0], name) for name in METHOD),
    *((WHOLE[1], name) for method, name in FIRST.items() if not recipe.is_paper(name) and method not in LONG),
    *TURN,
]
OTHERS = [*itertools.product(WHOLE[1:], METHOD), *itertools.product((model for model, _ in TURN), FIRST.values())]
REST = [pair for pair in OTHERS if pair not in PAIRS and pair != ROUTED]
IDS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))


def small(name: str, *overrides: str) -> Setup:
    steps = recipe.load(name).transform
    transforms = SMALL_TRANSFORM.get(steps[0].method, ()) if steps else ()
    original = ("nested=[4, 32]",) if name == "draft4bit" else ()  # the small models are in float32
    return Setup(
        name, (*CALIBRATION, *SMALL.get(METHOD[name], ()), *transforms, *short_tuning(name), *original, *overrides)
    )


def short_tuning(name: str) -> tuple[str, ...]:
    """The tuning that a recipe asks for, in a few steps."""
    plain = [plain_step(step) for step in recipe.load(name).tune]
    short = [{key: 2 if key in ("steps", "between") else value for key, value in step.items()} for step in plain]
    return (f"tune={json.dumps(short)}",) if short else ()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of all blocks, experts taken apart in place."""
    for name, module in list(model.named_modules()):
        if is_fused_experts(module):
            model.set_submodule(name, Experts.from_fused(module))
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}


def stored_weight(tensors: Mapping[str, Tensor], row: Mapping[str, Any]) -> PackedWeight:
    """A reported layer as the files have it."""
    layer = from_dict(row)
    own = {key: tensors[f"{layer.name}.{key}"] for key in formats.specs(layer.stored, layer.shape)}
    return PackedWeight(layer.stored, own, layer.shape)


def quantize_inputs(linear: nn.Linear, weight: PackedWeight) -> None:
    """Make a plain linear round its inputs as the packed one does: behind the operations, which are turned back."""
    activations, around = weight.stored.activations, weight.stored.ops
    assert activations is not None
    turn = ops.rotate(torch.eye(linear.in_features), WeightTransforms(around.input), weight.tensors)

    def rounded(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        x = ops.apply_input(inputs[0], around, weight.tensors)
        return activation_quant.fake_quantize(x, activations, weight.tensors.get("in_scale")) @ turn.T

    linear.register_forward_pre_hook(rounded)


def check(out: Path, original: PreTrainedModel, transformed: bool = False) -> dict[str, Any]:
    """All that must hold of a finished checkpoint; returns its report."""
    report, tensors = report_of(out), stored_tensors(out)
    assert report["self_check"] == "passed" and verify.verify(out)["blocks"] == 2
    packed = {row["name"]: stored_weight(tensors, row) for row in report["layers"]}
    check_bytes(out, report, packed)
    decoded = linears(original)
    assert decoded.keys() == packed.keys()
    with torch.no_grad():
        loaded: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        model, info = loaded
        for name, parameter in original.named_parameters():  # what transforms and tuning have changed
            if transformed and not name.endswith(tuple(f"{linear}.weight" for linear in decoded)):
                parameter.copy_(model.get_parameter(name))
        for name, linear in decoded.items():
            linear.weight.copy_(formats.decode(packed[name], torch.float32))
            if packed[name].stored.activations is not None:
                quantize_inputs(linear, packed[name])
        expected = original(IDS).logits
        found = model(IDS).logits
    assert not any(info.values()), info
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == len(packed)
    is_rounded = any(weight.stored.activations for weight in packed.values())
    rounding = 0.02 if is_rounded else 1e-4  # inputs between two integers
    assert (found - expected).abs().max() < rounding * float(expected.abs().max())
    few = min(row["bpw"] for row in report["layers"]) < 1.9 or report["layers"][0]["method"] in BINARY
    for row in report["layers"]:  # at 1 bit a weight loses a quarter of a Gaussian, and fed-back errors as much again
        is_exact = row["method"] in LOSSLESS or report["recipe"] == "draft4bit"
        assert row["weight_error"] == 0 if is_exact else 0 < row["weight_error"] < (0.8 if few else 0.5)
        assert (row["output_error"] or 0) < (0.35 if few else 0.1)
    return report


def check_bytes(out: Path, report: Mapping[str, Any], packed: Mapping[str, PackedWeight]) -> None:
    """Bytes of each layer and of all are those in the files."""
    numel = 0
    for row in report["layers"]:
        weight = packed[row["name"]]
        assert row["nbytes"] == weight.nbytes and row["bpw"] == weight.bpw
        numel += weight.shape[0] * weight.shape[1]
    quantized = sum(weight.nbytes for weight in packed.values())
    assert report["nbytes"]["quantized linears"] == quantized and report["bpw"] == 8 * quantized / numel
    files = sorted(out.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert report["nbytes"]["total"] + headers == sum(file.stat().st_size for file in files)
    modules = json.loads((out / "config.json").read_text())["quantization_config"]["modules"]
    assert modules.keys() == packed.keys()


def without_tables(setup: Setup, model: PreTrainedModel) -> Setup:
    """The recipe for linears alone: tests/run/test_tables.py has embeddings and heads."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is table for table in tables)]
    return setup.set(f"ignore={json.dumps(names)}")


@pytest.mark.parametrize(("model", "name"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in REST)])
def test_every_recipe(model: str, name: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    setup = small(name) if recipe.load(name).head is None else without_tables(small(name), PICO[model]())
    api.quantize(job(pico_dir(model), setup, tmp_path / "out"))
    loaded = recipe.load(name)
    report = check(tmp_path / "out", PICO[model](), bool(loaded.transform or loaded.tune))
    methods = {row["method"] for row in report["layers"]}
    assert report["recipe"] == name and methods - {NARROW.get(name)} <= {METHOD[name]}


# ---------------------------------------------------------------- sizes that divide nothing


# Settings, and the bytes that all codes of a weight [66, 50] take: rows x columns as padded, and their bits.
ODD_CODES = {
    ("rtn", "bits=8", "group_size=-1"): 80 * 64 * 8 // 8,
    ("gptq", "bits=4", "group_size=32"): 80 * 64 * 4 // 8,
    ("trellis", "bits=2", "tile_rows=128"): 80 * 50 * 2 // 8,  # one tile of 80 rows
    ("trellis", "bits=2.5", "tile_rows=128"): 96 * 50 * 5 // 16,  # one of 96
    ("e8p", "bits=3"): 80 * 64 * 3 // 8,
    ("glvq", "bits=2", "group_size=128"): 80 * 64 * 2 // 8,
    ("gptvq", "bits=6", "vector_dim=4", "permute=true"): 80 * 16 * 6 // 8,  # 13 vectors of 4 columns
    ("vptq", "bits=6", "vector_dim=4", "outliers=0"): 20 * 56 * 6 // 8,  # 17 vectors of 4 rows
    ("ternary", "group_size=32"): 80 * 60 // 5,  # 3 units of 20 columns
    ("pvq", "pulses=9", "vector_dim=128", "gain_bits=4"): 66 * 7 * 24 // 8,  # vectors of 8 columns: 20 bits and 4
}


@pytest.mark.parametrize("settings", ODD_CODES, ids=lambda settings: settings[0])
def test_odd_sizes(settings: tuple[str, ...], tmp_path: Path) -> None:
    """Padding is stored, and counted; a size without a Hadamard matrix takes another one, and says so."""
    source = save_pico("llama", tmp_path / "model", changes=ODD)
    method, *overrides = settings
    setup = Setup("int4", (*KEEP_TABLES, *CALIBRATION, f"method={method}", *SMALL.get(method, ()), *overrides))
    api.quantize(job(source, setup, tmp_path / "out"))
    report = check(tmp_path / "out", build("llama", ODD))
    tensors = stored_tensors(tmp_path / "out")
    wide = [row for row in report["layers"] if row["shape"] == [66, 50]]
    assert len(wide) == 4  # gate and up
    for row in wide:
        stored = stored_weight(tensors, row).tensors
        codes = sum(t.nbytes for key, t in stored.items() if key.startswith("words") or key in ("codes", "residual"))
        assert codes == ODD_CODES[settings]
        assert row["bpw"] > 8 * codes / (66 * 50)
        odd = "no Hadamard matrix of size 66 is known here: a Hartley matrix of 33 is used"
        assert (odd in report["fallbacks"].get(row["name"], ())) == bool(row["ops"]["input"])


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("name", [NEW[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NEW[1:])])
def test_a_resumed_run_writes_the_same_bytes(name: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Killed in block 1."""
    source, out, setup = pico_dir("llama", shards=True), tmp_path / "out", small(name)
    words = command(source, setup, out)
    method = plugins.load("quant", NARROW.get(name, METHOD[name]))
    where = interrupt(
        method.__name__, "quantize_rows" if hasattr(method, "quantize_rows") else "quantize", 10
    )  # of 7 x 2
    assert cli(*words, prepare=where).code == -signal.SIGKILL
    assert not out.exists()
    result = cli(*words)
    assert result.code == 0, result.err
    assert report_of(out)["resumed_blocks"] == 1
    api.quantize(job(source, setup, tmp_path / "whole"))
    assert contents(out) == contents(tmp_path / "whole")


# ---------------------------------------------------------------- settings that a layer cannot have


@pytest.mark.parametrize(
    ("name", "settings", "note"),
    [
        (
            "gptvq2bit",
            ("bits=12",),
            "codes of 8 bits instead of 12: the weight has too few vectors for a larger codebook",
        ),
        (
            "vptq2bit",
            ("bits=16",),
            "codes of 8 bits instead of 16: the weight has too few vectors for a larger codebook",
        ),
        ("pvq3bit", ("bpw=0.4",), "bits per weight, not 0.4: the layer is too small for less"),
        ("pvq3bit", ("vector_dim=128",), "vectors of 64 columns, not 128, to pad 64 columns less"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_smaller_setting_is_reported(
    name: str, settings: tuple[str, ...], note: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Of k_proj, [32, 64]; the report counts what was really stored."""
    api.quantize(job(pico_dir("llama"), small(name, *settings), tmp_path / "out"))
    report = report_of(tmp_path / "out")
    row = next(row for row in report["layers"] if row["name"].endswith("k_proj"))
    assert any(note in said for said in report["fallbacks"][row["name"]]), report["fallbacks"][row["name"]]
    assert row["nbytes"] == stored_weight(stored_tensors(tmp_path / "out"), row).nbytes


@pytest.mark.parametrize("name", NEW)
def test_fewer_tokens_than_columns(name: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    few = small(name, *KEEP_TABLES, "calibration.num_samples=1")
    api.quantize(job(pico_dir("llama"), few, tmp_path / "out"))
    loaded = recipe.load(name)
    report = check(tmp_path / "out", PICO["llama"](), bool(loaded.transform or loaded.tune))
    said = {shape: f"only 32 calibration tokens for {shape} inputs: Hessian shrunk by " for shape in (64, 192)}
    for row in report["layers"]:
        assert report["fallbacks"][row["name"]][0].startswith(said[row["shape"][1]])
