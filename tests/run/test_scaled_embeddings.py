"""Embeddings that multiply their rows by a number, or add one, are packed; a head that is tied to them sees none of it.

The number is no power of two, so that a model in bfloat16 rounds it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma3 import modeling_gemma3

from compress import api
from compress.errors import CompressError
from compress.export import convert
from compress.run import verify
from compress.runtime.embedding import PackedEmbedding
from helpers.pico import of_type, save
from helpers.runs import GPTQ, Setup, job

TABLES = ("head={bits: 8, group_size: 32}", "embeddings={bits: 8, group_size: 32}")
PACKED = Setup("int4", (*TABLES, *GPTQ.overrides[2:]))
ROTATE = "transform=[{method: rotate}]"
IDS = torch.arange(60)[None]
GEMMA = {
    **{"hidden_size": 96, "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 160, "sliding_window": 32},
    **{"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
}


def saved(folder: Path, tied: bool, dtype: torch.dtype = torch.bfloat16) -> Path:
    return save(of_type("gemma3_text", {**GEMMA, "tie_word_embeddings": tied}).to(dtype), folder)


def rotatable(folder: Path) -> Path:
    """A tied model with scaled embeddings and no norms behind the linears."""
    sizes = {key: GEMMA[key] for key in ("hidden_size", "head_dim", "num_key_value_heads", "intermediate_size")}
    return save(of_type("gemma", {**sizes, "tie_word_embeddings": True}), folder)


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.double()


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(params=["scaled", "scaled and offset"])
def offset(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """What the embeddings of the model class add to their rows."""
    if request.param == "scaled":
        return 0.0

    def forward(self: torch.nn.Embedding, input_ids: Tensor) -> Tensor:
        rows = functional.embedding(input_ids, self.weight, self.padding_idx)
        return rows * self.embed_scale.to(self.weight.dtype) + 0.75

    monkeypatch.setattr(modeling_gemma3.Gemma3TextScaledWordEmbedding, "forward", forward)
    return 0.75


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_are_packed_and_load_as_they_were(tied: bool, dtype: torch.dtype, offset: float, tmp_path: Path) -> None:
    source, out = saved(tmp_path / "m", tied, dtype), tmp_path / "out"
    result = api.quantize(job(source, PACKED, out))
    names = {row["name"] for row in result["layers"]}
    assert result["self_check"] == "passed" and "model.embed_tokens" in names and ("lm_head" in names) != tied
    verify.verify(out)
    for loading in (dtype, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(out, dtype=loading)
        table = model.get_input_embeddings()
        assert isinstance(table, PackedEmbedding)
        original = AutoModelForCausalLM.from_pretrained(source, dtype=loading).get_input_embeddings()
        original.weight = torch.nn.Parameter(table.dequantize(loading))
        assert torch.equal(table(IDS), original(IDS))
        with_scale = logits(model)
        if tied:
            assert torch.equal(model.get_output_embeddings().packed().tensors["words8"], table.words8)
        assert apart(logits(model.dequantize()), with_scale) < (0.02 if loading == torch.bfloat16 else 1e-5)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert apart(with_scale, logits(model)) < 0.5


def test_a_rotated_model_keeps_one_table_that_is_scaled(tmp_path: Path) -> None:
    source, out = rotatable(tmp_path / "m"), tmp_path / "out"
    result = api.quantize(job(source, PACKED.set("bits=8", ROTATE), out))
    assert result["self_check"] == "passed" and "transform" not in result["notes"]
    model, original = (AutoModelForCausalLM.from_pretrained(each) for each in (out, source))
    assert apart(logits(model), logits(original)) < 0.05


def test_what_adds_a_number_cannot_be_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: torch.nn.Embedding, input_ids: Tensor) -> Tensor:
        return functional.embedding(input_ids, self.weight) + 0.75

    monkeypatch.setattr(modeling_gemma.GemmaTextScaledWordEmbedding, "forward", forward)
    with pytest.raises(CompressError, match="what reaches the first block"):
        api.quantize(job(rotatable(tmp_path / "m"), PACKED.set(ROTATE), tmp_path / "out"))


def test_plain_weights_of_them_compute_the_same(tmp_path: Path) -> None:
    """The export has the table without the number, which the model's class has."""
    api.quantize(job(saved(tmp_path / "m", True), PACKED, tmp_path / "out"))
    convert.export(tmp_path / "out", "dense", tmp_path / "dense")
    paths = (tmp_path / "out", tmp_path / "dense")
    packed, dense = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in paths)
    assert apart(logits(dense), logits(packed)) < 0.02
