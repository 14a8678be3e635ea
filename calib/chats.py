"""Write chats as the text that a model reads: through the chat template of its tokenizer, whose cost is limited.

A template is a program that a checkpoint brings along, run in the sandbox of jinja2, which keeps it from files and
code. The sandbox limits a range to 100,000 numbers, and nothing else: loops in loops run for ever, and texts that
double fill the memory. Here the lines that a template runs are counted, and what the process may allocate meanwhile
is limited.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from compress.errors import CalibrationError, first_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMN = "messages"  # the field of a chat
MESSAGE_KEYS = {"role", "content"}  # others (calls of tools) would be lost, or are not known to templates

Writer = Callable[[Any, str], str]  # (messages, where they stand) -> text


def writer(tokenizer: PreTrainedTokenizerBase, is_answered: bool = False) -> Writer:
    """Return what turns messages, a list of {"role": ..., "content": ...}, into one text.

    is_answered: up to where the model answers.

    It raises CalibrationError, which begins with where the messages stand, for anything else, and for a tokenizer
    without a template.
    """

    def write_chat(messages: Any, where: str) -> str:
        _check(messages, where)
        if not tokenizer.chat_template:
            raise CalibrationError(
                f'{where} is a chat, and the tokenizer has no chat template; give texts ({{"text": ...}}), or put the '
                "model's chat_template.jinja beside its tokenizer"
            )
        try:
            with limit_template():
                return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_answered))
        except Exception as error:  # noqa: BLE001  (a template is a program, which may raise anything)
            raise CalibrationError(
                f"{where}: the chat template does not take these messages ({first_line(error)}); correct them"
            ) from error

    return write_chat


def _check(messages: Any, where: str) -> None:
    """Raise CalibrationError for what is not a list of messages of text."""
    if not isinstance(messages, list) or not messages:
        raise CalibrationError(f"{where}: {COLUMN} is {shown(messages)}, not a list of messages")
    for number, message in enumerate(messages, 1):
        here = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise CalibrationError(f'{here} is {shown(message)}, not {{"role": ..., "content": ...}}')
        given = {key for key, value in message.items() if value is not None}
        if message.get("role") == "tool" or "tool_calls" in given:
            raise CalibrationError(f"{here} is of a tool; only chats of text are read, leave such chats out")
        if unknown := sorted(map(str, given - MESSAGE_KEYS)):
            raise CalibrationError(f"{here} has {shown(unknown[0])}; only role and content are read")
        for key in sorted(MESSAGE_KEYS):
            if not isinstance(message.get(key), str):
                raise CalibrationError(f"{here}: {key} is {shown(message.get(key))}, not text")


MAX_TEMPLATE_LINES = 2_000_000  # a long chat takes some 30 for each message
MAX_TEMPLATE_NBYTES = 512 << 20  # beside what the process has
TEMPLATE, LIBRARY = "<template>", f"{os.sep}jinja2{os.sep}"  # files whose lines are counted


class TemplateLimitError(RuntimeError):
    """A template has run for too long."""


@contextmanager
def limit_template() -> Iterator[None]:
    """Raise TemplateLimitError within for a template that runs too many lines, MemoryError for one that grows."""
    lines, former = 0, sys.gettrace()

    def count_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if event == "call" and frame.f_code.co_filename != TEMPLATE and LIBRARY not in frame.f_code.co_filename:
            return None
        lines += 1
        if lines > MAX_TEMPLATE_LINES:
            raise TemplateLimitError(f"it runs for more than {MAX_TEMPLATE_LINES:,} lines")
        return count_line

    with _limit_memory():
        sys.settrace(count_line)
        try:
            yield
        finally:
            sys.settrace(former)


@contextmanager
def _limit_memory() -> Iterator[None]:
    """Limit what the process may allocate, where the system says what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    has = None
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    if has is None or (soft != resource.RLIM_INFINITY and soft <= has + MAX_TEMPLATE_NBYTES):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (has + MAX_TEMPLATE_NBYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
