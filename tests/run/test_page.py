"""The page that a run writes beside its checkpoint: no part of it, never a reason to fail, and kept up to date."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress import api
from compress.evaluate import page, record, suite
from compress.export import convert
from compress.run import records, verify
from compress.storage.manifest import PAGE, SCORES, Manifest
from helpers.runs import GPTQ, RTN, SMALL, Setup, contents, job

KINDS = {"no text": RTN, "transform": Setup("quarot4bit", SMALL), "cache alone": Setup("kv8")}
SUITE = suite.SuiteResult("quick", "base", (), {}, (), ("<this> looks odd",), (), 1.0).plain()


@pytest.fixture(scope="module")
def made(pico_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "out"
    api.quantize(job(pico_dir("llama"), GPTQ, out))
    return out


def test_it_is_no_part_of_the_checkpoint(made: Path, tmp_path: Path) -> None:
    listed = Manifest.read(made)
    assert listed is not None and PAGE not in listed.files and (made / PAGE).is_file()
    record.add(made, suites=[SUITE])
    assert verify.verify(made)["unlisted"] == []
    convert.export(made, "dense", tmp_path / "dense")
    assert not {PAGE, SCORES} & {path.name for path in (tmp_path / "dense").iterdir()}


def test_scores_of_the_source_are_not_those_of_the_result(
    pico_dir: Callable[..., Path], tmp_path: Path, made: Path
) -> None:
    source = Path(shutil.copytree(pico_dir("llama"), tmp_path / "source"))
    for name in (PAGE, SCORES):
        (source / name).write_text("{}")
    api.quantize(job(source, GPTQ, tmp_path / "out"))
    assert not (tmp_path / "out" / SCORES).exists() and (tmp_path / "out" / PAGE).stat().st_size > 1000


def test_new_scores_come_onto_it(made: Path) -> None:
    record.add(made, suites=[SUITE])
    page.refresh(made)
    assert "&lt;this&gt; looks odd" in (made / PAGE).read_text(encoding="utf-8")


def test_what_is_gone_stays_gone_and_damage_is_a_note(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    (made / SCORES).write_text("[]")
    before = (made / PAGE).read_bytes()
    with caplog.at_level(logging.WARNING):
        page.refresh(made)
    (said,) = caplog.messages
    assert "is not up to date" in said and "\n" not in said and (made / PAGE).read_bytes() == before
    (made / SCORES).unlink()
    (made / PAGE).unlink()
    page.refresh(made)
    assert not (made / PAGE).exists()
    assert page.write(made) == made / PAGE


@pytest.mark.parametrize("failing", ["page", "write_text"])
def test_a_page_that_fails_fails_no_run(
    failing: str,
    pico_dir: Callable[..., Path],
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = records.write_text

    def write_badly(path: Path, text: str) -> None:
        if path.name == PAGE:
            path.with_name(PAGE + ".part").write_text("half")
            raise OSError("the disk\nis odd")
        real(path, text)

    def drawn(*_: Any) -> str:
        raise ZeroDivisionError

    if failing == "page":
        monkeypatch.setattr(records.pages, "page", drawn)
    else:
        monkeypatch.setattr(records, "write_text", write_badly)
    with caplog.at_level(logging.WARNING):
        api.quantize(job(pico_dir("llama"), GPTQ, tmp_path / "out"))
    (said,) = [text for text in caplog.messages if PAGE in text]
    assert "\n" not in said and f"compress inspect {tmp_path / 'out'} --page" in said
    assert not {PAGE, PAGE + ".part"} & {path.name for path in (tmp_path / "out").iterdir()}
    assert contents(tmp_path / "out") == contents(made)
    verify.verify(tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint_has_one(kind: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    asked = dataclasses.replace(job(pico_dir("llama"), KINDS[kind], tmp_path / "out"), pack=kind == "no text")
    api.quantize(asked)
    text = (tmp_path / "out" / PAGE).read_text(encoding="utf-8")
    found = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert found["report"]["recipe"] == asked.recipe.name and text.endswith("</html>\n")
