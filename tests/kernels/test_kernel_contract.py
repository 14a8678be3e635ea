"""The contract of kernel files: one new file is a kernel, and every kernel keeps to the contract."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from compress.kernels import cpu, dispatch
from compress.papers.formats import nf
from compress.runtime.linear import PackedLinear
from helpers import problems, stored

SHAPE = (48, 128)
DROPPED = '''
"""A kernel that multiplies one row, twice as large as it should be, so that its results can be told from others."""

import torch.nn.functional as F

from compress.papers.formats import nf
from compress.kernels.contract import Prepared


def prepare(tensors, params, shape):
    return Twice(tensors, params, shape) if shape[0] > 16 else None


class Twice(Prepared):
    def __call__(self, x):
        return 2 * F.linear(x, self.decode(x.dtype))

    def most_rows(self, dtype):
        return 1

    def decode(self, dtype):
        return nf.decode(self.tensors, self.params, self.shape, dtype)
'''


@pytest.fixture
def dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One file more among the kernels of the CPU: that of a format that has none."""
    assert "nf" not in {module.name for module in pkgutil.iter_modules(cpu.__path__)}
    (tmp_path / "nf.py").write_text(DROPPED)
    monkeypatch.setattr(cpu, "__path__", [*cpu.__path__, str(tmp_path)])
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.usefixtures("dropped")
def test_a_new_file_is_a_kernel() -> None:
    params = nf.Params(4, 64, nf.tile_words(4, SHAPE[1]))
    weight = stored.random_weight("nf", params, SHAPE)
    layer = PackedLinear.from_packed(weight)
    x = problems.random(3, SHAPE[1]).bfloat16()
    plain = F.linear(x, layer.dequantize(torch.bfloat16))
    assert torch.equal(layer(x[:1]), 2 * F.linear(x[:1], layer.dequantize(torch.bfloat16)))
    assert torch.equal(layer(x), plain)  # more rows than it is good for
    assert torch.equal(dispatch.product(x[:1], weight.tensors, "nf", params, SHAPE), layer(x[:1]))
    assert dispatch.taken("nf", params, SHAPE, x[:1]) and not dispatch.taken("nf", params, SHAPE, x)
    assert not dispatch.taken("nf", params, SHAPE, x[:1].float())  # of another type than it takes
    assert dispatch.supported("cpu", "nf", params, (16, 128)) is None
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x[:1]), layer(x[:1]))
