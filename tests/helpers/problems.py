"""Small layer problems and the slow references that several tests compare with. Everything here is float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compress import formats
from compress.formats import int as int_format
from compress.types import PackedWeight, Stats


def random(*shape: int, seed: int = 0) -> Tensor:
    """N(0, 1), float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """[tokens, columns] float32: correlated channels with log-normal sizes, so that order and feedback matter."""
    mixing = torch.eye(columns) + random(columns, columns, seed=seed) / columns**0.5
    return random(tokens, columns, seed=seed + 1) @ mixing * random(columns, seed=seed + 2).exp()


def stats(x: Tensor) -> Stats:
    """Statistics of inputs [tokens, columns]."""
    return Stats((x.double().T @ x.double()).float(), x.shape[0])


def damped(hessian: Tensor, damp: float) -> Tensor:
    """H + damp * mean(diag H) * I."""
    hessian = hessian.double()
    return hessian + damp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)


def upper(hessian: Tensor) -> Tensor:
    """C, upper triangular, C C^T = H: the inverse of the factor in the GPTQ paper."""
    return torch.linalg.inv(torch.linalg.cholesky(torch.linalg.inv(hessian.double()), upper=True))


def loss(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """tr(R H R^T) for weights [rows, columns]."""
    residual = weight.double() - quantized.double()
    return (residual @ hessian.double() * residual).sum().item()


def right_looking(
    weight: Tensor,
    hessian: Tensor,
    group: int,
    fit: Callable[[Tensor, Tensor, int], None],
    round_column: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """GPTQ as published, one column at a time and without lazy blocks: quantized weight [rows, columns].

    fit(targets [rows, columns of the group], C_gg, start) is called where a group starts (group 0: never);
    round_column(target [rows], column) gives the quantized column.
    """
    work, quantized = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian.double()), upper=True)
    for j in range(work.shape[1]):
        if group and j % group == 0:
            part = slice(j, min(j + group, work.shape[1]))
            fit(work[:, part].clone(), torch.linalg.inv(factor[part, part]), j)
        quantized[:, j] = round_column(work[:, j].clone(), j)
        error = (work[:, j] - quantized[:, j]) / factor[j, j]
        work[:, j:] -= torch.outer(error, factor[j, j:])
    return quantized


def decoded(packed: PackedWeight) -> Tensor:
    """[rows, columns] float64."""
    return formats.decode(packed, torch.float32).double()


def parts(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points of an `int` weight, each [rows, columns], float64."""
    params = packed.params
    codes, scales, zeros = int_format.unpack(packed.tensors, params, packed.shape)
    columns = packed.shape[1]
    owner = torch.arange(columns) // (columns if params.group_size == -1 else params.group_size)
    if zeros is None:
        zeros = torch.full(scales.shape, 2 ** (params.bits - 1))
    return codes.double(), scales.double()[:, owner], zeros.double()[:, owner]


def nearest(weight: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Distance of each weight to the nearest level of its grid, found by trying all levels."""
    levels = torch.arange(2**bits, dtype=torch.float64)
    grid = scales[..., None] * (levels - zeros[..., None])
    return (weight.double()[..., None] - grid).abs().amin(-1)
