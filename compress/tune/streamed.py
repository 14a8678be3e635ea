"""Differentiate a packed model by stored numbers, one block in memory at a time.

Gradient checkpointing over blocks that are loaded anew: a batch goes forward without gradients and leaves the hidden
states in front of each block. The head gives the loss and its gradient behind the last block. Then each block is
decoded again, the last first, and its pass repeated with gradients, which go on to the block before it. So memory holds
one decoded block with the gradient of its weights, its activations for some samples, and the hidden states of one batch
in front of all blocks. Packed linears are computed around their stored matrices (compress/tune/stored_linear.py); the
gradient of a matrix goes through its format's own decoding, one linear at a time.

All is computed in float32 from what is stored, also where the model has 16 bits. Inputs that are quantized at run time
are not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress import formats
from compress.calib import reference_logprobs
from compress.calib.reference_logprobs import ReferenceLogprobs
from compress.formats import lowrank
from compress.model import blockwise, lm_head
from compress.model.blockwise import BlockArgs, HiddenStates, ModelArgs
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from compress.tune.stored_linear import StoredLinear
from compress.types import PackedWeight

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Numbers = Mapping[str, Tensor]  # name on disk -> values, float32


class TrainingText(NamedTuple):
    """Samples [samples, seq_len] on their way into the first block, and the predictions of the original for them."""

    stream: HiddenStates
    calls: ModelArgs
    batches: list[slice]  # of samples that go through a block together
    reference: ReferenceLogprobs
    first: int  # number of the first sample in `reference`
    seq_len: int

    @property
    def is_separable(self) -> bool:
        """Whether blocks hand each other nothing but hidden states."""
        return not (self.calls.layout.passed or self.calls.layout.shared)

    def hidden(self, samples: slice, device: torch.device) -> Tensor:
        """Return what enters the first block, [samples, seq_len, hidden] float32."""
        return self.stream.read(samples.start, samples.stop - samples.start).to(device)

    def call(self, index: int, samples: slice) -> BlockArgs:
        """Return what a block is called with beside it."""
        return self.calls.at(index, samples.start, samples.stop - samples.start)


class _StreamedBlock(NamedTuple):
    """A block as it is stored."""

    module: nn.Module  # without weights
    packed: dict[str, PackedWeight]  # by paths in the block
    plain: dict[str, Tensor]  # other parameters, by paths in the block
    inner: dict[str, dict[str, str]]  # path of a packed linear -> tensor -> name on disk, of those that are trained
    vectors: dict[str, str]  # path of another parameter -> name on disk, of those that are trained


class StreamedModel:
    """A packed checkpoint whose blocks are read from its files whenever they are needed, or held as they are stored.

    `stored`: what can be trained, by names on disk, in its type there: norms and biases, and floating-point tensors of
    packed linears but the scales of what these read; with `is_low_rank` the 16-bit factors of low-rank parts alone.
    """

    def __init__(self, directory: Path, device: torch.device, is_held: bool, is_low_rank: bool = False) -> None:
        self.device, self.is_held, self.is_low_rank = device, is_held, is_low_rank
        self.skeleton, self.outside = (Skeleton(open_checkpoint(directory)) for _ in range(2))
        for skeleton in (self.skeleton, self.outside):
            blockwise.computing_in(skeleton, torch.float32)
            for module in skeleton.model.modules():
                if isinstance(module, PackedEmbedding):
                    module.uses_kernels = False
        self.modules: dict[int, nn.Module] = {}
        self.held: dict[int, _StreamedBlock] = {}
        self.stored: dict[str, Tensor] = {}
        self.vectors: set[str] = set()  # of these, norms and biases
        self.behind: dict[str, str] = {}  # parameter outside of the blocks -> name on disk, of those that are trained
        for index in range(len(self.skeleton.blocks)):
            block = self._block(index)
            for path, names in block.inner.items():
                self.stored.update({name: block.packed[path].tensors[key] for key, name in names.items()})
            self.stored.update({name: block.plain[path] for path, name in block.vectors.items()})
            self.vectors.update(block.vectors.values())
        self._load_outside()
        self.vectors.update(self.behind.values())
        self._as_on_disk()

    def text(
        self, tokens: Tensor, batch: int, file: Path | None, reference: ReferenceLogprobs, first: int = 0
    ) -> TrainingText:
        """Embed tokens [samples, seq_len], int64; file: where hidden states go, None: they stay in memory."""
        stream = HiddenStates(len(tokens), file)
        calls = blockwise.record_inputs(self.skeleton, tokens, batch, stream, self.device)
        batches = [slice(start, min(start + batch, len(tokens))) for start in range(0, len(tokens), batch)]
        return TrainingText(stream, calls, batches, reference, first, tokens.shape[1])

    @torch.no_grad()
    def divergence(self, text: TrainingText, batches: Sequence[slice], numbers: Numbers) -> float:
        """Return the sum of KL(original || this model) over all positions of these batches, in nats."""
        states = [text.hidden(samples, self.device) for samples in batches]
        for index in range(len(self.skeleton.blocks)):
            states = self._forward(index, states, text, batches, numbers)
        self._place(numbers)
        return sum(self._head(hidden, text, samples) for hidden, samples in zip(states, batches, strict=True))

    @torch.no_grad()
    def gradients(
        self, text: TrainingText, batches: Sequence[slice], numbers: Numbers
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the same sum and its gradients by `numbers`, by names on disk; none for what has no part in it."""
        front = [[text.hidden(samples, self.device) for samples in batches]]
        for index in range(len(self.skeleton.blocks)):
            front.append(self._forward(index, front[-1], text, batches, numbers))
        behind, total, of_all = front.pop(), 0.0, dict[str, Tensor]()
        self._place(numbers)
        outside = {name: self.outside.model.get_parameter(path) for path, name in self.behind.items()}
        for parameter in outside.values():
            parameter.requires_grad_(True)
        for number, samples in enumerate(batches):
            hidden = behind[number].requires_grad_()
            total += self._head(hidden, text, samples)
            behind[number] = cast(Tensor, hidden.grad)
        for name, parameter in outside.items():
            if parameter.grad is not None:
                of_all[name], parameter.grad = parameter.grad, None
            parameter.requires_grad_(False)
        for index in reversed(range(len(self.skeleton.blocks))):
            calls = [text.call(index, samples) for samples in batches]
            behind, of_block = self._pull_back(index, front.pop(), calls, behind, numbers)
            of_all.update(of_block)
        return total, of_all

    def _forward(
        self, index: int, states: Iterable[Tensor], text: TrainingText, batches: Iterable[slice], numbers: Numbers
    ) -> list[Tensor]:
        """Return what a block gives for the hidden states of these batches."""
        block = self._block(index)
        states = list(states)
        weights, made = _weights(block, numbers, states), []
        for hidden, samples in zip(states, batches, strict=True):
            made.append(_run(block.module, weights, text.call(index, samples), hidden))
        return made

    def _head(self, hidden: Tensor, text: TrainingText, samples: slice) -> float:
        """Return the sum of the divergence behind the last block; its gradient is left in `hidden` if that needs it."""
        total = 0.0
        for row, sample in enumerate(range(samples.start, samples.stop)):
            reference = text.reference.row(text.first + sample, self.device)
            for part in kl.slices(text.seq_len, self.skeleton.vocab_size):
                with torch.set_grad_enabled(hidden.requires_grad):
                    logits = lm_head.logits(self.outside, hidden[row : row + 1, part])[0]
                    loss = reference_logprobs.loss(reference, part, logits)
                if hidden.requires_grad:
                    loss.backward()
                total += loss.item()
        return total

    def _pull_back(
        self,
        index: int,
        front: Sequence[Tensor],
        calls: Sequence[BlockArgs],
        behind: Sequence[Tensor],
        numbers: Numbers,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the gradients in front of a block from those behind it, and those by its trained numbers."""
        block = self._block(index)
        weights = _weights(block, numbers, front)
        read, made = _leaves(block)
        weights.update({path: weights[path].detach().requires_grad_() for path in (*read, *made)})
        before = []
        for hidden, call, gradient in zip(front, calls, behind, strict=True):
            with torch.enable_grad():
                _run(block.module, weights, call, hidden.requires_grad_()).backward(gradient)
            before.append(cast(Tensor, hidden.grad))
        gradients = {}
        for path, name in read.items():
            if (slope := weights[path].grad) is not None:
                gradients[name] = slope
        for path, linear in made.items():
            if (by_matrix := weights.pop(path).grad) is not None:  # else an expert that no token went to
                gradients.update(_through(block, path.removesuffix(".weight"), linear, numbers, by_matrix))
        return before, gradients

    def _block(self, index: int) -> _StreamedBlock:
        if (held := self.held.get(index)) is not None:
            return held
        loaded, prefix = self.skeleton.load_block(index, self.device), self.skeleton.block_prefix(index)
        packed = {path: module.packed() for path, module in loaded.named_modules() if isinstance(module, PackedLinear)}
        owned = {f"{path}.{key}" for path, weight in packed.items() for key in weight.tensors}
        plain = {path: tensor.detach() for path, tensor in loaded.named_parameters() if path not in owned}
        inner = {path: self._train_packed(prefix, path, weight) for path, weight in packed.items()}
        vectors = {path: name for path in plain if (name := self._vector(prefix + path, plain[path])) is not None}
        if index not in self.modules:
            self.modules[index] = _without_weights(loaded, inner)
        self.skeleton.free()
        inner = {path: names for path, names in inner.items() if names}
        block = _StreamedBlock(self.modules[index], packed, plain, inner, vectors)
        if self.is_held:
            self.held[index] = block
        return block

    def _train_packed(self, prefix: str, path: str, weight: PackedWeight) -> dict[str, str]:
        """Return tensor -> name on disk for what is trained of a packed linear."""
        fixed = formats.fixed_tensors(weight.stored)
        floats = (key for key, tensor in weight.tensors.items() if tensor.dtype in FLOATS and key not in fixed)
        if self.is_low_rank:
            floats = (key for key in floats if key in (lowrank.PREFIX + "a", lowrank.PREFIX + "b"))
        named = {key: self._on_disk(f"{prefix}{path}.{key}", weight.tensors[key]) for key in floats}
        return {key: name for key, name in named.items() if name is not None}

    def _vector(self, full: str, tensor: Tensor) -> str | None:
        """Return the name on disk of a norm or bias that is trained, None for anything else."""
        is_vector = tensor.dim() == 1 and tensor.is_floating_point() and not self.is_low_rank
        return self._on_disk(full, tensor) if is_vector else None

    def _on_disk(self, full: str, tensor: Tensor) -> str | None:
        """Return the name of the one stored tensor that a parameter is, None if it is made of more or less than one."""
        sources = self.skeleton.sources.get(full, [])
        if len(sources) != 1 or sources[0].name in self.skeleton.split or sources[0].shape != tuple(tensor.shape):
            return None
        return sources[0].name if sources[0].dtype in FLOATS and tensor.numel() else None

    def _load_outside(self) -> None:
        """Load all that is outside of the blocks, a packed head decoded."""
        model = self.outside.model
        lm_head.load(self.outside, self.device)
        for path, module in list(model.named_modules()):
            if isinstance(module, PackedLinear) and module is model.get_output_embeddings():
                model.set_submodule(path, module.to_linear(torch.float32).requires_grad_(False))
        for path, parameter in model.named_parameters():
            is_outside = not path.startswith(self.outside.in_blocks) and not parameter.is_meta
            if is_outside and (name := self._vector(path, parameter)) is not None:
                self.behind[path], self.stored[name] = name, parameter.detach().clone()

    def _as_on_disk(self) -> None:
        """Give `stored` the types on disk, to which norms and biases have been widened."""
        kinds = {source.name: source.dtype for group in self.skeleton.sources.values() for source in group}
        self.stored = {name: tensor.to(kinds[name]) for name, tensor in self.stored.items()}

    def _place(self, numbers: Numbers) -> None:
        for path, name in self.behind.items():
            self.outside.model.get_parameter(path).data.copy_(numbers[name])


def _without_weights(block: nn.Module, inner: Mapping[str, Iterable[str]]) -> nn.Module:
    """Return a copy of a block without weights; configurations stay shared.

    inner: path of a packed linear -> its tensors that are trained.
    """
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta"), False) for p in block.parameters()}
    for path, module in block.named_modules():
        config = getattr(module, "config", None)
        memo[id(config)] = config
        if isinstance(module, PackedLinear):
            memo[id(module)] = StoredLinear(module.stored, module.shape, module.bias is not None, inner.get(path, ()))
    return copy.deepcopy(block, memo)


def _weights(block: _StreamedBlock, numbers: Numbers, states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return all that a block reads for hidden states [samples, seq_len, hidden], float32, as `functional_call` has it.

    What is trained shares memory with `numbers`.
    """
    tokens = sum(hidden.shape[:-1].numel() for hidden in states)
    weights = {path: tensor for path, tensor in block.plain.items() if path not in block.vectors}
    weights.update({path: numbers[name] for path, name in block.vectors.items()})
    for path in block.packed:
        of_linear = _linear(block, path).numbers(_replace_trained(block, path, numbers), tokens)
        weights.update({f"{path}.{key}": tensor for key, tensor in of_linear.items()})
    return weights


def _linear(block: _StreamedBlock, path: str) -> StoredLinear:
    return cast(StoredLinear, block.module.get_submodule(path))


def _replace_trained(block: _StreamedBlock, path: str, numbers: Numbers) -> PackedWeight:
    """Return a packed weight with its trained tensors as they are in `numbers`."""
    packed = block.packed[path]
    trained = {key: numbers[name] for key, name in block.inner.get(path, {}).items()}
    return PackedWeight(packed.stored, {**packed.tensors, **trained}, packed.shape)


def _leaves(block: _StreamedBlock) -> tuple[dict[str, str], dict[str, StoredLinear]]:
    """Return what gradients are taken by, by paths in the block: what is trained -> name on disk, other matrices."""
    read, made = dict(block.vectors), dict[str, StoredLinear]()
    for path, names in block.inner.items():
        linear = _linear(block, path)
        read.update({f"{path}.{key}": names[key] for key in linear.direct})
        if not set(names) <= set(linear.direct):
            made[f"{path}.weight"] = linear
    return read, made


def _run(module: nn.Module, weights: Mapping[str, Tensor], call: BlockArgs, hidden: Tensor) -> Tensor:
    """Return what a block with these parameters gives for hidden states [samples, seq_len, hidden]."""

    def run(*args: object, **kwargs: object) -> object:
        return functional_call(module, dict(weights), args, kwargs)

    return blockwise.call_block(run, call, hidden)[0]


def _through(
    block: _StreamedBlock, path: str, linear: StoredLinear, numbers: Numbers, gradient: Tensor
) -> dict[str, Tensor]:
    """Return the gradients by stored numbers, by names on disk, from that by what activations are multiplied by."""
    names = {key: name for key, name in block.inner[path].items() if key not in linear.direct}
    leaves = {key: numbers[name].detach().requires_grad_() for key, name in names.items()}
    packed = block.packed[path]
    with torch.enable_grad():
        matrix = linear.matrix(PackedWeight(packed.stored, {**packed.tensors, **leaves}, packed.shape))
    slopes = torch.autograd.grad(matrix, list(leaves.values()), gradient, allow_unused=True)
    return {name: each for name, each in zip(names.values(), slopes, strict=True) if each is not None}
