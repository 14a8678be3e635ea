"""Files of a study are not believed: whatever is changed in one, it is one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import OutputError
from compress.study import grid, losses, summary
from compress.study.folder import ASKED, RESULT, CellFolder, StudyFolder
from compress.study.grid import Axes, Settings
from helpers.json_damage import mutations

IDENTITY = {"model": "fingerprint"}
TEXT = {"text": "text", "tokens": 10, "perplexity": 2.0, "base_perplexity": 1.5, "kl_mean": 0.1, "kl_se": None}
SPEED = {"device": "cpu", "threads": 2, "prompt_tokens": 8, "new_tokens": 8}
SPEED |= {"prefill_tokens_per_s": 1.0, "decode_tokens_per_s": 2.0}
PAIRED = dict.fromkeys(("difference", "difference_low", "difference_high", "p_value", "nll_difference"), 0.1)
TASK = {
    **{"task": "copy", "score": 0.5, "se": 0.1, "base": 0.4, "n": 10, "nll": 1.0, "nll_se": None},
    "paired": {**PAIRED, "nll_low": None, "nll_high": None, "lost": 1, "gained": 2},
}
CALIBRATION = {"source": "text", "num_samples": 8, "seq_len": 32, "self_generated": False}
COST = {"seconds": 3.0, "quantize_seconds": 1.0, "resumed_blocks": 0, "predicted_peak": 5, "measured_peak": None}
COST |= {"scoring_seconds": 1.0, "scoring_peak": 9, "tasks_seconds": None}
SIZE = {"bytes_per_token": 10.5, "exact_bytes_per_token": 40.0, "context": 64}


def result(cell: CellFolder, cost: dict[str, Any]) -> dict[str, Any]:
    """What a cell's process writes; int2 has failed."""
    asked = cell.request
    found = {
        **{"version": 1, "key": cell.key, "calib": None, "versions": {"torch": "2"}, "device": "cpu", "seed": 0},
        **{key: asked[key] for key in ("name", "label", "overrides")},
    }
    if "bits=2" in "".join(asked["overrides"]):
        return {**found, "status": "failed", "reason": "out of memory"}
    is_cache, is_original = asked["name"] == "kv4", asked["name"] == grid.ORIGINAL
    done = {
        **{"status": "done", "is_cache_only": is_cache, "purpose": "cache" if is_cache else "weights"},
        **{"nbytes": 100 + len(cell.key), "texts": [TEXT], "suites": {"quick": [TASK]}, "speed": SPEED},
    }
    if is_original:
        whole = {key: cost[key] for key in ("scoring_seconds", "scoring_peak", "tasks_seconds")}
        return {**found, **done, "parameters": 1000, "positions": 64, "cost": whole}
    sizes = {
        "bpw": None if is_cache else 4.5,
        "whole_bpw": 6.0,
        "packed_share": 0.9,
        "cache": SIZE if is_cache else None,
    }
    return {**found, **done, **sizes, "calibration": CALIBRATION, "notes": ["odd"], "cost": cost}


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    found = StudyFolder(tmp_path / "s")
    found.open(IDENTITY)
    settings = Settings("model", ("text",), suite="quick", max_memory=1 << 30, speed=True)
    for cell in grid.cells(Axes(("int4", "kv4"), bits=("2", "3", "4"))):
        folder = found.ask(cell, settings, IDENTITY)
        if "bits=4" not in cell.overrides[0:1]:  # one waits
            folder.finish(result(folder, COST))
    return found


def judged(study: StudyFolder, path: Path, read: Callable[[], object], most: int) -> int:
    """Read a file with each damage; return how often it was refused."""
    whole, refused = path.read_text(), 0
    for where, damaged in mutations(json.loads(whole), most=most):
        path.write_text(json.dumps(damaged))
        try:
            read()
        except OutputError as error:
            assert path.name in str(error) and "\n" not in str(error), where
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path.name}: {where}") from error
    path.write_text(whole)
    read()
    return refused


@pytest.mark.parametrize("name", [grid.ORIGINAL, "int4", "kv4"])
@pytest.mark.parametrize("file", [ASKED, RESULT])
def test_cells(name: str, file: str, study: StudyFolder) -> None:
    cell = next(x for x in study.cells() if x.result and x.result["name"] == name and x.result["status"] == "done")

    def read() -> None:
        assert isinstance(cell.settings, Settings)
        summary.write(study)

    assert judged(study, cell.path / file, read, 150) > 70


def test_a_cell_that_has_failed(study: StudyFolder) -> None:
    cell = next(x for x in study.cells() if x.result and x.result["status"] == "failed")
    assert judged(study, cell.path / RESULT, lambda: summary.write(study), 150) > 70


def test_the_identity_of_a_study(study: StudyFolder) -> None:
    assert judged(study, study.run, lambda: summary.write(study), 100) > 20


def test_a_study_that_others_are_compared_with(study: StudyFolder) -> None:
    summary.write(study)
    path = study.folder / summary.JSON

    def read() -> None:
        losses.points(path)
        known = losses.read(path)
        assert len(known.losses) <= 1 and isinstance(known.frontier, list)
        losses.nearest([known], 10, "fingerprint")

    assert judged(study, path, read, 800) > 100


def test_settings_of_a_later_version_are_refused(study: StudyFolder) -> None:
    cell = study.cells()[0]
    asked = cell.request
    asked["settings"]["colour"] = "red"
    (cell.path / ASKED).write_text(json.dumps(asked))
    with pytest.raises(
        OutputError, match=r"of another version \(settings has 'colour'\); delete .* to measure it again"
    ):
        _ = cell.settings


def test_a_result_of_another_cell_is_refused(study: StudyFolder) -> None:
    one, other = (cell for cell in study.cells() if cell.result is not None and cell.result["status"] == "failed")
    (one.path / RESULT).write_bytes((other.path / RESULT).read_bytes())
    with pytest.raises(OutputError, match="it is of the cell"):
        _ = one.result
