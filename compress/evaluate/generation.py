"""Let checkpoints continue prompts: one a prompt of the user's, or a model and its original texts, side by side.

Side by side both write greedily, all prompts as one batch, for people to read. A figure is not made of it: texts part
at the first token that differs, and what follows need not be worse.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from compress.calib import chats, prefix
from compress.errors import CalibrationError, CheckpointError, first_line, shown
from compress.evaluate.cache_candidates import open_reader
from compress.evaluate.reader import Execution
from compress.kv import fused
from compress.kv import generation as kv_generation
from compress.kv.fused import CacheReads
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.model import writing
from compress.model.architectures import max_positions
from compress.progress import silent
from compress.speculate.generation import Speculation
from compress.speculate.statistics import Statistics
from compress.storage.files import read_text

MIN_ANSWER_TOKENS = 16  # a chat with less room for the next answer is full
HALF_LETTER = "\ufffd"  # stands for a letter whose other bytes are those of other tokens
SHOWN_PROMPTS, SHOWN_PROMPT_TOKENS, SHOWN_NEW_TOKENS = 3, 32, 48


class Continuation(NamedTuple):
    """What a model has written."""

    text: str
    cache: CacheReads | None  # how its compressed cache was read; None without one
    drafts: Statistics | None = None  # what was drafted and accepted; None where nothing was to be


def generate(
    model_directory: str | Path,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "cpu",
) -> str:
    """Return the text with which the model continues the prompt, without the prompt, up to its end of text.

    temperature 0 takes the likeliest token each time; above that tokens are drawn, seeded by `seed`. The generation
    settings stored with the checkpoint do not count.
    """
    return write(model_directory, prompt, max_new_tokens, temperature, seed, dtype, device).text


def write(
    model_directory: str | Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str,
    device: str,
) -> Continuation:
    """Return what `generate` does, and how the checkpoint's own cache was read."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} is not positive")
    if temperature < 0:
        raise ValueError(f"temperature {temperature} is negative")
    directory = Path(model_directory)
    ids = prompt_ids(directory, prompt)
    writer = open_writer(directory, Style(max_new_tokens, temperature, seed), device, dtype)
    return writer.write(ids)


class Style(NamedTuple):
    """How a model writes."""

    max_new_tokens: int = 64
    temperature: float = 0.0  # 0: the likeliest token each time
    seed: int = 0  # of each text by itself
    tokens: writing.Filter = writing.Filter()  # that may be drawn


@dataclass
class TextWriter:
    """A loaded model that continues token ids in a style."""

    model: Any
    tokenizer: Any
    style: Style
    name: str
    draft: Any = None  # a smaller model whose tokens the first one checks
    speculation: Speculation | None = None  # the model drafts for itself

    def write(self, ids: list[int], tell: Callable[[str], None] | None = None) -> Continuation:
        """Return what follows the ids; tell: is given the text piece by piece."""
        whole = self.continue_ids(ids, tell)
        drafts = None if self.speculation is None else self.speculation.statistics
        return Continuation(self.text(whole, len(ids)), fused.reads_of_model(self.model), drafts)

    def continue_ids(self, ids: list[int], tell: Callable[[str], None] | None = None, cache: Any = None) -> list[int]:
        """Return the ids and those that follow; cache: of the first of them. Raises CompressError."""
        more: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        if tell is not None:
            more["streamer"] = Stream(self.text, tell)
        if self.draft is not None:
            more["assistant_model"] = self.draft
        style = self.style
        generator = torch.Generator().manual_seed(style.seed)
        kind = writing.Draw if self.speculation is None else writing.Law
        draw = kind(self.name, style.temperature, generator, tokens=style.tokens)
        if self.speculation is not None:
            self.speculation.generator, self.speculation.streamer = generator, more.get("streamer")
            more["custom_generate"] = self.speculation
        stop, start = writing.end_tokens(self.model), torch.tensor([ids])
        written: list[int] = writing.write(self.model, start, style.max_new_tokens, draw, stop, **more)[0].tolist()
        return written

    def text(self, tokens: Sequence[int], count: int) -> str:
        """Return the text of the tokens behind the first `count`."""
        return text_behind(partial(self.tokenizer.decode, skip_special_tokens=True), tokens, count)


class Stream:
    """What `generate` of transformers takes for a streamer: tells the text of new tokens, whole letters only."""

    def __init__(self, decode: Callable[[Sequence[int], int], str], tell: Callable[[str], None]) -> None:
        self.decode, self.tell = decode, tell
        self.tokens, self.begun, self.told = list[int](), 0, ""

    def put(self, value: Tensor) -> None:
        """Take the prompt at first, and then what follows it, a token or several."""
        self.tokens += value.flatten().tolist()
        if not self.begun:
            self.begun = len(self.tokens)
        elif not (text := self.decode(self.tokens, self.begun)).endswith(HALF_LETTER):
            self._tell(text)

    def end(self) -> None:
        """Tell what is left."""
        self._tell(self.decode(self.tokens, self.begun))

    def _tell(self, text: str) -> None:
        if text.startswith(self.told) and text != self.told:
            self.tell(text[len(self.told) :])
            self.told = text


def open_writer(
    directory: Path,
    style: Style,
    device: str = "cpu",
    dtype: str = "auto",
    caches: Mapping[str, CacheSettings] | None = None,
    calib: str | None = None,
    draft: Path | None = None,
) -> TextWriter:
    """Load a model that writes, through its own cache or through the one in `caches`; draft: a model that helps it.

    calib: text for a cache that is calibrated. Raises CompressError.
    """
    tokenizer = lm.load_tokenizer(directory)
    if draft is not None and lm.load_tokenizer(draft).get_vocab() != tokenizer.get_vocab():
        raise CheckpointError(f"--draft {draft} has other tokens than {directory}; give a model of the same family")
    if caches is None:
        model: Any = lm.load_model(directory, dtype, device)
    else:
        model = open_reader(directory, Execution("auto", device), caches, calib, silent).model
    if draft is not None and hasattr(model, "kv_cache"):
        raise CheckpointError(f"{directory} writes through a compressed cache, which takes no --draft; leave it out")
    helper = None if draft is None else lm.load_model(draft, dtype, device)
    return TextWriter(model, tokenizer, style, directory.name, helper)


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str) -> list[int]:
    """Return the token ids of a chat up to where the model answers, by the template of its tokenizer.

    messages: "role" and "content" of each. where: they stand, for errors. Raises CalibrationError for a model without a
    template, or messages that it refuses.
    """
    if not tokenizer.chat_template:
        raise CalibrationError(
            "the tokenizer has no chat template; use `compress generate --prompt`, or put the model's "
            "chat_template.jinja beside its tokenizer"
        )
    text = chats.writer(tokenizer, True)(list(messages), where)
    return cast(list[int], tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"])


class Conversation:
    """A chat with a model: the messages so far, and one cache of the tokens that it has read, turn after turn.

    A template that writes an earlier turn in another way than it was read, for example without its thinking, makes the
    model read the conversation anew.
    """

    def __init__(self, writer: TextWriter, system: str | None = None) -> None:
        self.writer, self.system = writer, system
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.known, self.cache = list[int](), self._new_cache()
        self.read, self.written, self.seconds = 0, 0, 0.0

    def say(self, text: str, tell: Callable[[str], None] | None = None) -> str:
        """Return the model's answer to a message, which is told piece by piece; CalibrationError where none fits.

        The message is taken back where there is an error.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = chat_ids(self.writer.tokenizer, messages, "this conversation")
        positions, style = max_positions(self.writer.model.config.get_text_config()), self.writer.style
        room = style.max_new_tokens if positions is None else min(style.max_new_tokens, positions - len(ids))
        if room < min(MIN_ANSWER_TOKENS, style.max_new_tokens):
            raise CalibrationError(f"{len(ids)} of {positions} positions are taken; /reset begins anew")
        if not self.known or self.known != ids[: len(self.known)] or len(self.known) >= len(ids):
            self.known, self.cache = [], self._new_cache()
        self.read, begun = len(ids) - len(self.known), time.perf_counter()
        self.known = []  # what was read is not known where the answer is interrupted
        writer = dataclasses.replace(self.writer, style=style._replace(max_new_tokens=room))
        whole = writer.continue_ids(ids, tell, self.cache)
        self.seconds, self.written = time.perf_counter() - begun, len(whole) - len(ids)
        self.known = whole[: self.cache.get_seq_length()]
        answer = self.writer.text(whole, len(ids))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def stats(self) -> dict[str, Any]:
        """Return tokens of the conversation and of the last answer, its rate, and the bytes of the cache."""
        speculation = self.writer.speculation
        return {
            "tokens": self.cache.get_seq_length(),
            "read": self.read,
            "written": self.written,
            "tokens per second": round(self.written / self.seconds, 2) if self.seconds else None,
            "cache bytes": sum(map(_nbytes, self.cache.layers)),
            "compressed cache": hasattr(self.writer.model, "kv_cache"),
            **({} if speculation is None else {"drafts": speculation.statistics.plain()}),
        }

    def _new_cache(self) -> Any:
        model = self.writer.model
        return kv_generation.fresh(model) if hasattr(model, "kv_cache") else DynamicCache(config=model.config)


def _nbytes(layer: Any) -> int:
    """Return the bytes of one layer of a cache."""
    if hasattr(layer, "nbytes"):
        return int(layer.nbytes().total)
    parts = [getattr(layer, name, None) for name in ("keys", "values")]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def read_prompts(file: Path) -> list[str | list[dict[str, Any]]]:
    """Return the prompts of a file, one a line: text, or JSON of a text, of {"prompt": ...} or {"messages": [...]}.

    Empty lines are passed over. Raises CalibrationError.
    """
    try:
        lines = read_text(file).splitlines()
    except (OSError, ValueError) as error:
        raise CalibrationError(f"cannot read {file} ({first_line(error)}); give a text in UTF-8") from error
    prompts = [_prompt(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise CalibrationError(f"{file} has no prompts; give one a line")
    return prompts


def _prompt(line: str, where: str) -> str | list[dict[str, Any]]:
    """Return the prompt that a line of a file holds."""
    if line.lstrip()[0] not in '{"':
        return line
    try:
        entry = json.loads(line)
    except ValueError:
        return line  # text that begins like JSON
    value = entry.get("messages", entry.get("prompt")) if isinstance(entry, dict) else entry
    is_chat = isinstance(value, list) and value and all(isinstance(each, dict) and "role" in each for each in value)
    if not isinstance(value, str) and not is_chat:
        raise CalibrationError(f'{where} is neither a text nor {{"prompt": ...}} nor {{"messages": [...]}}')
    return cast(Any, value)


def text_behind(decode: Callable[[Sequence[int]], Any], tokens: Sequence[int], count: int) -> str:
    """Return the text of tokens behind the first `count`; decode: token ids to text.

    All are decoded together: some tokenizers drop the space before a first word. A letter that the first ones begin and
    the others end is part of it.
    """
    whole, start = decode(tokens), decode(tokens[:count]).rstrip(HALF_LETTER)
    return str(whole[len(start) :] if whole.startswith(start) else decode(tokens[count:]))


def prompt_ids(directory: Path, prompt: str, is_first: bool = True) -> list[int]:
    """Return the token ids of a prompt; one that goes on from another gets no tokens that begin a text.

    Raises CalibrationError for what is no Unicode text or has no tokens.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # bytes of the command line, or half a pair
        raise CalibrationError(f"the prompt {shown(prompt)} is not Unicode text; give it in UTF-8")
    tokenizer = lm.load_tokenizer(directory)
    ids = cast(list[int], tokenizer(prompt, verbose=False, add_special_tokens=False)["input_ids"])
    ids = prefix.of_tokenizer(tokenizer).before(ids) if is_first else ids
    if not ids:
        raise CalibrationError(f"the prompt {shown(prompt)} has no tokens; give at least one word")
    return ids


def continue_side_by_side(
    base: Any, model: Any, windows: Sequence[Tensor], decode: Callable[[Sequence[int]], str]
) -> list[dict[str, str]]:
    """Return "prompt", "base" and "model", what both write behind it, for a few windows.

    windows: for each text int64 [windows, tokens], of at least two tokens; texts take turns. model: with the cache that
    it is to write through attached.
    """
    first = [each[turn] for turn in range(SHOWN_PROMPTS) for each in windows if turn < len(each)][:SHOWN_PROMPTS]
    if not first:
        return []
    length = min(SHOWN_PROMPT_TOKENS, min(map(len, first)) // 2)
    start = torch.stack([window[:length] for window in first])
    prompts = [decode(tokens) for tokens in start.tolist()]
    by_base, by_model = (_continue_rows(each, start, decode) for each in (base, model))
    rows = zip(prompts, by_base, by_model, strict=True)
    return [{"prompt": prompt, "base": a, "model": b} for prompt, a, b in rows]


def _continue_rows(model: Any, start: Tensor, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return what a model writes behind each row of start int64 [rows, tokens]."""
    stop, positions = writing.end_tokens(model), max_positions(model.config.get_text_config())
    new = SHOWN_NEW_TOKENS if positions is None else min(SHOWN_NEW_TOKENS, positions - start.shape[1])
    draw = writing.Draw(str(model.name_or_path), 0.0, torch.Generator())
    rows = writing.write(model, start, new, draw, stop).tolist()
    return [text_behind(decode, row, start.shape[1]) for row in rows]
