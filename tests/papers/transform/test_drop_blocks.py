"""Dropped blocks: what is written is the model without them, what is refitted is least squares, and runs resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, recipe
from compress.calib import reference_logprobs
from compress.errors import RecipeError, UnsupportedModelError
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.papers.transform import block_choice, drop_blocks, fewer_layers, gap_healing
from compress.papers.transform.block_choice import Choosing
from compress.papers.transform.drop_blocks import Config
from compress.papers.transform.dropped_kl import DroppedKL
from compress.papers.transform.gap_healing import Moments
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint
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


def bench(folder: Path, tokens: Tensor = TOKENS) -> EditContext:
    return EditContext(torch.device("cpu"), tokens, None, 2, folder, None, lambda text: None)  # type: ignore[arg-type]


@torch.no_grad()
def logits(model: PreTrainedModel, without: set[int] = frozenset()) -> Tensor:  # type: ignore[assignment]
    """Logits of the model, in which these blocks do nothing."""
    layers = model.base_model.layers
    hooks = [
        layers[i].register_forward_hook(lambda _, args, y: (args[0], *y[1:]) if isinstance(y, tuple) else args[0])
        for i in without
    ]
    result: Tensor = model.eval()(input_ids=TOKENS, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return result


@pytest.mark.parametrize(
    ("name", "changes", "cut"),
    [
        ("llama", {}, {}),
        ("gemma2", {}, {"layer_types": ["sliding_attention"] * 3}),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {"mlp_only_layers": [0]}),
    ],
)
def test_the_checkpoint_is_the_model_without_the_blocks(
    name: str, changes: dict[str, object], cut: dict[str, object], tmp_path: Path
) -> None:
    model = build(name, {"num_hidden_layers": LAYERS, **changes})
    directory = save(model, tmp_path / "m")
    api.quantize(job(directory, tmp_path / "out", "by: even, heal: none"))
    (said,) = [note for note in report_of(tmp_path / "out")["notes"]["transform"] if "counted from 0" in note]
    dropped = set(map(int, said.rpartition(": ")[2].split(", ")))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS - 2 == len(plain.base_model.layers)
    assert {key: config[key] for key in cut} == cut
    assert torch.equal(logits(plain), logits(model) if not dropped else logits(model, dropped))


def test_divergence_is_that_of_the_model_without_the_blocks(llama: Path, tmp_path: Path) -> None:
    sets = [frozenset({1, 3}), frozenset({1, 2}), frozenset({0}), frozenset({4, 3})]
    evaluator = DroppedKL(open_checkpoint(llama), TOKENS, bench(tmp_path), tmp_path)
    measured = evaluator.per_sample(sets, range(4))
    shared = evaluator.block_tokens
    assert torch.equal(evaluator.per_sample(sets[::-1], [2, 0])[:, 0], measured.flip(0)[:, 2])  # order, samples, batch
    evaluator.close()
    assert shared == 4 * 24 * (1 + 2 + 3 + 2 + 3)  # nodes of the tree at each block that run it
    model = AutoModelForCausalLM.from_pretrained(llama)
    original = logits(model)
    for row, each in zip(measured, sets, strict=True):
        expected = torch.stack(
            [kl.from_logits(*pair).mean() for pair in zip(original, logits(model, set(each)), strict=True)]
        )
        torch.testing.assert_close(row.float(), expected, rtol=1e-3, atol=1e-6)


def test_rules_on_known_figures() -> None:
    figures = dict(enumerate([(0.1, 0.4), (0.9, 0.2), (0.8, 0.1), (0.7, 0.3), (0.95, 0.5)]))
    assert block_choice.choose_window(figures, range(5), 2) == [2, 3]
    assert block_choice.choose_window(figures, range(3, 5), 2) == [3, 4]
    assert block_choice.choose_least(figures, range(5), 3) == [1, 2, 4]
    for layers in range(4, 40):
        for count in range(1, layers - 1):
            dropped = block_choice.choose_evenly(layers, range(layers), count)
            assert len(dropped) == count and not {0, layers - 1} & set(dropped)


def test_a_search_goes_on_and_never_gets_worse(llama: Path, tmp_path: Path) -> None:
    def choose(rule: block_choice.Rule, generations: int, name: str) -> block_choice.Choice:
        original = Skeleton(open_checkpoint(llama))
        choosing = Choosing(original, range(LAYERS), 2, bench(tmp_path), tmp_path / name / "choice.json", 2)
        return choosing.choose(rule, generations, 3, 0)

    whole, greedy = choose("evolve", 2, "whole"), choose("kl", 0, "greedy")
    half = choose("evolve", 1, "half")
    half.is_done = False
    (tmp_path / "half" / "choice.json").write_text(json.dumps(vars(half)))
    assert choose("evolve", 2, "half") == whole
    falls = [row[1] for row in whole.trace]
    assert falls == sorted(falls, reverse=True) and whole.kl == falls[-1]
    assert len(whole.dropped) == len(greedy.dropped) == 2 and len(greedy.trace) == 2


@pytest.mark.parametrize("rank", [0, 2])
def test_the_refit_is_least_squares(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, x, z = (torch.randn(200, n, generator=generator, dtype=torch.float64) for n in (7, 5, 5))
    z = z + a @ torch.randn(7, 5, generator=generator, dtype=torch.float64)
    moments = Moments.of((5, 7), torch.device("cpu"))
    for part in range(0, 200, 50):
        moments.add(*(each[part : part + 50] for each in (a, x, z)))
    scale = z.norm(dim=1, keepdim=True)
    ridge = 0.01 * moments.inputs.diagonal().mean()
    above = torch.cat((a / scale, ridge.sqrt() * torch.eye(7, dtype=torch.float64)))
    behind = torch.cat(((z - x) / scale, torch.zeros(7, 5, dtype=torch.float64)))
    expected = torch.linalg.lstsq(above, behind).solution.T
    torch.testing.assert_close(gap_healing.solve(moments, 0.01), expected, rtol=1e-4, atol=1e-5)
    fitted = gap_healing.fit(moments, moments, rank)
    assert fitted.change is not None and fitted.after < fitted.before
    error = ((z - x - a @ fitted.change.T) / scale).square().sum() / 200
    assert fitted.after == pytest.approx(error.item(), rel=1e-4)
    assert torch.linalg.matrix_rank(fitted.change, rtol=1e-5) == (rank or 5)
    none = Moments(moments.inputs, -moments.cross, moments.squares, moments.states)
    assert gap_healing.fit(moments, none).change is None  # no better on what is held out


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
    assert fewer_layers.cut_settings(config, [0, 2, 3]) == {
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
        fewer_layers._compare(first, second, (3, 2))
    for settings in ({"share": 1.0}, {"blocks": -1}, {"rank": 0}, {"samples": 1}, {"numbers": (1, 1)}):
        with pytest.raises(ValueError, match="is |twice"):
            Config(**settings)  # type: ignore[arg-type]


def test_a_norm_behind_the_last_projection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="set heal: none"):
        api.quantize(job(save(build("gemma2", {"num_hidden_layers": 4}), tmp_path / "m"), tmp_path / "out", "by: even"))


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
