"""Chats as text: through the template of the tokenizer, one document a chat, one line for what cannot be read."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from compress.calib.data import token_windows
from compress.errors import CalibrationError
from helpers.pico import EOS_ID, VOCAB_SIZE, pico_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?", "name": None}],
]
WRITTEN = ["[user]Hello?[assistant]Hello.", "[system]Be short.[user]Why?"]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    made = pico_tokenizer()
    made.chat_template = template
    return made


def pico_ids(text: str) -> list[int]:
    return pico_tokenizer()(text, add_special_tokens=False)["input_ids"]


def tokens(source: Path, template: str | None = TEMPLATE) -> list[int]:
    return token_windows(str(source), tokenizer(template), 1, VOCAB_SIZE)[0].flatten().tolist()


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_jsonl(folder: Path) -> Path:
    return lines(folder / "chats.jsonl", [{"messages": chat} for chat in CHATS])


def as_parquet(folder: Path) -> Path:
    datasets.Dataset.from_dict({"messages": CHATS}).to_parquet(folder / "chats.parquet")
    return folder / "chats.parquet"


def as_data_set(folder: Path) -> Path:
    (folder / "set").mkdir()
    as_jsonl(folder / "set")
    return folder / "set"


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, as_data_set])
def test_each_chat_is_a_document(write: Callable[[Path], Path], tmp_path: Path) -> None:
    assert tokens(write(tmp_path)) == [*pico_ids(WRITTEN[0]), EOS_ID, *pico_ids(WRITTEN[1])]


def test_texts_and_chats_may_stand_in_one_file(tmp_path: Path) -> None:
    source = lines(tmp_path / "both.jsonl", [{"text": "plain"}, {"messages": CHATS[0]}, {"text": "x", "messages": 1}])
    assert tokens(source) == [*pico_ids("plain"), EOS_ID, *pico_ids(WRITTEN[0]), EOS_ID, *pico_ids("x")]


USER = {"role": "user", "content": "Hi"}
BAD: dict[str, tuple[Any, str]] = {
    "no list": ("Hi", "line 2: messages is 'Hi', not a list of messages"),
    "empty": ([], "line 2: messages is [], not a list"),
    "no object": ([USER, "Hi"], "line 2, message 2 is 'Hi'"),
    "no content": ([{"role": "user"}], "line 2, message 1: content is None, not text"),
    "no role": ([{"content": "Hi"}], "line 2, message 1: role is None, not text"),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "line 2, message 1: content is ["),
    "result of a tool": ([USER, {"role": "tool", "content": "42"}], "line 2, message 2 is of a tool"),
    "call of a tool": ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "line 2, message 1 is of a tool"),
    "other keys": ([{**USER, "weight": 1}], "line 2, message 1 has 'weight'"),
    "not by the template": ([USER, {"role": "system", "content": "No"}], "(system comes first)"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_chat_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    messages, said = BAD[name]
    source = lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}, {"messages": messages}])
    with pytest.raises(CalibrationError) as raised:
        tokens(source)
    assert said in str(raised.value) and str(raised.value).startswith(f"{source}, line 2")


def test_a_tokenizer_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"line 1 is a chat, and the tokenizer has no chat template; give texts"):
        tokens(as_jsonl(tmp_path), template=None)


def test_a_template_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="line 1: the chat template does not take these messages"):
        tokens(as_jsonl(tmp_path), template="{% for %}")


HOSTILE = {  # what a template does -> what is said of it
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "loops in loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "lines"),
    "words without end": ("{{ lipsum(n=10**9) }}", "it runs for more than 2,000,000 lines"),
    "slices without end": ("{{ messages | slice(10**9) | list }}", "it runs for more than 2,000,000 lines"),
    "a long text": ("{{ 'a' * 10**12 }}", "MemoryError"),
    "a text that doubles": (
        "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "MemoryError",
    ),
    "a division": ("{{ 1 // 0 }}", "integer division or modulo by zero"),
    "an overflow": ("{{ 2.0 ** 5000 }}", "out of range"),
    "a macro of itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "an assertion": ("{{ messages | batch(0) | list }}{{ 1 / 0 }}", "division"),
    "what the sandbox keeps": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "a number that cannot be written": ("{{ 10 ** 5000 }}", "limit"),
    "an unknown filter": ("{{ messages | nothing }}", "nothing"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_one_line(name: str, tmp_path: Path) -> None:
    template, said = HOSTILE[name]
    limits, begun = resource.getrlimit(resource.RLIMIT_AS), time.process_time()
    with pytest.raises(CalibrationError) as raised:
        tokens(as_jsonl(tmp_path), template=template)
    line = str(raised.value)
    assert "line 1: the chat template does not take these messages" in line and said in line and "\n" not in line
    assert time.process_time() - begun < 20
    assert resource.getrlimit(resource.RLIMIT_AS) == limits and sys.gettrace() is None


def test_a_long_chat_is_within_the_limits(tmp_path: Path) -> None:
    chat = [USER, {"role": "assistant", "content": "Yes."}] * 5000
    assert len(tokens(lines(tmp_path / "chats.jsonl", [{"messages": chat}]))) > 10_000
