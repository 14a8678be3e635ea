"""The sections `embeddings` and `head` of a recipe, and `allocate.tables`: their options in an allocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress import recipe
from compress.errors import RecipeError

TABLES = "tables: [{bits: 8}, {method: gptq, bits: 4, group_size: 64}, {keep: true}]"


def load(tmp_path: Path, text: str) -> recipe.Recipe:
    path = tmp_path / "mine.yaml"
    path.write_text("quantize: {method: gptq, bits: 4}\n" + text)
    return recipe.load(str(path))


def test_defaults_are_eight_bits_by_rtn(tmp_path: Path) -> None:
    found = load(tmp_path, "embeddings: {}\nhead: {method: gptq, group_size: 64}\n")
    assert found.embeddings is not None and found.head is not None
    assert (found.embeddings.method, found.embeddings.config.bits) == ("rtn", 8)
    assert (found.head.method, found.head.config.bits, found.head.config.group_size) == ("gptq", 4, 64)
    assert load(tmp_path, "").head is None


def test_a_table_is_kept(tmp_path: Path) -> None:
    """`--set` replaces the whole section of a recipe."""
    assert load(tmp_path, "embeddings: {keep: true}\n").embeddings is None
    (tmp_path / "mine.yaml").write_text("quantize: {method: rtn}\nhead: {bits: 6, group_size: -1}\n")
    assert recipe.load(str(tmp_path / "mine.yaml"), ("head={keep: true}",)).head is None


def test_they_are_written_back_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    found, plain = load(tmp_path, "head: {bits: 6}\n"), load(tmp_path, "")
    (tmp_path / "again.yaml").write_text(recipe.dump(found))
    assert recipe.load(str(tmp_path / "again.yaml")) == found
    assert recipe.fingerprint(found) != recipe.fingerprint(plain)
    assert "head" not in recipe.dump(plain)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("embeddings: {bits: 9}", "bits 9 is not one of 2..8"),
        ("embeddings: {incoherence: true}", "embeddings: their rows are looked up; remove incoherence"),
        ("head: {lowrank: {rank: 4, train: 10}}", "head: lowrank cannot be trained"),
        ("head: {activations: {scale: tensor}}", "head: activations can have a scale of each token only"),
        ("head: {bits: 8, keep: true}", "head keeps the weight; remove keep or"),
        ("head: 8", "head must be keys with values"),
        ("heads: {bits: 8}", "unknown key"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, text)


def test_options_are_schemes_like_those_of_the_sections(tmp_path: Path) -> None:
    found = load(tmp_path, f"allocate: {{{TABLES}}}")
    assert found.allocate is not None
    plain, head, kept = found.allocate.tables
    section = load(tmp_path, "head: {bits: 8}").head
    assert plain == section and kept is None
    assert head is not None and (head.method, head.config.group_size) == ("gptq", 64)
    (tmp_path / "again.yaml").write_text(recipe.dump(found))
    assert recipe.load(str(tmp_path / "again.yaml")) == found
    without = load(tmp_path, "allocate: {}")
    assert recipe.fingerprint(found) != recipe.fingerprint(without) and "tables" not in recipe.dump(without)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"head: {{}}\nallocate: {{{TABLES}}}", "line 2: head and allocate.tables say both how it is stored"),
        (f"embeddings: {{}}\nallocate: {{{TABLES}}}", "embeddings and allocate.tables say both"),
        ("allocate: {tables: [{bits: 8}]}", "tables needs two or more options, all different"),
        ("allocate: {tables: [{bits: 8}, {}]}", "tables needs two or more options, all different"),
        ("allocate: {tables: [{bits: 9}, {}]}", "bits 9 is not one of"),
        ("allocate: {tables: [{}, {lowrank: {train: 3}}]}", "lowrank cannot be trained"),
        (f"allocate: {{estimator: hessian, {TABLES}}}", "knapsack chooses by hessian, which the KL"),
        (f"allocate: {{estimator: gradient, {TABLES}}}", "use method knapsack with the estimator auto, kl_one_at_a"),
        (f"allocate: {{estimator: hessian, scale: fisher, {TABLES}}}", "chooses by fisher and hessian"),
        (f"allocate: {{method: lq_lora, {TABLES}}}", "lq_lora chooses by weight"),
        (f"allocate: {{method: layerwise, {TABLES}}}", "layerwise chooses by lim"),
        (f"allocate: {{method: uniform, {TABLES}}}", "uniform chooses without damages"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as found:
        load(tmp_path, text)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "settings",
    [
        "estimator: noise",
        "estimator: kl_shares, rounds: 2",
        "estimator: hessian, scale: noise",
        "method: adaquant",
        "method: evolve",
        "method: evolve, start: uniform, surrogate: false",
    ],
)
def test_what_is_in_nats_is_taken(settings: str, tmp_path: Path) -> None:
    found = load(tmp_path, f"allocate: {{{settings}, {TABLES}}}").allocate
    assert found is not None and len(found.tables) == 3


def test_without_weights_there_are_no_tables(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"kv_cache: {{method: kivi}}\nallocate: {{context: 9, {TABLES}}}")
    with pytest.raises(RecipeError, match="tables are for weights and need quantize"):
        recipe.load(str(path))
