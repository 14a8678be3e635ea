"""Train subspaces of keys and values through the whole model, one block in memory at a time (MatryoshkaKV, 2410.14731).

MatryoshkaKV freezes the model and distils it into itself: at each step, each head's keys and values are cut to a number
of directions that is drawn at random, and the loss of all heads and layers together is

    (1 - language) KL(original || cut) + language * nll of the next token

with `language` 0.75 in the authors' code (repository The-kamisato/MatryoshkaKV-cache, whose trainer and attention were
read: AdamW at a rate of 1e-3 with a cosine, gradients cut at the norm 1, ranks in quarters or eighths of a head). On
as little text as a calibration has, the nll of the next token raises the divergence (docs/results/kv_structure.md), so
that 0 is the default here.

Memory is that of tuning end to end (compress/tune/streamed.py): a sample goes forward without gradients and leaves the
states in front of each block; the head gives the loss; then each block is loaded again, the last first, and its pass
repeated with gradients. The original's states behind the last block are kept (`file`: on disk), and its logits are made
anew from them at each step, so that the divergence is over the whole vocabulary.

A query reads sinks and the `tail` newest tokens as they are and older ones cut, as the cache does. The paper cuts all
tokens: that is sink 0 and tail 0. One sample in HELD_OUT is not trained on; kept is the state with the lowest
divergence on these, of that at the start and those at CHECKS places. A `Subspace` says what is cut, so that other
codecs can be trained alike (cskv.py).

What it does not do: attention with bounds on scores (softcap), sink logits or position biases; models whose blocks hand
each other more than hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from compress.calib.kv import TextPass
from compress.errors import CalibrationError, UnsupportedModelError
from compress.model import blockwise, graph, lm_head
from compress.numerics import kl
from compress.progress import note
from compress.tune.descend import descend, is_checked

NAME = "compress_kv_distilled"
HELD_OUT = 10  # [samples] of which one is not trained on
CHECKS = 4  # times that the held-out divergence is measured
DRAWS_PER_SAMPLE = 2  # held-out samples are measured at so many draws of ranks
QUERIES_PER_PIECE = 256

Turns = tuple[Tensor, Tensor] | None  # rows of the rotary embedding, cos and sin


class Subspace(Protocol):
    """What keys or values of a layer are cut to, and what is trained of it."""

    parameters: list[nn.Parameter]

    def draw(self, generator: torch.Generator) -> None:
        """Choose how many directions are left until the next draw."""

    def cut(self, states: Tensor, turns: Turns) -> Tensor:
        """Return states [B, h, n, width] behind the rotary embedding as the cache would give them back."""


class DistillationSettings(NamedTuple):
    """How subspaces are trained."""

    steps: int
    rate: float  # of AdamW
    batch_tokens: int  # of a step, about: at least a sample
    language: float  # share of the loss that is the nll of the next token
    tail: int  # newest tokens that a query reads as they are
    seed: int


Subspaces = Mapping[tuple[int, str], Subspace]  # by layer and kind


def train(text: TextPass, subspaces: Subspaces, settings: DistillationSettings) -> tuple[float, float]:
    """Train the parameters in place; return the held-out divergences before and after, nats a token.

    Raises CalibrationError for fewer than two samples, UnsupportedModelError for attention that cannot be replaced.
    """
    if len(text.tokens) < 2:
        raise CalibrationError("kv_cache: training through the model needs two samples or more; give more text")
    return _Distillation(text, subspaces, settings).run()


class CutAttention:
    """An attention function that reads cut keys and values where `is_on`."""

    def __init__(self, text: TextPass, subspaces: Subspaces, tail: int) -> None:
        self.model, self.sink, self.tail = text.tap.model, text.tap.sink, tail
        self.subspaces, self.is_on = subspaces, False
        self.turns: Turns = None

    @contextmanager
    def replace_attention(self) -> Iterator[None]:
        """While active, the model's attention is this one."""
        AttentionMaskInterface.register(NAME, sdpa_mask)
        modules = [m for m in self.model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
        hooks = [module.register_forward_pre_hook(self._note_turns, with_kwargs=True) for module in modules]
        with graph.watch_attention(self.model.config, self._attend, NAME), blockwise.attached(hooks):
            yield

    def _note_turns(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        turns = kwargs.get("position_embeddings")
        self.turns = turns if isinstance(turns, tuple) else None

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend: query [B, H, n, width], key and value [B, h, n, width] after RoPE -> [B, n, H, width]."""
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            raise UnsupportedModelError(
                "kv_cache: attention with a bound on scores, sink logits or position biases cannot be trained through; "
                "set steps: 0"
            )
        states, cut = {"keys": key, "values": value}, {}
        for kind in states if self.is_on else ():
            if (subspace := self.subspaces.get((module.layer_idx, kind))) is not None:
                cut[kind] = subspace.cut(states[kind], self.turns)
        if not cut:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0], None
        both = {**states, **cut}
        scaling = kwargs.get("scaling")
        output = attend_mixed(
            query, (key, value), (both["keys"], both["values"]), attention_mask, scaling, self.sink, self.tail
        )
        return output.transpose(1, 2).contiguous(), None


def attend_mixed(
    query: Tensor,
    exact: tuple[Tensor, Tensor],
    cut: tuple[Tensor, Tensor],
    mask: Tensor | None,
    scaling: float | None,
    sink: int,
    tail: int,
) -> Tensor:
    """Attend causally to exact keys and values near and at the sinks, to cut ones between -> [B, H, n, width].

    query [B, H, n, width]; exact and cut: keys and values [B, h, n, width]; mask [B, 1 or H, n, n], bool or additive.
    """
    groups = query.shape[1] // exact[0].shape[1]
    states = [[x.repeat_interleave(groups, 1) for x in pair] for pair in (exact, cut)]
    outputs = []
    for start in range(0, query.shape[2], QUERIES_PER_PIECE):
        stop = min(start + QUERIES_PER_PIECE, query.shape[2])
        ends = [min(sink, stop), max(sink, stop - tail), min(max(sink, start - tail + 1), stop)]
        parts = [torch.arange(first, last) for first, last in ((0, ends[0]), (sink, ends[1]), (ends[2], stop))]
        columns = torch.cat(parts)
        is_cut = torch.arange(len(columns)) >= len(parts[0])
        is_cut &= torch.arange(len(columns)) < len(parts[0]) + len(parts[1])
        now = torch.arange(start, stop)[:, None]
        is_near = (columns > now - tail) | (columns < sink)
        allowed = ((columns <= now) & (is_cut ^ is_near)).to(query.device)
        if mask is not None:
            own = mask[:, :, start:stop, columns.to(mask.device)]
            allowed = allowed & own if own.dtype == torch.bool else own.masked_fill(~allowed, -torch.inf)
        keys, values = (
            torch.cat((x[:, :, : ends[0]], y[:, :, sink : ends[1]].to(x.dtype), x[:, :, ends[2] : stop]), 2)
            for x, y in zip(*states, strict=True)
        )
        piece = query[:, :, start:stop]
        outputs.append(F.scaled_dot_product_attention(piece, keys, values, allowed, scale=scaling))
    return torch.cat(outputs, 2)


class _Distillation:
    """A model, its states on the text, and the subspaces in training."""

    def __init__(self, text: TextPass, subspaces: Subspaces, settings: DistillationSettings) -> None:
        self.text, self.subspaces, self.settings = text, subspaces, settings
        self.skeleton, self.tokens, self.device = text.skeleton, text.tokens, text.device
        count = len(self.tokens)
        self.unseen = [*range(count - max(1, count // HELD_OUT), count)]
        self.used = count - len(self.unseen)
        self.of_step = max(1, min(self.used, settings.batch_tokens // self.tokens.shape[1]))
        self.attention = CutAttention(text, subspaces, settings.tail)
        self.parameters = [p for subspace in subspaces.values() for p in subspace.parameters]
        self.kept = [p.detach().clone() for p in self.parameters]
        self.generator = torch.Generator().manual_seed(settings.seed)

    def run(self) -> tuple[float, float]:
        """Take all steps; leave the best parameters behind."""
        self.stream = blockwise.HiddenStates(len(self.tokens), self.text.file, 2)  # embedded, and behind all blocks
        try:
            with torch.inference_mode(False), self.attention.replace_attention():
                self.calls = blockwise.record_inputs(self.skeleton, self.tokens, 1, self.stream, self.device)
                for index in range(len(self.skeleton.blocks)):
                    sides = (min(index, 1), 1)
                    blockwise.propagate(self.skeleton, index, self.calls, self.stream, 1, self.device, sides)
                self.attention.is_on = True
                first = self.best = self._held_out_divergence()
                descend(self.parameters, self.settings.steps, self.settings.rate, self._loss, self._check)
                for parameter, kept in zip(self.parameters, self.kept, strict=True):
                    parameter.data.copy_(kept)
        finally:
            self.stream.close()
        note(
            f"kv_cache: {len(self.subspaces)} subspaces trained through the model for {self.settings.steps} steps: KL "
            f"on held-out calibration text, ranks at random, {first:.4f} -> {self.best:.4f}"
        )
        return first, self.best

    def _draw(self, generator: torch.Generator) -> None:
        for subspace in self.subspaces.values():
            subspace.draw(generator)

    def _check(self, step: int) -> None:
        """Keep the present state if it is the best on what is not trained on."""
        if is_checked(step, self.settings.steps, CHECKS) and (loss := self._held_out_divergence()) < self.best:
            self.best, self.kept = loss, [p.detach().clone() for p in self.parameters]

    def _held_out_divergence(self) -> float:
        """Return the mean divergence on the samples that are not trained on, the same ranks at every call."""
        generator, total = torch.Generator().manual_seed(self.settings.seed + 1), 0.0
        for _ in range(DRAWS_PER_SAMPLE):
            self._draw(generator)
            states = self._forward(self.unseen)[-1]
            total += sum(
                self._head(sample, hidden, None)[0] for sample, hidden in zip(self.unseen, states, strict=True)
            )
            self.skeleton.free()
        return total / (DRAWS_PER_SAMPLE * len(self.unseen) * self.tokens.shape[1])

    @torch.no_grad()
    def _forward(self, samples: list[int]) -> list[list[Tensor]]:
        """Return the states in front of each block and behind the last, of each sample; all outside is loaded then."""
        front = [[self.stream.read(sample, 1, 0).to(self.device) for sample in samples]]
        for index in range(len(self.skeleton.blocks)):
            block, name = self.skeleton.load_block(index, self.device), self.skeleton.block_prefix(index).rstrip(".")
            calls = [self.calls.alone(index, sample) for sample in samples]
            front.append([blockwise.run_block(block, c, x, name) for c, x in zip(calls, front[-1], strict=True)])
            self.skeleton.free()
        self.skeleton.load_rest(self.device, with_head=True)
        return front

    def _head(self, sample: int, hidden: Tensor, language: float | None) -> tuple[float, Tensor]:
        """Return the summed loss of a sample and its gradient by hidden [1, tokens, hidden], behind the last block.

        language: None for the divergence alone, without a gradient.
        """
        tokens = self.tokens[sample].to(self.device)
        original, total, slope = self.stream.read(sample, 1, 1).to(self.device), 0.0, torch.zeros_like(hidden)
        for part in kl.slices(len(tokens), self.skeleton.model.config.get_text_config().vocab_size):
            with torch.no_grad():
                expected = lm_head.logits(self.skeleton, original[:, part])[0].log_softmax(-1)
            with torch.set_grad_enabled(language is not None):
                states = hidden[:, part].detach().requires_grad_()
                log_probs = lm_head.logits(self.skeleton, states)[0].log_softmax(-1)
                loss = kl.from_log_probs(expected, log_probs).sum()
                if language is not None:
                    following = tokens[part.start + 1 : part.stop + 1]
                    nll = F.nll_loss(log_probs[: len(following)], following, reduction="sum")
                    loss = (1 - language) * loss + language * nll
                    slope[:, part] = torch.autograd.grad(loss, states)[0]
            total += loss.item()
        return total, slope

    def _loss(self, step: int) -> float:
        """Leave the gradients of the mean loss of a step behind, and return it."""
        self._draw(self.generator)
        samples = [(step * self.of_step + i) % self.used for i in range(self.of_step)]
        front = self._forward(samples)
        losses = [self._head(s, x, self.settings.language) for s, x in zip(samples, front.pop(), strict=True)]
        self.skeleton.free()
        behind = [slope for _, slope in losses]
        for index in reversed(range(len(self.skeleton.blocks))):
            block, states = self.skeleton.load_block(index, self.device), front.pop()
            for at, sample in enumerate(samples):
                behind[at] = self._pull_back(block, self.calls.alone(index, sample), states[at], behind[at])
            self.skeleton.free()
        positions = len(samples) * self.tokens.shape[1]
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= positions
        return sum(loss for loss, _ in losses) / positions

    @torch.enable_grad()
    def _pull_back(self, block: nn.Module, call: blockwise.BlockArgs, hidden: Tensor, behind: Tensor) -> Tensor:
        """Return the gradient in front of a block; those by the subspaces' parameters are added to what they have."""
        hidden = hidden.detach().requires_grad_()
        states, _ = blockwise.call_block(block, call, hidden)
        slopes = torch.autograd.grad(states, (hidden, *self.parameters), behind, allow_unused=True)
        for parameter, slope in zip(self.parameters, slopes[1:], strict=True):
            if slope is not None:
                parameter.grad = slope if parameter.grad is None else parameter.grad + slope
        return slopes[0]
