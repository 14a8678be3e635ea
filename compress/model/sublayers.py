"""Find the sublayers of a block, its attention and its MLP with all experts, and what writes their results.

Found from what a forward pass on the meta device shows (compress/model/graph.py), not by names: a child of a block that
holds a linear which writes to the residual stream is a sublayer. What such children read from others beside them
(fc1 beside fc2) goes with the next one that writes.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from compress.model import graph
from compress.model.skeleton import Skeleton
from compress.types import LinearSpec

_known: WeakKeyDictionary[Skeleton, frozenset[str]] = WeakKeyDictionary()


def writers(skeleton: Skeleton) -> frozenset[str]:
    """Return the full names of linears that write to the residual stream; UnsupportedModelError as `graph.trace`."""
    if skeleton not in _known:
        blocks = graph.trace(skeleton).blocks
        names = (skeleton.block_prefix(i) + name for i, block in enumerate(blocks) for name in block.writers)
        _known[skeleton] = frozenset(names)
    return _known[skeleton]


def sublayers(skeleton: Skeleton, specs: list[LinearSpec]) -> dict[str, str]:
    """Return linear -> full name of the child of its block that is its sublayer, for all linears in model order."""
    children = {spec.name: _child(skeleton, spec) for spec in specs}
    ends = {children[spec.name] for spec in specs if spec.name in writers(skeleton)}
    parts, following = dict[str, str](), dict[int, str]()
    for spec in reversed(specs):
        child = children[spec.name]
        if child in ends:
            following[spec.block] = child
        parts[spec.name] = following.get(spec.block, child)
    return parts


def keeps_bias(skeleton: Skeleton, spec: LinearSpec) -> bool:
    """Return whether a linear adds a bias to the residual stream, whatever becomes of its weight."""
    module = None if spec.is_expert else skeleton.model.get_submodule(spec.name)
    has_bias = len(spec.parameters) > 1 if module is None else getattr(module, "bias", None) is not None
    return has_bias and spec.name in writers(skeleton)


def _child(skeleton: Skeleton, spec: LinearSpec) -> str:
    prefix = skeleton.block_prefix(spec.block)
    return prefix + spec.name.removeprefix(prefix).partition(".")[0]
