"""Narrower blocks: which channels go, that the refit is least squares, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api, recipe
from compress.errors import RecipeError, UnsupportedModelError
from compress.model.skeleton import Skeleton
from compress.papers.transform import channel_choice, gap_healing, prune_width, reshaping, width_pass
from compress.papers.transform.gap_healing import Moments
from compress.papers.transform.prune_width import Config
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import build, save
from helpers.runs import TEXT, contents, report_of

SETTINGS = "neurons: 0.25, multiple: 16, heads: 0.5, samples: 6"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def job(model: Path, out: Path, settings: str) -> Job:
    path = out.parent / f"{out.name}.yaml"
    path.write_text(f"calibration: {{num_samples: 6, seq_len: 32}}\ntransform: [{{method: prune_width, {settings}}}]\n")
    return Job(str(model), recipe.load(str(path)), out, calib=str(TEXT), pack=False)


def test_the_refit_is_that_of_float64_least_squares() -> None:
    inputs, weight, missing = numbers(300, 8) @ numbers(8, 8, seed=1), numbers(5, 8, seed=2), numbers(300, 5, seed=3)
    targets = numbers(300, 5, seed=4)
    scale = targets.norm(dim=1, keepdim=True)
    moments = Moments.of((5, 8), torch.device("cpu"))
    moments.add(inputs, targets - missing, targets)
    stays = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    left = width_pass.without(moments, weight, stays)
    wanted = (
        missing + inputs @ weight.T - inputs[:, stays] @ weight[:, stays].T
    ) / scale  # what the rest does not give
    expected = torch.linalg.lstsq(inputs[:, stays] / scale, wanted).solution.T
    torch.testing.assert_close(gap_healing.solve(left, 0.0), expected, rtol=1e-3, atol=1e-3)
    assert left.error(None) == pytest.approx((wanted.square().sum() / 300).item(), rel=1e-4)
    alone = Moments(moments.inputs, torch.zeros(5, 8, dtype=torch.float64), 0.0, 300)
    both = weight[:, stays] + gap_healing.solve(width_pass.without(alone, weight, stays), 0.0)
    torch.testing.assert_close(both, channel_choice.absorb(weight, moments.inputs, stays), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("size", [1, 2])
def test_the_unit_whose_loss_is_least_goes(size: int) -> None:
    inputs, weight = numbers(100, 6) @ numbers(6, 6, seed=1), numbers(4, 6, seed=2)
    hessian, losses = inputs.T @ inputs, []
    for unit in range(6 // size):
        stays = torch.ones(6, dtype=torch.bool)
        stays[unit * size : (unit + 1) * size] = False
        change = inputs @ weight.T - inputs[:, stays] @ channel_choice.absorb(weight, hessian, stays).T
        losses.append(change.square().sum())
    least = int(torch.stack(losses).argmin())
    kept = channel_choice.choose_channels(weight, hessian, size, 1, "refit")
    assert kept.tolist() == [i for i in range(6) if i // size != least]
    scores = channel_choice._score(weight, hessian, size, "refit")
    torch.testing.assert_close(scores, torch.stack(losses), rtol=1e-6, atol=1e-6)


def test_channels_that_others_hold_go_without_loss() -> None:
    inputs = numbers(100, 8)
    inputs[:, 4:] = inputs[:, :4] @ numbers(4, 4, seed=1)  # any four say the rest
    weight, hessian = numbers(3, 8, seed=2), inputs.T @ inputs
    kept = channel_choice.choose_channels(weight, hessian, 1, 4, "refit")
    stays = torch.zeros(8, dtype=torch.bool)
    stays[kept] = True
    left = inputs[:, stays] @ channel_choice.absorb(weight, hessian, stays).T
    assert (left - inputs @ weight.T).norm() < 1e-6 * left.norm()
    assert len(channel_choice.choose_channels(weight, hessian, 2, 3, "size")) == 2


@pytest.fixture(scope="module")
def narrowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the result."""
    folder = tmp_path_factory.mktemp("width")
    model = save(build("qwen2"), folder / "m")  # biases of queries, keys and values
    api.quantize(job(model, folder / "out", SETTINGS))
    return model, folder / "out"


def test_the_checkpoint_is_plain_and_holds_rows_of_the_original(narrowed: tuple[Path, Path]) -> None:
    config = json.loads((narrowed[1] / "config.json").read_text())
    keys = ("intermediate_size", "num_key_value_heads", "num_attention_heads", "head_dim")
    assert [config[key] for key in keys] == [128, 1, 2, 16] and "quantization_config" not in config
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in narrowed)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        whole = [before[f"{prefix}self_attn.v_proj.{key}"] for key in ("weight", "bias")]
        head = next(i for i in (0, 16) if torch.equal(after[f"{prefix}self_attn.v_proj.bias"], whole[1][i : i + 16]))
        assert torch.equal(after[f"{prefix}self_attn.v_proj.weight"], whole[0][head : head + 16])
        queries = before[f"{prefix}self_attn.q_proj.weight"][2 * head : 2 * head + 32]
        assert torch.equal(after[f"{prefix}self_attn.q_proj.weight"], queries)
        rows = [before[f"{prefix}mlp.{name}.weight"].tolist() for name in ("gate_proj", "up_proj")]
        left = [after[f"{prefix}mlp.{name}.weight"].tolist() for name in ("gate_proj", "up_proj")]
        places = [[whole.index(row) for row in some] for whole, some in zip(rows, left, strict=True)]
        assert places[0] == places[1] == sorted(places[0]) and len(places[0]) == 128
    (said,) = [note for note in report_of(narrowed[1])["notes"]["transform"] if "held-out" in note]
    first, last = (float(word) for word in said.split("blocks: ")[1].split(" -> "))
    assert last < first


def test_an_interrupted_run_goes_on(
    narrowed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real, calls = job(narrowed[0], tmp_path / "out", SETTINGS), reshaping.write_parameters, list[Path]()

    def once(path: Path, *args: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(reshaping, "write_parameters", once)
    with pytest.raises(KeyboardInterrupt):
        api.quantize(asked)
    api.quantize(asked)
    assert [path.name for path in calls] == [f"0000{index}.safetensors" for index in (0, 1, 1)]
    files, whole = contents(asked.out), contents(narrowed[1])
    assert [name for name in whole if files[name] != whole[name] and name != "recipe.yaml"] == []


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("llama", {"neurons": 0.01}, "no smaller multiple of 64"),
        ("llama", {"heads": 0.1}, "is none or all"),
        ("llama", {"neurons": 0.0}, "removes nothing"),
        ("phi3", {"neurons": 0.5}, "more than one of a kind"),
        ("qwen3_moe", {"neurons": 0.5}, "not one projection"),
        ("opt", {"neurons": 0.5}, "gives no intermediate_size"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, float], says: str, tmp_path: Path) -> None:
    model = save(build(name), tmp_path / "m")
    with pytest.raises((RecipeError, UnsupportedModelError), match=says):
        prune_width.apply(Skeleton(open_checkpoint(model)), Config(**settings), 0)  # type: ignore[arg-type]
    for wrong in ({"neurons": 1.0}, {"heads": -0.1}, {"multiple": 0}, {"samples": 1}):
        with pytest.raises(ValueError, match="is"):
            Config(**wrong)  # type: ignore[arg-type]


def test_a_norm_behind_the_mlp_is_refitted_to_itself_only(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="set update: own"):
        api.quantize(job(save(build("gemma2"), tmp_path / "m"), tmp_path / "out", "multiple: 16"))
