"""float8 weights with scales are decoded as transformers' own dequantizer does, and where that gives up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from compress.importers import open_checkpoint
from compress.model.skeleton import Skeleton
from compress.run import sizes
from compress.storage.checkpoint import CHUNK
from helpers import foreign
from helpers.runs import GPTQ, RTN, TEXT, cli, command, contents, interrupt, one_line, report_of

BLOCK = (48, 40)  # neither divides the rows and columns of all linears
EVEN = (16, 16)
FLOAT8 = torch.float8_e4m3fn
Q = "model.layers.1.self_attn.q_proj"


def settings(block: tuple[int, int] | None) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}


def grid(shape: torch.Size, block: tuple[int, int], seed: int = 0) -> Tensor:
    """Scales of blocks, spread over some powers of two."""
    rows, columns = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator).mul_(4).sub_(9).exp2()


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale of each number, counted one by one."""
    rows = torch.tensor([i // block[0] for i in range(shape[0])])
    columns = torch.tensor([j // block[1] for j in range(shape[1])])
    return scales[rows][:, columns]


def pack(name: str, weight: Tensor) -> foreign.Packed:
    scales = grid(weight.shape, BLOCK, len(name))
    each = spread(scales, BLOCK, weight.shape)
    codes = (weight / each).clamp(-448, 448).to(FLOAT8)
    return {".weight": codes, ".weight_scale_inv": scales}, (codes.float() * each).bfloat16()


def evenly(name: str, weight: Tensor, kind: str) -> foreign.Packed:
    """Blocks that transformers' reader can count; scales as floats, or as exponents of two kinds."""
    scales, ending = grid(weight.shape, EVEN, len(name)), ".weight_scale_inv"
    if kind != "float":
        scales = scales.to(torch.float8_e8m0fnu)
    codes = (weight / spread(scales.float(), EVEN, weight.shape)).clamp(-448, 448).to(FLOAT8)
    if kind == "bytes":
        scales, ending = scales.view(torch.uint8), ".qscale_weight"
    return {".weight": codes, ending: scales}, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)


def test_blocks_that_do_not_divide_the_weight(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings(BLOCK), pack)
    foreign.check(both, tmp_path / "out", "fp8 in blocks of 48 x 40")


@pytest.mark.parametrize("kind", ["float", "exponents", "bytes"])
def test_transformers_gives_the_same(kind: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("qwen3"), tmp_path, settings(EVEN), lambda name, w: evenly(name, w, kind))
    foreign.check_tensors(both)


def test_experts_that_lie_one_by_one(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("qwen3_moe"), tmp_path, settings(BLOCK), pack)
    foreign.check_tensors(both)
    foreign.check_run(both, tmp_path / "out")


@pytest.mark.parametrize("shape", [(), (1,), (-1, 1), (-1,)])
def test_one_scale_or_one_for_each_row(shape: tuple[int, ...], pico_dir: foreign.Pico, tmp_path: Path) -> None:
    def rows(name: str, weight: Tensor) -> foreign.Packed:
        scales = weight.abs().amax(1 if -1 in shape else (0, 1)).reshape(shape) / 448
        each = scales.reshape(-1, 1)
        codes = (weight / each).to(FLOAT8)
        stored = {".weight": codes, ".weight_scale": scales, ".input_scale": torch.ones(())}
        return stored, (codes.float() * each).bfloat16()

    both = foreign.written(pico_dir("llama"), tmp_path, settings(None), rows)
    foreign.check_tensors(both)
    if -1 in shape:
        foreign.configure(both.quantized, quantization_config={"quant_method": "fbgemm_fp8"})
        foreign.check_tensors(both)
        assert open_checkpoint(both.quantized).base == "fp8 by rows"


def test_experts_of_four_bits(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    """Two numbers in a byte, beside linears of eight bits."""

    def mixed(name: str, weight: Tensor) -> foreign.Packed:
        if ".experts." not in name:
            return pack(name, weight)
        codes = torch.randint(-128, 128, (weight.shape[0], weight.shape[1] // 2), dtype=torch.int8)
        scales = grid(weight.shape, (1, 32)).to(torch.float8_e8m0fnu)
        if weight.shape[1] % 32:  # transformers asks for whole blocks
            decoded = Fp8Dequantize(None)._unpack_fp4(codes) * spread(scales.float(), (1, 32), weight.shape)
            return {".weight": codes, ".scale": scales}, decoded.bfloat16()
        return {".weight": codes, ".scale": scales}, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)

    changed = {**settings(BLOCK), "expert_dtype": "fp4"}
    both = foreign.written(pico_dir("qwen3_moe"), tmp_path, changed, mixed)
    foreign.check_tensors(both)
    assert open_checkpoint(both.quantized).base == "fp8 in blocks of 48 x 40 and experts of 4 bits"


DAMAGE: dict[str, dict[str, Tensor | None]] = {
    "q_proj.weight_scale_inv is missing": {f"{Q}.weight_scale_inv": None},
    "has the shape .3, 3., but .* in blocks of 48 x 40 needs .2, 2.": {f"{Q}.weight_scale_inv": torch.ones(3, 3)},
    "has the shape .0, 64., a quantized weight has two dim": {f"{Q}.weight": torch.ones(0, 64).to(FLOAT8)},
    "has the shape .64., a quantized weight has two dimensions": {f"{Q}.weight": torch.ones(64).to(FLOAT8)},
}


@pytest.mark.parametrize("pattern", DAMAGE)
def test_damage_is_named(pattern: str, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings(BLOCK), pack)
    foreign.restore(both.quantized, DAMAGE[pattern])
    foreign.refused(both.quantized, pattern)


@pytest.mark.parametrize("block", [[128], [0, 128], ["128", 128], 128])
def test_block_sizes_that_are_none(block: object, pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, {"quant_method": "fp8", "weight_block_size": block}, pack)
    foreign.refused(both.quantized, "weight_block_size .* is no pair of sizes")


def test_tools_that_cannot_be_read_are_named(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, {"quant_method": "higgs"}, pack)
    line = one_line(cli(*command(both.quantized, RTN, tmp_path / "out")))
    assert (
        "already quantized ('higgs'), in a way that cannot be read; what can be: aqlm, auto-round, awq, bitnet, bitsan"
        in line
    )
    foreign.configure(both.quantized, quantization_config={"bits": 4})
    foreign.refused(both.quantized, "names no quant_method")


def test_an_interrupted_run_goes_on(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    """With the same bytes; it is another run if the weights are to be read in another way."""
    both = foreign.written(pico_dir("llama"), tmp_path, settings(BLOCK), pack)
    assert cli(*command(both.quantized, GPTQ, tmp_path / "whole")).code == 0
    words = command(both.quantized, GPTQ, tmp_path / "out")
    assert cli(*words, prepare=interrupt("compress.quant.gptq", "quantize_rows", 10)).code < 0
    foreign.configure(both.quantized, quantization_config={**settings(BLOCK), "fmt": "e4m3"})
    assert "another model" in one_line(cli(*words))
    foreign.configure(both.quantized, quantization_config=settings(BLOCK))
    assert cli(*words).code == 0 and report_of(tmp_path / "out")["resumed_blocks"] == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_it_is_scored_against(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    """`eval --base` of both gives the same numbers."""
    both = foreign.written(pico_dir("llama"), tmp_path, settings(BLOCK), pack)
    assert cli(*command(both.quantized, RTN, tmp_path / "out")).code == 0
    words = ["eval", str(tmp_path / "out"), "--text", str(TEXT), "--seq-len", "32", "--json", "--base"]
    one, other = (cli(*words, str(directory)) for directory in both)
    assert one.code == 0, one
    assert json.loads(one.out)["kl_mean"] == json.loads(other.out)["kl_mean"]


def test_the_pieces_of_decoding_are_planned(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings(BLOCK), pack)
    nbytes = [sizes.decoding_nbytes(Skeleton(open_checkpoint(directory))) for directory in both]
    largest = 64 * 192 + 2 * 5 * 4  # codes of a linear, and its scales
    assert nbytes == [largest + sizes.DECODING_COPIES * CHUNK, 0]


def test_plan_and_result_say_what_the_base_was(pico_dir: foreign.Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, settings(BLOCK), pack)
    planned = cli("plan", str(both.quantized), *RTN.options())
    done = cli(*command(both.quantized, RTN, tmp_path / "out"))
    for result in (planned, done):
        assert result.code == 0 and "base: fp8 in blocks of 48 x 40" in result.out + result.err
