"""Walk through a model block by block on calibration windows, each block behind the quantized ones before it.

A block's linears are seen in one pass behind quantized blocks, all of them replaced after it, and its outputs computed
anew. No tool of its own; for tools that round one matrix by one Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Replace = Callable[[str, "Hessians"], Mapping[str, Tensor]]


class Hessians(NamedTuple):
    """What the linears of a block read."""

    moments: dict[str, Tensor]  # first reader of an input -> mean of x x^T, [in, in] float32
    first_reader: dict[str, str]  # linear -> the first linear that has the same input


class _Stop(Exception):
    """Ends a forward pass at the first block."""


@torch.no_grad()
def walk(model: Any, windows: Tensor, batch_size: int, replace: Replace) -> None:
    """Replace the weights of all blocks in order.

    windows int64 [n, tokens]. replace(prefix, hessians) returns new weights [out, in] of some linears of the block by
    their full names; `prefix` is the block's name with a dot.
    """
    blocks, batches = list(model.model.layers), windows.split(batch_size)
    keywords = _block_keywords(model, blocks, batches[0])
    hidden = [_first_inputs(model, blocks[0], batch) for batch in batches]
    for number, block in enumerate(blocks):
        prefix = f"model.layers.{number}."
        with _captured(block, prefix) as hessians:
            for states in hidden:
                block(states, **keywords[number])
        tokens = windows.numel()
        for moment in hessians.moments.values():
            moment /= tokens
        for name, weight in replace(prefix, hessians).items():
            block.get_submodule(name.removeprefix(prefix)).weight.data.copy_(weight)
        for states in hidden:
            out = block(states, **keywords[number])
            states.copy_(out[0] if isinstance(out, tuple) else out)


def _block_keywords(model: Any, blocks: list[nn.Module], batch: Tensor) -> list[dict[str, Any]]:
    """Return what each block is called with beside its inputs: masks and positions, the same for all windows."""
    keywords: list[dict[str, Any]] = []

    def hook(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        keywords.append({key: value for key, value in given.items() if key not in ("past_key_values", "hidden_states")})

    handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in blocks]
    model.model(input_ids=batch, use_cache=False)
    for handle in handles:
        handle.remove()
    return keywords


def _first_inputs(model: Any, block: nn.Module, batch: Tensor) -> Tensor:
    """Return what the first block reads of a batch."""
    caught: list[Tensor] = []

    def hook(_: nn.Module, arguments: tuple[Tensor, ...], given: dict[str, Any]) -> None:
        caught.append(arguments[0] if arguments else given["hidden_states"])
        raise _Stop

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    with suppress(_Stop):
        model.model(input_ids=batch, use_cache=False)
    handle.remove()
    return caught[0].clone()


@contextmanager
def _captured(block: nn.Module, prefix: str) -> Iterator[Hessians]:
    """Sum x x^T over the inputs of the block's linears; an input that several read is summed once."""
    hessians, last = Hessians({}, {}), {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            given = arguments[0]
            first = next((reader for reader, seen in last.items() if seen is given), name)
            hessians.first_reader[name] = first
            if first == name:
                last[name] = given
                rows = given.reshape(-1, given.shape[-1]).float()
                moment = hessians.moments.setdefault(name, rows.new_zeros(rows.shape[1], rows.shape[1]))
                moment.addmm_(rows.T, rows)

        return hook

    linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(prefix + name)) for name, module in linears]
    yield hessians
    for handle in handles:
        handle.remove()
