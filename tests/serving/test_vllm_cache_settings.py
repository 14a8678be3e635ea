"""What the kv_cache section of a checkpoint makes of the layers of an engine with pages, without the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from compress.errors import RecipeError, UnsupportedModelError
from compress.kv.pages import PageCodes, PagedCodes, Turn
from compress.kv.settings import cache_settings
from compress.runtime import kv_config
from compress.serving.vllm_cache_settings import CheckpointCache, heads_of_rank, of_heads, vllm_types

CONFIG = LlamaConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=64, hidden_size=512)
TOKEN = {"method": "per_token", "sink": 0, "residual_length": 0}


def stored(settings: dict[str, Any], folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> CheckpointCache:
    section = kv_config.write(folder, cache_settings(settings), 3, tensors or {})
    return CheckpointCache(section, str(folder), CONFIG)


@pytest.mark.parametrize(
    "settings, sizes",
    [
        ({"bits": 8}, [136, 136, 136]),
        ({"bits": 8, "values": {"bits": 4}}, [104, 104, 104]),
        ({"bits": 4, "levels": "lloyd", "layers": [{"match": -1, "bits": 3}]}, [68, 68, 52]),
        ({"bits": 4, "group_size": 32, "skip_layers": [0]}, [None, 80, 80]),
    ],
)
def test_bytes_of_a_token_by_layer(settings: dict[str, Any], sizes: list[int | None], tmp_path: Path) -> None:
    cache = stored({**TOKEN, **settings}, tmp_path)
    layers = [cache.layer(index, (4, 64, 64), (0, 1)) for index in range(3)]
    assert [layer and layer.token_bytes for layer in layers] == sizes and cache.note is None


def test_what_pages_cannot_hold_is_said_in_a_line(tmp_path: Path) -> None:
    cache = stored({"method": "kivi", "bits": 4, "sink": 4}, tmp_path)
    held = cache.layer(0, (4, 64, 64), (0, 1))
    assert held is not None and held.keys.codes == PageCodes(4, 64, 64)
    assert cache.note is not None and "kivi" in cache.note and "\n" not in cache.note
    with pytest.raises(RecipeError, match="kv_cache: layer 0, keys"):
        cache.layer(0, (4, 63, 63), (0, 1))


def test_ranks_hold_heads_of_their_own_or_repeat_them() -> None:
    assert [heads_of_rank(4, rank, 2) for rank in range(2)] == [range(2), range(2, 4)]
    assert [heads_of_rank(2, rank, 4) for rank in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    with pytest.raises(UnsupportedModelError, match="6 KV heads are not shared evenly by 4 ranks"):
        heads_of_rank(6, 0, 4)


def test_heads_that_only_tensors_tell_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose queries all share a head: each of two ranks has it."""
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_key_value_heads": 1, "multi_query": True})
    settings = {"method": "balanced", "bits": 8, "sink": 0, "residual_length": 0}
    cache = CheckpointCache(kv_config.write(tmp_path, cache_settings(settings), 3, {}), str(tmp_path), config)
    forward = torch.linalg.qr(torch.randn(1, 64, 64)).Q
    own = {"forward": forward.half(), "mean": torch.randn(1, 64).half(), "bits": torch.tensor([8])}
    tensors = {f"layers.0.{kind}.{name}": x for kind in ("keys", "values") for name, x in own.items()}
    monkeypatch.setattr(CheckpointCache, "_static", tensors)
    for rank in range(2):
        held = cache.layer(0, (1, 64, 64), (rank, 2))
        assert held is not None and torch.equal(held.keys.turn.forward, forward.half().float())
        assert held.values.turn.mean is not None and held.values.turn.mean.shape == (1, 64)


def test_turns_are_cut_like_the_heads() -> None:
    x = torch.randn(5, 4, 8)
    forward = torch.linalg.qr(torch.randn(4, 8, 8)).Q
    whole = PagedCodes(PageCodes(4, 8, 8), Turn(forward, forward.mT.contiguous(), torch.randn(4, 8)), None)
    for rank in range(2):
        heads = heads_of_rank(4, rank, 2)
        part = of_heads(whole, heads, x.device)
        own = slice(heads.start, heads.stop)
        torch.testing.assert_close(part.turn.into(x[:, own]), whole.turn.into(x)[:, own])
        torch.testing.assert_close(part.turn.out_of(x[:, own]), whole.turn.out_of(x)[:, own])
        assert part.codes is whole.codes
    shared = PagedCodes(whole.codes, Turn(forward[0], forward[0].mT.contiguous()), None)
    assert of_heads(shared, range(1, 2), x.device).turn.forward.shape == (8, 8)


@pytest.mark.parametrize(
    "size, width, words",
    [
        (264, 128, "int8_per_token_head (264 bytes) or --kv-cache-dtype turboquant_k8v4 (196 bytes)"),
        (136, 128, "int4_per_token_head (136 bytes) or --kv-cache-dtype turboquant_4bit_nc (134 bytes)"),
        (52, 64, "int4_per_token_head (72 bytes) or --kv-cache-dtype turboquant_3bit_nc (54 bytes)"),
    ],
)
def test_types_of_the_engine_are_named_with_their_bytes(size: int, width: int, words: str) -> None:
    assert vllm_types(size, width) == f"--kv-cache-dtype {words}"
