"""The model card: valid for the hub's own reader, with facts of the run and of the base's card, and no local path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from compress import api
from compress.run import records
from helpers.pico import save_pico
from helpers.runs import GPTQ, RTN, SMALL, Setup, cli, job

BASE_CARD = """---
license: llama3.2
license_name: "a: b"
language: [en, no]
pipeline_tag: text-generation
tags: [chat]
base_model: somebody/else
---
# Pico
"""


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("card")
    model = save_pico("llama", folder / "model")
    (model / "README.md").write_text(BASE_CARD)
    out = folder / "packed"
    words = ["quantize", str(model), *GPTQ.options(), "--calib", str(Path(__file__)), "--out", str(out)]
    result = cli(*words, "--base-model", "me/pico")
    assert result.code == 0, result.err
    return ModelCard.load(out / "README.md")


def test_the_front_matter_is_what_the_hub_reads(card: ModelCard) -> None:
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "base_model": "me/pico",
        "base_model_relation": "quantized",
        "pipeline_tag": "text-generation",
        "license": "llama3.2",
        "language": ["en", "no"],
        "tags": ["compress", "quantized", "4-bit"],
    }


def test_the_text_says_what_was_done_and_how_to_load(card: ModelCard) -> None:
    for words in (
        "stored bits per packed weight",
        "from_pretrained",
        "vllm serve",
        "Not measured",
        "test_model_card.py",
    ):
        assert words in card.text
    assert "/" + str(Path(__file__).parent) not in card.content


def test_without_a_known_base_none_is_named(tmp_path: Path) -> None:
    out = tmp_path / "packed"
    model = save_pico("llama", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "_name_or_path": "somebody/else"}))  # of a fine-tuned one
    api.quantize(job(model, RTN, out))
    data = ModelCard.load(out / "README.md").data.to_dict()
    assert not {"base_model", "base_model_relation", "license", "datasets"} & data.keys()
    assert str(tmp_path) not in (out / "README.md").read_text()


def test_a_wrong_id_is_wrong_usage(tmp_path: Path) -> None:
    result = cli("quantize", str(save_pico("llama", tmp_path / "m")), *RTN.options(), "--base-model", "/a/path")
    assert result.code == 2 and "owner/name" in result.err


CASES: list[tuple[str, str | None, str | None]] = [
    ("owner/name", None, "owner/name"),
    ("owner/name", "other/one", "other/one"),
    (".", "other/one", "other/one"),
    (".", None, None),
    ("./model", None, None),
    ("/data/model", None, None),
]


@pytest.mark.parametrize(("model", "given", "expected"), CASES)
def test_the_name_of_the_base(model: str, given: str | None, expected: str | None) -> None:
    assert records.base_model(model, given) == expected


def test_the_name_of_a_snapshot_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert records.base_model(str(snapshot), None) == "owner/name"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# no front matter",
        "---\n[\n---\n",
        "---\n- a\n---\n",
        "---\nlicense: {a: b}\n---\n",
        "---\n" + "[" * 60000 + "\n---\n",
    ],
    ids=["empty", "none", "broken", "list", "table", "deep"],
)
def test_cards_that_say_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert records.base_card(tmp_path) == {}


def test_the_tag_of_bits_is_that_of_the_blocks(tmp_path: Path) -> None:
    """Not of the tables, which have 8 bits, nor of scales of small groups."""
    setup = Setup("int3", (*SMALL, "group_size=32"))
    api.quantize(job(save_pico("llama", tmp_path / "base"), setup, tmp_path / "out"))
    assert "3-bit" in ModelCard.load(tmp_path / "out" / "README.md").data.tags


HOSTILE = "<img src=x onerror=alert(1)> [x](javascript:1) `` *b* a|b\n# head"


def test_names_are_shown_as_they_are() -> None:
    shown = records.plain(HOSTILE)
    assert shown == "&lt;img src=x onerror=alert(1)&gt; \\[x\\](javascript:1) \\`\\` \\*b\\* a\\|b \\# head"
    assert records.code(HOSTILE) == f"``` {HOSTILE.replace(chr(10), ' ')} ```" and records.code("int4") == "`int4`"


def test_a_hostile_name_of_a_model_and_of_a_text_is_no_html(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    model = save_pico("llama", tmp_path / name)
    text = tmp_path / "`<script>`.txt"
    text.write_text(Path(__file__).read_text())
    out = tmp_path / "packed"
    done = cli("quantize", str(model), *GPTQ.options(), "--calib", str(text), "--out", str(out))
    assert done.code == 0, done.err
    card = (out / "README.md").read_text()
    assert "# &lt;img src=x onerror=alert(1)&gt;, quantized" in card and name not in card
    assert "`` `<script>`.txt ``" in card
    page = (out / "report.html").read_text()
    assert name not in page and "`<script>`" not in page
