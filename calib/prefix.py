"""Find the tokens that each window of a text begins with: those that the tokenizer puts before a text by itself.

A model that was trained with a begin-of-text token (BOS) before every text is another model without it. `generate` and
tasks put before a prompt what the tokenizer does. So does everything that cuts a text into windows, in each window:
calibration, scores, allocation, caches. What a tokenizer adds behind a text (EOS) is left out, because a running text
does not end where a window does. What already begins with these tokens, as a chat by its template, gets no second ones.

A model that reads whole texts, such as an encoder, gets windows that end as the tokenizer ends a text. One that scores
pairs of texts gets pairs, parted as the tokenizer parts them: the first text is short, as a question is, and the second
is what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.errors import CalibrationError, CheckpointError
from compress.model import architectures, load, pairs
from compress.model.pairs import Template
from compress.recipe.schema import Bos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_SHARES = (16, 8, 4)  # the first text of a pair has one of so many tokens of a window, in turn


@dataclass(frozen=True)
class Prefix:
    """The tokens that each window begins with; often none."""

    tokens: tuple[int, ...] = ()
    text: str = ""  # what the tokenizer calls them
    sentence: str = ""  # what the user is told; "" where the tokenizer adds nothing and nothing else was asked for
    between: tuple[int, ...] = ()  # the tokens between the two texts of a window; none: it has one text
    behind: tuple[int, ...] = ()  # the tokens that each window ends with

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
        room, count = seq_len - len(self.tokens) - len(self.between) - len(self.behind), len(self.tokens)
        if room < (2 if self.between else 1):
            raise CalibrationError(
                f"windows of {seq_len} tokens have no room for text behind {self.text}; make them longer"
            )
        if room == seq_len:
            windows = len(tokens) // seq_len
            return tokens[: windows * seq_len].view(windows, seq_len).long()
        first = torch.tensor(self.tokens, dtype=tokens.dtype)
        starts, start = [], 0
        while True:
            start += count if count and torch.equal(tokens[start : start + count], first) else 0
            if start + room > len(tokens):
                break
            starts.append(start)
            start += room
        made = [self._around(tokens[at : at + room], number) for number, at in enumerate(starts)]
        text = torch.stack(made) if starts else tokens.new_empty(0, seq_len - count)
        return torch.cat((first.expand(len(text), count), text), 1).long()

    def _around(self, text: Tensor, number: int) -> Tensor:
        """Return the text of a window with what stands in it and behind it."""
        if not (self.between or self.behind):
            return text
        between, behind = (torch.tensor(tokens, dtype=text.dtype) for tokens in (self.between, self.behind))
        cut = max(1, len(text) // FIRST_SHARES[number % len(FIRST_SHARES)]) if self.between else 0
        return torch.cat((text[:cut], between, text[cut:], behind))


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
    """Return the same for the model and tokenizer of a checkpoint; nothing is put around text without a tokenizer.

    Windows of a model that writes no text are whole texts, or pairs for one that gives a single score.
    """
    begun = NONE
    try:
        tokenizer = load.load_tokenizer(directory)
        begun = of_tokenizer(tokenizer, bos)
        config = load.whole_config(directory)
    except CheckpointError:
        return begun
    if bos == "never" or architectures.task(config) not in architectures.ENCODERS:
        return begun
    around = pairs.around_pair(tokenizer) if architectures.scores_pairs(config) else Template()
    around = around if around.between else _around_text(tokenizer, begun.tokens)
    if not (around.between or around.behind):
        return begun
    words = ("begins with", "has its two texts parted by", "ends with")
    names = [_text(tokenizer, part) for part in around]
    shape = " and ".join(f"{each} {name}" for each, name in zip(words, names, strict=True) if name)
    sentence = f"each window {shape}, as the tokenizer does"
    return Prefix(around.before, names[0], sentence, around.between, around.behind)


def _tokens_before_text(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before a text."""
    whole, bare = pairs.encode(tokenizer)
    start = pairs.find(whole, bare)
    if start is not None:
        return tuple(whole[:start])
    return tuple(takewhile(set(tokenizer.all_special_ids).__contains__, whole))


def _around_text(tokenizer: Any, before: tuple[int, ...]) -> Template:
    """Return the tokens that a tokenizer puts around a text; before: those that are wanted before it."""
    whole, bare = pairs.encode(tokenizer)
    start = pairs.find(whole, bare)
    return Template(before, (), () if start is None else tuple(whole[start + len(bare) :]))


def _text(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    return "".join(map(str, tokenizer.convert_ids_to_tokens(list(tokens))))
