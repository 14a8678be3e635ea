"""The Triton decoder of sparse weights in the interpreter, its machine code, and the layout of sparse tensor cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress import formats
from helpers import (
    interpreter,  # noqa: F401
    offline,
)
from helpers.cpu_weights import SPARSE, sparse_weight

from compress.kernels.triton import sparse as kernel  # isort: skip


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_decode(case: Any) -> None:
    """The bits of the format's own decoder; a product is that of the decoded weight where there is no such device."""
    weight = sparse_weight(*case)
    prepared = kernel.prepare(weight.tensors, weight.params, weight.shape)
    assert prepared is not None and prepared.most_rows(torch.bfloat16) == 0
    expected = formats.decode_stored(weight, torch.float32)
    assert torch.equal(prepared.decode(torch.float32), expected)
    close = (prepared.decode(torch.bfloat16).float() - expected).abs() <= expected.abs() * 2**-7
    assert close.all()  # the interpreter cuts off instead of rounding
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
    assert torch.allclose(prepared(x), x @ expected.T, atol=1e-5)


def test_places_of_sparse_tensor_cores() -> None:
    """What torch makes of the decoded weight."""
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass as from_dense

    weight = sparse_weight((64, 256), 2, 4, "bfloat16")
    kept, where = from_dense(formats.decode_stored(weight, torch.bfloat16))
    assert torch.equal(kept, weight.tensors["values"])
    assert torch.equal(where, kernel.places(weight.tensors["mask"], weight.shape))


def test_a_device_without_such_products_is_told() -> None:
    assert "torch does not multiply 2:4 weights here" in kernel.failure(torch.bfloat16, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "multiply", lambda x, kept, where: torch.ones(len(x), len(kept)))
        kernel.failure.cache_clear()
        assert kernel.failure(torch.bfloat16, torch.device("cpu")) == (
            "torch multiplies 2:4 weights with other results here"
        )
    kernel.failure.cache_clear()


@pytest.mark.parametrize("patterns", [False, True])
def test_machine_code(patterns: bool) -> None:
    signature = {"mask": "*u8", "kept": "*bf16", "out": "*bf16", "columns": "i32", "pitch": "i32", "groups": "i32"}
    keep, of, many = (2, 4, 128) if patterns else (64, 128, 4)
    constants = {"KEEP": keep, "OF": of, "PADDED": of, "MANY": many, "BLOCK_ROWS": 1, "BLOCK_COLUMNS": 1}
    constants["PATTERNS"] = patterns
    module = "compress.kernels.triton.sparse"
    case = offline.Case(module, "expand", signature, constants, 90, kernel.WARPS, 1, ("columns",))
    (built,) = offline.compile_cases([case])
    assert not any(opcode.startswith(("LDL", "STL")) for opcode in built.opcodes)
