"""Compare the tokenizers of a compressed model and of its original: the same text must give the same tokens.

A checkpoint with another tokenizer loads, runs and has the same weights. Only what it reads is not what it was trained
on, which no comparison on equal tokens shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compress.calib import prefix
from compress.errors import shown
from compress.evaluate.reader import Reader
from compress.evaluate.scores import positions
from compress.model.positions import max_positions

TOKENIZED_CHARACTERS = 4000
READ_CHARACTERS = 800


def encode_with(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that gives the tokens of a text, no special ones added."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def difference(base: Any, tokenizer: Any, text: str) -> str:
    """Return a clause on how a tokenizer differs from the original's; "" where it does not. text: to try both on."""
    vocabularies = [dict(each.get_vocab()) for each in (base, tokenizer)]
    first, second = vocabularies
    if len(first) != len(second):
        return f"it has {len(second):,} tokens, the original {len(first):,}"
    moved = sorted(token for token, number in first.items() if second.get(token, number) != number)
    absent = sorted(token for token in first if token not in second)
    if absent:
        return f"{len(absent):,} of its {len(first):,} tokens are not the original's, which has {shown(absent[0])}"
    if moved:
        token = moved[0]
        return (
            f"{len(moved):,} of its {len(first):,} tokens have other ids: {shown(token)} is {second[token]}, "
            f"{first[token]} in the original"
        )
    ids = [encode_with(each)(text[:TOKENIZED_CHARACTERS]) for each in (base, tokenizer)]
    if ids[0] != ids[1]:
        place = next((i for i, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), min(map(len, ids)))
        return (
            f"it splits the text otherwise from token {place + 1} on ({len(ids[1])} tokens, {len(ids[0])} originally)"
        )
    begins = [list(each("a", verbose=False)["input_ids"]) for each in (base, tokenizer)]
    if begins[0] != begins[1]:
        return f"it puts other tokens around a text: 'a' is {begins[1]}, {begins[0]} in the original"
    return ""


def finding(base: Any, tokenizer: Any, model: Any, text: str) -> str:
    """Return a sentence on a tokenizer that is not the original's; "" where it is.

    It says what the difference does: how well the model reads the text through either.
    """
    clause = difference(base, tokenizer, text)
    if not clause:
        return ""
    through = [_nats_per_byte(model, each, text[:READ_CHARACTERS]) for each in (tokenizer, base)]
    read = ""
    if through[0] is not None and through[1] is not None:
        read = (
            f"; through it the model reads the text at {through[0]:.2f} nats a byte, through the original's at "
            f"{through[1]:.2f}"
        )
    advice = ""
    if through[0] is None or (through[1] is not None and through[0] > through[1] + 0.01):
        advice = "; put the tokenizer files of the original in its place"
    return f"the tokenizer is not the original's: {clause}{read}{advice}"


def _nats_per_byte(model: Any, tokenizer: Any, text: str) -> float | None:
    """Return the negative log-likelihood per byte; None where the tokens are not the model's, or too few."""
    config, begun = model.config.get_text_config(), prefix.of_tokenizer(tokenizer)
    ids = begun.before(encode_with(tokenizer)(text))
    if not 2 <= len(ids) <= (max_positions(config) or len(ids)) or max(ids) >= config.vocab_size:
        return None
    nll = positions([Reader(model, name=str(model.name_or_path))], torch.tensor([ids]))[0, begun.unscored :]
    return float(nll.sum()) / len(text.encode())
