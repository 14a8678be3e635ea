"""ParoQuant's weights give the products that AWQ's give behind rotations of the inputs, which are written out here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compress.importers import open_checkpoint, source, turned
from helpers import foreign
from helpers.pico import save_pico
from helpers.runs import stored_tensors

SETTINGS = {"quant_method": "paroquant", "bits": 4, "group_size": 64, "krot": 3}
GROUP, ROUNDS = SETTINGS["group_size"], SETTINGS["krot"]
assert isinstance(GROUP, int) and isinstance(ROUNDS, int)
Q = "model.layers.1.self_attn.q_proj"


def rotated(inputs: Tensor, theta: Tensor, pairs: Tensor, scales: Tensor) -> Tensor:
    """Inputs [tokens, in] as the kernel changes them, in float64, pair after pair."""
    x = inputs.double() * scales.double()
    for number in range(len(theta)):
        for t in range(theta.shape[1]):
            start = t // (GROUP // 2) * GROUP
            i, j = (start + int(pairs[number, 2 * t + side]) for side in (0, 1))
            cos, sin = theta[number, t].double().cos(), theta[number, t].double().sin()
            x[:, i], x[:, j] = x[:, i] * cos + x[:, j] * sin, x[:, j] * cos - x[:, i] * sin
    return x


def surroundings(inner: int, draw: torch.Generator) -> dict[str, Tensor]:
    orders = [[torch.randperm(GROUP, generator=draw) for _ in range(inner // GROUP)] for _ in range(ROUNDS)]
    return {
        "theta": torch.randn(ROUNDS, inner // 2, generator=draw).half(),
        "pairs": torch.stack([torch.cat(groups) for groups in orders]).short(),
        "channel_scales": (1 + torch.rand(1, inner, generator=draw)).half(),
    }


def awq(weight: Tensor, draw: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Random codes for a weight [out, in] in the layout of AWQ, and what its kernels decode."""
    out, inner = weight.shape
    codes = torch.randint(0, 16, (inner, out), generator=draw)
    zeros = torch.randint(0, 16, (inner // GROUP, out), generator=draw)
    scales = (0.01 + 0.01 * torch.rand(inner // GROUP, out, generator=draw)).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(fields: Tensor) -> Tensor:
        return foreign.stream(fields.view(len(fields), -1, 8)[..., order].flatten(1), 4)

    wide = [part.repeat_interleave(GROUP, 0) for part in (zeros, scales)]
    decoded = (codes - wide[0]).half() * wide[1]
    return {".qweight": words(codes), ".qzeros": words(zeros), ".scales": scales}, decoded.t()


def pack(name: str, weight: Tensor) -> foreign.Packed:
    draw = torch.Generator().manual_seed(len(name))
    stored, matrix = awq(weight, draw)
    around = surroundings(weight.shape[1], draw)
    products = rotated(torch.eye(weight.shape[1]), **{k.replace("channel_", ""): v for k, v in around.items()})
    effective = (products @ matrix.double().t()).t()
    return {**stored, **{f".{part}": tensor for part, tensor in around.items()}}, effective.half()


def check(quantized: Path, plain: Path) -> None:
    """All weights are those of the other directory, but for the last bit of float16."""
    read, wanted = open_checkpoint(quantized).tensors, stored_tensors(plain)
    assert read.keys() == wanted.keys()
    for name, tensor in read.items():
        made = tensor.read()
        assert made.dtype == wanted[name].dtype
        torch.testing.assert_close(made, wanted[name], rtol=2**-10, atol=2**-14)
        if made.dim() == 2:
            assert tensor.rows(1, len(made) - 1).equal(made[1:-1])


def test_weights(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, SETTINGS, pack, torch.float16)
    check(*both)
    assert open_checkpoint(both.quantized).base == "paroquant of 4 bits in groups of 64"
    pairs = stored_tensors(both.quantized)[f"{Q}.pairs"]
    pairs[0, :2] = 5
    foreign.restore(both.quantized, {f"{Q}.pairs": pairs})
    foreign.refused(both.quantized, "every input of a group in one pair")


def test_experts_share_rotations(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "num_experts": 2, "num_hidden_layers": 1}
    model = save_pico("qwen3_moe", tmp_path / "model", changes=sizes)
    both = foreign.written(model, tmp_path, SETTINGS, pack, torch.float16)
    stored, plain = stored_tensors(both.quantized), stored_tensors(both.plain)
    changes, draw = dict[str, Tensor | None](), torch.Generator().manual_seed(1)
    for name in sorted({name.rpartition(".")[0] for name in stored if ".experts." in name and "qweight" in name}):
        experts, _, part = name.rsplit(".", 2)
        prefix = f"{experts}.{'down' if part == 'down_proj' else 'gate_up'}_weight_"
        around = {key: changes.get(prefix + key) for key in ("theta", "pairs", "channel_scales")}
        if around["theta"] is None:
            around |= surroundings(64, draw)
        parts, matrix = awq(plain[f"{name}.weight"], draw)
        given = {key.replace("channel_", ""): value for key, value in around.items() if value is not None}
        plain[f"{name}.weight"] = (rotated(torch.eye(64), **given) @ matrix.double().t()).t().half().contiguous()
        changes |= {name + key: value for key, value in parts.items()}
        changes |= {f"{name}.{key}": None for key in around} | {prefix + key: value for key, value in around.items()}
    foreign.restore(both.quantized, changes)
    foreign.restore(both.plain, dict(plain))
    check(*both)


def test_rows_are_decoded_without_the_others(
    pico_dir: foreign.Pico, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, SETTINGS, pack, torch.float16)
    unpack, codes = turned.unpack_ordered, list[int]()

    def count(words: Tensor, bits: int) -> Tensor:
        codes.append(8 * words.numel())
        return unpack(words, bits)

    monkeypatch.setattr(turned, "unpack_ordered", count)
    monkeypatch.setattr(source, "CHUNK", 4 * 64 * 32)  # bytes of 32 rows
    open_checkpoint(both.quantized).tensors["model.layers.0.mlp.up_proj.weight"].read()  # [192, 64]
    assert codes == 6 * [192, 32 * 64]  # zeros, and codes
