"""Runs with levels: the lowest is what the same recipe writes without the others, and all else goes on as ever."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from compress import api, formats, recipe
from compress.errors import RecipeError
from compress.export.source import open_source
from compress.formats import levels
from compress.quant import parts
from compress.recipe.schema import dump, fingerprint
from compress.run import counts, predict, prepare, shards, sizes, verify
from helpers.runs import GPTQ, KEEP_TABLES, SMALL, Setup, contents, job, stored_tensors

NESTED = GPTQ.set("bits=8", "nested=true")
TRELLIS = Setup("vq2bit", (*KEEP_TABLES, *SMALL, "state_bits=8", "tile_rows=32", "out_scales=rms", "two_sided=false"))
# Recipes with one level, and what adds further ones.
PAIRS = {
    "int": (GPTQ, ("bits=8", "nested=true")),
    "three": (GPTQ.set("bits=2", "symmetric=false", "incoherence=true"), ("bits=8", "nested=[2, 4, 8]")),
    "trellis": (TRELLIS, ("nested=[2, 4.5]",)),
    "lowrank": (GPTQ.set("lowrank={rank: 2, iterations: 2}"), ("bits=8", "nested=true")),
    "awq": (GPTQ.set("method=rtn", "transform=[{method: awq}]"), ("bits=8", "nested=true")),
    "original": (GPTQ, ("nested=[4, 32]",)),
    "original3": (GPTQ.set("bits=2"), ("nested=[2, 4, 32]",)),
    "original_tables": (
        GPTQ.set("embeddings={bits: 4, group_size: 16}"),
        ("embeddings.bits=4", "embeddings.nested=[4, 32]", "nested=[4, 32]"),
    ),
    "tables": (
        GPTQ.set("embeddings={bits: 4, group_size: 16}"),
        ("embeddings.bits=8", "embeddings.nested=true", "bits=8", "nested=true"),
    ),
}


def errors(directory: Path, original: Path) -> dict[int, float]:
    """Level -> ||W - Q||^2 over all packed weights, 0 for those without levels."""
    dense = {name: tensor.double() for name, tensor in stored_tensors(original).items()}
    total: dict[int, float] = {}
    for weight in open_source(directory).packed:
        packed = weight.read()
        for level in levels.levels(packed.stored):
            decoded = formats.decode(levels.view(packed, level), torch.float64)
            error = (decoded - dense[f"{weight.module}.weight"]).square().sum().item()
            total[level] = total.get(level, 0.0) + error
    return total


@pytest.mark.parametrize("name", PAIRS)
def test_the_lowest_level_is_what_it_is_alone(name: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    source = pico_dir("llama_tied" if name.endswith("tables") else "llama")
    alone, added = PAIRS[name]
    api.quantize(job(source, alone, tmp_path / "alone"))
    report = api.quantize(job(source, alone.set(*added), tmp_path / "nested"))
    assert report["self_check"] == "passed"
    verify.verify(tmp_path / "nested")
    wanted, given = (stored_tensors(tmp_path / each) for each in ("alone", "nested"))
    assert wanted.keys() < given.keys()
    assert all(torch.equal(tensor, given[key]) for key, tensor in wanted.items())
    if name != "awq":  # which changes what is rounded
        lost = errors(tmp_path / "nested", source)
        by_level = [lost[level] for level in sorted(lost)]
        assert len(by_level) == (3 if name in ("three", "original3") else 2)
        assert not name.startswith("original") or by_level[-1] == 0
        assert all(high < 0.4 * low for low, high in pairwise(by_level))


def test_rules_give_levels_to_some(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    rules = "rules=[{match: '*.mlp.*', method: rtn, bits: 4}, {match: '*.q_proj', bits: 8, nested: [2, 8]}]"
    api.quantize(job(pico_dir("llama"), GPTQ.set("nested=true", rules), tmp_path / "out"))
    packed = open_source(tmp_path / "out").packed
    found = {weight.name.rpartition(".")[2]: levels.levels(weight.stored) for weight in packed}
    assert (found["q_proj"], found["k_proj"], found["up_proj"]) == ((2, 8), (2, 4), ())


def test_an_allocation_takes_nested_options(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    chosen = "allocate={method: knapsack, target: 6bpw, samples: 2, options: [{bits: 4}, {bits: 8, nested: true}]}"
    api.quantize(job(pico_dir("llama"), GPTQ.set(chosen), tmp_path / "out"))
    kinds = {weight.stored.format for weight in open_source(tmp_path / "out").packed}
    assert kinds == {"int", "nested"}


def test_experts_have_levels(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    api.quantize(job(pico_dir("mixtral"), NESTED, tmp_path / "out"))
    experts = [weight for weight in open_source(tmp_path / "out").packed if weight.is_expert]
    assert experts and all(levels.levels(weight.stored) == (4, 8) for weight in experts)


def test_an_interrupted_run_goes_on_to_the_same_bytes(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a restored block, too, the lowest level goes on."""
    source, whole, out = pico_dir("llama"), tmp_path / "whole", tmp_path / "out"
    api.quantize(job(source, NESTED, whole))
    write, written = shards.write_block, list[object]()

    def interrupted(*args: object, **kwargs: object) -> object:
        written.append(args)
        if len(written) == 2:
            raise KeyboardInterrupt
        return write(*args, **kwargs)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(shards, "write_block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            api.quantize(job(source, NESTED, out))
    assert len(written) == 2 and not out.exists()
    api.quantize(job(source, NESTED, out))
    assert contents(out) == contents(whole)


def test_bytes_and_time_of_all_parts_are_predicted(
    pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "speeds_of_machine", lambda dtype: counts.Speeds(1e9, 1e9, 1e9, 1e9))
    plain, nested = (job(pico_dir("llama"), each, tmp_path / "out") for each in (GPTQ, NESTED))
    first, both = prepare.prepare(plain), prepare.prepare(nested)
    assert [2 * layer.nbytes for layer in first.plan.layers] == [layer.nbytes for layer in both.plan.layers]
    once, twice = predict.predict_by_counts(plain, first), predict.predict_by_counts(nested, both)
    assert once is not None and twice is not None and once.blocks < twice.blocks < 2 * once.blocks
    of_layers = zip(first.plan.layers, both.plan.layers, strict=True)
    assert all(sizes.layer_workspace(a) <= sizes.layer_workspace(b) for a, b in of_layers)


def test_calibration_text_is_chosen_for_the_lowest_level(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Weights of few bits take more of it."""
    setups = [GPTQ.set("bits=2"), GPTQ.set("bits=8", "nested=[2, 8]")]
    alone, nested = (prepare.prepare(job(pico_dir("llama"), each, tmp_path / "out")).plan.layers for each in setups)
    assert [parts.lowest_bpw(layer) for layer in nested] == [layer.bpw for layer in alone]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("tune={method: blockwise}",), "is nested, and what all its levels share cannot be tuned"),
        (("group_size=32", "sparsity={share: 0.5}"), "all parts read all inputs"),
        (("lowrank={rank: 2, train: 5}",), "what is trained would be no level's own"),
        (("nested=[4]",), "are no two or more rising levels of which one is bits, 8"),
        (("nested=[4, 2, 8]",), "are no two or more rising levels"),
        (("nested=[4, 6]",), "are no two or more rising levels"),
        (("nested=[7, 8]",), "a part cannot be: bits 1 is not one of 2..8"),
        (("bits=4", "nested=[4, 16]"), "nested: the original weight is the last level and has 32 bits"),
        (("nested=[16]",), "are no two or more rising levels"),
        (("bits=4", "nested=[4, 32]", "incoherence=true"), "level 32 is the original; remove incoherence"),
        (("bits=4", "nested=[4, 32]", "lowrank={rank: 2}"), "level 32 is the original; remove incoherence"),
        (("bits=4", "nested=[4, 32]", "activations={bits: 8}"), "level 32 is the original; remove incoherence"),
        (("bits=4", "nested=[4, 32]", "transform=[{method: awq}]"), "which transform awq would change"),
        (("nested=5",), "nested must be true or false or a list"),
        (("nested=[a, 8]",), "nested must be an integer"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    overrides: tuple[str, ...], words: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="nested") as caught:
        prepare.prepare(job(pico_dir("llama"), NESTED.set(*overrides), tmp_path / "out"))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_methods_whose_bits_are_not_those_of_a_weight_are_refused() -> None:
    with pytest.raises(RecipeError, match="gptvq stores codebook; methods of int, trellis, e8p can"):
        Setup("gptvq2bit", ("nested=true",)).load()


def test_the_recipe_is_written_with_its_levels(tmp_path: Path) -> None:
    for value in ("true", "[2, 4, 8]"):
        loaded = NESTED.set(f"nested={value}").load()
        (tmp_path / "again.yaml").write_text(dump(loaded))
        again = recipe.load(str(tmp_path / "again.yaml"))
        assert again.quantize == loaded.quantize and fingerprint(again) == fingerprint(loaded)
    assert "nested" not in dump(GPTQ.load())
    assert fingerprint(GPTQ.set("nested=false").load()) == fingerprint(GPTQ.load())
