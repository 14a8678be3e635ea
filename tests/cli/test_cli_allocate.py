"""measure, allocate, --target and --max-kl on the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from helpers.pico import save_pico
from helpers.runs import TEXT, cli, one_line

RECIPE = """
calibration: {num_samples: 4, seq_len: 24}
quantize: {method: gptq, bits: 4, group_size: 32}
allocate: {method: knapsack, samples: 2, options: [{bits: 2}, {bits: 4}, {bits: 6}]}
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model, a recipe, and a folder in which it has been measured."""
    folder = tmp_path_factory.mktemp("cli")
    model, path = save_pico("llama", folder / "llama"), folder / "mine.yaml"
    path.write_text(RECIPE)
    common = [str(model), "--recipe", str(path), "--calib", str(TEXT)]
    result = cli("allocate", "--measure", *common, "--measurements", str(folder / "measured"), "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    assert facts["units"] == 8 and facts["options"] == 3 and "kl_one_at_a_time" in facts["damages"]
    assert (folder / "measured" / "sensitivity.json").is_file()
    return [*common, "--measurements", str(folder / "measured")]


def test_the_frontier_as_a_table_a_plot_and_a_page(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "plots"
    result = cli("allocate", *words, "--points", "3", "--target", "6bpw", "--report", str(out))
    assert result.code == 0, result.err
    assert "bits=4" in result.out and "knapsack, 6bpw" in result.out and "mlp.down_proj: bits=" in result.out
    assert {path.name for path in out.iterdir()} == {"frontier.png", "report.html"}


def test_a_text_that_was_not_calibrated_on(words: list[str], tmp_path: Path) -> None:
    text = tmp_path / "held.txt"
    text.write_text("Another text to score. " * 40)
    result = cli("allocate", *words, "--points", "2", "--text", str(text), "--json", "--report", str(tmp_path))
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["text"] == str(text) and found["tokens"] > 100 and len(found["allocated"]) == 2


def test_quantize_to_a_target(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    planned = cli("plan", *words, "--target", "6bpw", "--json")
    assert planned.code == 0, planned.err
    result = cli("quantize", *words, "--target", "6bpw", "--out", str(out), "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["bpw"] <= 6 and report["bpw"] == json.loads(planned.out)["bpw"]
    assert report["allocation"]["target"] == "6bpw" and len(report["allocation"]["units"]) == 8
    assert "allocate" not in (out / "recipe.yaml").read_text()


def test_quantize_within_a_divergence(words: list[str], tmp_path: Path) -> None:
    result = cli("quantize", *words, "--max-kl", "0.001", "--out", str(tmp_path / "out"), "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["allocation"]["target"] == "0.001kl"


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--target", "2bpw"], 1, "below the least"),
        (["--target", "many"], 2, "neither bits a weight"),
        (["--target", "3"], 2, "target 3 has no unit: 3bpw or 3GiB?"),
        (["--target", "100B"], 1, "below the least"),
        (["--max-kl", "0"], 2, "give a positive number"),
        (["--max-kl", "nan"], 2, "give a positive number"),
        (["--max-kl", "0.0000001"], 1, "above the bound"),
        (["--target", "5bpw", "--max-kl", "1"], 2, "not both"),
        ([], 1, "no target"),
        (["--set", "allocate.high=none", "--target", "5bpw"], 1, "unknown key 'high'"),
    ],
)
def test_what_cannot_be(more: list[str], code: int, message: str, words: list[str], tmp_path: Path) -> None:
    result = cli("quantize", *words, *more, "--out", str(tmp_path / "out"))
    assert result.code == code and message in result.err
    assert code == 2 or one_line(result)
    assert not (tmp_path / "out").exists()


def test_without_a_recipe(words: list[str], tmp_path: Path) -> None:
    """What is measured by default has something to allocate."""
    small = ["calibration.num_samples=4", "calibration.seq_len=24", "quantize.group_size=32", "allocate.samples=2"]
    common = [words[0], "--calib", str(TEXT), *(word for text in small for word in ("--set", text)), "--json"]
    result = cli("allocate", "--measure", *common, cwd=tmp_path)
    assert result.code == 0, result.err
    assert json.loads(result.out)["options"] == 5
    result = cli("allocate", *common, "--points", "2", "--target", "5bpw", cwd=tmp_path)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["recipe"] == "mixed3bit" and found["chosen"]["bpw"] <= 5
    folders = [path for path in (tmp_path / "models_out").iterdir() if path.suffix != ".gradients"]
    assert [path.name for path in folders] == [Path(found["folder"]).name]


def test_the_former_names_of_options(words: list[str], tmp_path: Path) -> None:
    old, new = words[:-2], words[-1]
    result = cli("allocate", "--measure", *old, "--out", new)
    assert (result.code, result.err) == (0, "compress: --out is for checkpoints; here it is called --measurements\n")
    result = cli("allocate", *words, "--points", "2", "-o", str(tmp_path / "plots"))
    assert (result.code, result.err) == (0, "compress: --out is for checkpoints; here it is called --report\n")
    assert (tmp_path / "plots" / "report.html").is_file()
    result = cli("allocate", "--measure", *words, "--out", new)
    assert result.code == 2 and "former name" in result.err
    assert "--out" not in cli("allocate", "--help").out


def test_a_folder_that_cannot_be_written(words: list[str], tmp_path: Path) -> None:
    """The advice names the option that the folder was given by."""
    (tmp_path / "file").write_text("")
    result = cli("allocate", "--measure", *words[:-1], str(tmp_path / "file"))
    assert result.code == 1 and one_line(result).endswith("give another --measurements")
    result = cli("allocate", *words, "--points", "2", "--report", str(tmp_path / "file"))
    assert result.code == 1 and one_line(result).endswith("give another --report")


@pytest.mark.slow
def test_a_plan_measures_nothing(words: list[str], tmp_path: Path) -> None:
    """It says what measuring would take, and how; the command that it prints makes the next plan complete."""
    folder = tmp_path / "none"
    unmeasured = [*words[:-1], str(folder), "--target", "6bpw"]
    for command in (["plan"], ["quantize", "--dry-run", "--out", str(tmp_path / "out")]):
        result = cli(*command, *unmeasured, cwd=tmp_path)
        assert (result.code, result.err) == (0, "")
        said, again, quantizing, measuring, *sizes = result.out.splitlines()
        assert quantizing.startswith("time of quantizing all options: about ")
        assert measuring.startswith("damages are measured by kl_one_at_a_time on ")
        assert said == "not measured: 3 options x 14 linears on 96 calibration tokens; target 6bpw; measure with:"
        assert [line.split()[0] for line in sizes] == ["bits=2", "bits=4", "bits=6"]
        assert not list(tmp_path.iterdir())
    found = json.loads(cli("plan", *unmeasured, "--json").out)
    assert found["measured"] is False and found["command"] == again
    assert " --budget 2h " in cli("plan", *unmeasured, "--budget", "2h").out.splitlines()[1]
    result = cli("plan", *words[:-1], str(folder), "--target", "2bpw")
    assert result.code == 1 and "below the least" in one_line(result)
    assert cli(*shlex.split(again)[1:]).code == 0
    assert json.loads(cli("plan", *unmeasured, "--json").out)["bpw"] <= 6


def test_a_plan_without_data(words: list[str], tmp_path: Path) -> None:
    """An allocator that looks at sizes alone answers at once, and as it does after measuring."""
    uniform = ["--target", "5bpw", "--set", "allocate.method=uniform", "--json"]
    result = cli("plan", *words[:-1], str(tmp_path / "none"), *uniform)
    assert result.code == 0 and not list(tmp_path.iterdir())
    planned, after = json.loads(result.out), json.loads(cli("plan", *words, *uniform).out)
    assert planned["plan"] == after["plan"] and planned["bpw"] == after["bpw"] <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--max-kl", "0.01"],
        ["--target", "5bpw", "--set", "allocate.method=evolve", "--set", "allocate.generations=2"],
    ],
)
def test_a_plan_searches_nothing(more: list[str], words: list[str], tmp_path: Path) -> None:
    """A choice that is scored while it is made is made by `allocate`, which keeps it for the plan."""
    result = cli("plan", *words, *more)
    assert (result.code, result.err) == (0, ""), result.err
    again = shlex.split(result.out.splitlines()[1])
    assert again[:2] == ["compress", "allocate"]
    done = cli(*again[1:], "--points", "2", "--report", str(tmp_path))
    assert done.code == 0, done.err
    assert "predicted peak memory" in cli("plan", *words, *more).out
