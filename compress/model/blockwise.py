"""Run a model one block at a time, with the hidden states between the blocks in memory or on disk.

Every decoder block is replaced once by a stand-in while the model runs on the calibration tokens. The hidden states
that reach the first block are kept, and each block's other arguments (masks, rotary tables; they differ between blocks)
for each batch size. These must not depend on the tokens, which is checked.

Target correction carries two sets of hidden states through the blocks in lockstep, the sides of one `HiddenStates`:
those that the quantized prefix produces, and those of the full-precision model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.errors import NumericalError, UnsupportedModelError
from compress.model.skeleton import Skeleton


class BlockArgs(NamedTuple):
    """The arguments of a block beside its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


ModelArgs = list[dict[int, BlockArgs]]  # for each block, by batch size
BlockInputs = Callable[[], Iterable[tuple[Tensor, BlockArgs]]]  # all batches of a block, the same at every call

QUANTIZED, FULL = 0, 1  # sides of hidden states: of the quantized prefix, of the full-precision model


class BlockPass(NamedTuple):
    """A batch's pass through a block: the side it is read from, the side that keeps the output, and what watches it."""

    source: int
    target: int | None = None
    watch: Callable[[slice], AbstractContextManager[None]] = lambda _: nullcontext()  # given the samples of the batch


class HiddenStates:
    """Hidden states [samples, tokens, hidden], for each side, on the CPU: in memory or in slices of a file."""

    def __init__(self, samples: int, file: Path | None, sides: int = 1) -> None:
        self.samples, self.file, self.sides = samples, file, sides
        self.tensor: Tensor | None = None
        self.slice_shape: tuple[int, ...] = ()
        self.dtype = torch.float32
        self.descriptor = -1

    def write(self, start: int, states: Tensor, side: int = QUANTIZED) -> None:
        """Put states [batch, tokens, hidden] at sample `start` of a side."""
        start += side * self.samples
        if not self.slice_shape:
            self.slice_shape, self.dtype = tuple(states.shape[1:]), states.dtype
            if self.file is None:
                self.tensor = torch.empty(self.sides * self.samples, *self.slice_shape, dtype=self.dtype)
            else:
                self.descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        if self.tensor is not None:
            self.tensor[start : start + states.shape[0]] = states
            return
        raw = memoryview(cast(Any, states.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        offset = start * self._nbytes()
        while raw:
            written = os.pwrite(self.descriptor, raw, offset)
            raw, offset = raw[written:], offset + written

    def read(self, start: int, count: int, side: int = QUANTIZED) -> Tensor:
        """Return states [count, tokens, hidden] from sample `start` of a side; a view when in memory."""
        start += side * self.samples
        if self.tensor is not None:
            return self.tensor[start : start + count]
        states = torch.empty(count, *self.slice_shape, dtype=self.dtype)
        raw = memoryview(cast(Any, states.reshape(-1).view(torch.uint8).numpy()))
        offset = start * self._nbytes()
        while raw:
            got = os.preadv(self.descriptor, [raw], offset)
            if got == 0:
                raise OSError(f"{self.file} is shorter than the hidden states written to it")
            raw, offset = raw[got:], offset + got
        return states

    def close(self) -> None:
        """Free the memory or the file."""
        self.tensor = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _nbytes(self) -> int:
        return int(torch.Size(self.slice_shape).numel()) * self.dtype.itemsize


def computing_in(skeleton: Skeleton, dtype: torch.dtype) -> Callable[[], None]:
    """Load weights, and compute blocks, in this type until the returned function is called.

    All weights must be free now; the end frees them.
    """
    owners = [(module, name, p.dtype) for module in skeleton.model.modules() for name, p in _own(module)]
    before = skeleton.dtype
    _retype(skeleton, dtype, [(module, name, dtype) for module, name, _ in owners])

    def end() -> None:
        skeleton.free()
        _retype(skeleton, before, owners)

    return end


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False))


def _retype(skeleton: Skeleton, dtype: torch.dtype, owners: list[tuple[nn.Module, str, torch.dtype]]) -> None:
    for module, name, chosen in owners:
        empty = torch.empty_like(module.get_parameter(name), dtype=chosen, device="meta")
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    skeleton.dtype = dtype
    skeleton.model.tie_weights()


@torch.no_grad()
def record_inputs(
    skeleton: Skeleton, tokens: Tensor, batch: int, stream: HiddenStates, device: torch.device
) -> ModelArgs:
    """Run all before the first block on tokens [samples, seq_len]; fill `stream`, return all blocks' arguments."""
    calls: ModelArgs = [{} for _ in skeleton.blocks]
    skeleton.load_rest(device)
    try:
        for start in range(0, tokens.shape[0], batch):
            samples = tokens[start : start + batch].to(device)
            hidden, batch_calls = _calls(skeleton, samples)
            stream.write(start, hidden)
            for call, known in zip(batch_calls, calls, strict=True):
                if not _equal(known.setdefault(samples.shape[0], call), call):
                    raise UnsupportedModelError(
                        "the decoder blocks take arguments that differ between samples; such a model cannot be "
                        "calibrated block by block"
                    )
    finally:
        skeleton.free()
    return calls


def _calls(skeleton: Skeleton, tokens: Tensor) -> tuple[Tensor, list[BlockArgs]]:
    """Return the hidden states that reach the first block, and what every block is called with."""
    for as_tuple in (False, True):
        seen: list[tuple[Tensor, BlockArgs]] = []

        def note(hidden_states: Any, *args: Any, seen: list[tuple[Tensor, BlockArgs]] = seen, **kwargs: Any) -> Tensor:
            if not isinstance(hidden_states, Tensor) or (seen and hidden_states.shape != seen[0][0].shape):
                raise _WrongKindError
            seen.append((hidden_states, BlockArgs(args, kwargs)))
            if len(seen) == len(skeleton.blocks):
                raise _AllSeenError
            return hidden_states

        try:
            with standing_in(skeleton.blocks, note, as_tuple):
                skeleton.model.base_model(input_ids=tokens, use_cache=False)
        except _AllSeenError:
            return seen[0][0], [call for _, call in seen]
        except _WrongKindError:
            continue
        break
    raise UnsupportedModelError("some decoder blocks are not called with hidden states in a plain forward pass")


@contextmanager
def standing_in(blocks: nn.ModuleList, gives: Callable[..., Tensor], as_tuple: bool) -> Iterator[None]:
    """While active, `gives` is called in the place of every block.

    The models of transformers do not say whether they take a tensor from a block, or a tuple: callers try both.
    """
    real = list(blocks)
    for i, block in enumerate(real):
        blocks[i] = StandIn(block, gives, as_tuple)
    try:
        yield
    finally:
        for i, block in enumerate(real):
            blocks[i] = block


class StandIn(nn.Module):
    """A block's place in a forward pass: has the block's attributes and returns what `gives` does."""

    def __init__(self, real: nn.Module, gives: Callable[..., Tensor], as_tuple: bool) -> None:
        super().__init__()
        self.__dict__.update(real=real, gives=gives, as_tuple=as_tuple)  # not registered as a child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["real"], name)  # attention_type, layer_idx ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = self.gives(*args, **kwargs)
        return (states,) if self.as_tuple else states


@contextmanager
def attached(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks of modules at the end."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def states_of(output: Any) -> Tensor:
    """Return the hidden states in what a block returns: a tensor, or a tuple with the states first."""
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)


@torch.no_grad()
def run_block(block: nn.Module, call: BlockArgs, hidden: Tensor, name: str) -> Tensor:
    """Run a block on hidden states [batch, tokens, hidden]; raise NumericalError if its output is not finite."""
    states = states_of(block(hidden, *call.args, **call.kwargs))
    if not torch.isfinite(states).all():
        raise NumericalError(
            f"the output of {name} is not finite; check the checkpoint's weights, or use a wider dtype"
        )
    return states


def propagate(
    skeleton: Skeleton,
    index: int,
    calls: ModelArgs,
    stream: HiddenStates,
    batch: int,
    device: torch.device,
    sides: tuple[int, int],
) -> None:
    """Load a block, run it on one side of the stream, write what comes out to the other, and free the block."""
    block, name = skeleton.load_block(index, device), skeleton.block_prefix(index).rstrip(".")
    for start in range(0, stream.samples, batch):
        hidden = stream.read(start, min(batch, stream.samples - start), sides[0]).to(device)
        stream.write(start, run_block(block, calls[index][len(hidden)], hidden, name), sides[1])
    skeleton.free()


@torch.enable_grad()
def pull_back(
    block: nn.Module, call: BlockArgs, hidden: Tensor, gradient: Tensor, weights: Sequence[Tensor] = ()
) -> tuple[Tensor | None, ...]:
    """Return gradients by hidden [batch, tokens, hidden] and by weights, of a loss with `gradient` by the output.

    None for a weight that has no part in the output.
    """
    hidden = hidden.detach().clone().requires_grad_()
    states = states_of(block(hidden, *call.args, **call.kwargs))
    return torch.autograd.grad(states, (hidden, *weights), gradient, allow_unused=True)


class InputsSeenError(Exception):
    """The inputs that a pass through a block was for have been seen: the rest of the pass is not needed."""


class _AllSeenError(Exception):
    """Every block has been called: the rest of the forward pass is not needed."""


class _WrongKindError(Exception):
    """A block was given no hidden states: the model wants the other of tensor and tuple from the block before."""


def _equal(a: Any, b: Any) -> bool:
    """Return True if two trees of arguments are the same, tensors by value."""
    if a is b:
        return True
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool(a == b)
