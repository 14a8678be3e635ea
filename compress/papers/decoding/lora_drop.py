"""Leave out most blocks in most decoding steps: what they gave for an earlier token, corrected (LoRA-Drop, 2601.02569).

LoRA-Drop (Rajabzadeh et al. 2026, arXiv 2601.02569) chooses a fixed set of inner blocks. Every `period`-th token of the
decoding is a refresh: the whole model runs, and each of these blocks keeps what it gave, `anchor`. For the tokens in
between, such a block is not run, and a correction of low rank by its own input x takes its place:

    output = anchor + B A x

It stores no keys and values then, so that its cache holds the prompt and the tokens of refreshes alone. All other
blocks run for every token. A prompt is read by the whole model.

    settings = lora_drop.FitSettings(period=4, rank=32)
    corrections = lora_drop.fit(model, tokens, lora_drop.published_blocks(30), settings)
    with lora_drop.decoding(model, corrections):
        model.generate(ids)

Where we differ: the authors train the whole model with its adapters on text (lora_drop_training.py). `fit` leaves the
model as it is, and A and B are fitted in closed form, block by block, to what the whole model gives there for the same
tokens (a regression of reduced rank on inputs that come from the blocks left out before; `linalg.truncate_rank`).
`reuse: "update"` is ours: what the block *added* for the refreshed token is used again, output = x + (anchor - anchor's
x) + B A (x - anchor's x), so that a token passes on its own state; `reuse: "nothing"` passes it on alone, output = x +
B A x. Tokens are counted from the end of the prompt, where the released code counts calls of the model since it was
loaded.

The set, as in the released code: three of four blocks, the first and each fourth one run always (`published_blocks`).

Not done: batches of several sequences, padding, decoding without a cache, a second prompt behind a decoding, caches
other than plain ones, models whose blocks share keys and values, sliding windows that are shorter than a text. On a
model of real size nothing was measured (docs/studies/lora_drop.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from compress.errors import UnsupportedModelError
from compress.numerics.linalg import truncate_rank
from compress.runtime.bodies import bodies
from compress.runtime.bypass import blocks_in

Reuse = Literal["state", "update", "nothing"]
ALWAYS_RUN = 4  # each so many-th block, as in the released code
RIDGE_SHARE = 1e-3  # mean square of inputs times this is added to the diagonal of their Gram matrix


class BlockCorrection(NamedTuple):
    """What takes the place of a block: A [rank, hidden] and B [hidden, rank], float32."""

    a: Tensor
    b: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Return B A x for x [..., hidden], in the type of x."""
        product = torch.nn.functional.linear(x.to(self.a.dtype), self.a)
        return torch.nn.functional.linear(product, self.b).to(x.dtype)


@dataclass(frozen=True)
class Corrections:
    """The blocks that are left out between refreshes, and their corrections."""

    blocks: Mapping[int, BlockCorrection]  # by number of the block
    period: int  # [tokens] from one refresh to the next; 1: the whole model runs for each
    reuse: Reuse = "state"  # of the refreshed token: the block's output, what it added, or nothing of it

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period {self.period} is less than 1")
        if 0 in self.blocks:
            raise ValueError("block 0 always runs: caches are as long as its own")


def published_blocks(count: int) -> tuple[int, ...]:
    """Return the blocks that the released code leaves out in a model of `count` blocks: three of four."""
    return tuple(number for number in range(1, count) if number % ALWAYS_RUN)


def without_correction(model: nn.Module, blocks: Sequence[int], period: int, reuse: Reuse = "state") -> Corrections:
    """Return corrections of nothing: anchors are used as they are."""
    hidden, device = hidden_size(model), next(model.parameters()).device
    return Corrections(dict.fromkeys(blocks, _no_correction(hidden, device)), period, reuse)


def _no_correction(hidden: int, device: torch.device) -> BlockCorrection:
    return BlockCorrection(torch.zeros(1, hidden, device=device), torch.zeros(hidden, 1, device=device))


class _Step:
    """Which token of the decoding a pass of the model is of, shared by the blocks that are left out."""

    def __init__(self, period: int) -> None:
        self.period, self.count, self.is_refresh = period, 0, True

    def begin(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Begin a pass: one of several tokens, or with an empty cache, is a refresh and starts the count."""
        samples, tokens = _hidden_of(args, kwargs).shape[:2]
        if samples > 1:
            raise UnsupportedModelError("LoRA-Drop decodes one sequence at a time; give one")
        is_behind = _cached_tokens(kwargs) > 0
        if tokens > 1 and is_behind and self.count:
            raise UnsupportedModelError(
                "LoRA-Drop reads no prompt behind tokens that it has decoded, which some blocks have not cached; give "
                "the whole text and a new cache"
            )
        self.count = self.count + 1 if tokens == 1 and is_behind else 0
        self.is_refresh = self.count % self.period == 0


@contextmanager
def decoding(model: nn.Module, corrections: Corrections) -> Iterator[None]:
    """Let the model leave out blocks in passes of one token; passes of several tokens, of prompts, are whole.

    The first token behind a prompt comes of the prompt's pass; `period` - 1 passes are then without these blocks.
    """
    step, reuse = _Step(corrections.period), corrections.reuse
    ways = {number: _Dropped(each, reuse, step) for number, each in corrections.blocks.items()}
    handle = blocks_in(model)[0].register_forward_pre_hook(step.begin, with_kwargs=True)
    try:
        with _replace_forwards(model, ways):
            yield
    finally:
        handle.remove()


class _Dropped:
    """The forward function of a block that is left out between refreshes."""

    def __init__(self, correction: BlockCorrection, reuse: Reuse, step: _Step) -> None:
        self.correction, self.reuse, self.step = correction, reuse, step
        self.original: Any = None
        self.anchor: tuple[Tensor, Tensor] | None = None  # its input and its output for the last refreshed token

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block returns, or what takes its place."""
        hidden = _hidden_of(args, kwargs)
        if not self.step.is_refresh and self.anchor is not None:
            return replace_output(hidden, *self.anchor, self.correction, self.reuse)
        if hidden.shape[1] == 1:
            kwargs["attention_mask"] = None  # as long as the first block's cache; all that is cached here is seen
        result = self.original(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        self.anchor = hidden[:, -1:].detach(), output[:, -1:].detach()
        return result


def replace_output(
    hidden: Tensor, anchor_in: Tensor, anchor_out: Tensor, correction: BlockCorrection, reuse: Reuse
) -> Tensor:
    """Return what takes the place of a block's output for inputs [..., hidden], with those of the refreshed tokens."""
    if reuse == "nothing":
        return hidden + correction.apply(hidden)
    if reuse == "state":
        return anchor_out + correction.apply(hidden)
    moved = hidden - anchor_in
    return anchor_out + moved + correction.apply(moved)


class TeacherForced:
    """Texts read at once as decoding would read them step by step behind a prompt.

    A block that is left out in decoding sees keys and values of the prompt and of refreshed tokens alone.
    """

    def __init__(self, model: nn.Module, corrections: Corrections, prompt: int) -> None:
        """prompt: tokens at the beginning of each text that the whole model reads."""
        self.model, self.corrections, self.prompt = model, corrections, prompt

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, length, vocabulary] of tokens [batch, length], without a gradient."""
        return self.read(tokens)

    def read(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, length, vocabulary] of tokens [batch, length]."""
        anchors = _anchors(tokens.shape[1], self.prompt, self.corrections.period, tokens.device)
        reuse = self.corrections.reuse
        ways = {number: _ReadBlock(each, reuse, anchors) for number, each in self.corrections.blocks.items()}
        with _replace_forwards(self.model, ways):
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def _anchors(length: int, prompt: int, period: int, device: torch.device) -> Tensor:
    if prompt < 1:
        raise ValueError(f"prompt {prompt} is less than 1: the first token is always read by the whole model")
    position = torch.arange(length, device=device)
    behind = (position - (prompt - 1)).clamp(min=0)
    return torch.where(behind > 0, prompt - 1 + behind // period * period, position)


class _ReadBlock:
    """The forward function of a block that is left out, for all tokens of texts at once."""

    def __init__(self, correction: BlockCorrection, reuse: Reuse, anchors: Tensor) -> None:
        self.correction, self.reuse, self.anchors = correction, reuse, anchors
        self.is_refreshed = anchors == torch.arange(len(anchors), device=anchors.device)
        self.original: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block gives for refreshed tokens, and what takes its place for the others."""
        hidden = _hidden_of(args, kwargs)
        result = self.original(*args, **{**kwargs, "attention_mask": self.mask(hidden)})
        output, others = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
        made = self.make_output(hidden, hidden[:, self.anchors], output[:, self.anchors])
        mixed = torch.where(self.is_refreshed[:, None], output, made)
        return mixed if others is None else (mixed, *others)

    def make_output(self, hidden: Tensor, anchor_in: Tensor, anchor_out: Tensor) -> Tensor:
        """Return what takes the place of the block's output [batch, length, hidden]."""
        return replace_output(hidden, anchor_in, anchor_out, self.correction, self.reuse)

    def mask(self, hidden: Tensor) -> Tensor:
        """Return what is added to scores [1, 1, length, length]: each token sees refreshed ones, and itself."""
        position = torch.arange(len(self.anchors), device=self.anchors.device)
        seen = (position[None] < position[:, None]) & self.is_refreshed[None] | (position[None] == position[:, None])
        added = torch.zeros(seen.shape, dtype=hidden.dtype, device=seen.device)
        return added.masked_fill(~seen, torch.finfo(hidden.dtype).min)[None, None]


class _Fitted(_ReadBlock):
    """A block whose correction is fitted when it is first called, to what the whole model gives there."""

    def __init__(self, target: Tensor, rank: int, reuse: Reuse, anchors: Tensor) -> None:
        """target [batch, length, hidden]."""
        super().__init__(BlockCorrection(torch.empty(0), torch.empty(0)), reuse, anchors)
        self.target, self.rank = target, rank

    def make_output(self, hidden: Tensor, anchor_in: Tensor, anchor_out: Tensor) -> Tensor:
        """Fit the correction; return what takes the place of the block's output with it."""
        moved = hidden - anchor_in if self.reuse == "update" else hidden
        nothing = _no_correction(hidden.shape[-1], hidden.device)
        plain = replace_output(hidden, anchor_in, anchor_out, nothing, self.reuse)
        left_out = ~self.is_refreshed
        x, missing = (each[:, left_out].flatten(0, 1).double() for each in (moved, self.target - plain))
        self.correction = regress(x, missing, self.rank)
        return super().make_output(hidden, anchor_in, anchor_out)


@dataclass(frozen=True)
class FitSettings:
    """How corrections are fitted."""

    period: int = 4  # [tokens] from one refresh to the next
    rank: int = 32  # of A and B
    reuse: Reuse = "state"
    prompt: int = 16  # [tokens] at the beginning of each text that the whole model reads


@torch.no_grad()
def fit(model: nn.Module, tokens: Tensor, blocks: Sequence[int], settings: FitSettings) -> Corrections:
    """Fit a correction for each of some blocks in one pass over texts [samples, length], from the first to the last.

    ValueError where the whole model reads every token of these texts.
    """
    check_texts(tokens, settings)
    body = next(bodies(model))
    anchors = _anchors(tokens.shape[1], settings.prompt, settings.period, tokens.device)
    targets = _outputs(model, body, tokens, blocks)
    ways = {number: _Fitted(targets[number], settings.rank, settings.reuse, anchors) for number in blocks}
    with _replace_forwards(model, ways):
        body(input_ids=tokens, use_cache=False)
    return Corrections({number: each.correction for number, each in ways.items()}, settings.period, settings.reuse)


def check_texts(tokens: Tensor, settings: FitSettings | None) -> None:
    """Raise ValueError where there is no text [samples, length], or no token of it is left out; None: none need be."""
    if not tokens.numel():
        raise ValueError("there is no text; give one of more tokens")
    if settings is not None and (settings.period < 2 or tokens.shape[1] <= settings.prompt):
        raise ValueError(
            f"no token is left out of texts of {tokens.shape[1]} tokens, of which the whole model reads the first "
            f"{settings.prompt} and then each {settings.period}th; give longer texts, or a period of 2 or more"
        )


def regress(x: Tensor, y: Tensor, rank: int) -> BlockCorrection:
    """Return the product of a rank whose image of x is nearest to y, both [tokens, hidden] float64."""
    gram = x.T @ x
    gram.diagonal().add_(RIDGE_SHARE * gram.diagonal().mean())
    whole = torch.linalg.solve(gram, x.T @ y).T
    cut = truncate_rank(whole, gram, rank)
    return BlockCorrection(cut.right.float(), cut.left.float())


def _outputs(model: nn.Module, body: nn.Module, tokens: Tensor, blocks: Sequence[int]) -> dict[int, Tensor]:
    """Return what blocks of the whole model give for texts, [samples, length, hidden]."""
    outputs: dict[int, Tensor] = {}
    held = blocks_in(model)

    def note(number: int) -> Any:
        def keep(_: nn.Module, args: Any, output: Any) -> None:
            outputs[number] = output[0] if isinstance(output, tuple) else output

        return held[number].register_forward_hook(keep)

    with ExitStack() as stack:
        for number in blocks:
            stack.callback(note(number).remove)
        body(input_ids=tokens, use_cache=False)
    return outputs


@contextmanager
def _replace_forwards(model: nn.Module, ways: Mapping[int, Any]) -> Iterator[None]:
    """Let these take the place of the forward functions of blocks."""
    blocks = blocks_in(model)
    try:
        for number, way in ways.items():
            way.original = blocks[number].forward
            vars(blocks[number])["forward"] = way
        yield
    finally:
        for number in ways:
            vars(blocks[number]).pop("forward", None)


def _cached_tokens(kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens the first block has cached before a pass; 0 without a cache."""
    return next((int(x.get_seq_length()) for x in kwargs.values() if isinstance(x, Cache)), 0)


def _hidden_of(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def hidden_size(model: Any) -> int:
    """Return the width of the states between the blocks of a model."""
    size: int = model.config.get_text_config().hidden_size
    return size
