"""Dropped blocks: what is written is the model without them, what is refitted is least squares, and runs resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from compress import api, recipe
from compress.calib import reference_logprobs
from compress.errors import RecipeError, UnsupportedModelError
from compress.model.skeleton import Skeleton
from compress.papers.transform import drop_blocks, gap_healing
from compress.papers.transform.block_choice import Choosing
from compress.papers.transform.drop_blocks import Config
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint
from helpers.dropped_blocks import logits
from helpers.pico import build, save
from helpers.runs import TEXT, contents, report_of

TOKENS = torch.randint(256, (4, 24), generator=torch.Generator().manual_seed(2))
LAYERS = 5


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama", {"num_hidden_layers": LAYERS}), tmp_path_factory.mktemp("llama") / "m")


def job(model: Path, out: Path, settings: str) -> Job:
    path = out.parent / f"{out.name}.yaml"
    path.write_text(
        "calibration: {num_samples: 6, seq_len: 32}\n"
        f"transform: [{{method: drop_blocks, blocks: 2, search_samples: 4, {settings}}}]\n"
    )
    return Job(str(model), recipe.load(str(path)), out, calib=str(TEXT), pack=False)


@pytest.mark.parametrize(
    ("name", "changes", "cut", "heal"),
    [
        ("llama", {}, {}, "none"),
        ("gemma2", {}, {"layer_types": ["sliding_attention"] * 3}, "linear"),  # norms behind projections: they stay
        ("qwen3_moe", {"mlp_only_layers": [0]}, {"mlp_only_layers": [0]}, "none"),
    ],
)
def test_the_checkpoint_is_the_model_without_the_blocks(
    name: str, changes: dict[str, object], cut: dict[str, object], heal: str, tmp_path: Path
) -> None:
    model = build(name, {"num_hidden_layers": LAYERS, **changes})
    directory = save(model, tmp_path / "m")
    api.quantize(job(directory, tmp_path / "out", f"by: even, heal: {heal}"))
    notes = report_of(tmp_path / "out")["notes"]["transform"]
    assert ("is not one linear: blocks" in notes[-1]) == (heal == "linear"), notes
    (said,) = [note for note in notes if "counted from 0" in note]
    dropped = set(map(int, said.rpartition(": ")[2].split(", ")))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS - 2 == len(plain.base_model.layers)
    assert {key: config[key] for key in cut} == cut
    assert torch.equal(logits(plain, TOKENS), logits(model, TOKENS, dropped))


@pytest.fixture(scope="module")
def healed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("healed") / "out"
    api.quantize(job(llama, out, "by: influence, samples: 6"))
    return out


def test_only_projections_before_gaps_change(llama: Path, healed: Path) -> None:
    notes = report_of(healed)["notes"]["transform"]
    dropped = set(map(int, notes[1].rpartition(": ")[2].split(", ")))
    kept = [i for i in range(LAYERS) if i not in dropped]
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (llama, healed))
    changed = set()
    for name, tensor in after.items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(kept[int(parts[2])])
        if not torch.equal(tensor, before[".".join(parts)]):
            changed.add(".".join(parts))
    assert changed == {f"model.layers.{i}.mlp.down_proj.weight" for i in gap_healing.find_edges(kept, LAYERS)}
    errors = notes[-1].split("squares, ")[1].split(", ")
    assert all(float(b) < float(a) for a, b in (each.split(": ")[1].split(" -> ") for each in errors))


def test_an_interrupted_run_goes_on(llama: Path, healed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = job(llama, tmp_path / "out", "by: influence, samples: 6")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(drop_blocks.reshaping, "replace_parameters", _interrupt)
        api.quantize(asked)
    monkeypatch.setattr(gap_healing.GapHealing, "run", _interrupt)  # all is found again
    monkeypatch.setattr(Choosing, "_similarities", _interrupt)
    api.quantize(asked)
    files, whole = contents(asked.out), contents(healed)
    assert [name for name in whole if files[name] != whole[name] and name != "recipe.yaml"] == []


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_lists_by_layer_are_cut_and_numbers_of_layers_changed() -> None:
    config = {
        "num_hidden_layers": 4,
        "layer_types": list("abcd"),
        "no_rope_layers": [1, 0, 1, 0],
        "mlp_only_layers": [0, 3],
        "moe_layers": [0, 1, 2, 3],
        "eos_token_id": [5, 6, 7, 8],
        "other": [1, 2],
        "empty_layers": [],
    }
    assert drop_blocks.cut_settings(config, [0, 2, 3]) == {
        "num_hidden_layers": 3,
        "layer_types": list("acd"),
        "no_rope_layers": [1, 1, 0],
        "mlp_only_layers": [0, 2],
        "moe_layers": [0, 1, 2],
    }


def test_what_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path, **settings: object) -> str:
        with pytest.raises((RecipeError, UnsupportedModelError)) as caught:
            drop_blocks.apply(Skeleton(open_checkpoint(directory)), Config(**settings), 0)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "set blocks to a number between 1 and 4" in refuse(llama, blocks=5)
    assert "block 7 cannot be dropped; numbers are of 0 to 4" in refuse(llama, numbers=(1, 7))
    mixed = build("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2})
    assert "in a row are alike" in refuse(save(mixed, tmp_path / "mixed"))
    monkeypatch.setattr(Skeleton, "draft_tensors", {"mtp.weight": None})
    assert "draft heads (mtp.weight)" in refuse(llama)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first.window, second.window = 8, None  # type: ignore[assignment]
    with pytest.raises(UnsupportedModelError, match="window of block 3 is 8, and a smaller model would have None"):
        drop_blocks._compare(first, second, (3, 2))
    for settings in ({"share": 1.0}, {"blocks": -1}, {"rank": 0}, {"samples": 1}, {"numbers": (1, 1)}):
        with pytest.raises(ValueError, match="is |twice"):
            Config(**settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_tuning_goes_by_the_original_with_all_blocks(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real, blocks = job(llama, tmp_path / "out", "by: even, heal: none"), reference_logprobs.load, list[int]()
    path = tmp_path / "out.yaml"
    path.write_text(
        path.read_text()
        + "quantize: {method: rtn, bits: 8, group_size: -1}\ntune: [{method: end_to_end, steps: 2, batch_tokens: 64}]\n"
    )

    def watch(skeleton: Skeleton, *args: Any, **options: Any) -> Any:
        blocks.append(len(skeleton.blocks))
        return real(skeleton, *args, **options)

    monkeypatch.setattr(reference_logprobs, "load", watch)
    api.quantize(replace(asked, recipe=recipe.load(str(path)), pack=True))
    assert blocks == [LAYERS]
    assert api.load(tmp_path / "out").config.num_hidden_layers == LAYERS - 2
