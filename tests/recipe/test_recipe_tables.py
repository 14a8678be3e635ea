"""The sections `embeddings` and `head` of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress import recipe
from compress.errors import RecipeError


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
