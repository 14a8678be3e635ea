"""`compress eval --suite quick`: its figures, what it keeps for the page, and defects planted in the stored files."""

from __future__ import annotations

import json
import shutil
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import api
from compress.errors import CalibrationError, CheckpointError, RecipeError
from compress.evaluate import Execution, evaluate, generate, generation, record, suite, task_runs
from compress.evaluate.suite import SuiteRequest
from compress.pages import checkpoint
from compress.run import report
from helpers.pico import build, save
from helpers.runs import GPTQ, cli, job, one_line

HELDOUT = Path(__file__).parents[1] / "data" / "books_heldout.txt"
BLOCKS = 4
ASKED = dict[str, Any](seq_len=64, max_tokens=512)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder, text = tmp_path_factory.mktemp("texts"), HELDOUT.read_text(encoding="utf-8")
    for name, start in (("a.txt", 1000), ("b.txt", 9000)):
        (folder / name).write_text(text[start : start + 4000], encoding="utf-8")
    return str(folder / "a.txt"), str(folder / "b.txt")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and the same in 4 bits."""
    folder = tmp_path_factory.mktemp("models")
    base = save(build("llama", {"num_hidden_layers": BLOCKS}), folder / "base")
    api.quantize(job(base, GPTQ, folder / "packed"))
    return base, folder / "packed"


def run(
    models: tuple[Path, Path], texts: tuple[str, ...], name: str | None = "quick", **more: Any
) -> suite.SuiteResult:
    return suite.run(models[1], models[0], SuiteRequest(name, texts, **{**ASKED, **more}), Execution())


def changed(packed: Path, out: Path, name: str, change: Any) -> Path:
    """A copy with one stored tensor changed."""
    shutil.copytree(packed, out)
    (out / "compress_manifest.json").unlink(missing_ok=True)  # with it, loading tells that a file was changed
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name] = change(tensors[name]).contiguous()
            save_file(tensors, file, {"format": "pt"})
            return out
    raise AssertionError(name)


def test_a_sound_model(models: tuple[Path, Path], texts: tuple[str, str], tmp_path: Path) -> None:
    """KL and perplexity are those of `evaluate`; nothing is named; the page shows it all."""
    packed = tmp_path / "packed"
    shutil.copytree(models[1], packed)
    found = run((models[0], packed), texts)
    assert found.findings == () and {task.task for task in found.tasks} == set(task_runs.tasks_of("quick"))
    for text, row in zip(texts, found.texts, strict=True):
        alone = evaluate(packed, text, models[0], 64, 512)
        numbers = [key for key, value in vars(row).items() if not isinstance(value, str)]
        assert [vars(row)[key] for key in numbers] == pytest.approx([vars(alone)[key] for key in numbers], rel=1e-5)
    assert 0 < found.floor["kl_mean"] < found.texts[0].kl_mean / 3
    assert found.floor["path"] == "the original in bfloat16 against itself in float32"
    again = run((models[0], packed), texts)
    assert {**again.plain(), "seconds": 0} == {**found.plain(), "seconds": 0}
    kept = record.add(packed, suites=[json.loads(json.dumps(found.plain()))])
    kept = record.add(packed, suites=[json.loads(json.dumps({**again.plain(), "remarks": ["both books"]}))])
    assert len(kept["suites"]) == 1 and record.load(packed) == kept
    page = checkpoint.page(report.load(packed), "", kept)
    assert "Suite quick, beside base" in page and "No layer and no tokenizer looks broken" in page
    assert all(task.task in page for task in found.tasks) and "Looks broken" not in page
    depths = {task.task: task for task in found.tasks}["retrieval"]
    assert depths.by == "depth" and [(each.value, each.items) for each in depths.groups] == [
        *((0.0, 2), (0.25, 2), (0.5, 2), (0.75, 2), (1.0, 2))
    ]
    assert "What both write, greedily" in page and f"Prompt: {escape(found.written[0]['prompt'])}" in page
    assert "retrieval by depth" in page and "<p>both books.</p>" in page


def test_what_both_write_is_what_each_writes_alone(models: tuple[Path, Path], texts: tuple[str, str]) -> None:
    """Prompts take turns between texts; three at once give what one alone gives."""
    found = run(models, texts)
    assert len(found.written) == 3
    first, second = (Path(text).read_text(encoding="utf-8") for text in texts)
    for row, text in zip(found.written, (first, second, first), strict=True):
        assert row["prompt"] in text and len(row["prompt"]) == generation.SHOWN_PROMPT_TOKENS  # a token is a byte here
        for key, directory in (("base", models[0]), ("model", models[1])):
            assert row[key] == generate(directory, row["prompt"], generation.SHOWN_NEW_TOKENS, dtype="float32")
    assert any(row["base"] != row["model"] for row in found.written)


def test_a_model_is_its_own_original(models: tuple[Path, Path], texts: tuple[str, str]) -> None:
    found = run((models[0], models[0]), texts[:1])
    assert found.findings == () and found.texts[0].kl_mean == 0
    for task in found.tasks:
        assert task.paired is not None and (task.paired.all_flips, task.paired.nll_difference) == (0, 0)


def test_doubled_scales_are_named_on_the_page(
    models: tuple[Path, Path], texts: tuple[str, str], tmp_path: Path
) -> None:
    name = "model.layers.2.mlp.down_proj"
    broken = changed(models[1], tmp_path / "broken", f"{name}.scales", lambda scales: 2 * scales)
    result = cli(
        "eval", str(broken), "--base", str(models[0]), "--suite", "quick", "--text", texts[0], "--text", texts[1],
        "--seq-len", "64", "--max-tokens", "512",
    )  # fmt: skip
    assert result.code == 0, result
    assert "retrieval by depth" in result.out and "arithmetic by sign" in result.out
    assert f"looks broken: {name} puts out 2.0 times what the original does" in result.err
    assert cli("inspect", str(broken), "--page").code == 0
    page = (broken / "report.html").read_text(encoding="utf-8")
    assert f"<strong>Looks broken:</strong> {name} puts out 2.0 times what the original does" in page


def test_permuted_heads_are_named(models: tuple[Path, Path], texts: tuple[str, str], tmp_path: Path) -> None:
    name, base = "model.layers.1.self_attn.q_proj", tmp_path / "plain"
    changed(models[0], base, f"{name}.weight", lambda w: torch.cat([w[16:32], w[:16], w[32:]]))
    found = run((models[0], base), texts, None)
    assert found.findings == (
        f"{name} has rows in another order: rows 0 to 15 stand at 16 to 31, rows 16 to 31 stand at 0 to 15",
    )


def test_swapped_tokenizers_are_named(models: tuple[Path, Path], texts: tuple[str, str], tmp_path: Path) -> None:
    """Other ids of the same tokens; another vocabulary."""
    for change, said in (("ids", "of its 257 tokens have other ids"), ("fewer", "it has 256 tokens, the original 257")):
        other = tmp_path / change
        shutil.copytree(models[1], other)
        described = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
        words = described["model"]["vocab"]
        if change == "ids":
            names = list(words)
            described["model"]["vocab"] = dict(zip(names, [*range(7, 256), *range(7)], strict=True))
        else:
            described["model"]["vocab"] = {word: i for word, i in words.items() if i != 255}
        (other / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
        found = run((models[0], other), texts, None)
        (sentence,) = found.findings
        assert sentence.startswith("the tokenizer is not the original's: ") and said in sentence


def test_a_task_alone_and_questions(models: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "Two and two are", "choices": ["three", "four"], "answer": 1}\n')
    found = run(models, (), None, tasks=("arithmetic", f"choices={path}"))
    assert [(each.value, each.items) for each in found.tasks[0].groups] == [("*", 100), ("+", 100), ("-", 100)]
    assert [(task.task, task.items) for task in found.tasks] == [("arithmetic", 300), ("choices", 1)]
    assert found.texts == () and found.floor == {} and found.findings == ()


def test_a_result_that_cannot_be_kept_is_shown(models: tuple[Path, Path], tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    shutil.copytree(models[1], packed)
    (packed / record.FILE).write_text("{")
    result = cli("eval", str(packed), "--base", str(models[0]), "--task", "arithmetic")
    assert result.code == 0 and "arithmetic by sign" in result.out
    assert f"what was measured is not kept beside {packed}" in result.err
    assert (packed / record.FILE).read_text() == "{"


def test_what_cannot_be_run(models: tuple[Path, Path], texts: tuple[str, str], tmp_path: Path) -> None:
    for asked, said in (
        (SuiteRequest("quick"), "a suite scores text; give --text FILE"),
        (
            SuiteRequest(None, (), ("aritmetic",)),
            "unknown task plugin 'aritmetic'; known: .* did you mean 'arithmetic'",
        ),
    ):
        with pytest.raises(RecipeError, match=said):
            suite.run(models[1], models[0], asked, Execution())
    with pytest.raises(CalibrationError, match="task retrieval has no items here: give more text with --text"):
        run(models, (), None, tasks=("retrieval",))
    other = save(build("llama", {"vocab_size": 300}), tmp_path / "other")
    with pytest.raises(CheckpointError, match="base knows 264 token ids, other 300"):
        run((models[0], other), texts)
    for words, said in (
        (("--suite", "quick", "--text", texts[0]), "name the uncompressed model"),
        (("--text", texts[0], "--text", texts[1]), "give one text, or --suite quick"),
        (("--base", str(models[0]), "--choices", str(tmp_path / "no.jsonl")), "is not a file"),
    ):
        result = cli("eval", str(models[1]), *words)
        assert result.code in (1, 2) and said in " ".join(result.err.split()), result


def test_lines_of_bad_questions(models: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("[]\n")
    result = cli("eval", str(models[1]), "--base", str(models[0]), "--choices", str(path))
    assert result.code == 1 and "q.jsonl, line 1: no JSON object" in one_line(result)


def test_options_that_would_do_nothing_are_refused() -> None:
    for words, said in (
        (["--tasks", "piqa", "--suite", "quick"], "runs alone"),
        (["--suite", "quick", "--adapter", "lora"], "goes with --text"),
        (["--tasks", "piqa", "--adapter", "lora"], "has no effect on --tasks"),
    ):
        done = cli("eval", "anything", *words)
        assert done.code == 2 and said in " ".join(done.err.split()), done.err
