"""What is kept of a run, and the report of a checkpoint, is not believed: damage is one line that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import ones

from compress.errors import CheckpointError, OutputError
from compress.run import report
from compress.storage.checkpoint import CONFIG
from compress.storage.workdir import Output

ROW: dict[str, Any] = {
    **{"name": "a.b", "shape": [2, 4], "method": "rtn", "format": "int", "bpw": 4.5, "nbytes": 8, "notes": []},
    "params": {
        "bits": 4,
        "group_size": 64,
        "symmetric": True,
        "tile_words": 16,
        "scale_dtype": "float16",
        "narrow_tail": False,
    },
    **{"weight_error": 0.1, "output_error": None, "tokens": 0, "seconds": 0.5},
    **{"ops": {"input": [], "output": []}, "activations": None, "lowrank": None},
}
RECORD: dict[str, Any] = {
    **{"file": "x.safetensors", "sha256": "0", "probe": "0", "notes": [], "experts": {}},
    "layers": [ROW],
}
REPORT: dict[str, Any] = {
    **{"bpw": 4.5, "source_nbytes": 64, "nbytes": {"total": 32, "quantized linears": 8}, "layers": [ROW]},
    "plan": [
        {"pattern": "*.b", "count": 1, "shape": [2, 4], "method": "rtn", "format": "int", "bpw": 4.5, "nbytes": 8}
    ],
}
WRONG = [None, True, "x\x1b[31m", [None], {"a": None}, "missing"]


def changed(value: dict[str, Any], key: str, other: Any) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k != key} | ({} if other == "missing" else {key: other})


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("key", ["file", "sha256", "layers", "notes", "name", "shape", "bpw", "tokens"])
def test_the_record_of_a_block(key: str, wrong: Any, tmp_path: Path) -> None:
    record = changed(RECORD, key, wrong) if key in RECORD else {**RECORD, "layers": [changed(ROW, key, wrong)]}
    with Output(tmp_path / "out") as output:
        output.begin({}, {})
        output.finish_block(0, RECORD)
        assert output.finished_blocks(report.BLOCK_RECORD) == [RECORD]
        output.finish_block(0, record)
        with pytest.raises(OutputError, match=r"00000\.json is damaged, or of another version \(.*\); give --restart"):
            output.finished_blocks(report.BLOCK_RECORD)


@pytest.mark.parametrize("arrangement", [None, [], {}, {"batch": "1"}, {"batch": True}, {"batch": 0}, {"batch": -1}])
def test_the_arrangement_of_a_run(arrangement: Any, tmp_path: Path) -> None:
    with Output(tmp_path / "out") as output:
        output.begin({"a": 1}, {"batch": 4})
        assert output.begin({"a": 1}, {"batch": 8}) == {"batch": 4}
        output.run.write_text(json.dumps({"identity": {"a": 1}, "arrangement": arrangement}))
        with pytest.raises(OutputError, match="is damaged, or of another version; give --restart"):
            output.begin({"a": 1}, {"batch": 8})


def test_a_row_of_another_shape() -> None:
    assert report.to_dict(report.from_dict(ROW)) == {**ROW, "shape": (2, 4), "notes": ()}
    with pytest.raises(CheckpointError, match=r"a\.b has the shape \[2\]"):
        report.from_dict({**ROW, "shape": [2]})


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("key", [*REPORT, "pattern", "name", "count", "method"])
def test_a_report(key: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"t": ones(8)}, tmp_path / "model.safetensors")
    (tmp_path / CONFIG).write_text('{"model_type": "llama"}')
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    assert report.load(tmp_path) == REPORT
    if key in REPORT:
        damaged = changed(REPORT, key, wrong)
    else:
        damaged = {**REPORT, **{part: [changed(REPORT[part][0], key, wrong)] for part in ("plan", "layers")}}
    (tmp_path / "report.json").write_text(json.dumps(damaged))
    monkeypatch.setattr(report, "from_headers", lambda checkpoint, why: {"incomplete": why})
    why = report.load(tmp_path)["incomplete"]
    assert why.startswith("report.json is damaged, or of another version (") and why.isprintable()
