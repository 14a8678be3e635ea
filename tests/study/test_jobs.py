"""Cells that differ in the target alone share what their bits are allocated from, which is measured once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compress.allocate import quantize_options
from compress.errors import CompressError
from compress.study import cell, grid, jobs, runner
from compress.study.folder import CellFolder, StudyFolder
from compress.study.grid import Axes, Settings
from helpers.pico import save_pico
from helpers.runs import TEXT

RECIPE = """
quantize: {{method: rtn, bits: {bits}, group_size: 32}}
allocate: {{method: {method}, target: 3.5bpw, options: [{{bits: 2}}, {{bits: {bits}}}]}}
"""


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether options were quantized, for each time that they were asked for."""
    made: list[bool] = []

    def quantize_all(*given: Any) -> bool:
        made.append(original(*given))
        return made[-1]

    original = quantize_options.quantize_all
    monkeypatch.setattr(quantize_options, "quantize_all", quantize_all)
    yield made


def ask(folder: Path, *recipes: Path, targets: tuple[str, ...]) -> dict[str, CellFolder]:
    """Return the cells of a new study by label."""
    save_pico("llama", folder / "model")
    study = StudyFolder(folder / "study")
    study.open({"model": "m"})
    settings = Settings(str(folder / "model"), (str(TEXT),), window=64, max_tokens=512)
    axes = Axes(tuple(map(str, recipes)), (), (("allocate.target", targets),), (str(TEXT),), (4,), (32,))
    asked = [each for each in grid.cells(axes) if each.recipe is not None]
    return {f"{each.name} {each.overrides[0]}": study.ask(each, settings, {"model": "m"}) for each in asked}


def test_measured_once_and_removed_with_the_last(tmp_path: Path, passes: list[bool]) -> None:
    methods = {"first": ("knapsack", 4), "second": ("knapsack, gap: 0.01", 4)}
    for name, (method, bits) in methods.items():
        (tmp_path / f"{name}.yaml").write_text(RECIPE.format(method=method, bits=bits))
    cells = ask(tmp_path, *(tmp_path / f"{name}.yaml" for name in methods), targets=("3bpw", "3.5bpw"))
    shared, reused, left = tmp_path / "study" / jobs.MEASURED_FOLDER, {}, {}
    for name, each in sorted(cells.items()):
        cell.run(each)
        assert (result := each.result) is not None and result["status"] == "done", result
        reused[name] = result["cost"]["reused_measurements"]
        left[name] = sum(path.is_dir() for path in shared.iterdir())
        assert not any(path.is_dir() for path in each.path.iterdir())
    assert list(reused.values()) == [False, True] * 2
    assert passes == [not each for each in reused.values()]
    assert list(left.values()) == [1, 0] * 2


def test_a_cell_waits_while_another_measures(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE.format(method="knapsack", bits=4))
    first, second = ask(tmp_path, path, targets=("3bpw", "3.5bpw")).values()
    name = jobs.measured_name(first.path)
    assert name == jobs.measured_name(second.path)
    with first.study.hold_lock(f"{name}.lock"):
        assert jobs.is_held_up(second)
        assert not runner._start_next([second], [], runner.RunLimits())  # noqa: SLF001
    assert not jobs.is_held_up(second)


def test_what_nobody_needs_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE.format(method="knapsack", bits=4))
    (own,) = ask(tmp_path, path, targets=("3bpw",)).values()
    needed, left, used = (
        own.study.folder / name for name in (jobs.measured_name(own.path) or "", "measured/left", "measured/used")
    )
    for folder in (needed, left, used):
        folder.mkdir(parents=True)
    with own.study.hold_lock("measured/used.lock"):
        jobs.forget_measurements(own.study)
    assert (needed.is_dir(), left.is_dir(), used.is_dir()) == (True, False, True)
    (own.path / "recipe.yaml").write_text("quantize: {method: none such}")
    jobs.measured_name.cache_clear()
    with pytest.raises(CompressError):
        jobs.forget_measurements(own.study)
    assert needed.is_dir() and not jobs.is_held_up(own)


def test_the_figures_are_those_of_a_cell_alone(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE.format(method="knapsack", bits=4))
    together = ask(tmp_path, path, targets=("3bpw", "3.5bpw"))
    alone = ask(tmp_path / "alone", path, targets=("3.5bpw",))
    for each in (*together.values(), *alone.values()):
        cell.run(each)
    second, only = together["own allocate.target=3.5bpw"].result, alone["own allocate.target=3.5bpw"].result
    assert second is not None and only is not None and second["cost"]["reused_measurements"]
    assert second["texts"] == only["texts"] and second["nbytes"] == only["nbytes"] and second["bpw"] == only["bpw"]
