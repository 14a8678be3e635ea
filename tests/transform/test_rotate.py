"""Rotation: another basis, the same function, on every family; what cannot be rotated is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from compress import api
from compress.errors import UnsupportedModelError
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import open_checkpoint
from compress.transform import rotate
from compress.types import WeightTransforms
from helpers.pico import ODD, PICO, VOCAB_SIZE, save_pico
from helpers.runs import RTN, contents, job, report_of, stored_tensors

MODELS = Path(__file__).parents[1] / "models"
IDS = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
ROTATE = "transform=[{method: rotate}]"
INNER = "transform=[{method: rotate, residual: false}]"
BIASED = {"attention_bias": True, "mlp_bias": True}


def transformed(model: Path, out: Path, override: str = ROTATE, seed: int = 0) -> dict[str, Any]:
    """The report of `compress transform`."""
    return api.quantize(dataclasses.replace(job(model, RTN.set(override), out), pack=False, seed=seed))


@pytest.fixture(scope="module")
def rotated(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """rotated(name, override=ROTATE) -> a transformed checkpoint, made once."""
    made: dict[tuple[str, str], Path] = {}

    def directory(name: str, override: str = ROTATE) -> Path:
        if (name, override) not in made:
            made[name, override] = tmp_path_factory.mktemp(name) / "out"
            transformed(pico_dir(name), made[name, override], override)
        return made[name, override]

    return directory


def load(directory: Path) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model


def distance(a: Path, b: Path) -> float:
    """Of the logits of two checkpoints, relative."""
    with torch.no_grad():
        x, y = load(a)(IDS).logits.double(), load(b)(IDS).logits.double()
    return ((x - y).norm() / x.norm()).item()


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """Tensor name -> how much of it is another one."""
    return {n: ((after[n] - t).norm() / t.norm().clamp_min(1e-30)).item() for n, t in before.items()}


# ---------------------------------------------------------------- the same function


@pytest.mark.parametrize("name", PICO)
def test_every_family_computes_the_same(name: str, pico_dir: Callable[..., Path], rotated: Callable[..., Path]) -> None:
    """Loaded by transformers alone, as a model of the same class."""
    source, out = pico_dir(name), rotated(name, INNER if name == "gemma2" else ROTATE)
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, out))
    assert "quantization_config" not in after
    assert {k: v for k, v in after.items() if k != "tie_word_embeddings"} == {
        k: v for k, v in before.items() if k != "tie_word_embeddings"
    }
    assert distance(source, out) < 1e-5
    assert type(load(out)) is type(load(source))


@pytest.mark.parametrize("name", PICO)
def test_the_weights_are_others(name: str, pico_dir: Callable[..., Path], rotated: Callable[..., Path]) -> None:
    """Matrices wholly so; norms are left without a weight."""
    before, after = stored_tensors(pico_dir(name)), stored_tensors(rotated(name, INNER if name == "gemma2" else ROTATE))
    plain = 0.0 if name.startswith("gemma") else 1.0
    difference = changed(before, after)
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and after[key].shape == tensor.shape
        if name == "gemma2":  # only values and what reads them
            assert (difference[key] > 0.5) == key.endswith(("v_proj.weight", "o_proj.weight")), key
        elif tensor.dim() >= 2:
            assert difference[key] > 0.5, key
        elif key.endswith("weight") and "q_norm" not in key and "k_norm" not in key:
            assert (after[key] == plain).all(), key
        elif not key.endswith("bias"):
            assert torch.equal(after[key], tensor), key


CHANGED: dict[str, tuple[str, dict[str, Any]]] = {
    "odd widths": ("llama", ODD),
    "biases of all linears": ("llama", BIASED),
    "tied and odd": ("llama", {**ODD, "tie_word_embeddings": True}),
    "one head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}),
    "norms with a bias that no reader has": ("opt", {"enable_bias": False}),
    "one norm after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "three experts": ("mixtral", {"num_local_experts": 3, "intermediate_size": 24}),
}


@pytest.mark.parametrize("case", CHANGED)
def test_other_shapes_compute_the_same(case: str, tmp_path: Path) -> None:
    name, changes = CHANGED[case]
    source = save_pico(name, tmp_path / "model", changes=changes)
    transformed(source, tmp_path / "out")
    assert distance(source, tmp_path / "out") < 1e-5
    assert min(changed(stored_tensors(source), stored_tensors(tmp_path / "out")).values()) >= 0  # the same names


@pytest.mark.parametrize(
    ("override", "moved"),
    [
        (INNER, {"v_proj", "o_proj"}),
        ("transform=[{method: rotate, values: false}]", {"q_proj", "v_proj", "o_proj", "up_proj", "down_proj"}),
    ],
    ids=["values alone", "the stream alone"],
)
def test_a_part_of_it(
    override: str, moved: set[str], pico_dir: Callable[..., Path], rotated: Callable[..., Path]
) -> None:
    source, out = pico_dir("llama"), rotated("llama", override)
    difference = changed(stored_tensors(source), stored_tensors(out))
    kinds = {name.split(".")[-2] for name, d in difference.items() if d > 0.5}
    assert moved <= kinds and ("embed_tokens" in kinds) == (override != INNER)
    assert distance(source, out) < 1e-5


def test_a_trained_model(tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(MODELS / "books-8m", source)
    weights = source / "model.safetensors"
    save_file({n: t.float() for n, t in load_file(weights).items()}, weights, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    transformed(source, tmp_path / "out")
    assert distance(source, tmp_path / "out") < 1e-5


# ---------------------------------------------------------------- tensors and bytes


@pytest.mark.parametrize("name", ["llama_tied", "gemma", "opt"])
def test_a_tied_head_becomes_a_tensor_of_its_own(
    name: str, pico_dir: Callable[..., Path], rotated: Callable[..., Path]
) -> None:
    out = rotated(name)
    model, tensors = load(out), stored_tensors(out)
    embeddings, head = (
        m.get_parameter("weight") for m in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert json.loads((pico_dir(name) / "config.json").read_text())["tie_word_embeddings"] is True
    assert embeddings.data_ptr() != head.data_ptr() and not torch.equal(embeddings, head)
    assert len(tensors) == len(stored_tensors(pico_dir(name))) + 1 and "lm_head.weight" in tensors
    report = report_of(out)
    size = VOCAB_SIZE * 64 * 4
    assert report["nbytes"]["total"] == sum(t.nbytes for t in tensors.values()) == report["source_nbytes"] + size
    positions = 0 if name != "opt" else tensors["model.decoder.embed_positions.weight"].nbytes
    assert (report["nbytes"]["embeddings"], report["nbytes"]["output head"]) == (size, size)
    assert report["nbytes"]["norms and the rest"] >= positions
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report["nbytes"]["total"]


def test_a_tied_head_stays_tied_where_the_stream_is_not_rotated(rotated: Callable[..., Path]) -> None:
    out = rotated("gemma2", INNER)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in stored_tensors(out)


def test_the_draws_are_those_of_the_seed(
    pico_dir: Callable[..., Path], rotated: Callable[..., Path], tmp_path: Path
) -> None:
    torch.manual_seed(99)
    transformed(pico_dir("llama", shards=True), tmp_path / "same")
    first, again = contents(rotated("llama")), contents(tmp_path / "same")
    assert {name for name in first if first[name] != again[name]} == {"README.md"}  # names the source directory
    transformed(pico_dir("llama"), tmp_path / "other", seed=1)
    difference = changed(stored_tensors(rotated("llama")), stored_tensors(tmp_path / "other"))
    assert all(d > 0.5 for name, d in difference.items() if "norm" not in name)
    assert distance(rotated("llama"), tmp_path / "other") < 1e-5


# ---------------------------------------------------------------- refused


def refusal(source: Path, out: Path, override: str = ROTATE) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        transformed(source, out, override)
    assert "\n" not in str(caught.value) and not out.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "line"),
    [
        ("gemma2", {}, "model.layers.0.post_attention_layernorm normalizes what goes to the residual stream"),
        ("opt", {"do_layer_norm_before": False}, "model.decoder.layers.0.final_layer_norm normalizes what goes to"),
        ("opt", {"word_embed_proj_dim": 32}, "the output head does not read the residual stream through one norm"),
    ],
    ids=["norms behind each part", "norms behind each block", "a projection before the head"],
)
def test_a_stream_that_cannot_be_rotated(name: str, changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    source = save_pico(name, tmp_path / "model", changes=changes)
    message = refusal(source, tmp_path / "out")
    assert message.startswith(line) and message.endswith("which then rotates what lies inside the blocks, or remove it")
    transformed(source, tmp_path / "out", INNER)
    assert distance(source, tmp_path / "out") < 1e-5


def set_to_zero(directory: Path, name: str) -> Path:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name][3] = 0
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("norm", ["model.decoder.layers.1.final_layer_norm", "model.decoder.final_layer_norm"])
def test_a_bias_that_nothing_can_take_over(norm: str, tmp_path: Path) -> None:
    source = save_pico("opt", tmp_path / "model", changes={"enable_bias": False})
    message = refusal(set_to_zero(source, f"{norm}.weight"), tmp_path / "out")
    assert message.startswith(f"{norm} has weights of zero, or nearly, and a bias that its readers cannot take over")
    assert message.endswith("remove `rotate` from the recipe's transform")
    transformed(set_to_zero(source, f"{norm}.bias"), tmp_path / "none")  # a channel that is dead altogether
    assert distance(source, tmp_path / "none") < 1e-5


def test_a_weight_of_zero_is_no_harm_where_the_bias_moves(tmp_path: Path) -> None:
    source = save_pico("opt", tmp_path / "model")
    set_to_zero(source, "model.decoder.layers.1.final_layer_norm.weight")
    transformed(source, tmp_path / "out")
    assert distance(source, tmp_path / "out") < 1e-5


@pytest.mark.parametrize("left_out", ["self_attn.k_proj", "mlp.down_proj"])
def test_what_is_not_traced_is_noticed(
    left_out: str, pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader or a writer that tracing does not see: the block's result is another one on the probe states."""
    real = rotate.trace

    def trace(skeleton: Skeleton) -> Any:
        graph = real(skeleton)
        block = graph.blocks[1]
        norms = {norm: tuple(r for r in readers if r != left_out) for norm, readers in block.norms.items()}
        writers = tuple(w for w in block.writers if w != left_out)
        return dataclasses.replace(
            graph, blocks=(graph.blocks[0], dataclasses.replace(block, norms=norms, writers=writers))
        )

    monkeypatch.setattr(rotate, "trace", trace)
    message = refusal(pico_dir("llama"), tmp_path / "out")
    assert message.startswith("rotating model.layers.1 changes its result by ")


def test_embeddings_that_are_not_traced_are_noticed(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rotate.trace

    def trace(skeleton: Skeleton) -> Any:
        graph = real(skeleton)
        outside = dataclasses.replace(graph.outside, writers=graph.outside.writers[:1])  # not the positions
        return dataclasses.replace(graph, outside=outside)

    monkeypatch.setattr(rotate, "trace", trace)
    assert refusal(pico_dir("opt"), tmp_path / "out").startswith("rotating what reaches the first block changes its")


def test_nothing_is_read_before_the_plan(pico_dir: Callable[..., Path]) -> None:
    skeleton = Skeleton(open_checkpoint(pico_dir("llama_tied")))
    rotation = rotate.apply(skeleton, rotate.Config(), 0)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert rotation.online == {
        f"model.layers.{i}.{name}": WeightTransforms(input=(op,))
        for i in range(2)
        for name, op in (("self_attn.o_proj", "head_mix/16"), ("mlp.down_proj", "hadamard"))
    }
    assert rotate.apply(skeleton, rotate.Config(online=False), 0).online == {}
