"""Make the gradients at the outputs of all linears of a model, by one pass of a text through it and back.

The processes of a run share out the samples: each takes its own forward and backward. The rows of a linear then go to
one process, in the order of the samples, which sums them up. So files have the same bytes for any number of processes.

Of some models gradients cannot be had: what blocks hand to each other beside hidden states has none here, an operation
has no derivative, a number overflows. All processes then end the pass, and the store says why.

On a GPU all is computed in the model's type, and on a CPU too where that has fast products; elsewhere in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compress import ranks
from compress.calib.backward_pass import BackwardPass
from compress.calib.gradient_store import OPTION, GradientStore, as_stored
from compress.calib.output_gradients import BlockOutputs, GradientRows, SampledLabels, SampledStates, reduce_rows
from compress.errors import NumericalError, UnsupportedModelError, first_line
from compress.model import architectures, blockwise
from compress.model.skeleton import Skeleton
from compress.numerics import checks, products
from compress.storage.workdir import writing


def computed_dtype(skeleton: Skeleton, device: torch.device | str) -> torch.dtype:
    """Return the type that gradients are computed in."""
    is_as_given = torch.device(device).type != "cpu" or products.is_fast(skeleton.dtype)
    return skeleton.dtype if is_as_given else torch.float32


def make(
    skeleton: Skeleton,
    tokens: Tensor,
    store: GradientStore,
    seed: int,
    file: Path | None = None,
    device: torch.device | str = "cpu",
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Store the gradients over tokens [samples, seq_len] of all blocks that the store does not have yet.

    file: where hidden states may spill. report: is told what is being done, behind each block again. Called by all
    processes of a run. Frees all weights. Where they cannot be had, `store.failure` is why.
    """
    with store.hold(report) if ranks.current().is_main else nullcontext():
        store.failure = ranks.by_main(store.known_failure)
        if store.failure is None and (remaining := ranks.by_main(store.remaining)):
            report("taking output gradients")
            end = blockwise.computing_in(skeleton, computed_dtype(skeleton, device))
            try:
                if skeleton.edits is not None:
                    skeleton.edits.begin(torch.device(device))
                gradient_pass = _GradientPass(skeleton, tokens, store, seed, torch.device(device))
                store.failure = gradient_pass.run(remaining, file, report)
            finally:
                end()
            if store.failure is not None:
                ranks.by_main(partial(store.fail, store.failure))
        ranks.by_main(lambda: None)  # what the main process has written is there for all


Blocks = Generator[tuple[int, dict[str, GradientRows]]]


def _advance(blocks: Blocks | None) -> tuple[dict[str, GradientRows], str | None]:
    """Return what is taken in the next block, {} if there are no samples; or {}, and why that cannot be had."""
    try:
        return next(blocks)[1] if blocks is not None else {}, None
    except (UnsupportedModelError, NumericalError) as error:
        return {}, str(error)
    except RuntimeError as error:  # of operations of the model's own code that were never taken backward
        if checks.is_out_of_memory(error) or _is_of_device(error):
            raise
        return {}, first_line(error)


def _is_of_device(error: RuntimeError) -> bool:
    """Return whether an error is one of a GPU or of its libraries: another run may not have it."""
    return isinstance(error, torch.AcceleratorError) or str(error).startswith(("CUDA error", "cuDNN error"))


class _GradientPass:
    """A pass over the blocks that a store does not have."""

    def __init__(
        self,
        skeleton: Skeleton,
        tokens: Tensor,
        store: GradientStore,
        seed: int,
        device: torch.device,
    ) -> None:
        self.skeleton, self.store, self.ranks, self.device = skeleton, store, ranks.current(), device
        self.samples = self.ranks.part(len(tokens))
        self.tokens = tokens[self.samples]
        kind = SampledStates if architectures.gives_states(skeleton.config) else SampledLabels
        self.labels = kind(tokens.shape[1], seed, self.samples.start)

    def run(self, remaining: int, file: Path | None, report: Callable[[str], None]) -> str | None:
        """Make the first `remaining` blocks, the last of them first; return why that cannot be, None if it was."""
        begun = self.store.resume_point(remaining, self.samples)
        way = BackwardPass(self.skeleton, self.tokens, self.labels, file, self.device)
        has_samples = len(self.tokens) > 0  # there may be more processes than samples
        blocks = way.blocks(self._take, begun) if has_samples else None
        for index in reversed(range(remaining)):
            own, failure = _advance(blocks)
            if failures := list(filter(None, self.ranks.gather(failure))):
                if blocks is not None:
                    blocks.close()
                return failures[0]
            self._store(index, self._sum_up(index, own), way.gradient() if has_samples else None)
            del own
            report(f"taking output gradients ({remaining - index} of {remaining} blocks)")
        if blocks is not None:
            next(blocks, None)  # which frees what it holds
        return None

    def _take(self, index: int, block: nn.Module) -> BlockOutputs:
        linears = {name: self.skeleton.linear(block, name) for name in self.store.linears[index]}
        return BlockOutputs(block, linears, checks.advice(self.skeleton.dtype))

    def _sum_up(self, index: int, own: Mapping[str, GradientRows]) -> dict[str, Tensor]:
        """Return what is stored of the linears of which this process gets all rows; own: those of its samples."""
        linears = self.store.linears[index]
        none = {name: GradientRows.join([], width, self.device) for name, width in linears.items()}
        dealt = self.ranks.divide({name: width**2 for name, width in linears.items()}, dict.fromkeys(linears, 1))
        names = [[name for name in linears if dealt[name][0].rank == rank] for rank in range(self.ranks.size)]
        sent = [[side for name in group for side in own.get(name, none[name])] for group in names]
        received = [iter(tensors) for tensors in self.ranks.exchange(sent)]
        summed: dict[str, Tensor] = {}
        for name in names[self.ranks.rank]:
            parts = [GradientRows(next(tensors), next(tensors)) for tensors in received]
            rows = GradientRows.join(parts, linears[name], self.device) if len(parts) > 1 else parts[0]
            summed |= as_stored(name, len(rows.scales), reduce_rows(rows))
        return summed

    def _store(self, index: int, summed: dict[str, Tensor], gradient: Tensor | None) -> None:
        """Have the main process store a block, and the gradient in front of it; given are this process's own."""
        gradients = [gradient] if gradient is not None else []
        for source in range(1, self.ranks.size):
            if self.ranks.rank in (0, source):
                others, behind = self.ranks.hand((summed, gradients), source, 0)
                summed, gradients = (summed | others, gradients + behind) if self.ranks.is_main else (summed, gradients)
        if self.ranks.is_main:
            with writing(self.store.folder, OPTION):
                self.store.add(index, summed, torch.cat(gradients))
