"""What is left to run time around a table that is embeddings and output head in one, against matrices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from compress import formats
from compress.errors import CheckpointError
from compress.formats import int as int_format
from compress.formats import transforms
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedLinear
from compress.transform.bases import Basis
from compress.types import PackedWeight, Stored, WeightTransforms
from helpers.pico import round_to_nearest
from helpers.problems import random

AROUND = WeightTransforms(("reflection", "hadamard_transposed", "signs", "channel_scale"))
IDS = torch.tensor([[5, 0, 23, 5]])
SIZES = [64, 50, 576, 7]


def tensors_of(basis: Basis, size: int) -> dict[str, Tensor]:
    stored = {f"in_{name}": tensor for name, tensor in basis.undoing().items() if tensor is not None}
    return {**stored, "in_channel_scale": random(size, seed=5) + 3}


def table(size: int, basis: Basis) -> PackedWeight:
    rounded = round_to_nearest(random(40, size), 8, -1)
    around = WeightTransforms((*basis.undoing(), "channel_scale"))
    stored = dataclasses.replace(rounded.stored, ops=around)
    return PackedWeight(stored, {**rounded.tensors, **tensors_of(basis, size)}, rounded.shape)


def embedding(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> PackedEmbedding:
    layer = PackedEmbedding(weight.stored, nn.Embedding(*weight.shape, dtype=dtype))
    for key, tensor in weight.tensors.items():
        setattr(layer, key, nn.Parameter(tensor, requires_grad=False))
    return layer


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keep_mean", [True, False])
def test_the_transforms_undo_a_basis(size: int, keep_mean: bool) -> None:
    """Their product is diag(g) Q^T; without the scale it turns rows that are looked up."""
    basis = Basis(size, 3, keep_mean)
    q, weight = basis.dense(size), table(size, basis)
    assert weight.stored.ops.input == (AROUND.input if keep_mean else AROUND.input[1:])
    formats.check(weight, "table")
    x = random(4, size, seed=9).double()
    g = weight.tensors["in_channel_scale"].double()
    after = transforms.apply_input(x, weight.stored.ops, weight.tensors)
    assert torch.allclose(after, x @ q * g, atol=1e-5)
    rows = transforms.apply_rows(x, weight.stored.ops, weight.tensors)
    assert torch.allclose(rows, x @ q.T, atol=1e-5)
    if keep_mean:
        assert torch.allclose(q.sum(1), torch.ones(size).double(), atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_and_embeddings_of_one_table(size: int, dtype: torch.dtype) -> None:
    weight = table(size, basis := Basis(size, 3, keep_mean=True))
    bare = formats.decode_stored(weight, torch.float64)
    q, g = basis.dense(size), weight.tensors["in_channel_scale"].double()
    layer, head = embedding(weight, dtype), PackedLinear.from_packed(weight)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    rows, expected = layer(IDS), bare @ q.T
    assert rows.dtype == dtype and rows.shape == (1, 4, size)
    assert (rows.double() - expected[IDS]).norm() < tolerance * expected[IDS].norm()
    assert (layer.dequantize(torch.float64) - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(layer.to_embedding(dtype).weight, layer.dequantize(dtype))
    x = random(3, size, seed=4).to(dtype)
    y, product = head(x).detach(), (x.double() @ q * g) @ bare.T
    assert y.dtype == dtype and (y.double() - product).norm() < tolerance * product.norm()
    assert (head.dequantize(torch.float64) - bare * g @ q.T).norm() < 1e-5 * product.norm()


def test_a_traced_look_up_is_the_same() -> None:
    layer = embedding(table(64, Basis(64, 3, keep_mean=True)))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(IDS), layer(IDS), atol=1e-6)


def test_gradients_pass_to_what_the_head_reads() -> None:
    head, x = PackedLinear.from_packed(table(50, Basis(50, 3, keep_mean=True))), random(3, 50).requires_grad_()
    head(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, head.dequantize(torch.float32).sum(0).expand(3, 50), atol=1e-4)


def test_rows_are_looked_up_where_all_that_is_around_concerns_inputs() -> None:
    params = int_format.Params(8, -1, True, 64)
    assert formats.has_rows(Stored("int", params, AROUND))
    assert not formats.has_rows(Stored("int", params, WeightTransforms((), ("hadamard",))))
    assert transforms.of_rows(AROUND).input == AROUND.input[:-1]


def test_a_scale_is_undone_by_its_inverse() -> None:
    weight, stored = table(64, Basis(64, 3)), random(40, 64)
    effective = transforms.effective(stored, weight.stored.ops, weight.tensors)
    assert torch.allclose(transforms.rotate(effective, weight.stored.ops, weight.tensors), stored, atol=1e-5)


@pytest.mark.parametrize("key", ["in_channel_scale", "in_reflection"])
def test_damaged_numbers_are_refused(key: str) -> None:
    weight = table(64, Basis(64, 3, keep_mean=True))
    weight.tensors[key][3] = torch.nan
    with pytest.raises(CheckpointError, match=f"table.{key}"):
        formats.check(weight, "table")
