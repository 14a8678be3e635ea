"""Calibrate a cache: give every codec that NEEDS samples those of its layer, one block of the model at a time.

The calibration text streams through the blocks (compress/model/blockwise.py). An attention function in the place of the
model's own sees queries, keys and values of a block and hands them on; the rotary rows of the block turn them back to
what they were before RoPE. A layer's samples are freed before the next block is loaded.

Gradients are of the summed loss of the next token, by keys before RoPE and by values: exact, and without the whole
model in memory. The states that enter each block are kept (`file`: on disk), the loss is differentiated by what leaves
the last block, and the blocks are run once more from the last to the first, each with the gradient that the one above
it left. The loss is summed, so that no sample's gradient depends on the batch it is in.

    static, facts = calibrate(model, cache_settings(recipe).by_layer(layers), tokens)
    make_cache(model.config, recipe, static)

The first `sink` tokens of each sample are left out; the text has no padding. All layers see exact caches: what the
cache of an earlier layer loses plays no part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from compress import plugins
from compress.calib.kv_attended import attention_by_key, capped_attention
from compress.calib.projections import projection_weights
from compress.errors import CalibrationError, NumericalError, UnsupportedModelError
from compress.kv import rope
from compress.kv.codec import Spec, rotate, unrotate
from compress.kv.settings import KINDS, Coding, Codings, Reading, reading_layers
from compress.model import blockwise, graph, lm_head
from compress.model import skeleton as models
from compress.model.text_path import find_blocks
from compress.numerics import kl

NAME = "compress_kv_samples"
SINKS = ("keys_sink", "values_sink")  # float32 [samples, sink, h, width], what the others leave out
KIND_GRADIENTS = ("gradients", "gradients_rotated")  # keys before and after RoPE; values: the same twice
PROJECTIONS = "projections"  # float32 [rows, columns]: the weights that make the keys or the values; [0, 0]: not told
GRADIENTS = frozenset({*KIND_GRADIENTS, "gradients_output"})
QUERIES = ("queries", "queries_pre", "queries_scaled")
SAMPLES = ("keys", "keys_pre", "values", *QUERIES, "attended", *SINKS, PROJECTIONS, *sorted(GRADIENTS))
Samples = dict[str, list[Tensor]]  # "gradients" under their kind's name, "gradients.keys"


class Loaded:
    """A model in memory, seen as a skeleton whose blocks are always there."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.blocks_name, self.blocks = find_blocks(model)
        self.read, self.second = model.base_model, None

    def load_rest(self, device: torch.device, with_head: bool = False) -> None:
        pass

    def load_block(self, index: int, device: torch.device) -> nn.Module:
        return self.blocks[index]

    def free(self) -> None:
        pass

    def block_prefix(self, index: int) -> str:
        return f"{self.blocks_name}.{index}."


def calibrate(
    model: PreTrainedModel | models.Skeleton,
    codings: Codings,
    tokens: Tensor,
    device: str | torch.device | None = None,
    batch: int = 4,
    file: Path | None = None,
    reading: Reading | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return static tensors of all layers on the CPU, "layers.<i>.<keys|values|read>.<name>", and facts for the report.

    tokens: int64 [samples, seq_len]. device: where blocks run (a loaded model stays where it is). batch: samples in a
    forward pass. file: for the hidden states, which stay in memory without one: samples x seq_len x hidden, with
    gradients once for each block. reading: what chooses the tokens that attention reads.
    Raises CalibrationError for too few tokens, NumericalError for a model whose states are not finite.
    """
    started = time.monotonic()
    needs = _needed_samples(codings, reading)
    static: dict[str, Tensor] = {}
    layers = [index for index, names in enumerate(needs) if names]
    if layers:
        policies = [coding.policy for kinds in codings for coding in kinds.values()]
        sink, near = (max(getattr(p, name) for p in policies) for name in ("sink", "residual_length"))
        if tokens.dim() != 2 or not tokens.shape[0] or tokens.shape[1] <= sink + 1:
            raise CalibrationError(
                f"kv_cache: calibration needs samples of more than {sink + 1} tokens, found {tuple(tokens.shape)}"
            )
        if isinstance(model, PreTrainedModel):
            skeleton, device = cast(models.Skeleton, Loaded(model)), model.device
        else:
            skeleton = model
        made = TextPass(skeleton, tokens, torch.device(device or "cpu"), batch, _Tap(skeleton.model, sink, near), file)
        learned: list[_Learned] = []
        for index, samples, heads in made.layers(needs):
            learned += _learn_layer(codings, index, samples, heads)
            static |= _static_of_reading(codings, index, samples, heads, reading)
        learned.sort(key=lambda each: (each.spec.layer, each.spec.kind))
        for method in sorted({each.coding.method for each in learned}):
            plugin = plugins.load("kv", method)
            own = [(x.coding.config, x.spec, x.static) for x in learned if x.coding.method == method]
            if hasattr(plugin, "distil"):
                plugin.distil(own, made)
            if hasattr(plugin, "balance"):
                plugin.balance(own)
        for each in learned:
            names = f"layers.{each.spec.layer}.{each.spec.kind}."
            static |= {names + name: tensor for name, tensor in each.static.items()}
    facts = {
        "tokens": tokens.numel() if layers else 0,
        "layers": len(layers),
        "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in static.values()),
        "seconds": round(time.monotonic() - started, 3),
    }
    return static, facts


def _needed_samples(codings: Codings, reading: Reading | None) -> list[frozenset[str]]:
    """Return the names of the samples that each layer needs."""
    needs = []
    read = frozenset() if reading is None else plugins.load("read", reading.method).NEEDS
    readers = reading_layers(codings)
    for index, kinds in enumerate(codings):
        names = frozenset().union(*(plugins.load("kv", coding.method).NEEDS for coding in kinds.values()))
        names |= read if index in readers else frozenset()
        assert names <= frozenset(SAMPLES), names
        needs.append(names)
    return needs


class _Heads(NamedTuple):
    """The figures of a layer's attention that a `Spec` holds."""

    queries: int  # of the layer
    dtype: torch.dtype


class _Learned(NamedTuple):
    """What one codec learned from its samples."""

    coding: Coding
    spec: Spec
    static: dict[str, Tensor]  # on the CPU


def _learn_layer(codings: Codings, index: int, samples: Mapping[str, Tensor], heads: _Heads) -> list[_Learned]:
    """Return what the codecs of a layer learn from its samples."""
    results = []
    for kind in KINDS:
        coding = codings[index][kind]
        plugin = plugins.load("kv", coding.method)
        if not plugin.NEEDS:
            continue
        by_kind = (*KIND_GRADIENTS, PROJECTIONS)
        own = {name: samples[f"{name}.{kind}" if name in by_kind else name] for name in plugin.NEEDS}
        _, count, width = next(samples[name] for name in (kind, "keys") if name in samples).shape
        layers = len(codings)
        spec = Spec(kind, index, layers, count, width, max(1, heads.queries // count), heads.dtype)  # type: ignore[arg-type]
        static = plugin.calibrate(coding.config, spec, own)
        results.append(_Learned(coding, spec, {name: tensor.cpu() for name, tensor in static.items()}))
    return results


def _static_of_reading(
    codings: Codings, index: int, samples: Mapping[str, Tensor], heads: _Heads, reading: Reading | None
) -> dict[str, Tensor]:
    """Return what a layer learns from its samples about which tokens to read."""
    if reading is None or index not in reading_layers(codings):
        return {}
    plugin = plugins.load("read", reading.method)
    if not plugin.NEEDS:
        return {}
    _, count, width = samples["keys"].shape
    spec = Spec("read", index, len(codings), count, width, max(1, heads.queries // count), heads.dtype)
    learned = plugin.calibrate(reading.config, spec, {name: samples[name] for name in plugin.NEEDS})
    return {f"layers.{index}.read.{name}": tensor.cpu() for name, tensor in learned.items()}


class TextPass:
    """The text's pass through the blocks, and back if there are gradients."""

    def __init__(
        self,
        skeleton: models.Skeleton,
        tokens: Tensor,
        device: torch.device,
        batch: int,
        tap: _Tap,
        file: Path | None,
    ) -> None:
        self.skeleton, self.tokens, self.device, self.batch = skeleton, tokens, device, batch
        self.tap, self.file = tap, file

    def layers(self, needs: list[frozenset[str]]) -> Iterator[tuple[int, dict[str, Tensor], _Heads]]:
        """Yield (layer, its samples, its attention) for each layer of which samples are needed."""
        needed = [index for index, names in enumerate(needs) if names]
        is_backward = any(names & GRADIENTS for names in needs)
        blocks = len(self.skeleton.blocks)
        if blocks != len(needs):
            raise UnsupportedModelError(f"kv_cache: {blocks} decoder blocks, but the cache has {len(needs)} layers")
        stream = blockwise.HiddenStates(self.tokens.shape[0], self.file, blocks + 1 if is_backward else 1)
        first = min(self.batch, self.tokens.shape[0])
        try:
            with self.tap.attached():
                calls = blockwise.record_inputs(self.skeleton, self.tokens, self.batch, stream, self.device)
                for index in range(blocks if is_backward else needed[-1] + 1):
                    self.tap.watch(index, frozenset() if is_backward else needs[index])
                    sides = (index, index + 1) if is_backward else (0, 0)
                    blockwise.propagate(self.skeleton, index, calls, stream, self.batch, self.device, sides)
                    if needs[index] and not is_backward:
                        yield index, self._samples(index, calls, stream.read(0, first)), self.tap.heads
                if is_backward:
                    slopes = self._loss(stream, blocks)
                    for index in range(blocks - 1, needed[0] - 1, -1):
                        self.tap.watch(index, needs[index])
                        self._backward(index, calls, stream, slopes)
                        if needs[index]:
                            yield index, self._samples(index, calls, stream.read(0, first)), self.tap.heads
        finally:
            stream.close()

    def _samples(self, index: int, calls: blockwise.ModelArgs, hidden: Tensor) -> dict[str, Tensor]:
        """Return the samples of a block that was run; hidden: any states of its first slice, to trace projections."""
        if PROJECTIONS in self.tap.names:
            self.tap.names, block = frozenset(), self.skeleton.load_block(index, self.device)

            def run() -> dict[str, Tensor]:
                blockwise.call_block(block, calls[index][len(hidden)], hidden.to(self.device))
                return self.tap.states

            weights = projection_weights(block, run)
            self.tap.found |= {f"{PROJECTIONS}.{kind}": [weight] for kind, weight in weights.items()}
            self.skeleton.free()
        return self.tap.samples()

    def _slices(self) -> Iterator[slice]:
        for start in range(0, self.tokens.shape[0], self.batch):
            yield slice(start, min(start + self.batch, self.tokens.shape[0]))

    def _loss(self, stream: blockwise.HiddenStates, side: int) -> blockwise.HiddenStates:
        """Return gradients [samples, tokens, hidden] of the loss by what leaves the last block."""
        slopes = blockwise.HiddenStates(self.tokens.shape[0], None)
        self.skeleton.load_rest(self.device, with_head=True)
        for where in self._slices():
            hidden = stream.read(where.start, where.stop - where.start, side).to(self.device)
            slopes.write(where.start, _slope(self.skeleton, self.tokens[where].to(self.device), hidden))
        self.skeleton.free()
        return slopes

    def _backward(
        self, index: int, calls: blockwise.ModelArgs, stream: blockwise.HiddenStates, slopes: blockwise.HiddenStates
    ) -> None:
        """Put gradients by what enters the block in the place of those by what leaves it."""
        block, name = self.skeleton.load_block(index, self.device), self.skeleton.block_prefix(index).rstrip(".")
        for where in self._slices():
            count = where.stop - where.start
            hidden = stream.read(where.start, count, index).to(self.device)
            behind = slopes.read(where.start, count).to(self.device)
            (slope,) = blockwise.pull_back(block, calls[index][count], hidden, behind)
            if slope is None or not torch.isfinite(slope).all():
                raise NumericalError(f"the gradient of the loss by the input of {name} is not finite")
            slopes.write(where.start, slope)
        self.skeleton.free()


@torch.enable_grad()
def _slope(skeleton: models.Skeleton, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the gradient of the summed loss of tokens [batch, seq_len] by hidden [batch, seq_len, hidden].

    The hidden states are those behind the last block. Some positions at a time, so that logits stay small.
    """
    slopes = torch.zeros_like(hidden)  # the last position predicts nothing
    vocabulary = skeleton.model.config.get_text_config().vocab_size
    for row in range(hidden.shape[0]):
        for part in kl.slices(hidden.shape[1] - 1, vocabulary):
            states = hidden[row : row + 1, part].detach().clone().requires_grad_()
            logits = lm_head.logits(skeleton, states)[0]
            loss = nn.functional.cross_entropy(logits, tokens[row, part.start + 1 : part.stop + 1], reduction="sum")
            slopes[row, part] = torch.autograd.grad(loss, states)[0][0]
    return slopes


class _Tap:
    """An attention function that keeps what it sees of one layer."""

    def __init__(self, model: PreTrainedModel, sink: int, near: int) -> None:
        self.model, self.sink, self.near = model, sink, near
        self.layer, self.names = -1, frozenset[str]()
        self.found: Samples = {}
        self.turns: tuple[Tensor, Tensor] | None = None
        self.heads = _Heads(0, torch.float32)
        self.states: dict[str, Tensor] = {}  # keys and values of the newest call of which no samples are kept

    @contextmanager
    def attached(self) -> Iterator[None]:
        """While active, the model's attention is this one."""
        AttentionMaskInterface.register(NAME, sdpa_mask)
        modules = [m for m in self.model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
        hooks = [module.register_forward_pre_hook(self._rotation, with_kwargs=True) for module in modules]
        with graph.watch_attention(self.model.config, self._attention, NAME), blockwise.attached(hooks):
            yield

    def watch(self, layer: int, names: frozenset[str]) -> None:
        self.layer, self.names, self.found, self.states = layer, names, {}, {}

    def samples(self) -> dict[str, Tensor]:
        """Return name -> [tokens, h, width] float32 of the layer that was watched, and let go of them."""
        found, self.found = self.found, {}
        if not found:
            raise UnsupportedModelError(f"kv_cache: layer {self.layer} calls no attention function that can be watched")
        return {name: torch.cat(found.pop(name)) for name in [*found]}  # the parts of one at a time beside the whole

    def _rotation(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        turns = kwargs.get("position_embeddings")
        self.turns = turns if isinstance(turns, tuple) else None

    def _attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend: query [B, H, n, width], key and value [B, h, n, width] after RoPE -> [B, n, H, width]."""
        if self.names:
            self._keep(query, key, value, kwargs.get("scaling"))
        else:
            self.states = {"keys": key, "values": value}
        if "attended" in self.names:
            scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
            self._add(
                "attended", attention_by_key(query, key, attention_mask, (scaling, softcap), self.near)[..., None]
            )
        if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
            raise UnsupportedModelError("kv_cache: attention with sink logits or position biases cannot be calibrated")
        if kwargs.get("softcap") is not None:
            output = capped_attention(query, key, value, attention_mask, **kwargs)
        else:
            output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        if "gradients_output" in self.names:
            output.register_hook(lambda slope: self._add("gradients_output", slope.transpose(1, 2)))
        return output, None

    def _keep(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> None:
        self.heads = _Heads(query.shape[1], key.dtype)
        for name, x in (("keys", key), ("values", value), ("queries", query)):
            if name in self.names or name in KINDS:
                self._add(name, x)
        for name, x in (("keys_pre", key), ("queries_pre", query)):
            if name in self.names:
                self._add(name, unrotate(x.detach(), *self._turns()))
        if "queries_scaled" in self.names:
            self._add("queries_scaled", query.detach() * (query.shape[-1] ** -0.5 if scaling is None else scaling))
        for name, x in zip(SINKS, (key, value), strict=True):
            if name in self.names:
                first = x.detach()[:, :, : self.sink].transpose(1, 2).float().contiguous()
                self.found.setdefault(name, []).append(first)
        self._keep_gradients(key, value)

    def _keep_gradients(self, key: Tensor, value: Tensor) -> None:
        for name in self.names & {*KIND_GRADIENTS}:
            value.register_hook(partial(self._add, f"{name}.values"))
        if "gradients_rotated" in self.names:
            key.register_hook(partial(self._add, "gradients_rotated.keys"))
        if "gradients" in self.names:
            cos, sin = self._turns()  # of this batch, for when the gradient comes
            key.register_hook(lambda slope: self._add("gradients.keys", rotate(slope, cos, -sin)))

    def _turns(self) -> tuple[Tensor, Tensor]:
        if self.turns is None:
            raise UnsupportedModelError(
                f"kv_cache: the keys of layer {self.layer} have no rotary embedding that could be taken off; choose "
                "a codec of keys after RoPE"
            )
        rope.check(self.turns[0])
        return self.turns

    def _add(self, name: str, x: Tensor) -> None:
        """Keep the rows of x [B, h, n, width] behind the first `sink` tokens."""
        rows = x.detach()[:, :, self.sink :].transpose(1, 2).flatten(0, 1).float().contiguous()
        self.found.setdefault(name, []).append(rows)
