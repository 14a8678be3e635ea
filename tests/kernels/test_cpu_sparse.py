"""Products with sparse weights: without some instructions, several weights in one call, and parts of fused layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress import formats
from compress.formats import sparse
from compress.kernels import dispatch, llvm
from compress.serving.parts import FusedShards, LinearShard, Region
from helpers import problems, stored
from helpers.cpu_weights import SPARSE, kernel_of, sparse_weight

pytestmark = [
    pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here"),
    pytest.mark.usefixtures("small_weights_too"),
]


@pytest.mark.parametrize("case", [SPARSE[i] for i in (0, 2, 8, 9, 10)], ids=str)
def test_products_without_some_instructions(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the decoder and of a row of activations among others, in registers of 8 float32."""
    weight = sparse_weight(*case)
    monkeypatch.setattr(llvm, "available", lambda: True)
    monkeypatch.setattr(llvm, "features", frozenset)
    monkeypatch.setattr(llvm, "function", lambda kind, *settings: llvm.compiled(kind(*settings)))
    kernel: Any = kernel_of(weight)
    assert torch.equal(kernel.decode(torch.bfloat16), formats.decode_stored(weight, torch.bfloat16))
    x = problems.random(5, weight.shape[1])
    expected = stored.product(x, weight)
    assert (kernel(x) - expected).norm() < 1e-6 * expected.norm() and torch.equal(kernel(x[4:]), kernel(x)[4:])


def test_dropped_columns_are_not_multiplied() -> None:
    """What meets a dropped column may be infinite; other kernels would give NaN."""
    weight = sparse_weight((16, 128), 2, 4, (4, 32, True))
    x = problems.random(1, 128)
    dropped = int((~sparse.decode_mask(weight.tensors, weight.params, weight.shape, slice(3, 4))[0]).nonzero()[0])
    x[0, dropped] = float("inf")
    y = kernel_of(weight)(x)
    assert y[0, 3].isfinite() and not y.isfinite().all()


def test_weights_that_read_the_same_activations_share_them() -> None:
    cases = [((40, 320), 2, 4, (4, 32, True)), ((24, 320), 2, 4, "bfloat16"), ((24, 320), 64, 128, "bfloat16")]
    kernels = [kernel_of(sparse_weight(*case)) for case in cases]
    x = problems.random(3, 320).bfloat16()
    joined = kernels[0].fuse(kernels[:1])
    assert joined is not None and torch.equal(joined([kernels[0]] * 2, x), kernels[0](x).repeat(1, 2))
    assert kernels[0].fuse(kernels[2:]) is None  # reads them in order


def test_parts_of_fused_layers() -> None:
    """Rows of several linears, and columns at whole patterns, as engines cut them."""
    weight = sparse_weight((48, 256), 2, 4, (4, 32, True))
    x = problems.random(2, 256).bfloat16()
    whole = formats.decode_stored(weight, torch.float32)
    shards = FusedShards(
        LinearShard("a", weight.stored, Region((48, 256), (rows,), range(128, 256)), torch.bfloat16)
        for rows in (range(16), range(16, 48))
    )
    for shard in shards:
        for key, tensor in weight.tensors.items():
            shard.load(key, tensor, "cpu")
        assert shard.whole_because is None
    shards.finish()
    expected = x[:, 128:].float() @ whole[:, 128:].T
    assert (shards(x[:, 128:]).float() - expected).norm() < 1e-2 * expected.norm()
    assert dispatch.taken("sparse", weight.params, weight.shape, x)
