"""Every window begins with what the tokenizer puts before a text by itself, once, and is text behind that."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from compress.calib import data, prefix
from compress.calib.data import roll_windows, self_generated, token_windows
from compress.errors import CalibrationError, CheckpointError
from compress.importers import open_checkpoint
from compress.model.skeleton import Skeleton
from compress.run import demands
from helpers.pico import EOS_ID, VOCAB_SIZE, beginning, pico_tokenizer, save_pico
from helpers.runs import SMALL, TEXT, Setup, job

ROOT = Path(__file__).parents[2]
TOKENIZING = {
    "calib/data.py",
    "compress/evaluate/generation.py",
    "compress/evaluate/items.py",
    "compress/model/pairs.py",
}
BOS_ID = EOS_ID + 1
SAID = "each window begins with <bos>, as the tokenizer does"


def ids(text: str) -> list[int]:
    return list(pico_tokenizer()(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of 1000 tokens."""
    characters = filter(str.isascii, TEXT.read_text(encoding="utf-8"))
    path = tmp_path / "text.txt"
    path.write_text("".join(characters)[:1000], encoding="utf-8")
    return path


def test_what_a_tokenizer_puts_before_a_text_is_found_and_what_it_puts_behind_is_not() -> None:
    assert prefix.of_tokenizer(pico_tokenizer()) == prefix.NONE
    assert prefix.of_tokenizer(beginning(pico_tokenizer(), "<bos>")) == prefix.Prefix((BOS_ID,), "<bos>", SAID)
    both = beginning(pico_tokenizer(), "<bos>", end="<eos>")
    assert both("ab")["input_ids"] == [BOS_ID, *ids("ab"), EOS_ID]
    assert prefix.of_tokenizer(both).tokens == (BOS_ID,)
    two = prefix.of_tokenizer(beginning(pico_tokenizer(), "<first>", "<bos>"))
    assert (len(two.tokens), two.text, two.unscored) == (2, "<first><bos>", 1)
    only_end = beginning(pico_tokenizer(), "<bos>", end="<eos>")
    only_end.backend_tokenizer.post_processor = type(only_end.backend_tokenizer.post_processor)(
        single="$A <eos>", pair="$A $B", special_tokens=[("<eos>", EOS_ID)]
    )
    assert prefix.of_tokenizer(only_end) == prefix.NONE


@pytest.mark.parametrize("before", [("<bos>",), ("<first>", "<bos>")])
def test_windows_are_the_prefix_and_text_that_goes_on(text: Path, before: tuple[str, ...]) -> None:
    tokenizer = beginning(pico_tokenizer(), *before)
    first = list(prefix.of_tokenizer(tokenizer).tokens)
    windows, count = token_windows(text, tokenizer, 16, VOCAB_SIZE)
    room = 16 - len(first)
    assert count == 1000 and len(windows) == 1000 // room
    assert windows[:, : len(first)].tolist() == [first] * len(windows)
    assert windows[:, len(first) :].flatten().tolist() == ids(text.read_text())[: len(windows) * room]


def test_without_a_prefix_windows_have_the_bytes_of_the_text(text: Path) -> None:
    windows, _ = token_windows(text, pico_tokenizer(), 16, VOCAB_SIZE)
    assert windows.dtype == torch.int64 and windows.flatten().tolist() == ids(text.read_text())[: 1000 // 16 * 16]


def test_a_window_that_has_the_prefix_gets_no_second_one(tmp_path: Path) -> None:
    """As chats have, which begin with it by their template."""
    tokenizer = beginning(pico_tokenizer(), "<bos>")
    tokenizer.chat_template = "<bos>{{ messages[0]['content'] }}"
    chats = [{"messages": [{"role": "user", "content": "abcdef"}]}, {"messages": [{"role": "user", "content": "gh"}]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    windows, count = token_windows(tmp_path / "chats.jsonl", tokenizer, 4, VOCAB_SIZE)
    assert count == len("bABCDEFeBgh")
    assert windows.tolist() == [
        [BOS_ID, *ids("abc")],
        [BOS_ID, *ids("def")],
        [BOS_ID, EOS_ID, BOS_ID, *ids("g")],
    ]
    assert prefix.of_tokenizer(tokenizer).before([BOS_ID, 3]) == [BOS_ID, 3]
    assert prefix.of_tokenizer(tokenizer).before([]) == [BOS_ID]


def test_never_and_always(text: Path) -> None:
    plain, begun = pico_tokenizer(), beginning(pico_tokenizer(), "<bos>")
    never = prefix.of_tokenizer(begun, "never")
    assert (never.tokens, never.sentence) == ((), "no window begins with <bos>, as bos: never says")
    assert prefix.of_tokenizer(plain, "never") == prefix.NONE
    bare, _ = token_windows(text, plain, 16, VOCAB_SIZE)
    assert torch.equal(token_windows(text, begun, 16, VOCAB_SIZE, bos="never")[0], bare)
    with pytest.raises(CalibrationError, match="needs a tokenizer that has a begin-of-text token"):
        prefix.of_tokenizer(plain, "always")
    plain.bos_token = "<eos>"
    assert prefix.of_tokenizer(plain) == prefix.NONE
    assert prefix.of_tokenizer(plain, "always").tokens == (EOS_ID,)
    assert prefix.of_tokenizer(begun, "always").tokens == (BOS_ID,)


def test_windows_without_room_and_a_prefix_of_another_model_are_refused(text: Path) -> None:
    tokenizer = beginning(pico_tokenizer(), "<bos>")
    with pytest.raises(CalibrationError, match="windows of 1 tokens have no room for text behind <bos>"):
        token_windows(text, tokenizer, 1, VOCAB_SIZE)
    with pytest.raises(CheckpointError, match=f"gives token {BOS_ID}, the model knows {BOS_ID}"):
        token_windows(text, tokenizer, 16, BOS_ID)


def test_copies_are_shifted_behind_the_prefix(text: Path) -> None:
    tokenizer = beginning(pico_tokenizer(), "<bos>")
    found = data.expand_copies(data.calibration(text, tokenizer, 2, 9, 0, VOCAB_SIZE), 2)
    assert found.tokens[:, 0].tolist() == [BOS_ID] * 4
    assert torch.equal(found.tokens[:, 1:], roll_windows(found.tokens[::2, 1:], 2))
    assert found.facts()["begins_with"] == "<bos>"


def test_text_that_a_model_writes_begins_with_the_prefix(tmp_path: Path) -> None:
    """Whatever config.json says; where the tokenizer adds nothing, that decides (test_calib_self_generated.py)."""
    folder = save_pico("llama", tmp_path / "m")
    beginning(pico_tokenizer(), "<first>", "<bos>").save_pretrained(folder)
    found = self_generated(folder, 3, 8, 0)
    first = prefix.of_directory(folder)
    assert found.tokens.shape == (3, 8) and found.tokens[:, :2].tolist() == [list(first.tokens)] * 3
    assert found.prefix == first and found.facts()["begins_with"] == "<first><bos>"
    with pytest.raises(CalibrationError, match="never needs a text, .* give --calib"):
        self_generated(folder, 3, 8, 0, bos="never")


def test_a_folder_of_text_begins_as_a_file_does(tmp_path: Path) -> None:
    """A data set may be a folder; one of sound begins with nothing."""
    model = save_pico("llama", tmp_path / "m")
    beginning(pico_tokenizer(), "<bos>").save_pretrained(model)
    asked = dataclasses.replace(job(model, Setup("int4", SMALL), tmp_path / "out"), calib=str(tmp_path))
    assert demands._prefix(asked, Skeleton(open_checkpoint(model)), 1).tokens == (BOS_ID,)


def test_one_place_says_what_begins_a_window() -> None:
    """No other source turns text into tokens, but for whole texts that encoders compare."""
    folders = [ROOT / "compress", ROOT / "calib"]
    said = re.compile(r"add_special_tokens|\btokenizer\(")
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*.py")
        if said.search(path.read_text(encoding="utf-8")) and not path.is_relative_to(ROOT / "compress" / "calib")
    }
    assert found - {
        "compress/evaluate/encoders.py",
        "compress/export/targets/gguf/vocabulary.py",
        "compress/model/load.py",
        "compress/model/gguf_names.py",
    } == (TOKENIZING)
