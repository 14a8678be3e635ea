"""SQuat: the closed form against the recursion, what it does to errors of scores, bytes, paths, chunks, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compress.calib.kv import calibrate
from compress.errors import CompressError
from compress.kv import attention
from compress.kv.cache import make_cache
from compress.kv.codec import Codec, Spec
from compress.kv.codecs import kivi
from compress.kv.settings import Policy, cache_settings
from compress.kv.token_store import Store
from compress.papers.codecs import squat
from helpers.kv_cases import refusal
from helpers.pico import build

FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
HEADS, WIDTH = 2, 32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def queries(tokens: int = 400, width: int = WIDTH) -> Tensor:
    """[tokens, 2 HEADS, width] that look mostly in eight directions, others for each KV head."""
    bases = normal(HEADS, 8, width, seed=1).repeat_interleave(2, 0)
    strong = torch.einsum("nhr,hrw->nhw", normal(tokens, 2 * HEADS, 8), bases)
    return strong + 0.3 * normal(tokens, 2 * HEADS, width, seed=2)


def spec(kind: Any = "keys", width: int = WIDTH) -> Spec:
    return Spec(kind, 1, 2, HEADS, width, 2)


def codec(width: int = WIDTH, **settings: Any) -> Codec:
    config = squat.Config(**settings)
    return squat.build(
        config, spec(width=width), squat.calibrate(config, spec(width=width), {"queries": queries(width=width)})
    )


def errors(made: Codec, x: Tensor, q: Tensor) -> tuple[float, float]:
    """Relative squared error of scores and of keys; q [h, n, width]."""
    missed = made.decode(made.encode(x, {})) - x
    return float((q @ missed.mT).square().sum() / (q @ x.mT).square().sum()), float(missed.square().mean())


def grouped(q: Tensor) -> Tensor:
    """[tokens, H, width] -> [h, tokens and heads, width]."""
    return q.unflatten(1, (HEADS, 2)).transpose(0, 1).flatten(1, 2)


def test_the_second_moment() -> None:
    q = queries()
    found = squat.moment(q.transpose(0, 1), HEADS).double()
    plain = torch.einsum("hnv,hnw->hvw", grouped(q).double(), grouped(q).double())
    plain /= plain.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    padded = torch.cat((q, torch.zeros(50, *q.shape[1:])))
    again = squat.moment(padded.transpose(0, 1), HEADS).double()
    torch.testing.assert_close(again, found, atol=1e-5, rtol=1e-5)  # sums of float32


@pytest.mark.parametrize("columns", [1, 5, 16])
@pytest.mark.parametrize("rank", [None, 6])
def test_the_solve_is_the_published_recursion(columns: int, rank: int | None) -> None:
    """Pieces are eliminated one by one from A^-1, token by token; codes are those of the stored ranges."""
    config = squat.Config(columns=columns, rank=rank, strength=5.0)
    second = squat.moment(queries().transpose(0, 1), HEADS)
    x = normal(1, HEADS, 32, WIDTH, seed=3)
    made = squat.build(config, spec(), squat.calibrate(config, spec(), {"queries": queries()}))
    block = made.encode(x, {})
    read = made.decode(block)[0].double()
    for head in range(HEADS):
        values, vectors = torch.linalg.eigh(second[head].double())
        if rank is not None:
            values[:-rank] = 0
        inverse = torch.linalg.inv(torch.eye(WIDTH) + 5.0 * (vectors * values) @ vectors.T)
        rest, kept = x[0, head].double(), list(range(WIDTH))
        for start in range(0, WIDTH, columns):
            own = list(range(min(columns, WIDTH - start)))
            piece = kept[: len(own)]
            scale = block["scales"][0, head, 0, piece].double()
            low = block["minima"][0, head, 0, piece].double()
            best = ((rest[:, piece] - low) / scale).round().clamp(0, 3) * scale + low
            torch.testing.assert_close(read[head][:, piece], best, atol=0.02, rtol=0)
            missed = read[head][:, piece] - rest[:, piece]
            gain = inverse[:, own] @ torch.linalg.inv(inverse[own][:, own])  # later channels by coded ones
            rest[:, kept] += missed @ gain.T
            keep = list(range(len(own), len(kept)))
            inverse = (
                inverse[keep][:, keep]
                - inverse[keep][:, own] @ torch.linalg.inv(inverse[own][:, own]) @ inverse[own][:, keep]
            )
            kept = kept[len(own) :]


def test_errors_leave_the_directions_of_queries() -> None:
    x, q = normal(1, HEADS, 256, WIDTH, seed=3), grouped(queries())
    plain = errors(kivi.build(kivi.Config(), spec(), {}), x, q)
    found = [errors(codec(columns=columns), x, q) for columns in (16, 8, 1)]
    scores = [plain[0], *(score for score, _ in found)]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.5 * scores[0]
    assert all(plain[1] < keys < 2.5 * plain[1] for _, keys in found)  # what the keys themselves pay
    assert errors(codec(strength=0.0), x, q) == plain


def test_a_head_of_any_width() -> None:
    x = normal(1, HEADS, 64, 20, seed=3)
    for columns in (1, 8, 20, 64):
        made = codec(20, columns=columns, bits=8)
        assert float((made.decode(made.encode(x, {})) - x).abs().max()) < 0.15
    assert made.static["compensation"].shape == (HEADS, 0)


def prompt(batch: int, tokens: int) -> Tensor:
    return torch.randint(0, 250, (batch, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("subspace", ["calibrated", "prompt"])
def test_bytes_paths_and_operations(subspace: str) -> None:
    model = build("llama", FULL)
    own = {"method": "squat", "bits": 3, "subspace": subspace, "values": {"group_size": 16}}
    recipe = {**own, "sink": 2, "residual_length": 8, "flush": 1}
    static, _ = calibrate(model, cache_settings(recipe).by_layer(2), prompt(4, 64))
    attention.register()
    ids, logits = prompt(2, 134), {}
    for path in ("decode", "fused")[subspace == "prompt" :]:
        model.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
        cache = make_cache(model.config, recipe, static, path)  # type: ignore[arg-type]
        with torch.no_grad():
            logits[path] = [model(part, past_key_values=cache).logits for part in ids.split([106, 28], 1)][-1]
    if subspace == "calibrated":
        torch.testing.assert_close(logits["fused"], logits["decode"], atol=1e-4, rtol=0)
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits[:, -28:]
    assert 1e-3 < (logits["fused"] - exact).abs().max() < 1.5
    found, tokens = cache.nbytes(), (96 + 124) / 2  # the second chunk is coded too: 124 values, 96 keys
    bits = ((3 + 32 / 32) * 96 + (3 + 32 / 16) * 124) / (96 + 124)
    assert 8 * (found.codes + found.scales) / (2 * 2 * 2 * HEADS * 16 * tokens) == pytest.approx(bits, rel=0.01)
    count = HEADS * 16 * 8 // 2  # numbers that say how errors are passed on, of a layer: width (width - columns) / 2
    kept = (found.static, 0) if subspace == "calibrated" else (0, found.state)
    assert kept == ((2 * 2 * count, 0) if subspace == "calibrated" else (0, 2 * 2 * 2 * count))
    cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        swapped = model(prompt(2, 135)[[1, 0], -1:], past_key_values=cache).logits
    assert torch.isfinite(swapped).all()


def test_the_prompt_is_read_for_each_sequence() -> None:
    config = squat.Config(subspace="prompt")
    made = squat.build(config, spec(), {})
    assert made.needs_queries
    x = normal(2, HEADS, 64, WIDTH)
    q = torch.stack((queries().transpose(0, 1), normal(2 * HEADS, 400, WIDTH)))
    state = made.begin(x, q)
    fixed = codec()
    torch.testing.assert_close(state["compensation"][0], fixed.static["compensation"])
    both, one = made.encode(x, state), fixed.encode(x, {})
    torch.testing.assert_close(made.decode(both)[0], fixed.decode(one)[0])
    assert not torch.equal(both["codes2"][1], one["codes2"][1])
    with pytest.raises(CompressError, match="given no queries"):
        made.begin(x, None)


def test_chunks_and_padding() -> None:
    x = normal(2, HEADS, 150, WIDTH, seed=7)

    def read(states: Tensor, chunks: list[int], pads: Tensor | None = None) -> Tensor:
        store = Store(codec(bits=4), Policy(2, 8, flush=1))
        for part in states.split(chunks, 2):
            store.append(part, pads)
        assert store.coded == 128
        return store.read()

    whole = read(x, [150])
    for chunks in ([1] * 150, [90, 1, 59]):
        assert float((read(x, chunks) - whole).abs().gt(1e-3).float().mean()) < 1e-3  # ties of rounding
    pads, junk = torch.tensor([0, 9]), x.clone()
    junk[1, :, :9] = 1e4
    padded = read(junk, [150], pads)
    assert torch.equal(read(x, [150], pads)[1, :, 9:], padded[1, :, 9:])
    assert float((padded[1, :, 9:] - x[1, :, 9:]).square().mean()) < 0.02


def test_errors() -> None:
    error = refusal("squat", spec(), {})
    assert "keys: squat is calibrated, but compensation is missing, expected float16 [2, 384]" in error
    assert isinstance(squat.build(squat.Config(), spec("values"), {}), kivi.ByToken)
    for settings in ({"bits": 0}, {"columns": 0}, {"strength": -1.0}, {"rank": 0}, {"group_size": 1}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            squat.Config(**settings)  # type: ignore[arg-type]
