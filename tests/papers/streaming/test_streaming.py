"""CacheGen's levels and controller: what is decoded against the saved cache, the rule by hand, networks, damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from compress.errors import CheckpointError, CompressError, OutputError
from compress.papers.streaming.controller import (
    TEXT,
    MachineSpeeds,
    PieceSizes,
    StreamState,
    Trace,
    always,
    choose,
    simulate,
)
from compress.papers.streaming.levels import LevelledCache, fetch_from, write_levels
from compress.papers.streaming.stream import load_choices, stream_cache
from helpers.pico import build

MODEL = build("llama", {"max_position_embeddings": 2048})
IDS = torch.randint(0, 250, (1, 700), generator=torch.Generator().manual_seed(1))
SPEEDS = MachineSpeeds(computed=100.0, decoded=1000.0, question=0.5)
SIZES = PieceSizes([256, 256, 100], {"fine": [80, 80, 40], "coarse": [20, 20, 10]}, {"fine": 10, "coarse": 10}, 50)


@torch.no_grad()
def exact() -> DynamicCache:
    cache = DynamicCache(config=MODEL.config)
    MODEL(input_ids=IDS, past_key_values=cache, use_cache=True)
    return cache


CACHE = exact()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("levels") / "prompt"
    write_levels(CACHE, path, MODEL, IDS, {"fine": 1e-4, "coarse": 1e-2}, piece_tokens=256)
    return path


def source(folder: Path) -> LevelledCache:
    return LevelledCache(fetch_from(folder), MODEL)


def errors(cache: DynamicCache) -> Tensor:
    """Relative squared error of each token, mean over layers and kinds."""
    rows = []
    for layer, truth in zip(cache.layers, CACHE.layers, strict=True):
        for kind in ("keys", "values"):
            x, y = getattr(layer, kind).double(), getattr(truth, kind).double()
            rows.append((x - y).square().sum((0, 1, 3)) / y.square().sum((0, 1, 3)).mean())
    return torch.stack(rows).mean(0)


def test_each_level_has_the_error_that_it_was_written_with(folder: Path) -> None:
    fine, coarse = (errors(load_choices(source(folder), [level] * 3)) for level in ("fine", "coarse"))
    assert bool((fine[:4] == 0).all()) and fine.mean() < 3e-4  # the first tokens are exact
    assert 20 * fine.mean() < coarse.mean() < 3e-2
    sizes = source(folder).sizes.pieces
    assert sum(sizes["coarse"]) < 0.8 * sum(sizes["fine"])


def test_pieces_of_any_levels_stand_side_by_side(folder: Path) -> None:
    mixed = errors(load_choices(source(folder), ["coarse", "fine", "coarse"]))
    fine, coarse = (errors(load_choices(source(folder), [level] * 3)) for level in ("fine", "coarse"))
    assert torch.equal(mixed[260:516], fine[260:516])
    assert torch.equal(mixed[4:260], coarse[4:260]) and torch.equal(mixed[516:], coarse[516:])


def test_what_is_computed_from_text_is_exact_behind_exact_tokens(folder: Path) -> None:
    computed = load_choices(source(folder), [TEXT] * 3)
    assert computed.get_seq_length() == 700
    assert errors(computed).max() < 1e-9


def test_a_stream_goes_by_the_clock_and_fetches_each_file_once(folder: Path) -> None:
    names: list[str] = []

    def fetch(name: str) -> bytes:
        names.append(name)
        return fetch_from(folder)(name)

    cache, report = stream_cache(LevelledCache(fetch, MODEL), MachineSpeeds(1e-3, 1e9), deadline=60.0)
    assert report.choices == ("fine",) * 3 and cache.get_seq_length() == 700
    assert sorted(names) == sorted({*names}) and "coarse.0" not in names
    late, report = stream_cache(source(folder), MachineSpeeds(1e-3, 1e9), deadline=0.0)
    assert report.choices == ("coarse",) * 3 and torch.equal(
        errors(late), errors(load_choices(source(folder), report.choices))
    )
    _, report = stream_cache(source(folder), MachineSpeeds(1e9, 1e9), deadline=60.0)
    assert report.choices == (TEXT,) * 3


def test_the_rule() -> None:
    def level(left: float, bandwidth: float = 100.0, piece: int = 0, **more: float) -> str:
        return choose(SIZES, SPEEDS, StreamState(piece, bandwidth, left, **more))  # type: ignore[arg-type]

    assert level(6.62) == TEXT  # 612 tokens at 100 a second, and the question
    assert level(6.6) == "fine"
    assert level(2.71) == "fine"  # 210 bytes, then 100 tokens, and the question
    assert level(2.69) == "coarse" and level(-1.0) == "coarse"
    assert level(2.71, bandwidth=90.0) == "coarse"
    assert level(1.51, piece=2) == TEXT and level(1.49, piece=2) == "fine"


def test_a_trace_of_bandwidths() -> None:
    trace = Trace((10.0, 0.0, 5.0))
    assert trace.arrival(0.0, 10) == pytest.approx(1.0)
    assert trace.arrival(0.5, 10) == pytest.approx(3.0)  # 5 bytes, a second of nothing, 5 bytes
    assert trace.arrival(7.0, 10) == pytest.approx(9.0)
    sent, steps = 0.0, 0
    while sent < 12.5:  # in steps of a millisecond
        sent, steps = sent + 1e-3 * trace.rates[min(steps // 1000, 2)], steps + 1
    assert trace.arrival(0.0, 12.5) == pytest.approx(1e-3 * steps, abs=2e-3)
    dead = Trace((0.0,))
    assert dead.arrival(2.0, 1) == float("inf") and dead.arrival(2.0, 0) == 2.0  # text is here already
    for wrong in ((), (1.0, -1.0)):
        with pytest.raises(ValueError, match="rates"):
            Trace(wrong)
    with pytest.raises(ValueError, match="computed"):
        MachineSpeeds(0.0, 1.0)


def test_a_network_that_slows_down_costs_a_level_and_not_the_deadline() -> None:
    slow = MachineSpeeds(computed=10.0, decoded=1000.0, question=0.5)
    fast, drop = Trace((200.0,)), Trace((200.0, 40.0), span=0.5)
    assert simulate(SIZES, slow, fast, 3.0).choices == ("fine",) * 3
    assert simulate(SIZES, SPEEDS, fast, 3.0).choices == ("fine", "fine", TEXT)  # the last one is computed in time
    assert simulate(SIZES, slow, drop, 3.2, always("fine")).first_token > 3.2
    made = simulate(SIZES, slow, drop, 3.2)
    assert made.first_token <= 3.2 and made.choices == ("fine", "coarse", "coarse")
    assert made.nbytes < simulate(SIZES, slow, drop, 3.2, always("fine")).nbytes
    text = simulate(SIZES, SPEEDS, fast, 60.0)
    assert text.choices == (TEXT,) * 3
    assert text.first_token == pytest.approx(50 / 200 + 6.12 + 0.5)


def test_what_is_damaged_or_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    def damaged(name: str) -> LevelledCache:
        def fetch(asked: str) -> bytes:
            content = bytearray(fetch_from(folder)(asked))
            if asked == name:
                content[len(content) // 2] ^= 1
            return bytes(content)

        return LevelledCache(fetch, MODEL)

    for name in ("common.safetensors", "fine.safetensors", "fine.0", "fine.1", "fine.2"):
        with pytest.raises(CheckpointError, match="write the levels again"):
            load_choices(damaged(name), ["fine"] * 3)
    with pytest.raises(CheckpointError, match=r"fine\.1 is damaged"):
        stream_cache(damaged("fine.1"), SPEEDS, 60.0, always("fine"))
    with pytest.raises(CheckpointError, match="another model"):
        LevelledCache(fetch_from(folder), build("llama", {"max_position_embeddings": 2048, "hidden_size": 32}))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        LevelledCache(lambda name: b"{}", MODEL)
    with pytest.raises(CheckpointError, match="cannot be read"):
        LevelledCache(fetch_from(tmp_path), MODEL)
    with pytest.raises(OutputError, match="not there"):
        write_levels(CACHE, folder, MODEL, IDS)
    with pytest.raises(CompressError, match="multiple of 256"):
        write_levels(CACHE, tmp_path / "new", MODEL, IDS, piece_tokens=100)
