"""Models with merged key/value heads: what is written, what is lossless, what is refused, and that runs resume."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api, recipe
from compress.errors import RecipeError, UnsupportedModelError
from compress.model.edits import EditContext
from compress.model.skeleton import Skeleton
from compress.papers.transform import merge_kv_heads
from compress.papers.transform.merge_kv_heads import Config
from compress.run import verify
from compress.run.job import Job
from compress.storage.checkpoint import open_checkpoint
from helpers.pico import build, save
from helpers.runs import TEXT, cli, contents, interrupt, report_of

TOKENS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(2))
HEAL = "heal: 8, heal_tokens: 64"
BASE = "calibration: {num_samples: 6, seq_len: 32}\ntransform: [{method: merge_kv_heads%s}]\n"


def job(model: Path, out: Path, settings: str = "", more: str = "") -> Job:
    """A run that merges heads, and does `more`."""
    path = out.parent / f"{out.name}.yaml"
    path.write_text(BASE % (f", {settings}" if settings else "") + more)
    loaded = recipe.load(str(path))
    return Job(str(model), loaded, out, calib=str(TEXT), pack=loaded.packs)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def repeated(name: str, folder: Path, order: list[int]) -> tuple[Path, Tensor]:
    """A model with four key/value heads, of which each two are one times numbers that a merge may have; its logits."""
    model = build(name, {"num_key_value_heads": 4})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for linear, is_key in ((attention.k_proj, True), (attention.v_proj, False)):
                for key, parameter in linear.named_parameters():
                    heads = parameter.view(4, 16, -1)
                    for head in (1, 3):
                        if is_key:
                            factor = torch.complex(*torch.randn(2, 8, 1, generator=torch.Generator().manual_seed(head)))
                            turned = factor * torch.complex(heads[head - 1, :8], heads[head - 1, 8:])
                            heads[head].copy_(torch.cat((turned.real, turned.imag)))
                        else:
                            square = torch.randn(16, 16, generator=torch.Generator().manual_seed(head)) / 4
                            heads[head].copy_(square @ heads[head - 1])
                    heads.copy_(heads[order].clone())
                    assert key in ("weight", "bias")
            for linear, dim in ((attention.q_proj, 0), (attention.o_proj, 1)):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * 0.125)
                assert linear.weight.shape[dim] == 64
    return save(model, folder), logits(model)


@pytest.mark.parametrize(
    ("name", "order", "settings"),
    [
        ("llama", [0, 1, 2, 3], "group: 2, order: neighbours"),
        ("llama", [0, 2, 1, 3], "group: 2"),
        ("qwen2", [2, 1, 0, 3], "group: 2, samples: 4"),  # biases of queries, keys and values
    ],
)
def test_multiples_are_merged_without_loss(name: str, order: list[int], settings: str, tmp_path: Path) -> None:
    directory, expected = repeated(name, tmp_path / "m", order)
    report = api.quantize(job(directory, tmp_path / "out", settings))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.config.num_key_value_heads == 2 and "quantization_config" not in plain.config.to_dict()
    assert (logits(plain) - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(logits(plain), logits(api.load(tmp_path / "out")))
    assert any("heads have changed places in 2 of 2 blocks" in note for note in report["notes"]["transform"]) == (
        order != [0, 1, 2, 3]
    )
    verify.verify(tmp_path / "out")


def test_the_mean_is_the_mean(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = pico_dir("llama")
    api.quantize(job(model, tmp_path / "out", "pooling: mean"))
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, tmp_path / "out"))
    for name, tensor in before.items():
        if "k_proj" in name or "v_proj" in name:
            tensor = tensor.view(2, 16, -1).mean(0)
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def trained(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the result of merging and training it."""
    out = tmp_path_factory.mktemp("trained") / "out"
    api.quantize(job(pico_dir("llama"), out, HEAL))
    return pico_dir("llama"), out


def test_training_brings_blocks_closer(trained: tuple[Path, Path]) -> None:
    (said,) = [note for note in report_of(trained[1])["notes"]["transform"] if "held-out error" in note]
    before, after = (float(word) for word in said.split("blocks, ")[1].split(" -> "))
    assert 0 < after < before


@pytest.mark.slow
def test_a_killed_run_goes_on_behind_the_last_merged_block(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, expected = trained
    asked = job(model, tmp_path / "out", HEAL)
    words = ("transform", str(model), "--recipe", str(tmp_path / "out.yaml"), "--out", str(asked.out), "--calib")
    kill = interrupt("compress.papers.transform.reshaping", "write_shard", 2)
    assert cli(*words, str(TEXT), prepare=kill).code == -signal.SIGKILL
    first = tmp_path / "out.partial" / "kv-heads" / "00000.safetensors"
    written = first.stat().st_mtime_ns
    once = """
import compress.papers.transform.kv_head_pass as module
real, calls = module.train, []
def train(*args):
    calls.append(1)
    assert len(calls) == 1
    return real(*args)
module.train = train
"""
    assert written and not asked.out.exists()
    assert cli(*words, str(TEXT), prepare=once).code == 0
    found, whole = contents(asked.out), contents(expected)
    assert found.keys() == whole.keys()
    assert [name for name in found if found[name] != whole[name] and name != "recipe.yaml"] == []
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("heal", [0, 2])
def test_blocks_that_are_kept_change_nothing_in_those_that_follow(
    heal: int, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    def files() -> list[bytes]:
        bench = EditContext(torch.device("cpu"), TOKENS, None, 2, tmp_path, None, lambda text: None)  # type: ignore[arg-type]
        apply("llama", pico_dir("llama"), heal=heal, heal_tokens=24).choose(bench)
        return [path.read_bytes() for path in sorted((tmp_path / "kv-heads").iterdir())]

    whole = files()
    (tmp_path / "kv-heads" / "00001.safetensors").unlink()
    assert len(whole) == 2 and files() == whole


def test_a_merged_model_is_quantized_and_caches_less(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    more = "quantize: {method: rtn, bits: 8, group_size: -1}\nkv_cache: {method: kivi, bits: 4, group_size: 16}\n"
    tune = "tune: {method: end_to_end, steps: 2, batch_tokens: 64}\n"
    report = api.quantize(job(pico_dir("llama"), tmp_path / "out", more=more + tune))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == 1
    model = api.load(tmp_path / "out")
    assert model.get_submodule("model.layers.0.self_attn.k_proj").shape == (16, 64)
    assert "end-to-end tuning" in report["notes"]
    verify.verify(tmp_path / "out")


def apply(name: str, directory: Path, **settings: Any) -> merge_kv_heads.Merging:
    return merge_kv_heads.apply(Skeleton(open_checkpoint(directory)), Config(**settings), 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [("qwen3", "q_norm between its projections"), ("phi3", "makes more than values"), ("opt", "gives no number of")],
)
def test_what_cannot_be_merged_is_one_clear_line(name: str, said: str, pico_dir: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{said}.*remove merge_kv_heads"):
        apply(name, pico_dir(name))


def test_bad_settings_are_one_clear_line(pico_dir: Callable[..., Path]) -> None:
    with pytest.raises(RecipeError, match="group 3 does not divide the 2 key/value heads; set one of 1, 2"):
        apply("llama", pico_dir("llama"), group=3)
    with pytest.raises(ValueError, match="heal_rate 2"):
        Config(heal_rate=2)
    with pytest.raises(ValueError, match="samples 0 is less than 1"):
        Config(samples=0)


def test_the_plan_knows_the_smaller_shapes(pico_dir: Callable[..., Path]) -> None:
    merging = apply("llama", pico_dir("llama"))
    specs, _ = merging.skeleton.linears()
    assert {spec.shape for spec in specs if spec.name.endswith(("k_proj", "v_proj"))} == {(16, 64)}
    stored = merging.skeleton.sources["model.layers.0.self_attn.k_proj.weight"][0]
    assert stored.shape == (16, 64) and stored.read().shape == (16, 64)
