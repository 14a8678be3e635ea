"""Narrower keys: which rows become zero, that they stay so in training, that the codec then loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api, recipe
from compress.calib.kv import calibrate
from compress.errors import CalibrationError, UnsupportedModelError
from compress.kv.cache import coded_layers, make_cache
from compress.kv.settings import cache_settings
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.papers.transform import narrow_keys, reshaping
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint
from helpers.runs import TEXT, report_of

WIDTH, KEPT = 16, 4  # channels of a head, pairs that stay of 8
RECIPE = """calibration: {num_samples: 6, seq_len: 32}
transform: [{method: narrow_keys, keep: 0.5%s}]
"""


def narrowed(model: Path, out: Path, settings: str = "") -> Any:
    path = out.parent / f"{out.name}.yaml"
    path.write_text(RECIPE % settings)
    loaded = recipe.load(str(path))
    api.quantize(Job(str(model), loaded, out, calib=str(TEXT), pack=loaded.packs))
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()


def zero_pairs(linear: torch.nn.Linear) -> Tensor:
    """Return bool [heads, pairs]: both rows of a pair are zero."""
    is_zero = (linear.weight == 0).all(1)
    if linear.bias is not None:
        is_zero &= linear.bias == 0
    first, second = is_zero.view(-1, 2, WIDTH // 2).unbind(1)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_pairs_of_least_weight_are_zero_in_keys_and_queries(
    name: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(pico_dir(name), dtype=torch.float32).eval()
    made = narrowed(pico_dir(name), tmp_path / "out")
    for before, after in zip(model.model.layers, made.model.layers, strict=True):
        keys, queries = zero_pairs(after.self_attn.k_proj), zero_pairs(after.self_attn.q_proj)
        assert keys.sum(1).tolist() == [KEPT] * len(keys)
        assert torch.equal(queries, keys.repeat_interleave(len(queries) // len(keys), 0))
        assert torch.equal(before.self_attn.v_proj.weight, after.self_attn.v_proj.weight)
        rows = ~keys.repeat(1, 2).flatten()
        assert torch.equal(before.self_attn.k_proj.weight[rows], after.self_attn.k_proj.weight[rows])


def test_what_is_left_out_matters_least(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Every query against every key of the whole model, pair by pair: those of least squares become zero."""
    tokens = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(2))
    bench = EditContext(torch.device("cpu"), tokens, None, 2, tmp_path, None, lambda text: None)  # type: ignore[arg-type]
    narrow_keys.apply(Skeleton(open_checkpoint(pico_dir("llama"))), narrow_keys.Config(), 0).choose(bench)
    model = AutoModelForCausalLM.from_pretrained(pico_dir("llama"), dtype=torch.float32).eval()
    seen: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if path.endswith(("q_proj", "k_proj")):
            module.register_forward_hook(lambda _, args, out, path=path: seen.__setitem__(path, out.flatten(0, 1)))
    with torch.no_grad():
        model(tokens)
    for index in range(2):
        stored = reshaping.read_parameters(tmp_path / narrow_keys.FOLDER / f"{index:05d}.safetensors")
        is_zero = (stored["self_attn.k_proj.weight"].read() == 0).all(1).view(-1, 2, WIDTH // 2)[:, 0]
        q, k = (seen[f"model.layers.{index}.self_attn.{x}_proj"].double().unflatten(1, (-1, WIDTH)) for x in "qk")
        for head, zero in enumerate(is_zero):
            sizes = torch.zeros(WIDTH // 2).double()
            for reader in range(q.shape[1] // k.shape[1]):
                for pair in range(WIDTH // 2):
                    both = [pair, pair + WIDTH // 2]
                    mine = q[:, head * (q.shape[1] // k.shape[1]) + reader]
                    sizes[pair] += (mine[:, both].square().sum(1)[:, None] * k[:, head, both].square().sum(1)).sum()
            assert float(sizes[zero].max()) <= float(sizes[~zero].min())


@pytest.mark.parametrize("heals", ["attention", "block"])
def test_training_keeps_zeros_and_brings_blocks_closer(
    heals: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    made = narrowed(pico_dir("llama"), tmp_path / "out", f", heal: 8, heal_tokens: 64, heals: {heals}")
    for layer in made.model.layers:
        assert int(zero_pairs(layer.self_attn.k_proj).sum()) == KEPT * 2
    (said,) = [note for note in report_of(tmp_path / "out")["notes"]["transform"] if "held-out error" in note]
    before, after = (float(word) for word in said.split("blocks, ")[1].split(" -> "))
    assert 0 < after < before


def test_a_cache_of_as_many_pairs_loses_nothing(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = narrowed(pico_dir("llama"), tmp_path / "out", ", heal: 2, heal_tokens: 64")
    ids = torch.randint(0, 250, (4, 40), generator=torch.Generator().manual_seed(1))
    settings = {"method": "key_pairs", "keep": 0.5, "sink": 2, "residual_length": 4, "flush": 4}
    static, _ = calibrate(model, coded_layers(model.config, cache_settings(settings)), ids)
    cache = make_cache(model.config, settings, static)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        found = model(ids[:, 30:], past_key_values=cache).logits
        expected = model(ids).logits[:, 30:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_blocks_that_are_kept_change_nothing_in_those_that_follow(
    pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    def files() -> list[bytes]:
        tokens = torch.randint(256, (3, 24), generator=torch.Generator().manual_seed(2))
        bench = EditContext(torch.device("cpu"), tokens, None, 2, tmp_path, None, lambda text: None)  # type: ignore[arg-type]
        skeleton = Skeleton(open_checkpoint(pico_dir("llama")))
        narrow_keys.apply(skeleton, narrow_keys.Config(heal=2, heal_tokens=24), 0).choose(bench)
        return [path.read_bytes() for path in sorted((tmp_path / narrow_keys.FOLDER).iterdir())]

    whole = files()
    (tmp_path / narrow_keys.FOLDER / "00001.safetensors").unlink()
    assert len(whole) == 2 and files() == whole


def test_what_is_refused(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    bench = EditContext(torch.device("cpu"), tokens, None, 2, tmp_path, None, lambda text: None)  # type: ignore[arg-type]
    edits = narrow_keys.apply(Skeleton(open_checkpoint(pico_dir("qwen3"))), narrow_keys.Config(), 0)
    with pytest.raises(UnsupportedModelError, match="something else than rotary positions"):
        edits.choose(bench)
    with pytest.raises(CalibrationError, match="give --calib"):
        edits.choose(bench._replace(tokens=None))
    with pytest.raises(ValueError, match=r"keep 0\.0"):
        narrow_keys.Config(keep=0.0)
