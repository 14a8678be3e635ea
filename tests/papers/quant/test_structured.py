"""Structured pruning: the largest rows and columns are kept, zeros are left out, the former name is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress import api, formats
from compress.papers.formats import structured as structured_format
from compress.papers.quant import structured
from compress.recipe import blocks, load
from helpers import problems
from helpers.pico import save_pico
from helpers.runs import Setup, job

TOKENS = torch.arange(24).view(2, 12) * 5 % 250


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize(("rows", "columns"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (0.3, 0.7), (0.01, 0.01)])
def test_the_largest_rows_and_columns_are_kept(rows: float, columns: float) -> None:
    weight = problems.random(20, 32)
    packed = structured.quantize(weight, None, structured.Config(rows, columns, "float32")).weight
    found = formats.decode(packed, torch.float32)
    kept = [max(1, round(20 * rows)), max(1, round(32 * columns))]
    masks = [(found != 0).any(1), (found != 0).any(0)]
    assert [int(mask.sum()) for mask in masks] == kept == [packed.params.rows, packed.params.columns]
    assert torch.equal(found, weight * masks[0][:, None] * masks[1])
    sizes = weight.norm(dim=1)
    assert kept[0] == 20 or sizes[masks[0]].min() >= sizes[~masks[0]].max()
    assert packed.nbytes == 4 * (kept[0] * kept[1] + sum(k for k, n in zip(kept, (20, 32), strict=True) if k < n))
    assert found.data_ptr() != packed.tensors["weight"].data_ptr()


def test_zeros_are_what_is_left_out() -> None:
    weight = problems.random(20, 32)
    weight[3:13] = 0
    result = structured.quantize(weight, None, structured.Config(0.5, 1.0, "float32"))
    assert torch.equal(formats.decode(result.weight, torch.float32), weight) and not result.notes
    assert "of the squared norm is left out" in structured.quantize(weight, None, structured.Config(0.25)).notes[0]
    with pytest.raises(ValueError, match="rows 0 and columns"):
        structured.Config(0)
    with pytest.raises(ValueError, match="of a weight that is 3 x 4"):
        structured_format.specs(structured_format.Params(4, 4), (3, 4))


def test_checkpoints_and_recipes_with_the_former_name_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = save_pico("llama", tmp_path / "model"), tmp_path / "out"
    api.quantize(job(model, Setup("clover50", ("quantize.dtype=float32",)), out))
    wanted = logits(AutoModelForCausalLM.from_pretrained(out))
    config = out / "config.json"
    assert '"format": "structured"' in config.read_text()
    config.write_text(config.read_text().replace('"format": "structured"', '"format": "cut"'))
    capsys.readouterr()
    again = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(again), wanted)
    assert "structured" not in capsys.readouterr().err

    blocks.say_renamed.cache_clear()
    assert load("clover50", ["quantize.method=cut"]) == load("clover50", ["quantize.method=structured"])
    assert capsys.readouterr().err == "method 'cut' of the recipe is called 'structured' now\n"
