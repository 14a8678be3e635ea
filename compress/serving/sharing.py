"""Let a draft model compute with the tensors of its target, where both hold the same numbers.

A level of a checkpoint as the draft of the whole (self-speculation; on one set of weights: QSpec, arXiv 2410.11305)
reads tensors that the target reads, too. An engine builds the two as separate models in one process, each from its own
directory. Here a module that is complete looks for the one that was completed before it at the same place: the same
name in the checkpoint, the same rows and columns of a rank. Each of its parameters that is equal to that one's, bit for
bit, becomes that one, and its own memory is freed. What is compared are the numbers, so that it does not matter whether
the draft's directory links to the target's files, copies them, or was exported; and another model is never mistaken.

Keys and values are not shared: an engine gives a draft model a cache of its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

# The first module at each place. It dies with its model.
_FIRST: WeakValueDictionary[Hashable, nn.Module] = WeakValueDictionary()


def share(place: Hashable, module: nn.Module) -> int:
    """Let a module hold the equal parameters of the first one at its place; return their bytes, 0 for the first.

    place: name in the checkpoint, and which part of it. Only parameters of the module itself, not of its children.
    """
    first = _FIRST.setdefault(place, module)
    if first is module:
        return 0
    nbytes = 0
    for name, own in module.named_parameters(recurse=False):
        other = first._parameters.get(name)
        if other is not None and own.numel() and _are_equal(own, other):
            module.register_parameter(name, other)
            nbytes += other.nbytes
    return nbytes


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same type, shape, device and bits."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    return torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (one, other)))
