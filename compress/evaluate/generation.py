"""Let a checkpoint continue a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from compress.calib import prefix
from compress.errors import CalibrationError, shown
from compress.kv import fused
from compress.kv.fused import CacheReads
from compress.model import load as lm
from compress.model import writing

HALF = "\ufffd"  # in the place of a letter whose other bytes are those of other tokens


class Written(NamedTuple):
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
    return written(model_directory, prompt, max_new_tokens, temperature, seed, dtype, device).text


def written(
    model_directory: str | Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str,
    device: str,
) -> Written:
    """Return what `generate` does, and how the checkpoint's own cache was read."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens} is not positive")
    if temperature < 0:
        raise ValueError(f"temperature {temperature} is negative")
    directory = Path(model_directory)

    def load() -> PreTrainedModel:
        return lm.load_model(directory, dtype, device)

    return continued(directory, load, prompt, max_new_tokens, temperature, seed)


def continued(
    directory: Path,
    load: Callable[[], PreTrainedModel],
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Written:
    """Return the same of the model that `load` gives, which is called once the prompt is known to have tokens."""
    ids, tokenizer = prompt_ids(directory, prompt), lm.load_tokenizer(directory)
    model = load()
    draw = writing.Draw(directory.name, temperature, torch.Generator().manual_seed(seed))
    found = writing.write(model, torch.tensor([ids]), max_new_tokens, draw, stop=writing.end_tokens(model))[0].tolist()
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return Written(text_behind(decode, found, len(ids)), fused.reads_of_model(model))


def text_behind(decode: Callable[[Sequence[int]], Any], tokens: Sequence[int], count: int) -> str:
    """Return the text of tokens behind the first `count`; decode: token ids to text.

    All are decoded together: some tokenizers drop the space before a first word. A letter that the first ones begin and
    the others end is part of it.
    """
    whole, start = decode(tokens), decode(tokens[:count]).rstrip(HALF)
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
