"""What is kept of the rotary embedding: positions where these say all, else half rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.calib.kv import calibrate
from compress.errors import CompressError
from compress.kernels import contract
from compress.kv import attention, hooks
from compress.kv.cache import make_cache
from compress.kv.rope import Rope, sources
from compress.kv.settings import cache_settings
from helpers.pico import build

HALF = 6


class Source(nn.Module):
    """A rotary embedding; `reach`: positions beyond it turn all of them more slowly."""

    inv_freq: Tensor

    def __init__(self, reach: int = 1 << 30, factor: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(HALF))
        self.reach, self.factor = reach, factor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        slow = 0.5 if int(position_ids.max()) > self.reach else 1.0
        angles = (position_ids[..., None] * self.inv_freq * slow).repeat(1, 1, 2)
        return (self.factor * angles.cos()).to(x.dtype), (self.factor * angles.sin()).to(x.dtype)


def fed(source: Source, made: list[Source], cuts: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Rope, Any]:
    """A rope that was told of positions, two sequences, one padded; and the rows of all tokens."""
    rope, parts, first = Rope(), [], 0
    for count in cuts:
        positions = (torch.arange(first, first + count) - torch.tensor([[0], [3]])).clamp(min=0)
        parts.append(source(torch.empty(0, dtype=dtype), positions))
        rope.announce(positions, list(made))
        rope.append(*parts[-1])
        first += count
    return rope, [torch.cat(rows, 1) for rows in zip(*parts, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_kept_and_give_the_same_bits(dtype: torch.dtype) -> None:
    source = Source(factor=1.3)
    rope, expected = fed(source, [Source(), source], [20, 1, 9], dtype)
    assert rope.nbytes == 4 * 2 * 30
    assert len(rope) == 30
    for start, stop in ((0, 30), (3, 4), (11, 29)):
        for found, rows in zip(rope.rows(start, stop).unbind(1), expected, strict=True):
            assert torch.equal(found, rows[:, start:stop])
    rope.select(torch.tensor([1, 1, 0]))
    rope.crop(8)
    assert torch.equal(rope.rows(0, 22)[:, 1], expected[1][[1, 1, 0], :22])


def test_half_rows_are_made_once() -> None:
    source = Source()
    rope, expected = fed(source, [source], [20, 10])
    passing = rope.halves(4, 9, False)
    assert passing is not None
    assert rope.nbytes == 4 * 2 * 30
    kept = rope.halves(4, 9, True)
    assert torch.equal(kept, torch.stack(expected, 1)[:, :, 4:9, :HALF])  # type: ignore[arg-type]
    assert torch.equal(kept, passing)  # type: ignore[arg-type]
    assert rope.nbytes == 2 * 30 * (4 + 2 * HALF * 2)
    rope.crop(5)
    assert rope.nbytes == 2 * 25 * (4 + 2 * HALF * 2)
    rope.clear()
    assert rope.nbytes == len(rope) == 0


def test_what_depends_on_the_length_is_kept_as_rows() -> None:
    rope, expected = fed(Source(reach=15), [Source(reach=15)], [10, 10])
    assert torch.equal(rope.rows(0, 20)[:, 0], expected[0])
    assert rope.nbytes == 2 * 20 * 2 * HALF * 2
    no_source, expected = fed(Source(), [], [10, 10])
    assert torch.equal(no_source.rows(0, 20)[:, 1], expected[1])
    assert no_source.nbytes == 2 * 20 * 2 * HALF * 2


def test_a_source_that_changes_its_mind() -> None:
    """Rows that it does not make end the keeping of positions; nothing that was kept is lost."""
    source = Source()
    rope, expected = fed(source, [source], [10])
    cos, sin = torch.rand(2, 2, 4, HALF).repeat(1, 1, 1, 2).bfloat16()
    rope.append(cos, sin)
    assert torch.equal(rope.rows(0, 10)[:, 0], expected[0])
    assert torch.equal(rope.rows(10, 14)[:, 1], sin)
    assert rope.nbytes == 2 * 14 * 2 * HALF * 2


def test_other_forms_are_refused() -> None:
    model = build("llama")
    pairs = model.model.rotary_emb.forward

    def neighbours(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(rows[..., : rows.shape[-1] // 2].repeat_interleave(2, -1) for rows in pairs(x, position_ids))  # type: ignore[return-value]

    model.model.rotary_emb.forward = neighbours
    tokens = torch.arange(24).view(1, -1)
    hooks.attach(model)
    with pytest.raises(CompressError, match="not of the half-split form"):
        model(tokens, past_key_values=make_cache(model.config, {"method": "lloyd"}), use_cache=True)
    with pytest.raises(CompressError, match="not of the half-split form"):
        calibrate(model, cache_settings({"method": "pca", "bits": 3}).by_layer(2), tokens)
    with pytest.raises(CompressError, match="and a model with a rotary embedding"):
        Rope().rows(0, 1)


def test_sources_are_found_by_what_they_take() -> None:
    class Other(Source):
        def forward(self, x: Tensor, position_ids: Tensor, kind: str) -> Tensor:  # type: ignore[override]
            return x

    model = nn.ModuleList([Source(), nn.Linear(2, 2), Other()])
    assert sources(model) == [model[0]]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token costs four bytes, and generation is what it is with rows; a padded batch on both paths, compiled too."""
    model = build(name, {"max_position_embeddings": 2048, "head_dim": 32})
    ids = torch.randint(0, 250, (2, 100), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    recipe = {"method": "pca", "bits": 3, "residual_length": 4, "flush": 4}
    static, _ = calibrate(model, cache_settings(recipe).by_layer(2), ids.repeat(3, 1))
    hooks.attach(model)
    attention.register()
    monkeypatch.setattr(contract, "SMALL", 0)
    found = []
    for path, announces in (("decode", True), ("decode", False), ("fused", True)):
        model.set_attn_implementation("sdpa" if path == "decode" else attention.NAME)
        cache = make_cache(model.config, recipe, static, path)
        if not announces:
            monkeypatch.setattr(cache.rope, "announce", lambda *_: None)
        with torch.no_grad():
            for part in (slice(0, 90), slice(90, 91)):
                given = {"attention_mask": mask[:, : part.stop], "position_ids": places[:, part]}
                logits = model(ids[:, part], past_key_values=cache, **given).logits
            found.append(logits)
        if path == "decode":
            assert (cache.rope.nbytes == 2 * 91 * 4) == announces
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], found[0], atol=1e-4, rtol=1e-4)
