"""VPTQ with float16 entries: their bytes, and that training moves entries and leaves codes as they are."""

from __future__ import annotations

import pytest
import torch

from compress import formats
from compress.papers.quant import vptq
from compress.tune.codes import fixed
from compress.tune.descend import descend
from compress.types import PackedWeight
from helpers import problems

WEIGHT = problems.random(32, 64, seed=40)
STATS = problems.stats(problems.inputs(256, 64))


def quantize(dtype: str) -> PackedWeight:
    config = vptq.Config(bits=5, outliers=0.05, sweeps=0, codebook_dtype=dtype)  # type: ignore[arg-type]
    packed = vptq.quantize(WEIGHT, STATS, config).weight
    assert packed.params == vptq.plan_params(config, (32, 64))
    return packed


def loss(packed: PackedWeight) -> float:
    return problems.loss(WEIGHT, problems.decoded(packed), STATS.hessian)


def test_float16_entries_lose_no_more_and_take_twice_the_bytes() -> None:
    small, wide = quantize("int8"), quantize("float16")
    assert wide.tensors["codebook"].dtype == torch.float16 and "codebook_scales" not in wide.tensors
    entries = 32 * 4
    assert wide.nbytes - small.nbytes == entries - 2  # one more byte an entry, less the scale
    assert loss(wide) == pytest.approx(loss(small), rel=0.02)


def test_entries_are_trained_and_codes_are_not() -> None:
    packed = quantize("float16")
    codes = fixed.Codes(packed, torch.empty(0))
    assert {"codebook", "outlier_scale"} <= set(codes.trained)
    assert torch.equal(codes.weight(), formats.decode(packed, torch.float32))
    hessian = STATS.hessian.float()

    def step(_: int) -> float:
        error = codes.weight() - WEIGHT
        total = ((error @ hessian) * error).sum() / hessian.trace()
        total.backward()
        return total.item()

    descend([each.moved for each in codes.trained.values()], 100, 0.02, step)
    trained = codes.pack()
    assert loss(trained) < loss(packed)  # entries are best for their codes already, up to the outliers' scales
    assert not torch.equal(trained.tensors["codebook"], packed.tensors["codebook"])
    kept = [name for name in packed.tensors if packed.tensors[name].dtype in (torch.int16, torch.uint8, torch.int32)]
    assert kept and all(torch.equal(trained.tensors[name], packed.tensors[name]) for name in kept)
    assert trained.nbytes == packed.nbytes


def test_int8_entries_stay() -> None:
    assert "codebook" not in fixed.Codes(quantize("int8"), torch.empty(0)).trained


def test_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="codebook_dtype 'float32' is not one of int8, float16"):
        vptq.Config(codebook_dtype="float32")  # type: ignore[arg-type]
