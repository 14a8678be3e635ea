"""Linears that read one input have one tensor scale, whoever quantizes them and in whatever basis; no text is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import in_processes
import pytest
import torch

from compress import api
from compress.formats import transforms
from compress.model.skeleton import Skeleton
from compress.quant import feedback, grid_types, incoherence
from compress.recipe import catalogue
from compress.run import memory_plan, sizes
from compress.run.quantize_linear import LargestWeights, largest_magnitude
from compress.storage.checkpoint import open_checkpoint
from compress.types import LayerPlan, LinearSpec, Scheme, Stored
from helpers import forked, problems
from helpers.runs import KEEP_TABLES, Setup, contents, job, stored_tensors

NVFP4 = Setup("int8", (*KEEP_TABLES, "quantize={method: grid_rtn}"))
SHARED_OF_LLAMA = 2  # inputs of a block that several linears read


def scales(directory: Path) -> dict[str, float]:
    """Module -> its tensor scale."""
    named = stored_tensors(directory).items()
    return {name.removesuffix(".tensor_scale"): float(scale) for name, scale in named if name.endswith("tensor_scale")}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_what_engines_fuse_has_one_scale(name: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Of the largest weight of all: q, k and v; gate and up, those of each expert apart."""
    source = pico_dir(name)
    api.quantize(job(source, NVFP4, tmp_path / "out"))
    made, skeleton = scales(tmp_path / "out"), Skeleton(open_checkpoint(source))
    seen, device, specs = 0, torch.device("cpu"), skeleton.linears()[0]
    for index in range(len(skeleton.blocks)):
        block, inputs = skeleton.load_block(index, device), dict[str, list[str]]()
        for spec in specs:
            if spec.block == index:
                inputs.setdefault(spec.input_key, []).append(spec.name)
        for names in inputs.values():
            tops = [skeleton.linear(block, linear).weight.detach().abs().max() for linear in names]
            wanted = grid_types.tensor_scale(torch.stack(tops).amax(), "e2m1")
            assert {made[linear] for linear in names} == {float(wanted)}
            seen += len(names) > 1
        skeleton.free()
    blocks = len(skeleton.blocks)
    assert seen == (SHARED_OF_LLAMA * blocks if name == "llama" else blocks * (1 + skeleton.config.num_local_experts))


def test_no_text_is_asked_for() -> None:
    layer = LayerPlan(LinearSpec("a", (4, 32), torch.float32, 0, "a"), NVFP4.load().quantize, Stored("grid", None), 0)
    assert sizes.needs_largest_weight(layer) and not sizes.needs_statistics(layer) and not sizes.needs_text(layer)
    data = {"description": "x", "quantize": {"method": "grid_rtn"}}
    assert catalogue.ListedRecipe("x", data).cost == "data-free"


def test_the_basis_is_that_in_which_weights_are_rounded() -> None:
    """Behind a rotation it is the rotated weights whose largest counts, of all readers alike."""
    scheme = Scheme("grid_rtn", grid_types.TypeConfig(), incoherence=True)
    stored = Stored("grid", grid_types.TYPES["nvfp4"], incoherence.OPS)
    weights = {"a": problems.random(8, 32), "b": 3 * problems.random(16, 32), "c": 9 * problems.random(8, 32)}
    keys = {"a": "a", "b": "a", "c": "c"}
    specs = {name: LinearSpec(name, (len(w), 32), torch.float32, 0, keys[name]) for name, w in weights.items()}
    layers = [LayerPlan(spec, scheme, stored, 0) for spec in specs.values()]
    largest = LargestWeights(layers, weights.__getitem__, seed=3)
    rotated = []
    for layer in layers[:2]:
        around = incoherence.draw(layer.spec, 3, incoherence.OPS)
        rotated.append(transforms.rotate(weights[layer.spec.name], incoherence.OPS, around).abs().max())
    first, second = (largest.of(layer, {}) for layer in layers[:2])
    assert first is not None and second is not None
    assert float(first) == float(second) == float(max(rotated)) != float(weights["b"].abs().max())
    assert largest.of(layers[2], {}) == largest_magnitude(layers[2], weights["c"], 3)


def test_two_processes_write_the_bytes_of_one(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has some of the linears that read an input."""
    monkeypatch.setattr(feedback, "ROWS_PER_TILE", feedback.ROWS_PER_TILE)  # which in_processes sets
    monkeypatch.setattr(memory_plan, "BATCH_TOKENS", memory_plan.BATCH_TOKENS)
    (tmp_path / "llama").symlink_to(pico_dir("llama"))
    monkeypatch.setitem(in_processes.SETUPS, "shared", ("llama", NVFP4))
    in_processes.main(tmp_path, ["shared"])
    assert forked.together(2, partial(in_processes.main, tmp_path, ["shared"])) == [0, 0]
    assert contents(tmp_path / "2" / "shared") == contents(tmp_path / "1" / "shared")
