"""FP4 and three values in GGUF files: in every bit what was packed, read by the package gguf and by our importer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import api, importers
from compress.errors import ExportError
from compress.export import convert
from compress.export.source import open_source
from compress.importers import gguf_header, gguf_points
from compress.importers.gguf import values
from compress.model.gguf_names import write_directory
from helpers.engines import SUPER_BLOCKS, packed, tokenizer
from helpers.gguf_models import MODELS
from helpers.grids import set_tensor_scales
from helpers.pico import of_type, save, save_pico
from helpers.runs import KEEP_TABLES, SMALL, Setup, job

gguf = pytest.importorskip("gguf")

PLACES = {"q_proj": "attn_q", "v_proj": "attn_v", "o_proj": "attn_output", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def assert_equal(checkpoint: Path, folder: Path, kind: str, heads: int = 4) -> None:
    """The package decodes the tensors of block 1, and our importer all that was packed."""
    file = folder / "read" / "model.gguf"
    file.parent.mkdir()
    convert.export(checkpoint, "gguf", file)
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    weights = {weight.name: weight for weight in open_source(checkpoint).packed}
    for name, place in PLACES.items():
        module = "mlp" if "ffn" in place else "self_attn"
        expected = weights[f"model.layers.1.{module}.{name}"].dense(torch.float32)
        tensor = by_name[f"blk.1.{place}.weight"]
        assert tensor.tensor_type.name == kind
        theirs = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        if f"blk.1.{place}.scale" in by_name:
            theirs = theirs * torch.from_numpy(by_name[f"blk.1.{place}.scale"].data.copy())
        if place == "attn_q":
            theirs = theirs.view(heads, -1, 2, expected.shape[1]).transpose(1, 2).reshape(theirs.shape)
        assert torch.equal(theirs, expected), name
    write_directory(file, file.parent)
    read = importers.open_checkpoint(file.parent).tensors
    for name, weight in weights.items():
        ours = read[f"{name}.weight"].read()
        assert torch.equal(ours, weight.dense(ours.dtype)), name


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_fp4(kind: str, tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path, (*KEEP_TABLES, f"quantize={{method: grid_rtn, type: {kind}}}"))
    set_tensor_scales(checkpoint, {"": 2.0**-11, "down_proj": 2.0**-12})
    assert_equal(checkpoint, tmp_path, kind.upper())


def test_scales_of_experts_are_times_those_of_the_model(tmp_path: Path) -> None:
    """Both have the one tensor ffn_down_exps.scale of a Gemma 4 model."""
    kind, settings = MODELS["gemma4_moe"]
    model = save(of_type(kind, {**settings, "intermediate_size": 192}), tmp_path / "model")
    tokenizer().save_pretrained(model)
    stored = load_file(model / "model.safetensors")
    scales = {name: torch.tensor([0.5, 1.25, 2.0, 3.0]) for name in stored if name.endswith(".per_expert_scale")}
    save_file(stored | scales, model / "model.safetensors", {"format": "pt"})
    settings_of_run = (*KEEP_TABLES, "quantize={method: grid_rtn, type: nvfp4}")
    api.quantize(job(model, Setup("int8", settings_of_run), tmp_path / "packed"))
    convert.export(tmp_path / "packed", "gguf", tmp_path / "model.gguf")
    read = gguf_header.read_all(tmp_path / "model.gguf").tensors["blk.1.ffn_down_exps.weight"]
    experts = [w for w in open_source(tmp_path / "packed").packed if ".layers.1." in w.name and w.is_expert]
    down = torch.stack([w.dense(torch.float32) for w in experts if w.name.endswith("down_proj")])
    assert read.factor is not None
    expected = down * scales["model.layers.1.router.per_expert_scale"].view(-1, 1, 1)
    assert torch.allclose(values(read), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("method: ternary, packing: base3, group_size: 256", "TQ1_0"),
        ("method: ternary, packing: planar, group_size: -1", "TQ2_0"),
        ("method: bitnet, packing: base3", "TQ1_0"),
    ],
)
def test_three_values(method: str, kind: str, tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model", changes=SUPER_BLOCKS)
    tokenizer().save_pretrained(model)
    quantize = f"quantize={{{method}}}"
    api.quantize(job(model, Setup("int8", (*KEEP_TABLES, *SMALL, quantize)), tmp_path / "packed"))
    assert_equal(tmp_path / "packed", tmp_path, kind)


@pytest.mark.parametrize("number", [gguf_points.TQ1_0, gguf_points.TQ2_0])
def test_the_bytes_of_three_values_are_those_that_the_package_packs(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    trits = torch.randint(-1, 2, (33, 512), generator=generator, dtype=torch.int8)
    scales = torch.rand(33, 2, generator=generator).half() + 0.01
    values = trits.float() * scales.float().repeat_interleave(256, 1)
    expected = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType(number))
    assert np.array_equal(gguf_points.pack_trits(trits, scales, number).numpy(), expected)


@pytest.mark.parametrize(
    ("quantize", "reason"),
    [
        ("{method: grid_rtn, type: fp8}", "the type fp8 is none of GGUF files; set type: mxfp4, nvfp4 or iq4_nl"),
        ("{method: ternary, group_size: 64}", "rows of 64 are no whole blocks of 256"),
    ],
)
def test_refusals(quantize: str, reason: str, tmp_path: Path) -> None:
    checkpoint = packed("llama", tmp_path, (*KEEP_TABLES, *SMALL, f"quantize={quantize}"))
    with pytest.raises(ExportError, match=reason):
        convert.export(checkpoint, "gguf", tmp_path / "x.gguf")
