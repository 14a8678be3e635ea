"""Dropped linears: no tensors, 0 bytes, zeros in every way to run, and modules that are not run because of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from compress import api, recipe
from compress.errors import RecipeError
from compress.evaluate.reader import Candidate
from compress.kv import hooks
from compress.kv.settings import cache_settings
from compress.model.skeleton import Skeleton
from compress.model.sublayers import keeps_bias, sublayers
from compress.run import plan, verify
from compress.runtime.linear import PackedLinear
from compress.runtime.step.skipping import MARK
from compress.serving.parts import LinearShard, Region
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import save_pico
from helpers.runs import KEEP_TABLES, Setup, job, report_of, stored_tensors

IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(3))
RULES = '[{match: "*.0.self_attn.*", method: drop}, {match: "*.1.mlp.*", method: drop}]'
EVICT = {"method": "snapkv", "tokens": 16, "window": 8}


class Dropped:
    """A model without the first attention and the last MLP, and the same with zeros in plain linears."""

    def __init__(self, name: str, folder: Path) -> None:
        self.out = folder / f"{name}-out"
        source = save_pico(name, folder / name)
        self.report = api.quantize(job(source, Setup("int8", (*KEEP_TABLES, f"rules={RULES}")), self.out))
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.out).eval()
        self.plain: Any = AutoModelForCausalLM.from_pretrained(self.out).eval()
        self.plain.dequantize()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Dropped]]:
    folder = tmp_path_factory.mktemp("dropped")
    yield {name: Dropped(name, folder) for name in ("mistral", "mixtral")}


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_it_stores_nothing_and_the_report_says_so(name: str, made: dict[str, Dropped]) -> None:
    case = made[name]
    rows = {row["name"]: row for row in report_of(case.out)["layers"]}
    dropped = [row for row in rows.values() if row["method"] == "drop"]
    assert dropped and all(
        (row["nbytes"], row["bpw"], row["weight_error"], row["format"]) == (0, 0, 1, "zero") for row in dropped
    )
    numel = sum(row["shape"][0] * row["shape"][1] for row in rows.values())
    assert case.report["bpw"] == pytest.approx(8 * sum(row["nbytes"] for row in rows.values()) / numel)
    assert not [key for key in stored_tensors(case.out) if key.rpartition(".")[0] in {row["name"] for row in dropped}]
    assert case.report["self_check"] == "passed" and verify.verify(case.out)["blocks"] == 2


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_what_is_skipped_changes_nothing(name: str, made: dict[str, Dropped]) -> None:
    """Logits, caches and texts are those of the model that computes with zeros; the linears are not called."""
    case, called = made[name], list[str]()
    with torch.no_grad():
        case.model(IDS, past_key_values=DynamicCache())  # learns
        caches = DynamicCache(config=case.model.config), DynamicCache(config=case.model.config)
        with patch.object(PackedLinear, "forward", _recorded(called)):
            found = case.model(IDS, past_key_values=caches[0]).logits
        assert torch.equal(found, case.plain(IDS, past_key_values=caches[1]).logits)
        assert not any(shape == "zero" for shape in called)
        for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
            assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
            assert mine.get_seq_length() == other.get_seq_length()
        texts = [
            model.generate(IDS, max_new_tokens=40, do_sample=False, eos_token_id=None)
            for model in (case.model, case.plain)
        ]
        assert torch.equal(*texts)
        static = StaticCache(config=case.model.config, max_cache_len=64)
        assert torch.equal(case.model(IDS, past_key_values=static).logits, found)


@pytest.mark.parametrize("section", [{"method": "kivi", "bits": 4}, {"method": "kivi", "evict": EVICT}])
def test_a_coded_cache_is_filled_alike(section: dict[str, Any], made: dict[str, Dropped]) -> None:
    case, numbers = made["mistral"], []
    for model in (case.model, case.plain):
        hooks.attach(model)
        cache = Candidate("coded", cache_settings(section), {}).cache(model.config)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in (IDS[:1, :36], IDS[:1, 36:37], IDS[:1, 37:])]
        hooks.detach(model)
        numbers.append((torch.cat(parts, 1), cache.get_seq_length(), cache.nbytes()))
    assert torch.equal(numbers[0][0], numbers[1][0]) and numbers[0][1:] == numbers[1][1:]


def test_a_second_save(made: dict[str, Dropped], tmp_path: Path) -> None:
    model = made["mistral"].model
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_training_and_a_plain_copy_run_everything(made: dict[str, Dropped]) -> None:
    case, called = made["mistral"], list[str]()
    case.model(IDS)
    case.model.train()
    with patch.object(PackedLinear, "forward", _recorded(called)):
        case.model(IDS)
    case.model.eval()
    assert "zero" in called
    assert not any(MARK in vars(module) for module in case.plain.modules())


def _recorded(called: list[str]) -> Any:
    forward = PackedLinear.forward

    def call(self: PackedLinear, x: Tensor) -> Tensor:
        called.append(self.format)
        return forward(self, x)

    return call


def test_an_engine_gets_zeros(made: dict[str, Dropped]) -> None:
    stored = made["mistral"].model.model.layers[0].self_attn.o_proj.stored
    shard = LinearShard("o_proj", stored, Region((64, 64), (range(0, 16), range(32, 48)), range(32)), torch.float32)
    shard.check()
    assert torch.equal(shard(torch.ones(3, 32)), torch.zeros(3, 32))


SUBLAYERS = {
    "llama": (["self_attn"] * 4 + ["mlp"] * 3, 0),
    "mixtral": (["self_attn"] * 4 + ["mlp"] * 12, 0),
    "opt": (["self_attn"] * 4 + ["fc2"] * 2, 4),
}


@pytest.mark.parametrize("name", SUBLAYERS)
def test_sublayers_are_found_and_biases_stay(name: str, tmp_path: Path) -> None:
    skeleton = Skeleton(open_checkpoint(save_pico(name, tmp_path / "m")))
    specs, _ = skeleton.linears()
    parts, expected = sublayers(skeleton, specs), SUBLAYERS[name]
    counts = defaultdict[str, int](int)
    for spec in specs:
        counts[parts[spec.name].rpartition(".")[2]] += 1
    assert counts == {end: 2 * expected[0].count(end) for end in expected[0]}
    assert sum(keeps_bias(skeleton, spec) for spec in specs) == expected[1]
    if expected[1]:
        made = plan.make(recipe.load("int8", ("quantize={method: drop}", *KEEP_TABLES)), skeleton)
        assert [n for n, why in made.kept_reasons.items() if why == made.BIASED] and made.quantized_nbytes == 0
        with pytest.raises(RecipeError, match="has a bias, which would stay"):
            plan.make(
                recipe.load("int8", (f"rules={RULES.replace('mlp', 'fc?').replace('.fc?.*', '.fc?')}",)), skeleton
            )


def test_what_is_inherited_is_left_out() -> None:
    overrides = ("quantize.lowrank={rank: 4}", "quantize.activations={bits: 8}", f"rules={RULES}")
    scheme = recipe.load("int8", overrides).scheme_for("model.layers.0.self_attn.q_proj")
    assert scheme is not None and (scheme.lowrank, scheme.activations) == (None, None)
