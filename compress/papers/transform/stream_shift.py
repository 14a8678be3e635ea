"""Shift what a norm gives where that is the residual stream itself, as behind the attention of BERT (arXiv 2304.09145).

A post-norm's output x is read by linears and, as it is, by the next addition: y = writer(readers(x)) + x. No scale can
be folded there, since the stream would be scaled, too. A shift can: the norm gives x - z, the readers add W z to their
biases, and the writer adds z to its own, so that y stays what it was.

Which linears read a norm and which writes to its addition is found by one run of the block: readers are given the very
tensor that the norm gave, and the writer is the linear with which the block's output stays when z is random.

Not done: a norm at the end of a block, whose readers lie in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.model.blockwise import BlockInputs, run_block
from compress.model.graph import Site

MAX_CHANGE = 1e-3  # the most that a shift with the right writer changes in the block's output, relative


class StreamSite(NamedTuple):
    """A norm whose output goes on unchanged beside its readers, and the linear that is added to it."""

    site: Site
    writer: str


def find_stream_sites(block: nn.Module, known: Sequence[Site], batches: BlockInputs) -> list[StreamSite]:
    """Return the norms with biases, among those that are no producers of known sites, whose output can be shifted."""
    hidden, call = next(iter(batches()), (None, None))
    if hidden is None or call is None:
        return []
    taken, order = {site.producer for site in known}, _Calls(block)
    with order.watching():
        before = run_block(block, call, hidden, "a block that is being transformed")
    sites = []
    for norm, readers, later in order.norms():
        if norm in taken:
            continue
        shift = torch.randn(order.width(norm), generator=torch.Generator().manual_seed(0)).to(before.device)
        site = Site(norm, True, readers, readers[0].rpartition(".")[0])
        for writer in later:
            with _apply_shift(block, StreamSite(site, writer), shift * before.float().std()):
                after = run_block(block, call, hidden, "a block that is being transformed")
            if (after.float() - before.float()).norm() <= MAX_CHANGE * before.float().norm():
                sites.append(StreamSite(site, writer))
                break
    return sites


@torch.no_grad()
def fold_shift(block: nn.Module, stream: StreamSite, shift: Tensor) -> bool:
    """Subtract a shift [channels] from what the norm gives and add it again behind; False if a number overflows.

    Computed in float64; the norm's bias is rounded first, and the others get the shift that it then stands for.
    """
    biases = {name: block.get_submodule(name).get_parameter("bias") for name in _names(stream)}
    norm = biases[stream.site.producer]
    new = {stream.site.producer: (norm.double() - shift.double()).to(norm.dtype)}
    moved = norm.double() - new[stream.site.producer].double()
    for reader in stream.site.readers:
        weight = block.get_submodule(reader).get_parameter("weight").double()
        new[reader] = (biases[reader].double() + weight @ moved).to(norm.dtype)
    new[stream.writer] = (biases[stream.writer].double() + moved).to(norm.dtype)
    if not all(torch.isfinite(bias).all() for bias in new.values()):
        return False
    for name, bias in new.items():
        biases[name].copy_(bias)
    return True


def _names(stream: StreamSite) -> list[str]:
    return [stream.site.producer, *stream.site.readers, stream.writer]


@contextmanager
def _apply_shift(block: nn.Module, stream: StreamSite, shift: Tensor) -> Iterator[None]:
    """Shift for the time of a run."""
    biases = [block.get_submodule(name).get_parameter("bias") for name in _names(stream)]
    before = [bias.detach().clone() for bias in biases]
    try:
        fold_shift(block, stream, shift)
        yield
    finally:
        for bias, value in zip(biases, before, strict=True):
            bias.data.copy_(value)


class _Calls:
    """The norms and linears of a block in the order of their calls, and which linear reads what a norm gave."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.given: dict[str, Tensor] = {}  # norm -> what it gave, which stays alive
        self.read: list[tuple[str, str]] = []  # (linear, the norm whose output it read, or ""), as called
        self.called: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls of the block's modules that have biases."""
        handles = []
        for name, module in self.block.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if set(own) != {"weight", "bias"}:
                continue
            if own["weight"].dim() == 1:
                handles.append(module.register_forward_hook(lambda _, x, out, name=name: self._give(name, out)))
            elif isinstance(module, nn.Linear):
                handles.append(module.register_forward_pre_hook(lambda _, x, name=name: self._read(name, x)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _give(self, name: str, out: object) -> None:
        if isinstance(out, Tensor):
            self.given[name] = out
            self.called.append(name)

    def _read(self, name: str, inputs: tuple[object, ...]) -> None:
        norm = next((norm for norm, out in self.given.items() if inputs and inputs[0] is out), "")
        self.read.append((name, norm))
        self.called.append(name)

    def width(self, norm: str) -> int:
        """Return the channels of a norm."""
        return len(self.block.get_submodule(norm).get_parameter("weight"))

    def norms(self) -> Iterator[tuple[str, tuple[str, ...], list[str]]]:
        """Yield each norm that linears read, these, and the linears of its width that are called behind them."""
        for norm in self.given:
            readers = tuple(linear for linear, read in self.read if read == norm)
            if not readers or any(self.called.count(name) > 1 for name in (norm, *readers)):
                continue
            behind = self.called[self.called.index(readers[-1]) + 1 :]
            linears = [name for name in behind if isinstance(self.block.get_submodule(name), nn.Linear)]
            yield (
                norm,
                readers,
                [
                    name
                    for name in linears
                    if self.block.get_submodule(name).get_parameter("weight").shape[0] == self.width(norm)
                ],
            )
