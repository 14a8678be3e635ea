"""Checkpoints of a family that transformers does not know, rounded by names and shapes, and read by other readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api, formats, importers, recipe
from compress.errors import CheckpointError, ExportError, NumericalError, RecipeError, UnsupportedModelError
from compress.export import rounded_linears
from compress.export.model_free import TARGETS, RoundedCheckpoint
from compress.quant import grid_rtn, rtn
from compress.run.job import Job
from compress.types import Stats
from helpers import foreign
from helpers.grids import decompressed
from helpers.pico import save_pico
from helpers.runs import cli, one_line, stored_tensors

HIDDEN, HALF, EXPERTS, TOKENS = 128, 64, 3, 300
ATTENTION = {"q_proj": (128, 128), "k_proj": (64, 128), "v_proj": (64, 128), "o_proj": (128, 128)}


def weights() -> dict[str, Tensor]:
    """Two layers and one for further tokens: attention, experts one by one, in one tensor, and that turned around."""
    draw = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=draw) * 0.1 * (1 + torch.rand((), generator=draw) * 9)).bfloat16()

    tensors = {"model.embed_tokens.weight": make(TOKENS, HIDDEN), "model.lm_head.weight": make(TOKENS, HIDDEN)}
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}mixer.{name}.weight": make(*shape) for name, shape in ATTENTION.items()}
        tensors |= {f"{prefix}moe.gate.weight": make(HIDDEN, HIDDEN), f"{prefix}norm.weight": make(HIDDEN)}
    tensors |= {f"model.layers.0.moe.experts.1.{name}.weight": make(HALF, HIDDEN) for name in ("w1", "w3")}
    tensors |= {
        "model.layers.0.mixer.in_proj_b.weight": make(64, HIDDEN),
        "model.layers.0.mixer.q_proj.bias": make(128),
    }
    tensors |= {"model.layers.0.mixer.conv1d.weight": make(HIDDEN, 1, 4), "model.layers.0.mixer.D": make(HIDDEN)}
    turned, plain = "model.layers.1.moe.experts.", "model.layers.2.moe.experts."
    tensors |= {
        f"{turned}gate_up_proj": make(EXPERTS, HIDDEN, 2 * HALF),
        f"{turned}down_proj": make(EXPERTS, HALF, HIDDEN),
    }
    tensors |= {
        f"{plain}gate_up_proj": make(EXPERTS, 2 * HALF, HIDDEN),
        f"{plain}down_proj": make(EXPERTS, HIDDEN, HALF),
    }
    tensors |= {"model.layers.2.mixer.odd.weight": make(HIDDEN, 72), "visual.layers.0.fc.weight": make(64, 64)}
    return tensors


LINEARS = {
    *(f"model.layers.{layer}.mixer.{name}" for layer in range(3) for name in ATTENTION),
    *("model.layers.0.moe.experts.1.w1", "model.layers.0.moe.experts.1.w3"),
    *(
        f"model.layers.{layer}.moe.experts.{expert}.{name}"
        for layer in (1, 2)
        for expert in range(EXPERTS)
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
}

FUSED = {  # of experts that stay in one tensor
    f"model.layers.{layer}.moe.experts{part}"
    for layer in (1, 2)
    for part in ("", ".0.gate_proj", ".0.up_proj", ".0.down_proj")
}


def matrix_name(tensors: dict[str, Tensor], module: str) -> str:
    """The tensor that the weight of a linear lies in."""
    parent, _, part = module.rsplit(".", 2)
    fused = f"{parent}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
    return f"{module}.weight" if f"{module}.weight" in tensors else fused


def matrix(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The weight [out, in] of a linear, by the description of the layouts."""
    stored, (_, expert, part) = tensors[matrix_name(tensors, module)], module.rsplit(".", 2)
    if stored.dim() == 2:
        return stored
    fused = (stored[int(expert)].T if ".1.moe" in module else stored[int(expert)]).contiguous()
    return fused if part == "down_proj" else fused[:HALF] if part == "gate_proj" else fused[HALF:]


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model_free") / "unknown"
    folder.mkdir()
    tensors = weights()
    names = sorted(tensors, key=lambda name: name[::-1])  # linears that belong together lie in different files
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "model_type": "new_family_9",
        "architectures": ["NewFamily9"],
        "dtype": "bfloat16",
        "auto_map": {"a": "b"},
    }
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 3, "vocab_size": TOKENS}
    beside = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": HIDDEN}  # none of which is the text model's
    (folder / "config.json").write_text(json.dumps({**config, "audio_config": beside, "text_config": sizes}))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling.py").write_text("raise RuntimeError")
    return folder


def run(model: Path, scheme: str, out: Path, *overrides: str, dry_run: bool = False) -> RoundedCheckpoint:
    name, own = recipe.data_free(scheme)
    return api.quantize_model_free(Job(str(model), recipe.load(name, [*own, *overrides]), out), dry_run)


def nearest(scheme: str, tensors: dict[str, Tensor], module: str) -> Tensor:
    """A linear as the methods themselves round it, its tensor scale from all beside it with as many inputs."""
    weight, (name, own) = matrix(tensors, module), recipe.data_free(scheme)
    config = recipe.load(name, own).quantize.config
    if isinstance(config, rtn.Config):
        groups = [size for size in (config.group_size, 64, 32) if size == -1 or weight.shape[1] % size == 0]
        config = rtn.Config(bits=config.bits, group_size=groups[0])
        return formats.decode(rtn.quantize(weight, None, config, scale_dtype="bfloat16").weight, torch.bfloat16)
    beside = [matrix(tensors, each) for each in linears(scheme) if each.rpartition(".")[0] == module.rpartition(".")[0]]
    largest = torch.stack([each.abs().amax() for each in beside if each.shape[1] == weight.shape[1]]).amax().float()
    packed = grid_rtn.quantize(weight, Stats(torch.empty(0, 0), 0, largest_weight=largest), config).weight
    return formats.decode(packed, torch.bfloat16)


CASES = [*((scheme, "compressed-tensors") for scheme in recipe.DATA_FREE), ("nvfp4", "modelopt"), ("fp8", "modelopt")]


def linears(scheme: str) -> set[str]:
    """Those of the checkpoint that a scheme can pack, by the sizes of its groups and blocks."""
    if scheme == "fp8-block":  # others have 64 inputs, or lie beside one with 64 rows, with which they are one product
        return {name for name in LINEARS if name.endswith("o_proj")}
    return LINEARS | ({"model.layers.2.mixer.odd"} if scheme in ("int8", "fp8") else set())


@pytest.mark.parametrize(("scheme", "target"), CASES)
def test_an_unknown_family(unknown: Path, scheme: str, target: str, tmp_path: Path) -> None:
    rounded = run(unknown, scheme, tmp_path / "out", f"export={target}")
    tensors, read = weights(), importers.open_checkpoint(tmp_path / "out").tensors
    stored, theirs = stored_tensors(tmp_path / "out"), decompressed(tmp_path / "out") if target == TARGETS[0] else {}
    packed = {name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")}
    assert packed == linears(scheme) and rounded.linears == len(packed)
    for module in sorted(packed):
        assert torch.equal(read[f"{module}.weight"].read(), nearest(scheme, tensors, module)), module
        if target == TARGETS[0]:
            assert torch.equal(theirs[module].bfloat16(), read[f"{module}.weight"].read()), module
    taken = {matrix_name(tensors, module) for module in packed}
    for name in tensors.keys() - taken:
        assert torch.equal(read[name].read(), tensors[name]), name
    own = sum(
        tensor.nbytes for name, tensor in stored.items() if name.rpartition(".")[0] in packed and "bias" not in name
    )
    assert rounded.bpw == 8 * own / sum(matrix(tensors, name).numel() for name in packed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    kept = {name for name in rounded.kept if f"{name}.weight" in tensors and tensors[f"{name}.weight"].dim() == 2}
    kept |= {"lm_head"} if scheme != "fp8-block" else {"lm_head", *FUSED}
    heads = {"model.layers.3.*", r"re:^model\.layers\.3\..*"}
    assert set(config["quantization_config"]["ignore"]) == (kept | heads) - {"model.embed_tokens"}
    assert config["model_type"] == "new_family_9" and "auto_map" not in config
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert "tokenizer_config.json" in files and "modeling.py" not in files


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [("int8", ()), ("int4", ()), ("int4", ("symmetric=true", "group_size=64")), ("fp8", ()), ("fp8-block", ())],
)
def test_a_known_model_loads_in_transformers(scheme: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    """Its weights are those that our importer decodes, but for scales of FP8, which it reads into 16 bits."""
    foreign.tool("compressed_tensors")
    sizes = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 256}
    model = save_pico("llama", tmp_path / "model", dtype=torch.bfloat16, changes=sizes)
    assert run(model, scheme, tmp_path / "out", *settings).linears == 14
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", device_map="cpu")
    ours = importers.open_checkpoint(tmp_path / "out").tensors
    with torch.no_grad():
        loaded(torch.arange(8)[None])  # weights are decoded at the first product
    compared = {name: parameter for name, parameter in loaded.state_dict().items() if name in ours}
    assert len(compared) == len(ours)
    for name, parameter in compared.items():
        bound = 2**-7 if scheme.startswith("fp8") else 0.0
        torch.testing.assert_close(parameter.float(), ours[name].read().float(), rtol=bound, atol=0.0)


def test_zero_points_where_readers_open_them(unknown: Path, tmp_path: Path) -> None:
    """All weights are alike, or have none."""
    sizes = {"hidden_size": 192, "head_dim": 64, "intermediate_size": 256}
    model = save_pico("llama", tmp_path / "model", dtype=torch.bfloat16, changes=sizes)
    assert not any("zero points" in note for note in run(model, "int4", tmp_path / "out").notes)
    (group,) = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert (group["weights"]["symmetric"], group["weights"]["group_size"]) == (False, 64)
    eight = "rules=[{match: '*down_proj', bits: 8}]"
    cases = [(unknown, "int4", "", "an expert"), (model, "int4", eight, "alike")]
    odd = save_pico("llama", tmp_path / "odd", dtype=torch.bfloat16, changes={**sizes, "intermediate_size": 160})
    cases += [(odd, "int4", "", "down_proj has groups of 32"), (odd, "int8", "symmetric=false", "")]
    for source, scheme, setting, words in cases:
        notes = run(source, scheme, tmp_path / "none", *filter(None, [setting]), dry_run=True).notes
        assert [words in note for note in notes if "zero points" in note] == ([True] if words else [])


def test_what_is_asked_for_counts(unknown: Path, tmp_path: Path) -> None:
    """`ignore`, rules and settings are those of recipes; a member of a group that is kept keeps the others."""
    rounded = run(unknown, "int4", tmp_path / "out", "ignore=['*.0.mixer.k_proj']", "group_size=32", dry_run=True)
    reasons = {name.rpartition(".")[2]: reason for name, reason in rounded.kept.items() if ".0.mixer." in name}
    assert reasons["k_proj"] == "kept by the recipe" and "k_proj" in reasons["q_proj"] and "o_proj" not in reasons
    assert rounded.nbytes == 0 and not (tmp_path / "out").exists()
    with pytest.raises(UnsupportedModelError, match="in one tensor"):
        run(unknown, "int4", tmp_path / "out", "ignore=['*.1.moe.experts.0.down_proj']")
    with pytest.raises(ExportError, match="modelopt, not gguf"):
        run(unknown, "int4", tmp_path / "out", "export=gguf")
    for name in ("int4", "kv4", "w8a8-smooth", "nvfp4"):
        with pytest.raises(RecipeError, match="--model-free"):
            rounded_linears.check(recipe.load(name))
    packed = tmp_path / "packed"
    run(unknown, "int8", packed, "ignore=['*.experts.*']")
    config = json.loads((packed / "config.json").read_text())
    ours = {"quant_method": "compress", "version": 1}
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": ours}))
    with pytest.raises(CheckpointError, match="already quantized"):
        run(packed, "int4", tmp_path / "again", dry_run=True)
    with pytest.raises(RecipeError, match="has accept, which needs the class"):
        rounded_linears.check(recipe.load("int8", ["accept.kl=0.1"]))


def test_the_command(unknown: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = cli("quantize", str(unknown), "--out", str(out))
    assert refused.code == 1 and "--model-free int4" in one_line(refused)
    result = cli("quantize", str(unknown), "--model-free", "int4", "--out", str(out))
    assert result.code == 0 and "no Hessian" in result.out and "chooses experts" in result.out
    assert cli("quantize", str(unknown), "--model-free", "int4", "--seed", "2").code == 2
    named = cli("quantize", str(unknown), "--model-free", "fp8", "--export", "modelopt", "--dry-run")
    assert named.code == 0 and "modelopt, not written" in named.out
    assert cli("quantize", str(unknown), "--model-free", "int4", "--out", str(out)).code == 1  # it is there


def test_a_weight_that_is_lost(unknown: Path, tmp_path: Path) -> None:
    """Nothing is left behind where one is not finite."""
    model = tmp_path / "model"
    model.mkdir()
    name = "model.layers.0.mixer.q_proj.weight"
    save_file({name: torch.full((64, 64), torch.nan)}, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "new_family_9"}')
    with pytest.raises(NumericalError, match="NaN"):
        run(model, "int8", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
