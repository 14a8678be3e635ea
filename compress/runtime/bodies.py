"""Find the modules of a model that hold its decoder blocks, without knowing families by name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks_of(body: nn.Module) -> nn.ModuleList | None:
    """Return the list of decoder blocks that a module holds; None if it holds none, or more than one."""
    lists = [each for each in body.children() if isinstance(each, nn.ModuleList) and _has_layers(each)]
    return lists[0] if len(lists) == 1 else None


def _has_layers(blocks: nn.ModuleList) -> bool:
    return len(blocks) > 0 and any(getattr(each, "layer_idx", None) == 0 for each in blocks[0].modules())


def bodies(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model that hold decoder blocks and are given a cache."""
    for module in model.modules():
        forward = getattr(type(module), "forward", None)
        code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
        if code is not None and hasattr(module, "config") and blocks_of(module) is not None:
            yield module
