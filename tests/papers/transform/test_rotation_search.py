"""Several random rotations are tried: the score against a model put together by hand, the choice, a resumed run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compress import api
from compress.model import blockwise
from compress.model.skeleton import Skeleton
from compress.papers.transform import rotation_search, spin
from compress.quant import gptq
from compress.runtime import activation_quant
from compress.storage.checkpoint import open_checkpoint
from compress.transform.bases import Basis
from compress.transform.search import fake_weight
from helpers.pico import save_pico
from helpers.rotations import CPU, open_bench
from helpers.runs import GPTQ, RTN, Setup, contents, job, report_of

TOKENS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
W4A4 = RTN.set("bits=4", "group_size=32", "activations={bits: 4, clip: 0.9}")


def scores(model: Path, folder: Path, setup: Setup, seeds: int, pack: bool = True) -> list[float]:
    rotation, given = open_bench(model, folder, setup, spin.Config(seeds=seeds), TOKENS, pack)
    rotation.begin(CPU)
    layers = rotation_search.roundings(given.plan, 0, CPU)
    return rotation_search.search(rotation, given, layers)


# ---------------------------------------------------------------- the score


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral", "gemma"])
def test_the_score_is_that_of_the_rotated_model_with_rounded_linears(
    name: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """The transformed checkpoint in transformers, its linears rounded one by one, on all tokens at once."""
    (found,) = scores(pico_dir(name), tmp_path / "work", W4A4, 1, pack=False)
    recipe = W4A4.set("transform=[{method: rotate}]").load()
    asked = dataclasses.replace(job(pico_dir(name), W4A4, tmp_path / "out"), recipe=recipe, pack=False)
    api.quantize(asked)
    original: Any = AutoModelForCausalLM.from_pretrained(pico_dir(name))
    rounded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    skeleton = Skeleton(open_checkpoint(tmp_path / "out"))
    settings = recipe.quantize
    assert settings.activations is not None

    def change(_: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        return activation_quant.fake_quantize(inputs[0], settings.activations)

    with torch.no_grad():
        calls = blockwise.record_inputs(skeleton, TOKENS, 3, (stream := blockwise.HiddenStates(3, None)), CPU)
        states = stream.read(0, 3)
        for index in range(len(skeleton.blocks)):  # experts are linears only in a block that is loaded here
            block = skeleton.load_block(index, CPU)
            for spec in (s for s in skeleton.linears()[0] if s.block == index and not s.is_expert):
                linear = skeleton.linear(block, spec.name)
                linear.weight.data.copy_(fake_weight(linear.weight.float(), settings.config))
                linear.register_forward_pre_hook(change)
            for path, module in block.named_modules():
                if path.split(".")[-1] in ("gate_proj", "up_proj", "down_proj") and name == "mixtral":
                    module.weight.data.copy_(fake_weight(module.weight.float(), settings.config))
                    module.register_forward_pre_hook(change)
            states = blockwise.run_block(block, calls[index][3], states, "block")
        p = original(TOKENS).logits.double().log_softmax(-1)
        base = rounded.get_decoder()
        q = rounded.get_output_embeddings()(_last_norm(base)(states)).double().log_softmax(-1)
    assert found == pytest.approx(((p.exp() * (p - q)).sum(-1).mean()).item(), rel=1e-2)
    assert found > 1e-3


def _last_norm(decoder: Any) -> Any:
    return decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm


# ---------------------------------------------------------------- the choice


def test_more_candidates_are_never_worse_by_the_same_measure(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The first ones are the same whatever their number; the same again at another time."""
    four = scores(pico_dir("llama"), tmp_path, W4A4, 4)
    assert four[:2] == scores(pico_dir("llama"), tmp_path, W4A4, 2)
    assert len(set(four)) == 4
    rotation, given = open_bench(pico_dir("llama"), tmp_path, W4A4, spin.Config(seeds=4), TOKENS)
    rotation.begin(CPU)
    best, notes = rotation_search.choose(rotation, given)
    assert four[best] == min(four) <= four[0]
    assert notes == [
        f"rotation {best} of 0 to 3 is used: KL {', '.join(f'{s:.5g}' for s in four)} on 3 samples, rounded to nearest"
    ]
    assert not list(tmp_path.iterdir()), "the stream is removed"


def test_static_scales_and_operations_at_run_time(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """8 bits cost next to nothing however they are stored, unless an operation is forgotten."""
    model = pico_dir("qwen2")
    for change in ("incoherence=true", "activations={bits: 8, scale: tensor}", "activations={bits: 8, dtype: fp8}"):
        setup = RTN.set("activations={bits: 8}", change)
        assert all(0 < score < 0.01 for score in scores(model, tmp_path, setup, 2)), change


def test_the_lowest_of_equals(pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, given = open_bench(pico_dir("llama"), tmp_path, W4A4, spin.Config(seeds=3), TOKENS)
    monkeypatch.setattr(rotation_search, "search", lambda *_: [0.5, 0.25, 0.25])
    assert rotation_search.choose(rotation, given)[0] == 1


def test_where_nothing_can_be_scored_the_first_is_used(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    rotation, given = open_bench(pico_dir("llama"), tmp_path, W4A4, spin.Config(seeds=3), TOKENS)
    first = rotation.basis
    assert isinstance(first, Basis)
    (note,) = rotation.choose(given._replace(tokens=None))
    assert note == "there is no calibration text: the first of 3 rotations is used, none has been tried"
    assert isinstance(rotation.basis, Basis) and torch.equal(rotation.basis.signs, first.signs)
    vectors = Setup("vq2bit")
    rotation, given = open_bench(pico_dir("llama"), tmp_path / "other", vectors, spin.Config(seeds=2), TOKENS)
    (note,) = rotation.choose(given)
    assert note.startswith("the recipe rounds nothing on integer grids: the first of 2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": 0}, "seeds 0 is less than 1"),
        ({"learn": -1}, "learn -1 is less than 0"),
        ({"search_samples": 0}, "search_samples 0 is less than 1"),
        ({"seeds": 2, "residual": False, "values": False}, "seeds 2 without residual and values: nothing is drawn"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spin.Config(**settings)


# ---------------------------------------------------------------- in a run


def test_a_run_reports_the_choice_and_a_resumed_one_takes_it_over(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = GPTQ.set("activations={bits: 4}", "transform=[{method: spin, seeds: 3, search_samples: 2}]")
    api.quantize(job(pico_dir("llama"), setup, tmp_path / "whole"))
    (note,) = report_of(tmp_path / "whole")["notes"]["transform"]
    assert "of 0 to 2 is used" in note
    real, calls = gptq.prepare, []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 10:  # in the second block
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(gptq, "prepare", fails)
        with pytest.raises(KeyboardInterrupt):
            api.quantize(job(pico_dir("llama"), setup, tmp_path / "out"))
    monkeypatch.setattr(rotation_search, "search", lambda *_: pytest.fail("it is known already"))
    report = api.quantize(job(pico_dir("llama"), setup, tmp_path / "out"))
    assert report["resumed_blocks"] == 1 and report["notes"]["transform"] == [note]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob("out?*"))


def test_methods_without_data_read_what_the_search_needs(tmp_path: Path) -> None:
    """With one candidate there is no text; with two, just the samples they are tried on."""
    model = save_pico("llama", tmp_path / "model")
    one = api.quantize(job(model, W4A4.set("transform=[{method: rotate}]"), tmp_path / "one"))
    assert one["calibration"] is None and "transform" not in one["notes"]
    setup = W4A4.set("transform=[{method: spin, seeds: 2, search_samples: 3}]", "calibration.seq_len=16")
    two = api.quantize(job(model, setup, tmp_path / "two"))
    assert two["calibration"]["num_samples"] == 3
    assert "on 3 samples" in two["notes"]["transform"][0]


def test_older_keys_of_rotate_are_those_of_spin() -> None:
    steps = [W4A4.set(f"transform=[{{method: rotate, {key}: 2}}]").load().transform for key in ("seeds", "learn")]
    assert [(step.method, step.config.seeds, step.config.learn) for (step,) in steps] == [
        ("spin", 2, 0),
        ("spin", 1, 2),
    ]
