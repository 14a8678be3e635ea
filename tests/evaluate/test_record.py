"""What is kept of a checkpoint's scores: read back as written, replaced, and refused in one line where damaged."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CheckpointError
from compress.evaluate import record
from compress.evaluate.scores import Comparison
from compress.evaluate.speed import LayerSpeed, Speed
from compress.evaluate.suite import SuiteResult
from compress.pages import measurements
from helpers.json_damage import mutations

SAID = {"prompt": "Once\nupon", "base": " a time,\n\tthere", "model": "\x00\u2028"}


def scores(text: str, kl: float, begins_with: str = "") -> Comparison:
    names = (
        "nll",
        "perplexity",
        "base_perplexity",
        "perplexity_ratio",
        "kl_mean",
        "kl_p95",
        "kl_p99",
        "kl_max",
        "same_top1",
    )
    facts = {"text": text, "begins_with": begins_with}
    return Comparison(**facts, tokens=10, windows=2, seq_len=6, kl_se=None, **dict.fromkeys(names, kl))


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    assert record.load(tmp_path) == {"texts": [], "generations": [], "suites": []}
    record.add(tmp_path, [scores("a.txt", 1.0), scores("b.txt", math.inf)], [SAID])
    found = record.add(tmp_path, [scores("a.txt", 2.0)], [{**SAID, "model": "other"}])
    assert found == record.load(tmp_path)
    assert [(row["text"], row["kl_mean"]) for row in found["texts"]] == [("b.txt", math.inf), ("a.txt", 2.0)]
    assert found["generations"] == [{**SAID, "model": "other"}]


def test_scores_with_and_without_bos_stand_beside_each_other(tmp_path: Path) -> None:
    record.add(tmp_path, [scores("a.txt", 1.0), scores("a.txt", 2.0, "<bos>")])
    record.add(tmp_path, [scores("a.txt", 3.0, "<bos>")])
    found = record.load(tmp_path)["texts"]
    assert [(row["begins_with"], row["kl_mean"]) for row in found] == [("", 1.0), ("<bos>", 3.0)]


def test_older_files_are_read(tmp_path: Path) -> None:
    """Suites and rates without what came later have nothing there; the rest is kept."""
    suite = SuiteResult("quick", "base", (), {}, (), ("odd",), (), 1.0).plain()
    older = {key: value for key, value in suite.items() if key not in record.LATER["suites"]}
    (tmp_path / record.FILE).write_text(json.dumps({"suites": [older]}))
    assert record.load(tmp_path)["suites"] == [suite]
    record.add(tmp_path, [scores("a.txt", 1.0)])
    assert record.load(tmp_path)["suites"] == [suite]
    text = {key: value for key, value in asdict(scores("a.txt", 1.0)).items() if key != "begins_with"}
    (tmp_path / record.FILE).write_text(json.dumps({"texts": [text], "suites": [{**older, "texts": [text]}]}))
    found = record.load(tmp_path)
    assert found["texts"] == [{**text, "begins_with": ""}] == found["suites"][0]["texts"]


def test_whatever_is_changed_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    suite = SuiteResult("quick", "base", (), {}, (), ("odd",), (), 1.0).plain()
    record.add(tmp_path, [scores("a.txt", 1.0)], [SAID], [suite])
    path, refused = tmp_path / record.FILE, 0
    for where, damaged in mutations(json.loads(path.read_text())):
        path.write_text(json.dumps(damaged))
        try:
            record.load(tmp_path)
        except CheckpointError as error:
            assert "scores.json" in str(error) and "\n" not in str(error), where
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "does not hold a JSON object; delete it and measure again"),
        ({"texts": {}}, "'texts' is no list"),
        ({"texts": [{"text": "a"}]}, "'texts' has no tokens"),
        ({"generations": [{**SAID, "base": 1}]}, "'base' is 1"),
        ({"generations": [{"prompt": "a", "base": "b"}]}, "'generations' has no model"),
    ],
)
def test_a_damaged_file_is_one_line(wrong: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / record.FILE).write_text(json.dumps(wrong))
    with pytest.raises(CheckpointError, match=said) as caught:
        record.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_rates_are_replaced_by_those_of_the_same_device(tmp_path: Path) -> None:
    layer = LayerSpeed((8, 16), "int", 4.5, 2, True, 1, 1e-4, 1e9, 0.1, 2e-4)
    rates = Speed("cpu", 1, 1, 32, 8, 100.0, 10.0, 1e9, [layer])
    record.add_speed(tmp_path, rates.plain())
    record.add_speed(tmp_path, dataclasses.replace(rates, device="cuda").plain())
    record.add_speed(tmp_path, dataclasses.replace(rates, decode_tokens_per_s=20.0).plain())
    found = record.load(tmp_path)["speed"]
    assert [(row["device"], row["decode_tokens_per_s"]) for row in found] == [("cuda", 10.0), ("cpu", 20.0)]
    shown = measurements.speed(found)
    assert "cpu, 1 thread, batch 1" in shown and ">8×16<" in shown and 'data-value="2.0"' in shown
    assert measurements.speed_headline(found) == [("20", "tokens decoded a second, cpu, 1 thread, batch 1")]
    beside = dataclasses.replace(rates, base="llama", base_prefill_tokens_per_s=50.0, base_decode_tokens_per_s=40.0)
    record.add_speed(tmp_path, beside.plain())
    found = record.load(tmp_path)["speed"]
    assert measurements.speed_headline(found)[1] == ("0.25×", "as fast as the original in decoding")
    assert "as fast as llama, in turns with it: 2.00 in reading the prompt, 0.25 in decoding." in measurements.speed(
        found
    )
    assert measurements.speed(()) == "" and measurements.speed_headline(()) == []
    (tmp_path / record.FILE).write_text(json.dumps({"speed": [{"device": "cpu"}]}))
    with pytest.raises(CheckpointError, match="has no threads"):
        record.load(tmp_path)
