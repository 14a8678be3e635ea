"""Let checkpoints continue prompts: one a prompt of the user's, or a model and its original texts, side by side.

Side by side both write greedily, all prompts as one batch, for people to read. A figure is not made of it: texts part
at the first token that differs, and what follows need not be worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compress.calib import prefix
from compress.errors import CalibrationError, shown
from compress.evaluate.cache_candidates import open_reader
from compress.evaluate.reader import Execution
from compress.kv import fused
from compress.kv.fused import CacheReads
from compress.kv.settings import CacheSettings
from compress.model import load as lm
from compress.model import writing
from compress.model.architectures import max_positions
from compress.progress import silent

HALF_LETTER = "\ufffd"  # stands for a letter whose other bytes are those of other tokens
SHOWN_PROMPTS, SHOWN_PROMPT_TOKENS, SHOWN_NEW_TOKENS = 3, 32, 48


class Continuation(NamedTuple):
    """What a model has written."""

    text: str
    cache: CacheReads | None  # how its compressed cache was read; None without one


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

    def load() -> PreTrainedModel:
        return lm.load_model(directory, dtype, device)

    return _continue_prompt(directory, load, prompt, max_new_tokens, temperature, seed)


def write_through_cache(
    directory: Path,
    prompt: str,
    max_new_tokens: int,
    draw: tuple[float, int],
    device: str,
    caches: Mapping[str, CacheSettings],
    calib: str | None,
) -> Continuation:
    """Return what a model writes through one cache; draw: temperature and seed; calib: text for a calibrated cache.

    Without any in `caches` it is the checkpoint's own.
    """

    def load() -> PreTrainedModel:
        model: PreTrainedModel = open_reader(directory, Execution("auto", device), caches, calib, silent).model
        return model

    return _continue_prompt(directory, load, prompt, max_new_tokens, *draw)


def _continue_prompt(
    directory: Path,
    load: Callable[[], PreTrainedModel],
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Continuation:
    """Return the same of the model that `load` gives, which is called once the prompt is known to have tokens."""
    ids, tokenizer = prompt_ids(directory, prompt), lm.load_tokenizer(directory)
    model = load()
    draw = writing.Draw(directory.name, temperature, torch.Generator().manual_seed(seed))
    whole = writing.write(model, torch.tensor([ids]), max_new_tokens, draw, stop=writing.end_tokens(model))[0].tolist()
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return Continuation(text_behind(decode, whole, len(ids)), fused.reads_of_model(model))


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
