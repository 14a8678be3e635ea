"""Watch vectors, repeat calls of modules and round as if quantized, for the searches of the block transforms.

A block is run on its calibration batches while `observe` watches: a `Range` streams the per-channel statistics of a
site's vector over all tokens, a `Trial` keeps the first calls of a module, at most `tokens` tokens of each of the first
`sequences` sequences, and repeats them with other weights. Neither depends on how the tokens are batched.

A trial repeats the module that holds all readers of the site, or the reader itself where there is only one, which is
what that module gives up to what follows. A module that is called with nothing but hidden states is given the first
tokens of each sequence, which a causal module treats alike without the rest (one that mixes tokens of an encoder nearly
so); one that is given more (masks, rotary tables) is called as it was, with the whole sequences of the first batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.model.blockwise import BlockInputs, run_block
from compress.model.graph import Site
from compress.quant import grid
from compress.runtime import activation_quant
from compress.types import Activations, Scheme

CLEARLY_BETTER = 1 - 1e-4  # another error below this share of one is better: ties do not hang on the rounding of sums


class Watcher(Protocol):
    """What collects something from the runs of a block."""

    full: bool  # nothing more is wanted

    def attach(self) -> RemovableHandle: ...

    def begin(self, batch: int) -> None:
        """Note that `batch` sequences come next."""


@torch.no_grad()
def observe(block: nn.Module, batches: BlockInputs, watchers: Sequence[Watcher]) -> None:
    """Run the block on its batches until every watcher has what it wants."""
    handles = [watcher.attach() for watcher in watchers]
    try:
        for hidden, call in batches():
            if all(watcher.full for watcher in watchers):
                break
            for watcher in watchers:
                watcher.begin(hidden.shape[0])
            run_block(block, call, hidden, "a block that is being transformed")
    finally:
        for handle in handles:
            handle.remove()


class Range:
    """Streamed statistics of the vector of a site, in the readers' channels."""

    full = False

    def __init__(self, block: nn.Module, site: Site) -> None:
        self.is_norm = site.is_norm
        self.module = block.get_submodule(site.producer if site.is_norm else site.readers[0])
        self.low = self.high = self.total = torch.zeros(0)  # [channels]; float32, the sum of |x| in float64
        self.count = 0  # tokens

    def attach(self) -> RemovableHandle:
        if self.is_norm:  # not all of its readers may see all tokens
            return self.module.register_forward_hook(lambda _, inputs, output: self._add(output))
        return self.module.register_forward_pre_hook(lambda _, inputs: self._add(inputs[0]))

    def begin(self, batch: int) -> None:
        pass

    def _add(self, vectors: Tensor) -> None:
        """Add vectors [..., channels]."""
        x = vectors.reshape(-1, vectors.shape[-1])
        if x.shape[0] == 0:
            return
        low, high, total = x.amin(0).float(), x.amax(0).float(), x.abs().sum(0, dtype=torch.float64)
        first = self.count == 0
        self.low = low if first else torch.minimum(self.low, low)
        self.high = high if first else torch.maximum(self.high, high)
        self.total = total if first else self.total + total
        self.count += x.shape[0]

    @property
    def usable(self) -> bool:
        """Return whether tokens have come, all of them finite."""
        return self.count > 0 and bool(torch.isfinite(self.total).all())

    @property
    def largest(self) -> Tensor:
        """Return max |x| [channels]."""
        return torch.maximum(self.high, -self.low)

    @property
    def mean(self) -> Tensor:
        """Return mean |x| [channels], float64."""
        return self.total / self.count


class _Kept(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    share: tuple[int, int]  # of the output's first dimension, those that count: (counting, all) sequences


class Trial:
    """The first calls of a module, which can be repeated; what is kept is a copy and is never written to."""

    def __init__(self, module: nn.Module, tokens: int, sequences: int) -> None:
        self.module, self.tokens, self.sequences = module, tokens, sequences
        self.kept: list[_Kept] = []
        self.missing = sequences  # still to come
        self.rows = tokens * sequences  # still wanted of calls that show no sequences
        self.batch = self.keep = 0  # sequences of this batch, those of them that are wanted
        self.full = False

    def attach(self) -> RemovableHandle:
        return self.module.register_forward_pre_hook(self._take, with_kwargs=True)

    def begin(self, batch: int) -> None:
        self.batch, self.keep = batch, min(batch, self.missing)
        self.missing -= self.keep

    def _take(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if value is not None and not isinstance(value, bool)]
        x = tensors[0] if tensors else None
        if len(tensors) != 1 or not isinstance(x, Tensor):
            if self.keep:
                self.kept.append(_Kept(*_copy_arguments(args, kwargs), (self.keep, self.batch)))
            self.full = self.missing == 0
            return
        if x.dim() == 2:  # tokens of several sequences, or those routed to an expert
            part = x[: self.rows]
            self.rows -= part.shape[0]
            self.full = self.rows == 0
        else:
            part = x[: self.keep, : self.tokens]
            self.full = self.missing == 0
        if part.numel():
            self.kept.append(_Kept(*_copy_arguments(*_swap_argument(args, kwargs, x, part)), (1, 1)))

    def rows_of_input(self) -> Tensor:
        """Return the kept inputs [tokens, channels] of a linear, float32; there may be none."""
        parts = [kept.args[0].flatten(0, -2).float() for kept in self.kept]
        return torch.cat(parts) if parts else torch.empty(0, 0)

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        """Return what the module gives on its kept calls, float32: at most `tokens` of each sequence that counts."""
        outputs = []
        for kept in self.kept:
            args, kwargs = _copy_arguments(kept.args, kept.kwargs)
            out = self.module(*args, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            counting, all_sequences = kept.share
            out = out[: out.shape[0] * counting // all_sequences]
            outputs.append((out[:, : self.tokens] if out.dim() == 3 else out).float())
        return outputs

    def loss(self, reference: Sequence[Tensor]) -> float:
        """Return the squared error of the module's outputs, summed; not finite where they are not."""
        pairs = zip(self.outputs(), reference, strict=True)
        return sum((out - exact).square_().sum(dtype=torch.float64).item() for out, exact in pairs)


def trials(
    block: nn.Module, sites: Sequence[Site], batches: BlockInputs, tokens: int, sequences: int
) -> Iterator[tuple[Site, Range, Trial]]:
    """Yield each site with the statistics of its vector and a trial; the block may be edited between two of them.

    Sites with one reader come last: the inputs of a reader change only with its own site, so that these are kept all
    at once. The others are watched when their turn comes, for the change of one site may change what another module
    is called with.
    """
    ranges = {site: Range(block, site) for site in sites}
    single = {
        site: Trial(block.get_submodule(site.readers[0]), tokens, sequences) for site in sites if len(site.readers) == 1
    }
    observe(block, batches, [*ranges.values(), *single.values()])
    for site in sites:
        if site not in single:
            trial = Trial(block.get_submodule(site.scope), tokens, sequences)
            observe(block, batches, [trial])
            yield site, ranges[site], trial
    for site in list(single):
        yield site, ranges[site], single.pop(site)


class Substitute(NamedTuple):
    """Weight, bias and change of inputs that a reader has for the time of a trial."""

    weight: Tensor
    bias: Tensor | None = None  # None: its own
    inputs: Callable[[Tensor], Tensor] | None = None  # applied to its inputs; None: they stay


@contextmanager
def substitute_weights(block: nn.Module, substitutes: Mapping[str, Substitute]) -> Iterator[None]:
    """Give the linears at these paths other weights while active; afterwards they are as before."""
    before: list[tuple[nn.Parameter, Tensor]] = []
    handles = []
    try:
        for path, new in substitutes.items():
            module = block.get_submodule(path)
            for name, value in (("weight", new.weight), ("bias", new.bias)):
                if value is not None:
                    parameter = module.get_parameter(name)
                    before.append((parameter, parameter.data))
                    parameter.data = value.to(parameter.dtype)
            if (change := new.inputs) is not None:
                handles.append(module.register_forward_pre_hook(lambda _, args, f=change: (f(args[0]), *args[1:])))
        yield
    finally:
        for parameter, data in before:
            parameter.data = data
        for handle in handles:
            handle.remove()


def scalar_grid(scheme: Scheme | None) -> grid.GridConfig | None:
    """Return the integer grid of a linear's weights, of a nested one that of its lowest level; None without any.

    In another basis it has none.
    """
    if scheme is None or scheme.incoherence or not isinstance(scheme.config, grid.GridConfig):
        return None
    first: grid.GridConfig = scheme.part_configs[0]
    return first


def fake_weight(weight: Tensor, config: grid.GridConfig) -> Tensor:
    """Round weight [out, in] float32 to the nearest points of the grids of its groups, float32."""
    codes, fitted, params = grid.nearest(weight.T.contiguous(), config)
    return fitted.values(codes, params.group(weight.shape[1])).T


def fake_activations(inputs: Tensor, activations: Activations, bound: float) -> Tensor:
    """Round inputs [..., channels] as at run time; bound: max |x| of the calibration, for a scale of the tensor."""
    scale = max(activations.clip * bound / activation_quant.largest(activations), activation_quant.TINY)
    return activation_quant.fake_quantize(inputs, activations, torch.tensor([scale], device=inputs.device))


def _copy_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the arguments' tensors of numbers, which a module may write over."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(copy, args)), {name: copy(value) for name, value in kwargs.items()}


def _swap_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put `new` in the place of `old` among arguments."""
    return tuple(new if v is old else v for v in args), {k: new if v is old else v for k, v in kwargs.items()}
