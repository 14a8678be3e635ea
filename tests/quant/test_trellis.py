"""Trellis coding: the search against exhaustive dynamic programming, the bits against a reader of single bits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
import torch
from torch import Tensor

from compress import formats
from compress.formats import trellis as trellis_format
from compress.formats.trellis import Params
from compress.kernels.loops import viterbi as viterbi_compiled
from compress.quant import gptq, trellis, viterbi
from compress.quant.viterbi import Search
from compress.types import PackedWeight, Stats, Stored
from helpers import problems

GAUSSIAN = {  # (code, bits) -> distortion of N(0, 1) with a window of 16 bits, the project's reference table
    ("mul1", 1): 0.2800,
    ("mul1", 2): 0.0699,
    ("mcg", 2): 0.0723,
    ("1mad", 2): 0.0730,
    ("3inst", 2): 0.0735,
    ("hyb", 2): 0.0724,
    ("mul1", 3): 0.0182,
    ("mul1", 4): 0.0047,
    ("3inst", 4): 0.0049,
}
PARTS = {
    1.25: 0.2063,
    1.5: 0.1460,
    1.75: 0.1045,
    2.5: 0.0377,
    3.5: 0.0101,
}  # the same with a window of 12 bits and streams of 128


def hyb_table(params: Params) -> Tensor | None:
    return trellis._hyb_table() if params.code == "hyb" else None


def search_of(params: Params) -> Search:
    return Search(trellis_format.states_table(params, hyb_table(params)), params.state_bits, params.symbol_bits)


def closed_states(params: Params, tiles: int, columns: int) -> Tensor:
    """States of random circular streams, [tiles * steps, columns], window by window from lists of bits."""
    steps, kv, length = params.tile_rows // params.vector_dim, params.symbol_bits, int(params.tile_rows * params.bits)
    generator = torch.Generator().manual_seed(int(4 * params.bits))
    streams = torch.randint(2, (tiles, columns, length), generator=generator)
    states = torch.zeros(tiles, steps, columns, dtype=torch.int64)
    for t in range(steps):
        for back in range(params.state_bits):
            states[:, t] += streams[:, :, (math.floor((t + 1) * kv) - 1 - back) % length] << back
    return states.view(-1, columns)


def exhaustive(values: Tensor, table: Tensor, bits: float, seam: int) -> float:
    """Least squared error of all paths that start and end at the node `seam`; values [steps] float64."""
    size = len(table)
    new = [math.floor((t + 1) * bits) - math.floor(t * bits) for t in range(len(values) + 1)]
    cost = torch.full((size >> new[0],), float("inf"), dtype=torch.float64)
    cost[seam] = 0
    for t, value in enumerate(values.tolist()):
        after = torch.full((size >> new[t + 1],), float("inf"), dtype=torch.float64)
        for node, symbol in itertools.product(range(len(cost)), range(1 << new[t])):
            state = node << new[t] | symbol
            total = cost[node] + (table[state, 0].double() - value) ** 2
            after[state % len(after)] = torch.minimum(after[state % len(after)], total)
        cost = after
    return cost[seam].item()


@pytest.mark.parametrize(
    "bits, state_bits",
    [(1, 5), (2, 6), (3, 7), (2, 5), (1.5, 3), (1.5, 5), (2.5, 5), (2.5, 6), (3.5, 7), (1.25, 4), (1.75, 5), (2.25, 5)],
)
def test_the_search_finds_the_best_closed_path(bits: float, state_bits: int) -> None:
    params = Params(bits, state_bits, 64)
    search = search_of(params)
    values = problems.random(4, 16, seed=int(bits))
    states = search.encode(values)
    found = (search.table[states][..., 0].double() - values.double()).square().sum(1)
    for row in range(4):
        seam = int(states[row, -1]) & (search.nodes - 1)
        best = exhaustive(values[row].double(), search.table, bits, seam)
        assert best - 1e-9 <= found[row] <= best * 1.004 + 1e-3  # costs are rounded


@pytest.mark.parametrize(
    "code, bits",
    [*itertools.product(("mul1", "3inst"), range(1, 9)), ("hyb", 2), ("hyb", 4), *(("mul1", bits) for bits in PARTS)],
)
def test_paths_are_closed_and_the_stored_bits_decode_to_them(code: str, bits: float) -> None:
    """Stored words decode to just the values that the search meant, to the bit."""
    state_bits, rows = max(8, int(2 * bits) * (2 if code == "hyb" else 1)), max(32, trellis_format.row_multiple(bits))
    params = Params(bits, state_bits, rows, code)
    search, values = search_of(params), problems.random(3 * 5, rows)
    states = search.encode(values)
    new = torch.tensor(trellis_format.step_bits(params.symbol_bits)).repeat(states.shape[1])[: states.shape[1]]
    assert torch.equal(states.roll(1, 1) & ((1 << (state_bits - new)) - 1), states >> new)
    by_column = states.view(3, 5, -1).permute(0, 2, 1).reshape(-1, 5)
    tensors = trellis_format.pack(by_column, 0.5, params, None, hyb_table(params))
    assert {k: (tuple(t.shape), t.dtype) for k, t in tensors.items()} == trellis_format.specs(params, (3 * rows, 5))
    assert torch.equal(trellis_format.unpack(tensors["words"], params), by_column)
    decoded = trellis_format.decode(tensors, params, (3 * rows, 5), torch.float32)
    expected = (search.table * 0.5)[by_column].transpose(1, 2).reshape(3 * rows, 5)
    assert torch.equal(decoded, expected)


SINGLE_BITS = [("mul1", 2, 48), ("mul1", 3, 48), ("1mad", 5, 48), ("mcg", 1, 48), ("hyb", 3, 48)]
SINGLE_BITS += [
    ("mul1", bits, rows) for bits in PARTS for rows in (64, 96, 256) if rows % trellis_format.row_multiple(bits) == 0
]


@pytest.mark.parametrize("code, bits, tile", SINGLE_BITS)
def test_a_reader_of_single_bits_agrees(code: str, bits: float, tile: int) -> None:
    params = Params(bits, 12, tile, code, row_scales=True)
    states = closed_states(params, 2, 3)
    rows = torch.linspace(0.1, 1, 2 * tile).half()
    table = hyb_table(params)
    tensors = trellis_format.pack(states, 0.3, params, rows, table)
    decoded = trellis_format.decode(tensors, params, (2 * tile - 6, 3), torch.float32)
    assert torch.equal(trellis_format.unpack(tensors["words"], params), states)
    per_state = trellis_format.states_table(params, table)
    per_tile, dim, kv = int(tile * bits) // 16, params.vector_dim, params.symbol_bits
    for column, row in itertools.product(range(3), range(2 * tile - 6)):
        number, step = row // tile, row % tile // dim
        words = [int(w) & 0xFFFF for w in tensors["words"][number * per_tile : (number + 1) * per_tile, column]]
        stream = [word >> (15 - i) & 1 for word in words for i in range(16)]
        end = math.floor((step + 1) * kv)
        state = int("".join(str(stream[i % len(stream)]) for i in range(end - 12, end)), 2)
        expected = per_state[state, row % dim] * tensors["scale"][0] * rows[row].float()
        assert decoded[row, column] == expected


def test_computed_codes() -> None:
    """Each code's formula in plain integers."""

    def half(bits: int) -> Tensor:
        return torch.tensor([bits - ((bits & 0x8000) << 1)], dtype=torch.int16).view(torch.float16)

    tables = {code: trellis_format.states_table(Params(2, 16, 16, code)) for code in ("mul1", "1mad", "3inst", "mcg")}
    for state in (0, 1, 255, 4097, 40000, 65535):
        words = {
            "mul1": state * 0x83DCD12D & 0xFFFFFFFF,
            "1mad": (state * 34038481 + 76625530) & 0xFFFFFFFF,
            "3inst": (state * 89226354 + 64248484) & 0xFFFFFFFF,
            "mcg": state * 0xCBAC1FED & 0xFFFFFFFF,
        }
        for code, divisor in (("mul1", 147.7), ("1mad", 147.8005)):
            assert tables[code][state, 0].item() == pytest.approx((sum(words[code].to_bytes(4, "big")) - 510) / divisor)
        for code in ("3inst", "mcg"):
            masked = words[code] & 0x8FFF8FFF ^ 0x3B603B60
            assert tables[code][state] == (half(masked & 0xFFFF) + half(masked >> 16)).float()
    rms = {code: table.square().mean().sqrt().item() for code, table in tables.items()}
    assert rms == pytest.approx({"mul1": 1.001, "1mad": 1.0, "3inst": 1.2437, "mcg": 1.2441}, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("code, bits", GAUSSIAN)
def test_distortion_of_gaussian_values(code: str, bits: int) -> None:
    params = Params(bits, 16, 256, code)
    search = search_of(params)
    values = problems.random(64, 256, seed=1)
    rms = search.table.square().mean().sqrt()
    ratio = 1.06 if bits > 2 else 1.0
    decoded = search.table[search.encode(values / ratio * rms)].view_as(values) / rms * ratio
    assert (decoded - values).square().mean() / values.square().mean() < 1.02 * GAUSSIAN[code, bits]


@pytest.mark.parametrize("bits", PARTS)
def test_distortion_of_half_bits(bits: float) -> None:
    search = search_of(Params(bits, 12, 128))
    values = problems.random(96, 128, seed=1)
    ratio = 1.06 if bits > 2 else 1.0
    decoded = search.table[search.encode(values / ratio)].view_as(values) * ratio
    assert (decoded - values).square().mean() / values.square().mean() < 1.03 * PARTS[bits]


def layer(rows: int = 96, columns: int = 64) -> tuple[Tensor, Stats]:
    return problems.random(rows, columns, seed=3), problems.stats(problems.inputs(1000, columns))


def quantize(weight: Tensor, stats: Stats, **settings: object) -> PackedWeight:
    config = trellis.Config(**{"state_bits": 8, **settings})  # type: ignore[arg-type]
    return trellis.quantize(weight, stats, config).weight


@pytest.mark.parametrize("block_columns", [1, 4])
def test_the_loop_is_the_slow_one(block_columns: int) -> None:
    """Targets, order and scale against a float64 loop that solves each block's least-squares problem anew."""
    weight, stats = layer(32, 24)
    config = trellis.Config(state_bits=8, block_columns=block_columns)
    packed = trellis.quantize(weight, stats, config).weight
    search = search_of(packed.params)
    order = stats.hessian.diagonal().argsort(descending=True, stable=True)
    hessian = problems.damped(stats.hessian, config.damp)[order][:, order]
    ordered = weight.double()[:, order]
    scale = (weight.double().square().mean().sqrt() / search.table.double().square().mean().sqrt()).item() * 1.11
    quantized = torch.zeros_like(ordered)
    for start in range(0, 24, block_columns):
        block, later = slice(start, start + block_columns), slice(start + block_columns, 24)
        # what the block should be, given the columns done and all later ones free: (R H)_free = 0
        free, error = slice(start, 24), (ordered - quantized)[:, :start]
        shift = torch.linalg.solve(hessian[free, free], hessian[free, :start] @ error.T).T
        target = (ordered[:, free] + shift)[:, :block_columns]
        assert later.stop == 24
        tiles = (target / scale).T.reshape(-1, packed.params.tile_rows).float()
        values = search.table[search.encode(tiles)].reshape(block_columns, 32).T
        quantized[:, block] = values.double() * scale
    quantized *= ((quantized @ hessian) * ordered).sum() / ((quantized @ hessian) * quantized).sum()
    decoded = problems.decoded(packed)[:, order]
    agree = (decoded - quantized).abs().amax(0) < 1e-3
    assert agree[:block_columns].all() and agree.float().mean() > 0.9  # a tie in float32 changes all that follows


def test_sweeps_only_improve_and_keep_the_bits_true() -> None:
    weight, stats = layer()
    losses = [
        problems.loss(weight, problems.decoded(quantize(weight, stats, sweeps=n)), stats.hessian) for n in (0, 1, 3)
    ]
    damping = problems.damped(stats.hessian, 0.01)
    damped = [problems.loss(weight, problems.decoded(quantize(weight, stats, sweeps=n)), damping) for n in (0, 1, 3)]
    assert damped[0] > damped[1] > damped[2] and losses[0] > losses[2]


@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_paths_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    search, values = search_of(Params(2, 8, 32)), problems.random(50, 32)
    expected = search.encode(values)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(search.encode(values), expected)


@pytest.mark.parametrize("bits", [2, 2.5, 1.75])
def test_results_do_not_depend_on_batches(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on whether the search is compiled."""
    weight, stats = layer()
    whole = quantize(weight, stats, bits=bits)
    monkeypatch.setattr(viterbi_compiled, "compiled_search", lambda *settings: None)
    monkeypatch.setattr(viterbi, "STATES", {"cpu": 1})
    monkeypatch.setattr(viterbi, "DECISIONS", {"cpu": 1})
    monkeypatch.setattr(trellis_format, "DECODE_CHUNK", 1)
    assert search_of(whole.params).compiled is None
    small = quantize(weight, stats, bits=bits)
    assert all(torch.equal(whole.tensors[key], small.tensors[key]) for key in whole.tensors)
    assert torch.equal(problems.decoded(whole), problems.decoded(small))


def test_tiles_are_independent() -> None:
    """Rows of one tile do not see those of another, but for the scale that all share."""
    weight, stats = layer(64)
    settings = {"tile_rows": 32, "block_columns": 1, "row_scales": True}
    weight /= weight.square().mean(1, keepdim=True).sqrt()
    weight[32:] = weight[:32].flip(0)
    whole = problems.decoded(quantize(weight, stats, **settings))
    swapped = problems.decoded(quantize(weight.view(2, 32, -1).flip(0).reshape(64, -1), stats, **settings))
    assert torch.allclose(whole, swapped.view(2, 32, -1).flip(0).reshape(64, -1), atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 64), (24, 50), (96, 33), (5, 7), (130, 16), (1, 1)])
@pytest.mark.parametrize(
    "bits, code", [(1, "mul1"), (3, "mul1"), (2, "hyb"), (1.5, "mul1"), (3.5, "mul1"), (1.25, "mul1"), (1.75, "mul1")]
)
def test_any_shape(shape: tuple[int, int], bits: float, code: str) -> None:
    weight, stats = problems.random(*shape), problems.stats(problems.inputs(200, shape[1]))
    config = trellis.Config(bits=bits, state_bits=8, code=code, sweeps=1)
    packed = trellis.quantize(weight, stats, config).weight
    assert packed.params == trellis.plan_params(config, shape)
    assert packed.nbytes == formats.nbytes(Stored("trellis", packed.params), shape)
    decoded = formats.decode(packed, torch.float32)
    assert decoded.shape == shape and torch.isfinite(decoded).all()


def test_padded_rows_do_not_count_for_the_scale() -> None:
    """A single row is padded to a tile, and is coded as well as many rows are: measured 1.4e-5, and 0.02 if it did."""
    weight = problems.random(1, 64)
    values = problems.decoded(quantize(weight, problems.stats(torch.eye(64)), bits=8, state_bits=16))
    assert (values - weight).square().mean() < 1e-4 * weight.square().mean()


@pytest.mark.parametrize("row_scales", [False, True])
def test_the_scale_is_the_best_for_the_codes(row_scales: bool) -> None:
    weight, stats = layer(32)
    weight *= problems.random(32, 1, seed=9).exp()
    values = problems.decoded(quantize(weight, stats, row_scales=row_scales, damp=1e-6))
    found = problems.loss(weight, values, stats.hessian)
    assert all(found < problems.loss(weight, factor * values, stats.hessian) for factor in (0.995, 1.005))


def test_zero_weights_and_no_tokens() -> None:
    stats = Stats(torch.zeros(64, 64), 0)
    assert not formats.decode(quantize(torch.zeros(32, 64), stats), torch.float32).any()
    result = trellis.quantize(problems.random(32, 64), stats, trellis.Config(state_bits=8))
    assert result.notes == ("no calibration token reached this input: rounded to nearest",)


def test_it_beats_scalar_gptq_with_fewer_bytes() -> None:
    """Rotated, as the engine gives it; a random orthogonal basis stands for the Hadamard transform."""
    weight, stats = layer(128, 128)
    basis = torch.linalg.qr(problems.random(128, 128, seed=9).double())[0]
    rotated = Stats((basis @ stats.hessian.double() @ basis.T).float(), stats.count)
    for bits in (2, 3):
        ours = quantize((weight.double() @ basis.T).float(), rotated, bits=bits, state_bits=10)
        loss = problems.loss(weight, problems.decoded(ours) @ basis, stats.hessian)
        config = gptq.Config(bits=bits, group_size=64, symmetric=False, static_groups=False, sweeps=3)
        scalar = gptq.quantize(weight, stats, config).weight
        assert ours.nbytes < scalar.nbytes
        assert loss < 0.8 * problems.loss(weight, problems.decoded(scalar), stats.hessian)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bits": 0}, "bits 0 is not one of 1..8"),
        ({"bits": 9}, "bits 9 is not one of 1..8, nor a multiple of 0.25 between 1 and 4"),
        ({"bits": 4.5}, "bits 4.5 is not one of 1..8, nor a multiple of 0.25 between 1 and 4"),
        ({"bits": 2.5, "code": "3inst"}, "code '3inst' has no parts of a bit; set code: mul1, or whole bits"),
        ({"bits": 2.5, "code": "hyb"}, "code 'hyb' has no parts of a bit"),
        ({"bits": 2.5, "state_bits": 4}, "state_bits 4 is not one of 5..16, which code 'mul1' at 2.5 bits needs"),
        ({"bits": 1.5, "tile_rows": 48}, "tile_rows 48 is not a multiple of 32 up to 256"),
        ({"bits": 1.25, "tile_rows": 96}, "tile_rows 96 is not a multiple of 64 up to 256"),
        ({"bits": 1.75, "state_bits": 3}, "state_bits 3 is not one of 4..16"),
        ({"state_bits": 3}, "state_bits 3 is not one of 4..16, which code 'mul1' at 2 bits needs"),
        ({"state_bits": 17}, "state_bits 17 is not one of 4..16"),
        ({"bits": 5, "code": "hyb"}, "bits 5 is too many for code 'hyb'"),
        ({"tile_rows": 40}, "tile_rows 40 is not a multiple of 16 up to 256"),
        ({"tile_rows": 512}, "tile_rows 512 is not a multiple of 16 up to 256"),
        ({"code": "lut"}, "code 'lut' is not one of mul1"),
        ({"damp": 1.0}, r"damp 1.0 is not in \[0, 1\)"),
        ({"sweeps": -1}, "sweeps -1 is negative"),
        ({"block_columns": -1}, "block_columns -1 is negative"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        trellis.Config(**settings)  # type: ignore[arg-type]


def test_whole_bits_are_integers_however_they_are_written() -> None:
    """Stored parameters and fingerprints of settings do not change."""
    assert json.dumps(dataclasses.asdict(trellis.Config(bits=2.0))) == json.dumps(dataclasses.asdict(trellis.Config()))
    assert repr(Params(3.0, 12, 16).bits) == "3" and repr(Params(2.5, 12, 32).bits) == "2.5"


def test_parts_of_a_bit_lose_what_lies_between() -> None:
    """At equal steps of bits the losses fall by equal factors, about; the stored bytes are exact."""
    sizes = [1 + n / 4 for n in range(13)]
    weight, stats = layer(128, 64)
    packed = [quantize(weight, stats, bits=bits, state_bits=10) for bits in sizes]
    assert [8 * (each.nbytes - 4) / weight.numel() for each in packed] == sizes
    losses = [problems.loss(weight, problems.decoded(each), stats.hessian) for each in packed]
    for before, half, after in zip(losses[:-2], losses[1:-1], losses[2:], strict=True):
        assert 0.8 < half / (before * after) ** 0.5 < 1.25


def test_columns_with_large_inputs_first() -> None:
    weight, stats = layer()
    ordered, natural = (
        problems.loss(weight, problems.decoded(quantize(weight, stats, act_order=order)), stats.hessian)
        for order in (True, False)
    )
    assert ordered < natural
