"""The compiled search finds the same paths whatever instruction multiplies; short products are taken where exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compress.formats import trellis as trellis_format
from compress.formats.trellis import Params
from compress.kernels import llvm
from compress.quant import viterbi_compiled
from compress.quant.viterbi import SHORT, Search

pytestmark = pytest.mark.skipif(not llvm.available(), reason="nothing can be compiled")


CLEAR = viterbi_compiled.compiled_search.cache_clear


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """Compile for this test alone."""
    CLEAR()
    yield
    CLEAR()


def search(bits: int, state_bits: int) -> Search:
    params = Params(bits, state_bits, 64, "mul1")
    return Search(trellis_format.states_table(params, None), params.state_bits, params.symbol_bits)


@pytest.mark.parametrize(("bits", "state_bits"), [(1, 8), (2, 10), (3, 10), (4, 12)])
def test_every_product_finds_the_same_paths(bits: int, state_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = 4 * torch.randn(5, 64, generator=torch.Generator().manual_seed(bits))  # some beyond the table
    short = search(bits, state_bits)
    assert short.compiled is not None
    assert max(short.limit * short.unit, int(short.slope.abs().max())) < SHORT
    found = short.encode(values)
    monkeypatch.setattr(llvm, "features", lambda: frozenset({"f16c"}))
    CLEAR()
    plain = search(bits, state_bits)
    assert plain.compiled is not short.compiled and torch.equal(plain.encode(values), found)
    plain.compiled = None
    assert torch.equal(plain.encode(values), found)


def test_factors_of_more_bits_are_multiplied_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(viterbi_compiled, "compiled_search", lambda *settings: asked.append(settings[-1]))
    search(2, 10)
    monkeypatch.setattr("compress.quant.viterbi.SHORT", 100)
    search(2, 10)
    assert asked == [True, False]
