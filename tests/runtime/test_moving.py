"""Layers that move to another device, and what is chosen for a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from compress.formats import lowrank
from compress.kernels import dispatch, llvm
from compress.kernels.cpu import codebook
from compress.runtime.linear import PackedLinear
from compress.types import Activations, PackedWeight, Stored
from helpers import problems
from helpers.cpu_weights import CODEBOOK, INT, codebook_weight, int_weight, is_real

BF16 = torch.bfloat16


def lowrank_weight() -> PackedWeight:
    params = lowrank.Params(4, dtype="bfloat16")
    a, b = problems.random(4, 96), problems.random(4, 48, seed=1)
    return PackedWeight(Stored("lowrank", params), lowrank.pack(a, b, params), (48, 96))


WEIGHTS = {
    "int": lambda: int_weight(*INT[0]),
    "codebook": lambda: codebook_weight(*CODEBOOK[0]),
    "lowrank": lowrank_weight,
}


@pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("name", WEIGHTS)
def test_moving_a_layer_frees_the_tensors_that_a_kernel_was_given(name: str) -> None:
    layer = PackedLinear.from_packed(WEIGHTS[name]())
    x = problems.random(1, layer.in_features).to(BF16)
    layer(x)
    old = [StorageWeakRef(tensor.untyped_storage()) for tensor in layer.tensors.values()]
    model = nn.Sequential(layer).to("meta")
    gc.collect()
    assert [ref.expired() for ref in old] == [True] * len(old)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
@pytest.mark.usefixtures("small_weights_too")
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_layer_that_was_moved_computes_the_same(name: str) -> None:
    layer = PackedLinear.from_packed(WEIGHTS[name]())
    x = problems.random(1, layer.in_features).to(BF16)
    before = layer(x)
    layer._apply(lambda tensor: tensor.clone())
    gc.collect()
    assert torch.equal(layer(x), before)


# ---------------------------------------------------------------- what is chosen for a processor


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The second one is too old for the kernels, and for products of integers."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: ((9, 0), (7, 0))[device])
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_has_a_choice_of_its_own() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    weight = int_weight(*INT[0])
    choices = {name: dispatch.supported(name, "int", weight.params, weight.shape) for name in ("cuda:1", "cuda:0")}
    assert choices["cuda:1"] is None and choices["cuda:0"] is not None
    assert dispatch.supported("cuda", "int", weight.params, weight.shape) is choices["cuda:0"]


@pytest.mark.usefixtures("two_gpus")
def test_integers_are_multiplied_where_the_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, current = int_weight((64, 512), 8, -1, True), 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    given = ("int", weight.params, weight.shape, Activations())
    assert not is_real(*given, "cuda") and not is_real(*given, "cuda:1")
    current = 0
    assert is_real(*given, "cuda") and is_real(*given, "cuda:0")


@pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled here")
def test_a_cpu_with_other_instructions_has_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = codebook_weight(*CODEBOOK[0])
    features = llvm.features() | {"avx512vbmi"}
    for present, known in ((True, features), (False, features - {"avx512vbmi"}), (True, features)):
        monkeypatch.setattr(llvm, "features", lambda known=known: known)
        chosen = dispatch.supported("cpu", "codebook", weight.params, weight.shape)
        assert chosen is not None and isinstance(chosen, codebook.AnyCodebook) != present
