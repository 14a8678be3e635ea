"""BitNet checkpoints are decoded as the linears of transformers unpack and scale them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.importers import open_checkpoint
from helpers import foreign
from helpers.runs import stored_tensors

bitnet = foreign.tool("transformers.integrations.bitnet")
Q = "model.layers.1.self_attn.q_proj"


def settings(linear_class: str, **others: Any) -> dict[str, Any]:
    return {"quant_method": "bitnet", "linear_class": linear_class, "modules_to_not_convert": None, **others}


def pack(name: str, weight: Tensor, divides: bool) -> foreign.Packed:
    """Random values of three, packed by transformers and unpacked by it."""
    generator = torch.Generator().manual_seed(len(name))
    trits = torch.randint(-1, 2, weight.shape, generator=generator)
    packed = bitnet.pack_weights(trits.clone())
    scale = (torch.rand(1, generator=generator) + 0.1).bfloat16()
    with torch.compiler.set_stance("force_eager"):
        values = bitnet.unpack_weights(packed, torch.bfloat16)
    assert torch.equal(values.long(), trits)
    return {".weight": packed, ".weight_scale": scale}, values / scale if divides else values * scale


@pytest.mark.parametrize("linear_class", ["bitlinear", "autobitlinear"])
def test_packed_weights(linear_class: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(
        pico_dir("llama"), tmp_path, settings(linear_class), lambda n, w: pack(n, w, linear_class == "bitlinear")
    )
    foreign.check(both, tmp_path, "three values in 2 bits")


def test_weights_that_are_rounded_at_use(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    """Linears but for those that are kept; the head and the embeddings are as they were."""
    given = settings("autobitlinear", quantization_mode="online", modules_to_not_convert=["lm_head", "o_proj"])
    both = foreign.written(pico_dir("llama"), tmp_path, given, lambda *_: None)
    plain, count = stored_tensors(both.plain), 0
    for name, tensor in open_checkpoint(both.quantized).tensors.items():
        expected = plain[name]
        if "_proj" in name and "o_proj" not in name:
            with torch.compiler.set_stance("force_eager"):
                expected = bitnet.WeightQuant.apply(expected)
            count += 1
        assert foreign.same(tensor.read(), expected), name
        assert foreign.same(tensor.rows(3, 7), expected[3:7])
    assert count == 12


DAMAGE: dict[str, dict[str, Tensor | None]] = {
    "q_proj.weight_scale is missing": {f"{Q}.weight_scale": None},
    "q_proj.weight_scale has the shape .2., its weight asks for .1.": {f"{Q}.weight_scale": torch.ones(2)},
    "q_proj.weight holds a field of 3": {f"{Q}.weight": torch.full((16, 64), 0xE5, dtype=torch.uint8)},
}


@pytest.mark.parametrize("pattern", DAMAGE)
def test_damage_is_named(pattern: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings("bitlinear"), lambda n, w: pack(n, w, True))
    foreign.restore(both.quantized, DAMAGE[pattern])
    foreign.refused(both.quantized, pattern)


def test_norms_inside_of_linears_are_refused(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    given = settings("autobitlinear", use_rms_norm=True)
    both = foreign.written(pico_dir("llama"), tmp_path, given, lambda n, w: pack(n, w, False))
    foreign.refused(both.quantized, "use_rms_norm True, which has no meaning here")
