"""Paths, targets and sizes are answered at once: before torch is imported, in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compress.cli.app import app
from compress.errors import OutputError
from compress.process_memory import parse_size
from compress.recipe import Target
from compress.storage import paths
from helpers.runs import environment

# Runs command lines one after the other in one process, and says what each printed and when torch came.
RUN_ALL = """
import json, sys
from typer.testing import CliRunner
from compress.cli.app import app
done = []
for words in json.load(sys.stdin):
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    heavy = sorted({"torch", "transformers", "numpy", "datasets", "scipy"} & set(sys.modules))
    done.append([result.exit_code, result.stdout, result.stderr, heavy])
print(json.dumps(done))
"""


RUNS = ("quantize MODEL", "plan MODEL", "transform MODEL -r quarot4bit", "allocate --measure MODEL", "allocate MODEL")
SCORERS = ("eval MODEL --text good.txt", "kv bench MODEL --text good.txt", "generate MODEL --prompt x")
READERS = ("bench MODEL", "inspect MODEL", "verify MODEL")
WRITERS, BY_RECIPE, SIZED = (RUNS[0], RUNS[2]), (RUNS[0], RUNS[1], *RUNS[3:]), (*RUNS[:2], RUNS[4])
TEXTS = ("eval MODEL", "kv bench MODEL", "allocate MODEL")

NO_CONFIG = "bare has no config.json; is it a Hugging Face checkpoint directory?"
NO_DIRECTORY = "good.txt is not a directory; give a Hugging Face checkpoint directory or a hub id"
NO_TEXT = "is neither a file nor a data set; give a .txt, .jsonl or .parquet file"
NO_RECIPE = "there is no such file, and unknown recipe 'no.yaml'"
EXISTS = "exists already; give another --out, or --overwrite to replace it"
IS_FILE = "a part of the path is a file; give another"
POSITIVE = "give a positive number of nats a token, such as 0.05"

# (command lines, what stands for the model and what follows, exit code, what is said)
CASES: list[tuple[tuple[str, ...], str, int, str]] = [
    ((*RUNS, *SCORERS, *READERS), "bare", 1, NO_CONFIG),
    ((*RUNS, *SCORERS, *READERS), "good.txt", 1, NO_DIRECTORY),
    ((*RUNS, *SCORERS, READERS[0]), "nowhere", 1, "nowhere is neither a directory nor a hub id of the form owner/name"),
    (SCORERS[:1], "model --base bare", 1, NO_CONFIG),
    ((*RUNS, *SCORERS), "model --calib missing.txt", 1, f"missing.txt {NO_TEXT}"),
    ((*RUNS, *SCORERS), "model --calib ./missing", 1, f"./missing {NO_TEXT}"),
    ((*RUNS, *SCORERS), "model --calib text.txt", 1, "text.txt is a directory; give a .txt, .jsonl or .parquet file"),
    ((*RUNS, *SCORERS), "model --calib pipe.txt", 1, "pipe.txt is a pipe, a socket or a device; give a .txt, .jsonl"),
    ((*RUNS, *SCORERS), "model --calib empty.txt", 1, "empty.txt is empty; give a file with text"),
    ((*RUNS, *SCORERS), "model --calib blank.txt", 1, "blank.txt holds blank lines only; give a file with text"),
    (
        (*RUNS, *SCORERS),
        "model --calib binary.txt",
        1,
        "binary.txt is a binary file, or text in UTF-16; give a text in",
    ),
    ((*RUNS, *SCORERS), "model --calib table.csv", 1, "table.csv is a table, whose header and separators are no text"),
    ((*RUNS, *SCORERS), "model --calib good.TSV", 1, "good.TSV is a table, whose header and separators are no text"),
    ((*RUNS, *SCORERS), "model --calib bad.parquet", 1, "bad.parquet is not a readable parquet file"),
    (TEXTS, "model --text blank.txt", 1, "blank.txt holds blank lines only; give a file with text"),
    (TEXTS, "model --text missing.jsonl", 1, f"missing.jsonl {NO_TEXT}"),
    (TEXTS, "model --text text.txt", 1, "text.txt is a directory; give a .txt, .jsonl or .parquet file in it"),
    (TEXTS, "model --text pipe.txt", 1, "pipe.txt is a pipe, a socket or a device; give a .txt, .jsonl or .parquet"),
    (TEXTS, "model --text empty.txt", 1, "empty.txt is empty; give a file with text"),
    (BY_RECIPE, "model --recipe no.yaml", 1, NO_RECIPE),
    (BY_RECIPE, "model --recipe text", 1, "text is a directory; give a YAML file, or a built-in recipe"),
    (SCORERS, "model --kv no.yaml", 1, NO_RECIPE),
    (
        ("kv load MODEL text --prompt x", "kv show text"),
        "model",
        1,
        "text is a directory; give a file that compress kv save",
    ),
    (
        WRITERS,
        "model --out model/packed",
        1,
        "model/packed lies inside of model, which is read; give another --out, beside",
    ),
    (WRITERS, "model --out new --work model/work", 1, "which is read; give another --work, beside it"),
    (WRITERS, "model --out bare/../model/a/b", 1, "lies inside of model, which is read; give another --out, beside it"),
    (WRITERS, "model --out text", 1, f"text {EXISTS}"),
    (WRITERS, "model --out bare/../text/", 1, EXISTS),
    (WRITERS, "model --out loop", 1, f"loop {EXISTS}"),
    (WRITERS, "model --out loop/out", 1, f"{IS_FILE} --out"),
    (WRITERS, "model --out full --overwrite", 1, "full is not a checkpoint that compress wrote; delete it yourself"),
    (WRITERS, "model --out good.txt/out", 1, f"{IS_FILE} --out"),
    (WRITERS, "model --out ..", 1, ".. cannot be an output directory; give another --out"),
    ((RUNS[0], *RUNS[3:]), "model --measurements model/m", 1, "is read; give another --measurements, beside it"),
    ((RUNS[0], *RUNS[3:]), "model --measurements good.txt", 1, f"{IS_FILE} --measurements"),
    (RUNS[4:], "model --report good.txt", 1, f"{IS_FILE} --report"),
    (SIZED, "model --target 3", 2, "target 3 has no unit: 3bpw or 3GiB?"),
    (SIZED, "model --target three", 2, "target 'three' is neither bits a weight (3.25bpw) nor a size (2.1GiB)"),
    *((SIZED, f"model --max-kl {bound}", 2, POSITIVE) for bound in ("0", "-1", "nan", "inf", "1e-13")),
    (RUNS, "model --max-memory 8", 2, "8 is 8 bytes, less than any run takes; give a size such as 8GiB"),
]


def test_nothing_heavy_is_imported_for_what_cannot_be(tmp_path: Path) -> None:
    for folder in ("model", "bare", "text", "text.txt", "full/of"):
        (tmp_path / folder).mkdir(parents=True)
    files = {"model/config.json": "{}", "empty.txt": "", "good.txt": "good", "table.csv": "a,b\nc,d\n"}
    files |= {"blank.txt": "\n \t\r\n" * 300_000, "binary.txt": "ab\0c", "good.TSV": "a\tb\n", "bad.parquet": "PAR"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.txt")
    asked = {
        tuple(line.replace("MODEL", rest).split()): (code, said) for lines, rest, code, said in CASES for line in lines
    }
    before = sorted(tmp_path.rglob("*"))
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(list(asked)),
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert result.returncode == 0, result.stderr
    for (words, (code, said)), (exit_code, out, err, heavy) in zip(
        asked.items(), json.loads(result.stdout), strict=True
    ):
        assert (exit_code, out, heavy) == (code, "", []), (words, err)
        assert said in err and (code == 2 or (err.startswith("compress: ") and err.count("\n") == 1)), (words, err)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(OutputError, match="permission denied; give another --out$"):
        paths.check_writable(tmp_path / "new" / "out", "--out")
    paths.check_writable(Path("/"), "--out")


def test_the_ways_to_say_a_target() -> None:
    units = {"3bpw": "bpw", "3 bpw": "bpw", "3.25BPW": "bpw", "3bits": "bpw", "2.1GB": "gb", "500MiB": "mib", "2G": "g"}
    assert {text: Target(text).unit for text in units} == units
    for text in ("3", "3.5", ".5"):
        with pytest.raises(ValueError, match=rf"target {text} has no unit: {text}bpw or {text}GiB\?"):
            Target(text)
    for text in ("0bpw", "9" * 400 + "bpw", "nan", "bpw", "3 x", ""):
        with pytest.raises(ValueError, match="target "):
            Target(text)


def test_the_ways_to_say_a_size() -> None:
    assert parse_size("8G") == parse_size("8gib") == parse_size(" 8 GiB ") == 8 << 30
    assert parse_size("8gb") == 8 * 10**9 and parse_size("500m") == 500 << 20
    for text in ("9" * 400, "-1", "8TB", "nan"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text)


def test_a_size_reaches_the_job(tmp_path: Path) -> None:
    """What is said in another way is understood: the next complaint is about something else."""
    for words in (["--max-memory", "8g"], ["--target", "3 bpw"], ["--target", "3.25BPW"]):
        result = CliRunner().invoke(app, ["plan", str(tmp_path), *words])
        assert result.exit_code == 1 and "has no config.json" in result.stderr


def test_a_packed_base_of_a_plain_model_is_pointed_out(tmp_path: Path) -> None:
    """They may be exchanged; a base that is not there is an error as before."""
    configs = {"plain": {}, "packed": {"quantization_config": {"quant_method": "compress"}}, "other": {"x": []}}
    configs |= {"awq": {"quantization_config": {"quant_method": "awq"}}, "odd": {"quantization_config": "compress"}}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.json").write_text("{")
    found = {
        (model, base): paths.exchange_note(str(tmp_path / model), str(tmp_path / base))
        for model in (*configs, "bad")
        for base in (*configs, "bad")
    }
    said = {pair for pair, text in found.items() if text is not None}
    assert said == {(model, "packed") for model in ("plain", "other", "awq", "odd", "bad")}
    assert (found["plain", "packed"] or "").endswith("give the original as --base")
    assert paths.exchange_note(str(tmp_path / "plain"), None) is None
    assert paths.exchange_note("owner/name", str(tmp_path / "packed")) is None
