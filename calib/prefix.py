"""Find the tokens that each window of a text begins with: those that the tokenizer puts before a text by itself.

A model that was trained with a begin-of-text token (BOS) before every text is another model without it. `generate` and
tasks put before a prompt what the tokenizer does. So does everything that cuts a text into windows, in each window:
calibration, scores, allocation, caches. What a tokenizer adds behind a text (EOS) is left out, because a running text
does not end where a window does. What already begins with these tokens, as a chat by its template, gets no second ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.errors import CalibrationError, CheckpointError
from compress.model import load
from compress.recipe.schema import Bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = "a"  # a text that shows what a tokenizer adds


@dataclass(frozen=True)
class Prefix:
    """The tokens that each window begins with; often none."""

    tokens: tuple[int, ...] = ()
    text: str = ""  # what the tokenizer calls them
    sentence: str = ""  # what the user is told; "" where the tokenizer adds nothing and nothing else was asked for

    @property
    def unscored(self) -> int:
        """How many of the predicted tokens of a window belong to its prefix: all of that but the first."""
        return max(0, len(self.tokens) - 1)

    def before(self, tokens: list[int]) -> list[int]:
        """Return tokens with the prefix in front, once."""
        count = len(self.tokens)
        return tokens if tuple(tokens[:count]) == self.tokens else [*self.tokens, *tokens]

    def windows(self, tokens: Tensor, seq_len: int) -> Tensor:
        """Cut tokens [n] into windows int64 [count, seq_len]: each the prefix and then text, which do not overlap.

        What follows the last whole window is dropped. Raises CalibrationError for windows without room for text.
        """
        room, count = seq_len - len(self.tokens), len(self.tokens)
        if room < 1:
            raise CalibrationError(
                f"windows of {seq_len} tokens have no room for text behind {self.text}; make them longer"
            )
        if not count:
            windows = len(tokens) // seq_len
            return tokens[: windows * seq_len].view(windows, seq_len).long()
        first = torch.tensor(self.tokens, dtype=tokens.dtype)
        starts, start = [], 0
        while True:
            start += count if torch.equal(tokens[start : start + count], first) else 0
            if start + room > len(tokens):
                break
            starts.append(start)
            start += room
        text = torch.stack([tokens[at : at + room] for at in starts]) if starts else tokens.new_empty(0, room)
        return torch.cat((first.expand(len(text), count), text), 1).long()


NONE = Prefix()


def of_tokenizer(tokenizer: PreTrainedTokenizerBase | Any, bos: Bos = "auto") -> Prefix:
    """Return what windows of a text begin with.

    auto: what the tokenizer puts before a text by itself. never: nothing. always: that, or else its begin-of-text
    token; CalibrationError for a tokenizer that has none.
    """
    added = _tokens_before_text(tokenizer)
    if bos == "never":
        return (
            Prefix(sentence=f"no window begins with {_text(tokenizer, added)}, as bos: never says") if added else NONE
        )
    if added:
        text = _text(tokenizer, added)
        return Prefix(added, text, f"each window begins with {text}, as the tokenizer does")
    if bos == "auto":
        return NONE
    if tokenizer.bos_token_id is None:
        raise CalibrationError("bos: always needs a tokenizer that has a begin-of-text token; leave it at auto")
    tokens = (int(tokenizer.bos_token_id),)
    text = _text(tokenizer, tokens)
    return Prefix(tokens, text, f"each window begins with {text}, as bos: always says")


def of_directory(directory: Path, bos: Bos = "auto") -> Prefix:
    """Return the same for the tokenizer of a checkpoint; nothing is put before the text of a model without one."""
    try:
        tokenizer = load.load_tokenizer(directory)
    except CheckpointError:
        return NONE
    return of_tokenizer(tokenizer, bos)


def _tokens_before_text(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before a text."""
    whole = list(tokenizer(SAMPLE, verbose=False)["input_ids"])
    bare = list(tokenizer(SAMPLE, add_special_tokens=False, verbose=False)["input_ids"])
    for start in range(len(whole) - len(bare) + 1) if bare else ():
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start])
    return tuple(takewhile(set(tokenizer.all_special_ids).__contains__, whole))


def _text(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    return "".join(map(str, tokenizer.convert_ids_to_tokens(list(tokens))))
