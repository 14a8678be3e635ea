"""Write chats as the text that a model reads: through the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compress.calib import template_limits
from compress.errors import CalibrationError, first_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMN = "messages"  # the field of a chat
KEYS = {"role", "content"}  # of a message; others (calls of tools) would be lost, or are not known to templates

Writer = Callable[[Any, str], str]  # (messages, where they stand) -> text


def writer(tokenizer: PreTrainedTokenizerBase) -> Writer:
    """Return what turns messages, a list of {"role": ..., "content": ...}, into one text.

    It raises CalibrationError, which begins with where the messages stand, for anything else, and for a tokenizer
    without a template.
    """

    def written(messages: Any, where: str) -> str:
        _check(messages, where)
        if not tokenizer.chat_template:
            raise CalibrationError(
                f'{where} is a chat, and the tokenizer has no chat template; give texts ({{"text": ...}}), or put the '
                "model's chat_template.jinja beside its tokenizer"
            )
        try:
            with template_limits.limited():
                return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # noqa: BLE001  (a template is a program, which may raise anything)
            raise CalibrationError(
                f"{where}: the chat template does not take these messages ({first_line(error)}); correct them"
            ) from error

    return written


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
        if unknown := sorted(map(str, given - KEYS)):
            raise CalibrationError(f"{here} has {shown(unknown[0])}; only role and content are read")
        for key in sorted(KEYS):
            if not isinstance(message.get(key), str):
                raise CalibrationError(f"{here}: {key} is {shown(message.get(key))}, not text")
