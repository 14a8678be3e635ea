"""Layers that move to another device, and what is chosen for a device."""

from __future__ import annotations

import gc

import pytest
import torch
from cpu_weights import CODEBOOK, INT, codebook_weight, int_weight
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import problems
from compress import jit
from compress.formats import lowrank
from compress.runtime.linear import PackedLinear
from compress.types import PackedWeight

BF16 = torch.bfloat16


def lowrank_weight() -> PackedWeight:
    params = lowrank.Params(4, dtype="bfloat16")
    a, b = problems.random(4, 96), problems.random(4, 48, seed=1)
    return PackedWeight("lowrank", params, lowrank.pack(a, b, params), (48, 96))


WEIGHTS = {
    "int": lambda: int_weight(*INT[0]),
    "codebook": lambda: codebook_weight(*CODEBOOK[0]),
    "lowrank": lowrank_weight,
}


@pytest.mark.skipif(not jit.available(), reason="nothing can be compiled here")
@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("name", WEIGHTS)
def test_moving_a_layer_frees_the_tensors_that_a_kernel_was_given(name: str) -> None:
    layer = PackedLinear.from_packed(WEIGHTS[name]())
    x = problems.random(1, layer.in_features).to(BF16)
    layer(x)
    old = [StorageWeakRef(tensor.untyped_storage()) for tensor in layer.stored.values()]
    model = nn.Sequential(layer).to("meta")
    gc.collect()
    assert [ref.expired() for ref in old] == [True] * len(old)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.skipif(not jit.available(), reason="nothing can be compiled here")
@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_layer_that_was_moved_computes_the_same(name: str) -> None:
    layer = PackedLinear.from_packed(WEIGHTS[name]())
    x = problems.random(1, layer.in_features).to(BF16)
    before = layer(x)
    layer._apply(lambda tensor: tensor.clone())
    gc.collect()
    assert torch.equal(layer(x), before)
