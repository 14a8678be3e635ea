"""Codes with bits of their own for each channel: packing, and the compiled readers of them against plain algebra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels import contract, llvm
from compress.kernels.cpu import emitter, kv_basis, kv_mixed
from compress.kv.codec import Codec, Spec, rotate
from compress.kv.codecs import pca
from compress.kv.codecs.packed import Pieces

HEADS = 2


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("shape", [(3, 64), (2, 40), (1, 7)])
def test_packing_is_exact(shape: tuple[int, int]) -> None:
    bits = torch.randint(0, 8, shape, generator=generator())
    made = Pieces(bits)
    codes = (torch.rand(2, 5, *shape, generator=generator(1)) * 2.0**bits).int()
    rows = made.pack(codes)
    assert rows.shape == (2, 5, made.nbytes)
    assert torch.equal(made.unpack(rows).int(), codes)
    filled = [-(-int((row == b).sum()) // 8) * 8 * b for row in bits for b in range(1, 8)]
    assert made.nbytes * 8 == sum(filled)


def test_runs_of_eight_take_no_more_than_their_bits() -> None:
    bits = torch.tensor([[5] * 8 + [3] * 24 + [2] * 8 + [0] * 24, [7] * 40 + [1] * 24], dtype=torch.uint8)
    made = Pieces(bits)
    assert made.nbytes * 8 == int(bits.sum())
    assert [(p.head, p.bits, p.fields) for p in made.pieces[:4]] == [(0, 5, 8), (0, 3, 16), (0, 3, 8), (0, 2, 8)]
    assert made.reach == made.nbytes  # sixteen fields of a piece of eight end within the row
    assert made.bounds[0].tolist() == [0, 0, 0, 1, 1, 3, 4, 4]
    assert (made.lanes[0, 40:] == -1).all()
    assert made.columns[0, :40].tolist() == list(range(40))


def test_bits_lie_where_they_are_said_to() -> None:
    made = Pieces(torch.tensor([[5] * 16]))
    codes = torch.arange(16)[None, None] * 2 + 1
    row = made.pack(codes)[0].tolist()
    whole = int.from_bytes(bytes(row), "little")
    assert [whole >> 4 * i & 15 for i in range(16)] == [int(c) >> 1 for c in codes.flatten()]  # the plane of 4 bits
    assert whole >> 64 == 0xFFFF  # the plane of 1


@pytest.fixture(params=["tiles", "plain"])
def compiled(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With AMX where there is such, and without."""
    if not kv_mixed.supports(64):
        pytest.skip("no compiled functions with AVX-512 here")
    if request.param == "tiles" and not kv_basis.has_tiles():
        pytest.skip("no AMX here")
    monkeypatch.setattr(contract, "SMALL", 0)
    if request.param == "plain":
        monkeypatch.setattr(kv_basis, "has_tiles", lambda: False)
    llvm.function.cache_clear()
    yield
    llvm.function.cache_clear()


def codec(kind: Any, width: int, dtype: torch.dtype, most: int = 8) -> Codec:
    """With bits of all sorts, falling as the variances do; the second head has fewer."""
    bits = torch.randint(0, most, (HEADS, width // 8), generator=generator(2)).repeat_interleave(8, 1)
    bits[1] = bits[1] // 2
    bits = bits.sort(-1, descending=True)[0].to(torch.uint8)
    back = torch.linalg.qr(normal(HEADS, width, width, seed=3).double())[0] * torch.logspace(0.5, -1, width)
    static = {"mean": normal(HEADS, width, seed=4).half(), "back": back.half(), "bits": bits}
    static["variances"] = torch.logspace(1, -2, width).expand(HEADS, -1).contiguous()
    return pca.build(pca.Config(), Spec(kind, 0, 1, HEADS, width, 2, dtype), static)


def stored(made: Codec, batch: int, tokens: int) -> dict[str, Tensor]:
    """Any codes and norms, among them zero."""
    assert isinstance(made, pca.Principal)
    codes = torch.randint(0, 256, (batch, 1, tokens, made.pieces.nbytes), generator=generator(5), dtype=torch.uint8)
    norms = torch.randint(90, 150, (batch, HEADS, tokens, 1), generator=generator(6), dtype=torch.uint8)
    norms[:, :, 3] = 0
    return {"codes": codes, "norms": norms}


def turned(made: Codec, block: dict[str, Tensor], rotary: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Puts half rows for `rows` sequences into the block; the keys that the codes stand for, in float64."""
    batch, _, tokens, _ = block["codes"].shape
    positions = torch.arange(tokens)[None, :, None] + 7 * torch.arange(rows)[:, None, None]
    angles = positions * 100.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
    block["halves"] = torch.stack((angles.cos(), angles.sin()), 1).to(dtype)
    whole = torch.cat((block["halves"], block["halves"]), -1).expand(batch, -1, -1, -1)
    assert isinstance(made, pca.Principal)
    levels, norms = made.decode_levels(block)
    x = (levels.double() * norms.double()) @ made.static["back"].double() + made.static["mean"].double()
    cos, sin = whole.double().unbind(1)
    half = torch.cat((-x[..., rotary // 2 : rotary], x[..., : rotary // 2]), -1)
    return torch.cat((x[..., :rotary] * cos[:, None] + half * sin[:, None], x[..., rotary:]), -1)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("width", "rotary", "rows", "count", "dtype"),
    [
        (64, 64, 1, 1, torch.float32),
        (96, 32, 2, 3, torch.bfloat16),
        (64, 64, 2, 9, torch.float16),
    ],
)
def test_keys_are_read_and_written(width: int, rotary: int, rows: int, count: int, dtype: torch.dtype) -> None:
    made, tokens = codec("keys", width, dtype), 75
    block = stored(made, 2, tokens)
    keys = turned(made, block, rotary, rows, dtype)
    q = normal(2, HEADS, count, width, seed=8)
    assert made.at_once(q) > tokens
    out = torch.empty(2, HEADS, count, tokens + 9)[..., 4:-5]
    made.write_scores(q, block, out)
    limit = 1e-5 if dtype == torch.float32 else 1e-3
    expected = q.double() @ keys.mT
    assert float((out.double() - expected).norm() / expected.norm()) < limit
    torch.testing.assert_close(out.double(), expected, atol=10 * limit * float(expected.std()), rtol=0)
    whole = torch.empty(2, HEADS, tokens + 2, width, dtype=dtype)[:, :, 1:-1]
    made.write(block, whole)
    step = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert float((whole.double() - keys).norm() / keys.norm()) < limit + step


@pytest.mark.usefixtures("compiled")
def test_rows_of_pieces_of_eight_alone() -> None:
    """The last one reads beyond its row; the last tokens, which have no next row, are left to plain code."""
    plain = codec("keys", 64, torch.float32)
    bits = torch.tensor([7, 4, 3, 2, 1, 0, 0, 0], dtype=torch.uint8).repeat_interleave(8).expand(HEADS, -1)
    made = pca.build(pca.Config(), plain.spec, {**_static(plain), "bits": bits.contiguous()})
    assert isinstance(made, pca.Principal) and made.pieces.reach == made.pieces.nbytes + 1
    for tokens in (64, 65):
        block = stored(made, 1, tokens)
        assert made._whole(block) == tokens // 32 * 32 - (32 if tokens == 64 else 0)
        keys, q = turned(made, block, 64, 1, torch.float32), normal(1, HEADS, 2, 64, seed=8)
        assert made.at_once(q) > tokens
        out = torch.empty(1, HEADS, 2, tokens)
        made.write_scores(q, block, out)
        expected = q.double() @ keys.mT
        assert float((out.double() - expected).norm() / expected.norm()) < 1e-5


def _static(made: Codec) -> dict[str, Tensor]:
    """What a codec was built from."""
    return {
        "mean": made.static["mean"][:, 0].half(),
        "back": made.static["back"].mT.half(),
        "variances": torch.logspace(1, -2, made.spec.width).expand(HEADS, -1).contiguous(),
    }


@pytest.mark.usefixtures("compiled")
def test_the_same_however_blocks_and_rows_are_cut() -> None:
    made = codec("keys", 64, torch.bfloat16)
    block = stored(made, 2, 96)
    turned(made, block, 64, 2, torch.bfloat16)
    q, out = normal(2, HEADS, 2, 64), torch.empty(2, HEADS, 2, 96)
    made.write_scores(q, block, out)
    for start in (0, 32, 64):
        part = {name: x[:, :, start : start + 32] for name, x in block.items()}
        found = torch.empty(2, HEADS, 2, 32)
        made.write_scores(q, part, found)
        assert torch.equal(found, out[..., start : start + 32])
    alone = torch.empty(1, HEADS, 2, 96)
    made.write_scores(q[1:], {name: x[1:] for name, x in block.items()}, alone)
    assert torch.equal(alone, out[1:])


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("width", [64, 72])
def test_values_are_mixed(count: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kv_mixed.supports(64):
        pytest.skip("no compiled functions with AVX-512 here")
    monkeypatch.setattr(contract, "SMALL", 0)
    made = codec("values", width, torch.bfloat16)
    block = stored(made, 2, 75)
    assert isinstance(made, pca.Principal)
    levels, norms = made.decode_levels(block)
    p = normal(2, HEADS, count, 80, seed=1)[..., 2:77]
    assert made.at_once(p) > 75
    expected = (p.double() * norms.double().mT) @ levels.double()
    torch.testing.assert_close(made.mix(p, block).double(), expected, atol=2e-5 * float(expected.std()), rtol=1e-6)


def test_values_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SMALL", 0)
    made = codec("values", 64, torch.float32)
    block = stored(made, 2, 75)
    out = torch.empty(2, HEADS, 75, 64)
    made.write(block, out)
    torch.testing.assert_close(out, rotate_nothing(made, block), atol=1e-4, rtol=1e-5)


def rotate_nothing(made: Codec, block: dict[str, Tensor]) -> Tensor:
    """Plain code's values."""
    plain = made.decode(block)
    return rotate(plain, torch.ones(1, 75, 64), torch.zeros(1, 75, 64))


def test_what_compiled_code_leaves_alone() -> None:
    """Rotary widths that fill no registers, and types that it does not read, go the plain way."""
    made = codec("keys", 64, torch.float32)
    for rotary, dtype in ((40, torch.float32), (64, torch.float64)):
        block = stored(made, 1, 75)
        keys = turned(made, block, rotary, 1, dtype)
        q, out = normal(1, HEADS, 2, 64), torch.empty(1, HEADS, 2, 75)
        made.write_scores(q, block, out)
        torch.testing.assert_close(out.double(), q.double() @ keys.mT, atol=1e-3, rtol=1e-5)
    assert made.at_once(normal(1, HEADS, 17, 64)) == made.block
    assert made.at_once(normal(1, HEADS, 2, 64).double()) == made.block
    wide = codec("keys", 72, torch.float32)
    assert wide.at_once(normal(1, HEADS, 2, 72)) == wide.block


def test_sums_of_integer_products_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With levels as large as they may be, all of one sign; `back` is otherwise as large as it may be."""
    monkeypatch.setattr(kv_basis, "has_tiles", lambda: False)
    columns, mean = torch.arange(64)[None], torch.zeros(1, 64)
    for largest in (1.0, 127.0, 4000.0):
        back = normal(1, 64, 64).abs() + 1
        made = kv_basis.transform(back, mean, torch.full((1, 64), largest), columns, 64, False)
        sums = made.back.long().sum((2, 6)).flatten() * int(largest)  # over the steps and the two fields of each
        assert sums.max() < 2**31 and made.back.dtype == torch.int16
        rebuilt = sums / largest * made.scales[0, kv_basis.pair_channels(64, 64)]
        torch.testing.assert_close(rebuilt, back[0].sum(0)[kv_basis.pair_channels(64, 64)], rtol=1e-3, atol=0)
        assert largest > 1000 or int(made.back.max()) == emitter.LARGEST
