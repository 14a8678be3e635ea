"""NF-b: the published levels, sizes in few bits, every weight the nearest level of its block."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress import api, formats
from compress.errors import RecipeError
from compress.model.skeleton import Skeleton
from compress.papers.formats import nf as nf_format
from compress.papers.quant import nf
from compress.recipe import load
from compress.run import plan
from compress.storage.checkpoint import open_checkpoint
from compress.types import PackedWeight, Stored
from helpers import problems
from helpers.pico import save_pico
from helpers.runs import RTN, job, report_of

NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302]
NF4 += [0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]  # of QLoRA's code


def quantize(weight: Tensor, **settings: object) -> PackedWeight:
    return nf.quantize(weight, None, nf.Config(**settings)).weight  # type: ignore[arg-type]


def error(weight: Tensor, packed: PackedWeight) -> float:
    return ((problems.decoded(packed) - weight).square().sum() / weight.square().sum()).item()


def test_the_levels_of_four_bits_are_the_published_ones() -> None:
    torch.testing.assert_close(nf_format.levels(4), torch.tensor(NF4), rtol=0, atol=2e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_levels_of_other_widths(bits: int) -> None:
    levels = nf_format.levels(bits)
    assert len(levels) == 2**bits and (levels.diff() > 0).all()
    assert levels[0] == -1 and levels[-1] == 1 and levels[2 ** (bits - 1) - 1] == 0


@pytest.mark.parametrize("shape", [(5, 64), (3, 50), (16, 200)])
@pytest.mark.parametrize(("bits", "scale_bits"), [(2, 8), (3, 3), (4, 2), (8, 5)])
def test_every_weight_is_the_nearest_level_of_its_block(bits: int, scale_bits: int, shape: tuple[int, int]) -> None:
    weight = problems.random(*shape) * problems.random(shape[0], 1, seed=1).exp()
    packed = quantize(weight, bits=bits, scale_bits=scale_bits, block_size=32, scale_block=16)
    sizes = nf_format.sizes(packed.tensors, packed.params, shape).double()
    assert (sizes >= 0).all()
    levels = nf_format.levels(bits).double()
    found = problems.decoded(packed)
    for row, column in itertools.product(range(shape[0]), range(shape[1])):
        errors = (sizes[row, column // 32] * levels - weight[row, column].double()).abs()
        assert (found[row, column] - weight[row, column].double()).abs() <= errors.min() + 1e-6


def test_sizes_are_what_is_stored() -> None:
    """One size at a time, by the words of the format."""
    wanted = problems.random(7, 5).abs() + 1
    for scale_bits, dtype in ((8, "float32"), (3, "bfloat16"), (5, "float16")):
        params = nf_format.Params(4, 32, 4, scale_bits, 16, dtype)
        stored = nf_format.pack_sizes(wanted, params)
        octets = [int(value) for value in stored["scale_codes"]]
        whole = sum(octet << 8 * i for i, octet in enumerate(octets))
        found = nf_format.sizes(stored, params, (7, 160)).flatten()
        for k in range(35):
            code = (whole >> k * scale_bits & 2**scale_bits - 1) - 2 ** (scale_bits - 1)
            expected = stored["mean"].item() + stored["steps"][k // 16].float().item() * code
            assert found[k].item() == pytest.approx(max(0.0, expected), rel=1e-6)
        assert (found.view(7, 5) - wanted).abs().max() <= stored["steps"].float().abs().max() * 1.001


def test_bits_of_a_weight() -> None:
    packed = quantize(problems.random(256, 1024), bits=3, scale_bits=8, block_size=64, scale_block=256)
    assert packed.bpw == 3 + 8 / 64 + 32 / (64 * 256) + 32 / (256 * 1024)
    assert formats.nbytes(Stored("nf", packed.params), (256, 1024)) == packed.nbytes


def test_errors_on_normal_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = problems.random(128, 1024)
    best = [error(weight, quantize(weight, bits=bits)) for bits in (2, 3, 4, 8)]
    monkeypatch.setattr(nf, "SIZE_RATIOS", (1.0,))  # the published size
    plain = [error(weight, quantize(weight, bits=bits)) for bits in (2, 3, 4, 8)]
    assert all(a <= b for a, b in zip(best, plain, strict=True)) and best[0] < 0.75 * plain[0], (best, plain)
    assert all(b < 0.4 * a for a, b in itertools.pairwise(best))
    assert 0.0080 < plain[2] < 0.0090


def test_zeros_stay_zeros_and_errors_are_said() -> None:
    assert not problems.decoded(quantize(torch.zeros(4, 64))).any()
    mixed = torch.cat((torch.zeros(4, 64), problems.random(4, 64)))
    assert not problems.decoded(quantize(mixed))[:4].any()
    with pytest.raises(RecipeError, match="scale_bits 9 must be 2 to 8"):
        load("int8", ["quantize.method=nf", "scale_bits=9"])


def test_a_run(tmp_path: Path) -> None:
    model = save_pico("llama", tmp_path / "model")
    setup = RTN.set("quantize.method=nf", "bits=3", "lowrank={rank: 4, metric: none, iterations: 3}")
    api.quantize(job(model, setup, tmp_path / "out"))
    report = report_of(tmp_path / "out")
    assert {row["format"] for row in report["layers"]} == {"nf"}
    assert all(row["weight_error"] < 0.03 for row in report["layers"])


@pytest.mark.parametrize(
    ("name", "few"),
    [("llama", {"q_proj", "k_proj", "gate_proj"}), ("opt", {"q_proj", "k_proj"}), ("phi3", {"qkv_proj"}),
     ("gpt_neox", {"query_key_value"})],
)  # fmt: skip
def test_lq_lora_has_two_bits_where_attention_looks(name: str, few: set[str], pico_dir: Callable[..., Path]) -> None:
    made = plan.make(load("lq-lora2.75"), Skeleton(open_checkpoint(pico_dir(name))))
    bits = {layer.spec.name.rpartition(".")[2]: layer.stored.params.bits for layer in made.layers}
    assert {end for end, count in bits.items() if count == 2} == few and set(bits.values()) == {2, 3}
