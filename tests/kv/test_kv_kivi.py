"""KIVI and fp8 against known errors on Gaussian and key-like data, and their score-space reading against decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kernels import contract, llvm
from compress.kernels.cpu import kv_affine
from compress.kv.codec import Codec, Spec
from compress.kv.codecs import fp8, kivi

# relative squared error of min-max integers on N(0, 1), by bits and group size
GAUSSIAN = {
    (2, 16): 0.1070, (2, 32): 0.1546, (2, 64): 0.2028, (2, 128): 0.2511,
    (3, 16): 0.0195, (3, 32): 0.0281, (3, 64): 0.0370, (3, 128): 0.0458,
    (4, 16): 0.0042, (4, 32): 0.0061, (4, 64): 0.0080, (4, 128): 0.0100,
}  # fmt: skip
CHANNELS = {5: 12.0, 17: 15.0, 69: -9.0, 81: 8.0}  # of keys that stand out, and by how much


def codec(kind: Any, width: int = 128, **settings: Any) -> Codec:
    return kivi.build(kivi.Config(**settings), Spec(kind, 0, 1, 2, width, 4), {})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(made: Codec, x: Tensor) -> float:
    return float((made.decode(made.encode(x, {})) - x).square().mean() / x.var())


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("bits", "group"), GAUSSIAN)
def test_gaussian_data(bits: int, group: int, axis: str) -> None:
    made = codec("keys", bits=bits, group_size=group, axis=axis)
    assert error(made, normal(1, 2, 1024, 128)) == pytest.approx(GAUSSIAN[bits, group], rel=0.03, abs=5e-5)


def test_eight_bits() -> None:
    assert error(codec("keys", bits=8, group_size=128), normal(1, 2, 512, 128)) == pytest.approx(4e-5, rel=0.2)


@pytest.mark.parametrize(
    ("bits", "axis", "group", "expected"),
    [(2, "token", 128, 2.49), (2, "token", 32, 1.88), (2, "channel", 32, 0.154), (4, "channel", 32, 0.0061)],
)
def test_keys_with_channels_that_stand_out(bits: int, axis: Any, group: int, expected: float) -> None:
    x = normal(1, 1, 4096, 128)
    for channel, shift in CHANNELS.items():
        x[..., channel] += shift
    made = codec("keys", bits=bits, group_size=group, axis=axis)
    found = float((made.decode(made.encode(x, {})) - x).square().mean())  # over the variance of the noise, 1
    assert found == pytest.approx(expected, rel=0.03)


def test_the_groups_of_keys_lie_along_tokens_and_of_values_along_channels() -> None:
    x = normal(1, 1, 64, 64)
    keys, values = (codec(kind, 64, bits=4, group_size=32) for kind in ("keys", "values"))
    assert keys.encode(x, {})["scales"].shape == (1, 1, 2, 64)
    assert values.encode(x, {})["scales"].shape == (1, 1, 64, 2)
    torch.testing.assert_close(keys.decode(keys.encode(x, {})).mT, values.decode(values.encode(x.mT, {})))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_codes_are_the_nearest_for_the_stored_scales(bits: int) -> None:
    scale, low, codes = kivi.fit(normal(300, 32) * 3, bits)
    grid = low.double() + scale.double() * torch.arange(2.0**bits)
    x = normal(300, 32).double() * 3
    best = (x[..., None] - grid[:, None]).abs().argmin(-1)
    assert scale.dtype == low.dtype == torch.float16
    assert ((best != codes).float().mean()) < 1e-3  # ties of rounding


def test_constant_groups() -> None:
    x = torch.full((1, 2, 32, 32), 3.0)
    for kind in ("keys", "values"):
        made = codec(kind, 32, bits=2)
        assert torch.equal(made.decode(made.encode(x, {})), x)
        assert not made.decode(made.encode(x * 0, {})).any()


def test_a_group_must_divide_the_head() -> None:
    with pytest.raises(RecipeError, match="layer 0, values: group_size 32 does not divide the head's 80"):
        codec("values", 80, group_size=32)


COMPILED = [(2, 64, 2), (3, 64, 1), (3, 128, 2), (4, 64, 7), (8, 64, 2)]
PLAIN = [(bits, width, 7) for bits in (1, 2, 3, 4, 5, 8) for width in (16, 80, 128)]


@pytest.mark.parametrize(
    ("bits", "width", "rows", "compiled"), [(*case, True) for case in COMPILED] + [(*case, False) for case in PLAIN]
)
def test_reading_without_decoding(
    bits: int, width: int, rows: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and not llvm.available():
        pytest.skip("no compiled functions here")
    monkeypatch.setattr(contract, "SMALL", 0 if compiled else 1 << 40)
    x, tokens = normal(2, 2, 96, width), 96
    q, p = normal(2, 2, rows, width, seed=1), normal(2, 2, rows, 101, seed=2).softmax(-1)
    for kind, axis in (("keys", "channel"), ("values", "token")):
        made = codec(kind, width, bits=bits, group_size=16, axis=axis)
        assert isinstance(made, kivi.ByChannel | kivi.ByToken)
        at_once = made.at_once(q), made.write_at_once(torch.empty(2, 2, 96, width))
        assert at_once == (kivi.ALL, kivi.ALL) or not compiled
        block = made.encode(x, {})
        dense = made.decode(block).double()
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.empty(2, 2, 100, width, dtype=dtype)[:, :, 2:98]
            made.write(block, out)
            torch.testing.assert_close(
                out, dense.to(dtype), atol=1e-6, rtol=2.0**-8 if dtype != torch.float32 else 1e-6
            )
        found = torch.empty(2, 2, rows, tokens)
        made.write_scores(q, block, found)
        close(found, q.double() @ dense.mT, 2e-4)
        for count in (96, 83 if kind == "values" else 80):
            part = {name: data[:, :, : count // made.fields[name].tokens] for name, data in block.items()}
            close(made.mix(p[..., :count], part), p[..., :count].double() @ dense[:, :, :count], 4e-4)


def close(found: Tensor, expected: Tensor, relative: float) -> None:
    """Relative to the largest."""
    torch.testing.assert_close(found.double(), expected, atol=relative * float(expected.abs().max()), rtol=0)


def test_kernels_read_other_strides_and_extremes() -> None:
    if not llvm.available():
        pytest.skip("no compiled functions here")
    sizes = contract.PlanarCodes(4, 64, 32)
    made = codec("values", 64, bits=4, group_size=32)
    x = normal(1, 2, 128, 64)
    block = made.encode(x, {})
    held = {name: torch.zeros(1, 2, 300, rows.shape[-1], dtype=rows.dtype) for name, rows in block.items()}
    for name, rows in block.items():
        held[name][:, :, 100:228] = rows
    part = {name: rows[:, :, 100:228] for name, rows in held.items()}
    p = torch.zeros(1, 2, 4, 400)
    p[..., 7 + 5], p[..., 7 + 77] = 1.0, 1e-20
    found = kv_affine.mix(p[..., 7:135], [part["codes4"]], part["scales"], part["minima"], sizes)
    torch.testing.assert_close(found, made.decode(block)[:, :, 5:6].expand(-1, -1, 4, -1), atol=2e-4, rtol=0)
    keys = codec("keys", 64, bits=4)
    rows = keys.encode(x, {})
    out = torch.empty(1, 2, 4, 200)[..., 30:158]
    keys.write_scores(torch.zeros(1, 2, 4, 64), rows, out)
    assert not out.any()


def test_fp8_on_gaussian_data() -> None:
    """Against the nearest number of the format, from its definition: three bits after the point, exponents from -6."""
    steps = torch.arange(8, dtype=torch.float64)
    grid = torch.cat([steps * 2.0**-9, *((1 + steps / 8) * 2.0**e for e in range(-6, 9))])[:-1]  # its last is NaN
    grid = torch.cat((-grid.flip(0), grid))
    assert grid.max() == fp8.MAX_FLOAT8
    x = normal(1, 2, 512, 128)
    made = fp8.build(fp8.Config(), Spec("values", 0, 1, 2, 128, 4), {})
    scales = x.double().abs().amax(-1, keepdim=True) / fp8.MAX_FLOAT8
    places = torch.searchsorted(grid, x.double() / scales).clamp(1, len(grid) - 1)
    low, high = grid[places - 1] * scales, grid[places] * scales
    best = torch.minimum((x - low).square(), (x - high).square()).mean() / x.double().var()
    assert error(made, x) == pytest.approx(float(best), rel=0.03)
    assert float(best) == pytest.approx(6.6e-4, rel=0.1)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_fp8(kind: Any) -> None:
    x = normal(1, 2, 256, 128) * torch.logspace(-3, 3, 256)[None, None, :, None]
    made = fp8.build(fp8.Config(), Spec(kind, 0, 1, 2, 128, 4), {})
    block = made.encode(x, {})
    dense = made.decode(block)
    assert ((dense - x).square().sum(-1) / x.square().sum(-1)).max() < 1.5e-3
    q, p = normal(1, 2, 3, 128), normal(1, 2, 3, 256).softmax(-1)
    torch.testing.assert_close(made.scores(q, block), q @ dense.mT, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(made.mix(p, block), p @ dense, rtol=1e-4, atol=1e-3)
    assert not made.decode(made.encode(x * 0, {})).any()
