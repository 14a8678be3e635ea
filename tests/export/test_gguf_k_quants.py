"""K-quants in GGUF files: in every bit what was packed, read by the package gguf; what has no such type is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress import api
from compress.errors import ExportError
from compress.export import convert
from compress.export.source import open_source
from compress.export.targets.gguf import architecture, tensors
from compress.export.weights import ExportWeight
from compress.formats import kquant
from compress.types import Stored
from helpers.engines import k_quants, tokenizer
from helpers.pico import build, save_pico
from helpers.runs import SMALL, Setup, job

gguf = pytest.importorskip("gguf")

PLACES = {"q_proj": "attn_q", "k_proj": "attn_k", "o_proj": "attn_output", "up_proj": "ffn_up", "down_proj": "ffn_down"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return k_quants(tmp_path_factory.mktemp("k_quants"))


def test_the_package_decodes_what_we_decode(checkpoint: Path, tmp_path: Path) -> None:
    """Of every type one linear; rows of queries and keys have the halves of each rotary pair side by side."""
    convert.export(checkpoint, "gguf", tmp_path / "model.gguf")
    by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    weights = {weight.name: weight for weight in open_source(checkpoint).packed}
    types = set()
    for name, place in PLACES.items():
        module = "mlp" if "ffn" in place else "self_attn"
        expected = weights[f"model.layers.1.{module}.{name}"].dense(torch.float32)
        tensor = by_name[f"blk.1.{place}.weight"]
        types.add(tensor.tensor_type.name)
        found = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        if place in ("attn_q", "attn_k"):
            found = found.view(-1, 32, 2, 256).transpose(1, 2).reshape(found.shape)
        assert torch.equal(found, expected), name
    assert types == {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


def test_other_targets_refuse_them_and_dense_decodes_them(checkpoint: Path, tmp_path: Path) -> None:
    for target in ("gptq", "mlx", "compressed-tensors"):
        with pytest.raises(ExportError, match=r"format 'kquant'; choose a method that writes plain integers"):
            convert.export(checkpoint, target, tmp_path / target)
    convert.export(checkpoint, "dense", tmp_path / "dense", torch.float32)
    weight = next(weight for weight in open_source(checkpoint).packed if weight.name.endswith("1.mlp.up_proj"))
    written = open_source(tmp_path / "dense").plain["model.layers.1.mlp.up_proj.weight"].read()
    assert torch.equal(written, weight.dense(torch.float32))


def test_rows_that_are_no_whole_super_blocks_get_blocks_of_32_or_are_plain(tmp_path: Path) -> None:
    """As in llama.cpp: IQ4_NL, Q5_0 or Q8_0, or numbers of the model's type, with a note; inputs are 64, 96 and 48."""
    model = save_pico("llama", tmp_path / "model", changes={"intermediate_size": 96, "head_dim": 12})
    tokenizer().save_pretrained(model)
    rules = "rules=[{match: '*.down_proj', type: q2_k}, {match: '*.up_proj', type: q6_k}]"
    api.quantize(job(model, Setup("q4_k", (*SMALL, "export=gguf", rules)), tmp_path / "packed"))
    made = convert.export(tmp_path / "packed", "gguf", tmp_path / "model.gguf")
    assert any("o_proj is written as plain" in note and "rows of 48 are no whole" in note for note in made.notes)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    types = {"attn_q": "Q5_0", "ffn_down": "IQ4_NL", "ffn_up": "Q8_0", "attn_output": "F32"}
    assert {name: read[f"blk.0.{name}.weight"].tensor_type.name for name in types} == types
    packed = {weight.name.removeprefix("model.layers.0."): weight for weight in open_source(tmp_path / "packed").packed}
    for name, place in (("mlp.down_proj", "ffn_down"), ("mlp.up_proj", "ffn_up"), ("self_attn.o_proj", "attn_output")):
        weight = packed[name]
        tensor = read[f"blk.0.{place}.weight"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        expected = weight.dense(torch.float32)
        assert torch.equal(values.view(weight.shape), expected)


def test_operations_at_run_time_are_refused() -> None:
    from compress.export.targets.gguf import refuses
    from compress.quant.incoherence import OPS

    stored = Stored("kquant", kquant.Params("q4_k"), OPS)
    assert "operations lie around it" in (refuses(ExportWeight("model.layers.0.mlp.up_proj", (64, 256), stored)) or "")


def test_experts_of_a_tensor_have_one_type() -> None:
    model = architecture.describe(build("mixtral").config)
    name = "model.layers.1.block_sparse_moe.experts.{}.w1"

    def expert(index: int, type: str) -> ExportWeight:
        stored = Stored("kquant", kquant.Params(type))  # type: ignore[arg-type]
        return ExportWeight(name.format(index), (64, 256), stored, is_expert=True)

    tensors.check_experts([expert(0, "q4_k"), expert(1, "q4_k")], model)
    with pytest.raises(ExportError, match=r"experts.0.w1 and .*experts.2.w1 are parts of one tensor"):
        tensors.check_experts([expert(0, "q4_k"), expert(1, "q4_k"), expert(2, "q6_k")], model)
