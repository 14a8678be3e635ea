"""lm-evaluation-harness: what it keeps of documents becomes paired outcomes; a local task where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import CalibrationError, MissingPackageError, RecipeError
from compress.evaluate import harness
from compress.evaluate.reader import Execution
from helpers.pico import beginning, pico_tokenizer


def sample(number: int, **values: Any) -> dict[str, Any]:
    return {"doc_id": number, "filter": "none", "metrics": ["acc", "acc_norm"], **values}


def test_outcomes_of_choices() -> None:
    likelihoods = [(-3.0, False), (-1.5, False), (-2.0, True)]
    (found,) = harness.outcomes("t", [sample(7, acc=1.0, acc_norm=0.0, filtered_resps=likelihoods)])
    assert (found.name, found.right, found.chosen, found.right_by_bytes) == ("7", True, "1", False)


def test_outcomes_of_written_answers_take_the_first_filter() -> None:
    kept = [
        sample(i, metrics=["exact_match"], filter=f, exact_match=r, filtered_resps=[w])
        for i, f, r, w in ((0, "strict", 0.0, "18"), (0, "flexible", 1.0, "18"), (1, "strict", 1.0, "4"))
    ]
    found = harness.outcomes("t", kept)
    assert [(each.name, each.right, each.chosen) for each in found] == [("0", False, "18"), ("1", True, "4")]


def test_figures_that_are_not_right_or_wrong_are_refused() -> None:
    with pytest.raises(RecipeError, match="has no figure of 0 or 1 for a document .it has word_perplexity"):
        harness.outcomes("t", [sample(0, metrics=["word_perplexity"], word_perplexity=(-3.0, 5))])
    with pytest.raises(CalibrationError, match="gave no documents"):
        harness.outcomes("t", [])


def test_what_stands_before_a_text_is_what_the_tokenizer_puts_there() -> None:
    plain, begun = pico_tokenizer(), beginning(pico_tokenizer(), "<bos>")
    assert [harness.adds_bos(begun, bos) for bos in ("auto", "never", "always")] == [True, False, True]
    assert not harness.adds_bos(plain, "auto") and not harness.adds_bos(plain, "never")
    plain.add_special_tokens({"bos_token": "<bos>"})
    with pytest.raises(CalibrationError, match="leave --bos at auto"):
        harness.adds_bos(plain, "always")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)

    class Absent:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "lm_eval":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(MissingPackageError, match="needs the package lm_eval"):
        harness.evaluate([Path("x")], ["hellaswag"], Execution())


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_local_task(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    os.environ["HF_HOME"] = str(tmp_path / "cache")
    rows = [{"question": f"{i} and", "choices": ["x", "yy", "z"], "answer": i % 3} for i in range(9)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "t.yaml").write_text(
        f"task: local_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'q.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list:\n  - metric: acc\n"
    )
    base = pico_dir("llama")
    (found,) = harness.evaluate([base, base], [str(tmp_path / "t.yaml")], Execution())
    assert found.task == "local_choice" and found.items == 9 and found.paired is not None
    assert found.paired.flips == found.paired.all_flips == 0 and found.paired.base_accuracy == found.accuracy
    with pytest.raises(RecipeError, match="has no task 'nosuch'"):
        harness.evaluate([base], ["nosuch"], Execution())
