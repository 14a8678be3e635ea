"""The original runs once for each text: with its kept states cells have the same figures, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import OutputError
from compress.evaluate.reader import Reader
from compress.model import load as lm
from compress.study import cell, grid, kept_states
from compress.study.folder import CellFolder, StudyFolder
from compress.study.grid import Axes, Settings
from helpers.runs import TEXT

HELD_OUT = TEXT.with_name("books_heldout.txt")


@pytest.fixture
def ask(pico_dir: Callable[..., Path], tmp_path: Path) -> Callable[..., dict[str, CellFolder]]:
    """Return the folders of cells of a study by recipe."""

    def of_recipes(*names: str) -> dict[str, CellFolder]:
        study = StudyFolder(tmp_path / "study")
        study.open({"model": "m"})
        settings = Settings(str(pico_dir("llama")), (str(HELD_OUT),), window=64, max_tokens=512, keep=True)
        cells = grid.cells(Axes(names, samples=(8,), seq_len=(32,)))
        return {each.name: study.ask(each, settings, {"model": "m"}) for each in cells if each.recipe}

    return of_recipes


def kept(each: CellFolder) -> list[Path]:
    return sorted((each.study.folder / kept_states.FOLDER).glob("*"))


def measure(each: CellFolder) -> Any:
    """Return the scores of a cell that is measured in this process."""
    cell.run(each)
    result = each.result
    assert result is not None and result["status"] == "done", result
    return result["texts"]


@pytest.mark.parametrize("recipe", ["int8", "kv4"])
def test_kept_states_change_no_figure(ask: Callable[..., dict[str, CellFolder]], recipe: str) -> None:
    each = ask(recipe)[recipe]
    first = measure(each)
    (file,) = kept(each)
    hidden = Reader(lm.load_model(Path(each.settings.model))).model.config.hidden_size
    assert file.stat().st_size < 512 * hidden * 4 + 10_000
    assert measure(each) == first and kept(each) == [file]


def test_the_body_of_the_original_runs_once(
    ask: Callable[..., dict[str, CellFolder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ask("int8", "fp8")
    first = measure(cells["int8"])
    load, passes = lm.load_model, []

    def counted(directory: Path, *args: Any, **kwargs: Any) -> Any:
        model = load(directory, *args, **kwargs)
        if directory == Path(cells["int8"].settings.model):
            model.model.register_forward_hook(lambda *_: passes.append(1))
        return model

    monkeypatch.setattr(lm, "load_model", counted)
    other = measure(cells["fp8"])
    assert not passes
    assert other[0]["base_perplexity"] == first[0]["base_perplexity"] and other != first


@pytest.mark.slow
def test_damaged_states_are_a_line(ask: Callable[..., dict[str, CellFolder]]) -> None:
    each = ask("int8")["int8"]
    first = measure(each)
    (file,) = kept(each)
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:], b""):
        file.write_bytes(damaged)
        cell.run(each)
        assert (found := each.result) and found["status"] == "failed"
        assert found["reason"] == f"{file} is damaged; delete it, and the original runs again"
    file.unlink()
    assert measure(each) == first and kept(each) == [file]


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "llama_tied", "mixtral"])
def test_logits_of_other_families_are_equal_to_the_bit(
    pico_dir: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Caps, tied heads and experts: the first pass writes, the second reads, and a third has other tokens."""
    tokens, file = torch.arange(64).view(2, 32) % 50, tmp_path / "states" / "0.safetensors"
    logits = []
    for _ in range(2):
        model = lm.load_model(pico_dir(family), "float32")
        with kept_states.keep_states(model, file, tokens.numel()):
            logits.append(Reader(model).predictions(tokens))
    assert file.is_file() and torch.equal(*logits)
    model = lm.load_model(pico_dir(family), "float32")
    with (
        kept_states.keep_states(model, file, tokens.numel()),
        pytest.raises(OutputError, match="has states of other tokens; delete it"),
    ):
        Reader(model).predictions(tokens.flip(1))


def test_nothing_is_kept_where_logits_do_not_come_out_equal(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """A head that is given something else beside the states, and a text that was read more than once."""
    tokens, file = torch.arange(64).view(2, 32) % 50, tmp_path / "0.safetensors"
    plain = Reader(lm.load_model(pico_dir("llama"), "float32")).predictions(tokens)
    model, calls = lm.load_model(pico_dir("llama"), "float32"), list[int]()
    model.lm_head.register_forward_hook(lambda module, args, output: output + (calls.append(1) or len(calls)))
    with kept_states.keep_states(model, file, tokens.numel()):
        assert torch.equal(Reader(model).predictions(tokens), plain + 1)
    assert not file.exists()
    model = lm.load_model(pico_dir("llama"), "float32")
    with kept_states.keep_states(model, file, tokens.numel()):
        for _ in range(2):
            Reader(model).predictions(tokens)
    assert not file.exists()
