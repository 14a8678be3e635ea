"""The compiled reader of sums of codebook entries against plain algebra in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels import kv_contract, llvm
from compress.kernels.cpu import kv_additive
from compress.kv.codec import Spec
from compress.papers.codecs import commvq

HEADS, TOKENS = 3, 75
CASES: list[tuple[int, int, dict[str, Any], torch.dtype]] = [  # width, channels that turn, settings, type
    (64, 64, {"bits": 1.0, "entries": 64, "tied": False}, torch.float32),
    (96, 32, {"bits": 0.5, "entries": 8, "norm": "head"}, torch.bfloat16),
    (64, 64, {"bits": 0.5, "entries": 128, "norm": "token", "tied": False}, torch.float16),
    (64, 32, {"bits": 0.25, "entries": 2}, torch.float32),
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    if not kv_additive.supports(64, 6):
        pytest.skip("no compiled functions with AVX-512 here")
    monkeypatch.setattr(kv_contract, "SMALL", 0)


def codec(kind: Any, width: int, settings: dict[str, Any], dtype: torch.dtype) -> commvq.Additive:
    """With codebooks of any numbers, whose stages get smaller."""
    config, spec = commvq.Config(**settings), Spec(kind, 0, 1, HEADS, width, 2, dtype)
    shapes = {name: shape for name, (shape, _) in commvq.specs(config, spec).items()}
    books = normal(*shapes["codebooks"], seed=1) * torch.logspace(0, -1, shapes["codebooks"][1])[:, None, None]
    static = {"mean": normal(*shapes["mean"], seed=2).half(), "codebooks": books.half()}
    static |= {"metric": torch.eye(width).expand(HEADS, -1, -1).half()} if kind == "keys" else {}
    made = commvq.build(config, spec, static)
    assert isinstance(made, commvq.Additive)
    return made


def stored(made: commvq.Additive, batch: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Any codes and norms, among them zero."""
    codes = torch.randint(0, made.config.entries, (batch, tokens, HEADS * made.count)).to(torch.uint8)
    block = {"codes": commvq.pack(codes, made.config.code_bits)[:, None]}
    if "norms" in made.fields:
        heads = HEADS if made.config.norm == "head" else 1
        block["norms"] = torch.randint(90, 150, (batch, heads, tokens, 1)).to(torch.uint8)
        block["norms"][:, :, 3] = 0
    return block


def numbers(made: commvq.Additive, block: dict[str, Tensor]) -> Tensor:
    """What the codes stand for, in float64, entry by entry."""
    codes, tables = made.codes(block).long(), made.static["tables"].double()
    x = torch.zeros(*codes.shape[:3], made.spec.width, dtype=torch.float64)
    for head in range(HEADS):
        for place in range(made.count):
            x[:, head] += tables[head, place][codes[:, head, :, place]]
    if "norms" in block:
        x = x * made.norms.load(block["norms"]).double()
    return x + made.static["mean"].double()


def turned(x: Tensor, block: dict[str, Tensor], rotary: int, dtype: torch.dtype) -> Tensor:
    """Puts half rows into the block; x turned by them."""
    angles = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
    block["halves"] = torch.stack((angles.cos(), angles.sin()))[None].to(dtype)
    cos, sin = block["halves"][0].double()
    low, high = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., rotary:]), -1)


@pytest.mark.parametrize(("width", "rotary", "settings", "dtype"), CASES)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_keys_are_read(width: int, rotary: int, settings: dict[str, Any], dtype: torch.dtype, count: int) -> None:
    made = codec("keys", width, settings, dtype)
    block = stored(made, 2)
    keys, q = turned(numbers(made, block), block, rotary, dtype), normal(2, HEADS, count, width, seed=8)
    assert made.at_once(q) > TOKENS and made._whole(block) >= 32
    out = torch.empty(2, HEADS, count, TOKENS + 9)[..., 4:-5]
    made.write_scores(q, block, out)
    expected, limit = q.double() @ keys.mT, 1e-6 if dtype == torch.float32 else 1e-3
    assert float((out.double() - expected).norm() / expected.norm()) < limit
    torch.testing.assert_close(out.double(), expected, atol=10 * limit * float(expected.std()), rtol=0)


@pytest.mark.parametrize(("width", "rotary", "settings", "dtype"), CASES)
def test_keys_and_values_are_written(width: int, rotary: int, settings: dict[str, Any], dtype: torch.dtype) -> None:
    step = {torch.float32: 1e-6, torch.float16: 1e-3 + 2.0**-11, torch.bfloat16: 1e-3 + 2.0**-8}[dtype]
    for kind in ("keys", "values"):
        made = codec(kind, width, settings, dtype)
        block = stored(made, 2)
        x = numbers(made, block)
        x = turned(x, block, rotary, dtype) if kind == "keys" else x
        out = torch.empty(2, HEADS, TOKENS + 2, width, dtype=dtype)[:, :, 1:-1]
        made.write(block, out)
        assert float((out.double() - x).norm() / x.norm()) < step


@pytest.mark.parametrize(("width", "rotary", "settings", "dtype"), CASES)
@pytest.mark.parametrize("count", [1, 4, 9])
def test_values_are_mixed(width: int, rotary: int, settings: dict[str, Any], dtype: torch.dtype, count: int) -> None:
    made = codec("values", width, settings, dtype)
    block, p = stored(made, 2), normal(2, HEADS, count, TOKENS + 5, seed=1)[..., 2:-3]
    expected = p.double() @ numbers(made, block)
    found = made.output(made.mix(p, block), p.sum(-1, keepdim=True), {})
    torch.testing.assert_close(found.double(), expected, atol=2e-5 * float(expected.std()), rtol=1e-6)


def test_the_same_however_blocks_rows_and_threads_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = (codec(kind, 64, CASES[0][2], torch.bfloat16) for kind in ("keys", "values"))
    block, q, p = stored(keys, 2, 128), normal(2, HEADS, 2, 64), normal(2, HEADS, 2, 128)
    turned(numbers(keys, block), block, 64, torch.bfloat16)
    out = torch.empty(2, HEADS, 2, 128)
    keys.write_scores(q, block, out)
    for start in (0, 32, 64):
        part = {name: x[:, :, start : start + 64] for name, x in block.items()}
        found = torch.empty(2, HEADS, 2, 64)
        keys.write_scores(q, part, found)
        assert torch.equal(found[..., :32], out[..., start : start + 32])
    mixed = values.mix(p, block)
    alone = values.mix(p[1:], {name: x[1:] for name, x in block.items() if name != "halves"})
    assert torch.equal(alone, mixed[1:])
    monkeypatch.setattr(llvm, "parallel", lambda work, total, least=1: [work(i, i + 1) for i in range(total)])
    assert torch.equal(values.mix(p, block), mixed)
    again = torch.empty_like(out)
    keys.write_scores(q, block, again)
    assert torch.equal(again, out)


def test_what_compiled_code_leaves_alone() -> None:
    """Rotary widths that fill no registers, codes of 8 bits, and heads that are no whole registers."""
    made = codec("keys", 64, CASES[0][2], torch.float32)
    block, q = stored(made, 1), normal(1, HEADS, 2, 64)
    keys, out = turned(numbers(made, block), block, 40, torch.float32), torch.empty(1, HEADS, 2, TOKENS)
    made.write_scores(q, block, out)
    torch.testing.assert_close(out.double(), q.double() @ keys.mT, atol=1e-3, rtol=1e-5)
    for width, settings in ((64, {"bits": 1.0, "entries": 256}), (72, {"bits": 1.0})):
        other = codec("keys", width, settings, torch.float32)
        assert other.at_once(normal(1, HEADS, 2, width)) == other.block
