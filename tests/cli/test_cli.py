"""The command line: what every command prints, its exit codes, and JSON that parses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from compress import api, recipe
from compress.cli.app import FORMER_WORDS, PANELS, app
from compress.errors import CheckpointError
from compress.run import verify
from helpers.runs import GPTQ, RTN, TEXT, cli, command, contents, job, one_line, report_of, stored_tensors, untouched

BOOKS = Path(__file__).parents[1] / "models" / "books-8m"
COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]  # a group
MANIFEST = "compress_manifest.json"


@pytest.fixture(scope="module")
def packed(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts after GPTQ, with fallbacks to report: do not write into it."""
    out = tmp_path_factory.mktemp("packed") / "mixtral-int4"
    api.quantize(job(pico_dir("mixtral"), GPTQ, out))
    return out


def succeeded(*words: object, cwd: Path | None = None) -> str:
    """What a command prints; nothing goes to stderr."""
    result = cli(*map(str, words), cwd=cwd)
    assert (result.code, result.err) == (0, ""), result
    return result.out


# ---------------------------------------------------------------- help


def test_the_commands() -> None:
    assert (
        " ".join(COMMANDS)
        == "allocate bench chat draft eval export generate imatrix inspect kv merge methods plan push quantize recipes "
        "recommend sampling serve study transform verify"
    )


def test_help_groups_the_commands_by_what_people_want() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places) and sum(map(len, PANELS.values())) == len(COMMANDS) <= 22


@pytest.mark.parametrize("word", FORMER_WORDS)
def test_former_words_do_what_the_new_ones_do(word: str, tmp_path: Path) -> None:
    new = FORMER_WORDS[word]
    former, now = cli(word, "--help", cwd=tmp_path), cli(*new, "--help", cwd=tmp_path)
    assert (former.code, former.out) == (0, now.out)
    assert former.err == f"compress: {word} is now called {' '.join(new)}\n" and now.err == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", "DIR", "--base", "x"], "--base: has no effect without --page"),
        (["inspect", "DIR", "--seq-len", "512"], "--seq-len: has no effect without --page"),
        (["inspect", "DIR", "--page", "--all"], "--all: has no effect with --page"),
        (["allocate", "MODEL", "--measure", "--text", "x"], "ends before a text or a report is of use"),
        (["export"], "DIR: it is missing"),
        (["export", "DIR"], "--to: it is missing"),
        (["export", "DIR", "--to", "gguf"], "--out: it is missing"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], says: str) -> None:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert re.search(rf"Example: compress {name}( |$)", result.output, re.MULTILINE)
    for parameter in get_command(app).commands[name].params:  # type: ignore[attr-defined]
        assert parameter.help, f"{name} {parameter.name} has no help"


def test_help_is_instant() -> None:
    """It imports none of the heavy packages."""
    source = (
        "import sys\nfrom compress.__main__ import main\nsys.argv = ['compress', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'scipy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", source], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["quantise"], "No such command 'quantise'"),
        (["quantize"], "Missing argument 'MODEL'"),
        (["quantize", "--recipe", "int8"], "Missing argument 'MODEL'"),
        (["quantize", "model", "--recipe", "int8", "--bits", "4"], "No such option: --bits"),
        (["quantize", "model", "--recipe", "int8", "--max-memory", "8XB"], "'8XB' is not a size such as 8GiB"),
        (["quantize", "model", "--recipe", "int8", "--device", "tpu"], "'tpu' is not auto, cpu or cuda"),
        (["quantize", "model", "--recipe", "int8", "--seed", "-1"], "--seed"),
        (["quantize", "model", "--recipe", "int8", "--seed", str(1 << 64)], "--seed"),
        (["eval", "model"], "give the text to score"),
        (["eval", "model", "--text", "text", "--dtype", "float8"], "--dtype"),
        (["eval", "model", "--text", "text", "--seq-len", "1"], "--seq-len"),
        (["eval", "model", "--text", "text", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "model"], "give --prompt or --prompts"),
        (["generate", "model", "--prompt", "x", "--system", "y"], "--system: goes with --chat"),
        (["generate", "model", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "model", "--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["inspect"], "Missing argument 'DIR'"),
    ],
)
def test_wrong_usage(words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert expected in result.stderr and result.stdout == ""
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- plan and quantize


@pytest.mark.parametrize("dry", [True, False], ids=["quantize --dry-run", "plan"])
def test_a_plan_says_what_a_run_will_write_and_writes_nothing(
    dry: bool, packed: Path, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    words = command(pico_dir("mixtral"), GPTQ, tmp_path / "out")
    words = [*words, "--dry-run"] if dry else ["plan", *words[1:]]
    with untouched(pico_dir("mixtral")):
        planned = json.loads(succeeded(*words, "--json", cwd=tmp_path))
        table = succeeded(*words, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    report = report_of(packed)
    assert all(planned[key] == report[key] for key in ("plan", "nbytes", "bpw", "kept"))
    assert planned["predicted_peak"] > 0 and planned["predicted_seconds"] > 0
    for nbytes in (report["nbytes"]["total"], report["nbytes"]["embeddings"]):
        assert f"{nbytes:,}" in table
    assert f"{report['bpw']:.3f}" in table and "model.layers.*.mlp.experts.*.down_proj" in table
    assert "predicted peak memory" in table


def test_a_file_does_not_hide_a_built_in_recipe(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "int8").write_text("not a recipe")
    result = cli("plan", str(pico_dir("llama")), "--recipe", "int8", "--json", cwd=tmp_path)
    assert (result.code, result.err) == (0, "compress: int8 is the built-in recipe; the file of this name is ./int8\n")
    result = cli("plan", str(pico_dir("llama")), "--recipe", "./int8", cwd=tmp_path)
    assert result.code == 1 and one_line(result).startswith("int8, line 1: ")


def test_the_default_output_is_in_models_out(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = pico_dir("llama")
    assert cli("quantize", str(model), "--recipe", "int8", cwd=tmp_path).code == 0
    assert [path.relative_to(tmp_path) for path in tmp_path.glob("*/*")] == [Path("models_out", f"{model.name}-int8")]


def test_the_result_on_screen_and_as_json(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """One line says where it is, however long the name is and whatever it holds."""
    out = tmp_path / ("long" * 30) / "[bold]out[/bold]"
    result = cli(*command(pico_dir("llama"), RTN, out))
    assert result.code == 0
    first, *others = result.out.splitlines()
    assert first.startswith(f"{out}: 8.208 bits per packed weight, ") and first.endswith("self-check passed")
    assert others[0].startswith("peak memory ") and others[1].startswith("time ")
    (line,) = result.err.splitlines()
    assert line.startswith("14 linears to 8.208 bits per packed weight")
    result = cli(*command(pico_dir("llama"), RTN, out), "--overwrite", "--json", "--max-memory", "8GiB")
    assert result.code == 0 and json.loads(result.out) == report_of(out)


def test_an_overridden_value(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    words = command(pico_dir("llama"), RTN.set("bits=4", "group_size=16"), tmp_path / "out")
    assert cli(*words).code == 0
    params = {json.dumps(row["params"]) for row in report_of(tmp_path / "out")["layers"]}
    assert len(params) == 1 and json.loads(params.pop())["bits"] == 4
    assert recipe.load(str(tmp_path / "out" / "recipe.yaml")).quantize.config.group_size == 16


# ---------------------------------------------------------------- inspect


def test_inspect(packed: Path) -> None:
    report = report_of(packed)
    assert json.loads(succeeded("inspect", packed, "--json")) == {**report, "levels": []}
    table = succeeded("inspect", packed)
    assert f"{report['nbytes']['total']:,}" in table and f"{report['bpw']:.3f}" in table
    worst = sorted(report["layers"], key=lambda row: -row.get("two_sided_error", row["output_error"]))[:5]
    first_words = [line.split()[0] for line in table.splitlines()]
    shown = [word for word in first_words if word.startswith("model.layers.") and "*" not in word]
    assert shown == [row["name"] for row in worst]
    everything = succeeded("inspect", packed, "--all")
    assert all(row["name"] in everything for row in report["layers"])
    assert "calibration tokens for" in everything  # the fallbacks


def test_what_cannot_be_inspected(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    for directory, text in (
        (pico_dir("llama"), "has no packed linears; give a directory that `compress quantize` wrote"),
        (tmp_path / "nowhere", "is not a directory; give a Hugging Face checkpoint directory or a hub id"),
    ):
        result = cli("inspect", str(directory))
        assert result.code == 1 and one_line(result).endswith(text)


# ---------------------------------------------------------------- verify


def test_verify(packed: Path, tmp_path: Path) -> None:
    text = succeeded("verify", packed)
    assert re.fullmatch(rf"{re.escape(str(packed))}: \d+ files, \d+ tensors \(.*\) and 2 blocks are as written\n", text)
    counts = json.loads(succeeded("verify", packed, "--json"))
    nbytes = sum(t.nbytes for t in stored_tensors(packed).values())
    expected = {"files": len(list(packed.iterdir())) - 2, "tensors": counts["tensors"], "nbytes": nbytes, "blocks": 2}
    assert counts == {**expected, "manifest": "checked", "unlisted": []}
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    shard = sorted(copy.glob("*.safetensors"))[1]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    result = cli("verify", str(copy))
    assert result.code == 1 and f"{shard.name} is not the file that was written" in one_line(result)
    (copy / MANIFEST).unlink()
    assert re.search(
        r"\d+ tensors \(.*\) fit the configuration, all values are finite, and 2 blocks decode; hashes are not "
        "checked, because there is no manifest\n$",
        succeeded("verify", copy),
    )


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify.verify(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_verify_finds_every_change(packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    verify.verify(copy)
    for path in sorted(copy.iterdir()):
        whole = path.read_bytes()
        if path.name not in (MANIFEST, "report.html"):
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 32]))
            assert re.search(f"{path.name} is not (the file that was written|valid JSON)", refusal(copy))
            path.unlink()
            assert f"{path.name} is missing" in refusal(copy)
        path.write_bytes(whole)
    verify.verify(copy)


@pytest.mark.parametrize("files", [None, {}, [], {"../report.json": "0"}, {"nothing": "0"}, {"config.json": 3}])
def test_verify_with_a_damaged_manifest(files: object, packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    manifest: dict[str, Any] = {} if files is None else {"files": files}
    (copy / MANIFEST).write_text(json.dumps(manifest))
    refusal(copy)


# ---------------------------------------------------------------- eval and generate


def test_eval_against_the_base(packed: Path, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 26) for i in range(300)))
    words = ["eval", packed, "--text", tmp_path / "text.txt", "--seq-len", "32", "--max-tokens", "160"]
    alone = json.loads(succeeded(*words, "--json"))
    assert alone["windows"] == 5 and alone["tokens"] == 5 * 31 and alone["seq_len"] == 32
    assert alone["text"] == "text.txt" and alone["perplexity"] > 1
    compared = json.loads(succeeded(*words, "--base", pico_dir("mixtral"), "--json"))
    assert compared["perplexity"] == alone["perplexity"] != compared["base_perplexity"]
    assert compared["kl_mean"] > 0 and 0 <= compared["same_top1"] <= 1
    same = json.loads(succeeded(*words, "--base", packed, "--json"))
    assert same["kl_mean"] == 0 and same["same_top1"] == 1 and same["perplexity_ratio"] == 1
    shown = succeeded(*words)
    assert re.search(rf"perplexity +{alone['perplexity']:.6g}", shown) and re.search("begins with +nothing", shown)


def test_the_bundled_model(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    scores = json.loads(succeeded("eval", BOOKS, "--text", tmp_path / "text.txt", "--seq-len", "64", "--json"))
    assert 1 < scores["perplexity"] < 200 and scores["tokens"] % 63 == 0
    words = ["generate", BOOKS, "--prompt", "Once upon a time", "--max-new-tokens", "8"]
    text = succeeded(*words)
    assert text.strip() and json.loads(succeeded(*words, "--json")) == {
        "prompt": "Once upon a time",
        "text": text.removesuffix("\n"),
    }
    drawn = {succeeded(*words, "--temperature", "2", "--seed", seed) for seed in (1, 1, 2)}
    assert len(drawn) == 2


def test_what_cannot_be_scored_or_continued(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ten tokens")
    for words, expected in {
        (
            "eval",
            str(packed),
            "--text",
            str(tmp_path / "text.txt"),
        ): "512 tokens cannot be scored; 2 to 256 can",
        ("eval", str(packed), "--text", str(tmp_path / "text.txt"), "--seq-len", "32"): "has only 10 tokens",
        (
            "eval",
            str(packed),
            "--text",
            str(tmp_path / "missing.txt"),
            "--seq-len",
            "32",
        ): "missing.txt is neither a file",
        ("eval", str(tmp_path), "--text", str(tmp_path / "text.txt")): "has no config.json",
        ("generate", str(packed), "--prompt", ""): "the prompt '' has no tokens",
        ("generate", str(packed), "--prompt", "x", "--max-new-tokens", "256"): "256 positions, 257 tokens are too many",
        ("generate", str(tmp_path / "nowhere"), "--prompt", "x"): "is neither a directory nor a hub id",
        ("verify", str(tmp_path / "nowhere")): "is not a directory",
    }.items():
        result = cli(*words)
        assert result.code == 1 and expected in one_line(result), result


def test_the_output_stays_as_it_was(packed: Path) -> None:
    """None of the commands that only look has written."""
    with untouched(packed):
        succeeded("verify", packed)
        succeeded("inspect", packed)
    assert contents(packed)


def test_inspect_wants_the_report_of_these_tensors(packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    report = report_of(copy)
    report["nbytes"]["total"] -= 1
    (copy / "report.json").write_text(json.dumps(report))
    shown = succeeded("inspect", copy)
    assert "because report.json is of an earlier save, or of another model; methods and errors are not known" in shown
    assert f"{report['bpw']:.3f}" in shown and "largest errors" not in shown


# ---------------------------------------------------------------- report


def test_report(packed: Path, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    page = copy / "report.html"
    first = page.read_bytes()  # as the run that made the checkpoint has written it
    page.unlink()
    assert succeeded("inspect", copy, "--page") == f"{page}\n" and page.read_bytes() == first
    assert "Not scored yet" in page.read_text() and not (copy / "scores.json").exists()
    asked = ("--base", pico_dir("mixtral"), "--text", TEXT, "--seq-len", 32, "--max-tokens", 64, "--prompt", "Once")
    succeeded("inspect", copy, "--page", *asked, "--max-new-tokens", 4)
    kept = json.loads((copy / "scores.json").read_text())
    assert [row["tokens"] for row in kept["texts"]] == [62] and [x["prompt"] for x in kept["generations"]] == ["Once"]
    assert "Not scored yet" not in page.read_text() and "What both write" in page.read_text()
    succeeded("inspect", copy, "--page", *asked[:-2])  # the same text again replaces its row, the prompt stays
    again = json.loads((copy / "scores.json").read_text())
    assert again == kept
    succeeded("verify", copy)  # both files are no part of the checkpoint


def test_report_wants_a_base(packed: Path, tmp_path: Path) -> None:
    result = cli("inspect", str(packed), "--page", "--prompt", "x")
    assert result.code == 1 and one_line(result).endswith("name it with --base")
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    (copy / "scores.json").write_text('{"texts": [{"text": 3}]}')
    before = (copy / "report.html").read_bytes()
    result = cli("inspect", str(copy), "--page")
    assert result.code == 1 and one_line(result).endswith("delete it and measure again")
    assert (copy / "report.html").read_bytes() == before
