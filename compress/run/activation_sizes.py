"""Size what a block's activations and the weights around the blocks take, from shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from compress.kernels.loops import columns as column_loops
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import CHUNK, StoredTensor
from compress.types import LayerPlan, LinearSpec

PIECES = 5  # times the float32 numbers of a piece of a weight that are there while it is decoded: codes, scales, both

COPIES = 3  # of what experts read: as kept, as sent, as received
EXPERTS = 8  # of a token, where the configuration does not say


def token_nbytes(specs: list[LinearSpec], item: int) -> int:
    """Return the most bytes of activations that one token keeps alive in a block: inputs and outputs of linears."""
    dense = sum(sum(spec.shape) for spec in specs if not spec.is_expert)
    expert = max((sum(spec.shape) for spec in specs if spec.is_expert), default=0)
    return (dense + 3 * expert) * item


def alive_nbytes(specs: list[LinearSpec], item: int) -> int:
    """Return the most bytes of activations that one token takes at a time: what linears of one module read and write.

    What a module's linears share is there once, and nothing is left of one module when the next one runs.
    """
    modules: dict[str, dict[str, int]] = {}
    for spec in specs:
        if not spec.is_expert:
            numbers = modules.setdefault(spec.name.rpartition(".")[0], {})
            numbers[spec.input_key] = spec.shape[1]
            numbers[f"{spec.name} out"] = spec.shape[0]
    expert = max((sum(spec.shape) for spec in specs if spec.is_expert), default=0)
    return (max((sum(numbers.values()) for numbers in modules.values()), default=0) + 3 * expert) * item


def routed_nbytes(specs: list[LinearSpec], config: Any, item: int) -> int:
    """Return the bytes of what a token's experts read, while it goes to the processes that sum it up."""
    columns = {spec.shape[1] for spec in specs if spec.is_expert}
    return COPIES * getattr(config, "num_experts_per_tok", EXPERTS) * sum(columns) * item


def compiler_nbytes(layers: Iterable[LayerPlan]) -> int:
    """Return the bytes that come to stay when a weight is large enough to compile functions; loads what does that."""
    largest = max((layer.spec.numel for layer in layers), default=0)
    return column_loops.COMPILER_NBYTES if column_loops.is_worthwhile(largest) else 0


def head_nbytes(model: PreTrainedModel) -> int:
    """Return the bytes of an output head that is not the embeddings too."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    shared = {id(p) for p in embeddings.parameters()}
    return sum(p.numel() * p.itemsize for p in head.parameters() if id(p) not in shared) if head is not None else 0


def converted_nbytes(skeleton: Skeleton) -> int:
    """Return the bytes of the largest group of weights that is loaded in another type than it is stored in."""
    groups: dict[str, int] = {}
    for name, sources in skeleton.sources.items():
        inner = name.removeprefix(f"{skeleton.blocks_name}.")
        group = inner.partition(".")[0] if inner != name else ""
        groups[group] = groups.get(group, 0) + sum(x.nbytes for x in sources if x.dtype != skeleton.dtype)
    return max(groups.values(), default=0)


def decoding_nbytes(skeleton: Skeleton) -> int:
    """Return the bytes that decoding one weight of another tool takes beside the weight: what is stored, and pieces."""
    decoded = [tensor for tensor in skeleton.checkpoint.tensors.values() if not isinstance(tensor, StoredTensor)]
    if not decoded:
        return 0
    stored = max(sum(source.nbytes for source in tensor.sources) for tensor in decoded)
    piece = max(CHUNK, *(4 * math.prod(tensor.shape[1:]) for tensor in decoded))
    return stored + PIECES * piece
