"""An allocation over GGUF types: the file is within its bytes, header and all, and holds what was chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import api
from compress.cli.run_options import RunOptions
from compress.errors import BudgetError, OutputError, RecipeError
from compress.export.source import open_source
from compress.model.load import load_model
from helpers.engines import SUPER_BLOCKS, tokenizer
from helpers.pico import save_pico
from helpers.runs import SMALL, Setup, job

gguf = pytest.importorskip("gguf")

FEW = ("allocate.options=[{type: q2_k}, {type: iq4_xs}, {type: q6_k}]", "allocate.estimator=kl_shares")
TABLES = "allocate.tables=[{bits: 5, group_size: 32}, {bits: 8, group_size: 32}]"
MIX = Setup("gguf-mix", (*SMALL, *FEW, TABLES, "quantize.sweeps=0"))
WIDTHS = {
    **SUPER_BLOCKS,
    "intermediate_size": 320,
    "num_hidden_layers": 1,
}  # 320 is no multiple of 256: down_proj has blocks of 32

PLACES = {"mlp.down_proj": "ffn_down", "mlp.up_proj": "ffn_up", "self_attn.o_proj": "attn_output"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save_pico("llama", tmp_path_factory.mktemp("mix") / "model", changes=WIDTHS)
    tokenizer().save_pretrained(model)
    return model


def run(model: Path, target: str, out: Path) -> dict[str, Any]:
    """Quantize for a target, by what the module's runs have measured together."""
    asked = job(model, MIX.set(f"allocate.target={target}"), out.with_suffix(""))
    return api.quantize(dataclasses.replace(asked, measurements=model.parent / "measured"), exported=out)


def test_the_file_is_within_its_bytes_and_near_them(model: Path, tmp_path: Path) -> None:
    numel = sum(tensor.numel() for tensor in load_model(model).state_dict().values() if tensor.dim() > 1)
    target, out = int(4.4 / 8 * numel), tmp_path / "mix.gguf"
    report = run(model, f"{target}B", out)
    assert 0.93 * target < out.stat().st_size == report["exported"]["nbytes"] <= target
    assert report["allocation"]["target"] == f"{target}B"
    assert any(f"of {target:,} bytes" in line for line in report["allocation"]["notes"])
    weights = {weight.name: weight for weight in open_source(out.with_suffix("")).packed}
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    for name, place in PLACES.items():
        tensor, weight = read[f"blk.0.{place}.weight"], weights[f"model.layers.0.{name}"]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(values.view(weight.shape), weight.dense(torch.float32))
    chosen = {tensor.tensor_type.name for tensor in read.values()} - {"F32"}
    assert len(chosen) >= 2 and chosen <= {"Q2_K", "IQ4_XS", "Q6_K", "IQ4_NL", "Q8_0", "Q5_0"}
    with pytest.raises(BudgetError, match="below the least that the options allow"):
        run(model, "1000B", tmp_path / "least.gguf")


def test_a_file_in_the_way_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken.gguf").write_text("not ours")
    with pytest.raises(OutputError, match="exists already"):
        api.quantize(job(model, MIX, tmp_path / "packed"), exported=tmp_path / "taken.gguf")
    assert not (tmp_path / "packed").exists()


def test_words_of_the_command_line(model: Path, tmp_path: Path) -> None:
    """The checkpoint lies beside the file; without --recipe it is the mix, and --target is that of the file."""
    options = RunOptions(str(model), out=tmp_path / "mine.gguf", target="4.0GiB", export="gguf")
    made = options.job(writes=None)
    assert made.out == tmp_path / "mine" and options.export_path(made.out) == tmp_path / "mine.gguf"
    assert made.recipe.name == "gguf-mix" and made.recipe.export == "gguf"
    assert made.recipe.allocate is not None and made.recipe.allocate.target is not None
    assert made.recipe.allocate.target.nbytes == 4 << 30
    other = RunOptions(str(model), recipe="int4", out=tmp_path / "other", export="mlx")
    assert other.job(writes=None).recipe.name == "int4"
    assert other.export_path(tmp_path / "other") == tmp_path / "other-mlx"
    with pytest.raises(RecipeError, match="ggfu"):
        RunOptions(str(model), export="ggfu").job(writes=None)
