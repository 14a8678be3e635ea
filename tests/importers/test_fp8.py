"""float8 weights with scales are decoded as transformers' own dequantizer does, where it can."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import foreign

BLOCK = (48, 40)  # neither divides the rows and columns of all linears
SETTINGS = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
FLOAT8 = torch.float8_e4m3fn
Pico = Callable[..., Path]


def grid(shape: tuple[int, int], block: tuple[int, int], seed: int = 0) -> Tensor:
    """Scales of blocks, spread over some powers of two."""
    rows, columns = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator).mul_(4).sub_(9).exp2()


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale of each number, counted one by one."""
    rows = torch.tensor([i // block[0] for i in range(shape[0])])
    columns = torch.tensor([j // block[1] for j in range(shape[1])])
    return scales[rows][:, columns]


def pack(name: str, weight: Tensor, block: tuple[int, int] = BLOCK) -> foreign.Packed:
    scales = grid((weight.shape[0], weight.shape[1]), block, len(name))
    each = spread(scales, block, weight.shape)
    codes = (weight / each).clamp(-448, 448).to(FLOAT8)
    return {".weight": codes, ".weight_scale_inv": scales}, (codes.float() * each).bfloat16()


def test_blocks(pico_dir: Pico, tmp_path: Path) -> None:
    both = foreign.written(pico_dir("llama"), tmp_path, SETTINGS, pack)
    foreign.check(both, tmp_path / "out", "fp8 in blocks of 48 x 40")
