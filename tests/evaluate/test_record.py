"""What is kept of a checkpoint's scores: read back as written, replaced, and refused in one line where damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CheckpointError
from compress.evaluate import record
from compress.evaluate.scores import Comparison

SAID = {"prompt": "Once\nupon", "base": " a time,\n\tthere", "model": "\x00\u2028"}


def scores(text: str, kl: float) -> Comparison:
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
    return Comparison(text=text, tokens=10, windows=2, seq_len=6, kl_se=None, **dict.fromkeys(names, kl))


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    assert record.load(tmp_path) == {"texts": [], "generations": [], "suites": []}
    record.add(tmp_path, [scores("a.txt", 1.0), scores("b.txt", math.inf)], [SAID])
    found = record.add(tmp_path, [scores("a.txt", 2.0)], [{**SAID, "model": "other"}])
    assert found == record.load(tmp_path)
    assert [(row["text"], row["kl_mean"]) for row in found["texts"]] == [("b.txt", math.inf), ("a.txt", 2.0)]
    assert found["generations"] == [{**SAID, "model": "other"}]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "does not hold a JSON object"),
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
