"""Find the linears of draft heads by their names and shapes, and run heads on hidden states of the model.

What joins a head to the model (the projection of embedding and hidden state), norms, and copies of embeddings and
output head stay as they are. compress/runtime/draft_heads.py says what heads are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError
from compress.model import stored_weights, told_linears
from compress.model.load import no_bars
from compress.model.skeleton import MIN_FEATURES, Skeleton
from compress.model.told_linears import EXPERT, Matrix
from compress.runtime import draft_heads
from compress.storage.checkpoint import Readable
from compress.types import LinearSpec

NO_BLOCK = -1
NARROW = f"narrower than {MIN_FEATURES} features"
SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("w1", "w3"))


def matrices(skeleton: Skeleton) -> tuple[dict[str, Matrix], dict[str, str]]:
    """Return the linears of all heads that can be quantized by their names, and why other matrices are kept."""
    part = dataclasses.replace(skeleton.checkpoint, tensors=skeleton.draft_tensors)
    every, kept = told_linears.tell(part, told_linears.OF_HEADS)
    narrow = {name: NARROW for name, matrix in every.items() if min(matrix.shape) < MIN_FEATURES}
    return {name: matrix for name, matrix in every.items() if name not in narrow}, {**kept, **narrow}


def specs(found_matrices: Mapping[str, Matrix], dtype: torch.dtype) -> list[LinearSpec]:
    """Return the linears of heads, in their order; those that read the same input share a key."""
    return [
        LinearSpec(name, matrix.shape, dtype, NO_BLOCK, _first_reader(name, found_matrices), bool(EXPERT.search(name)))
        for name, matrix in found_matrices.items()
    ]


def _first_reader(name: str, names: Mapping[str, Any]) -> str:
    parent, _, last = name.rpartition(".")
    others = next((group for group in SHARING if last in group), (last,))
    return next(first for each in others if (first := f"{parent}.{each}") in names)


def copies(skeleton: Skeleton) -> dict[str, str]:
    """Return the tensors of heads that are copies of the model's embeddings or output head -> the tensor that they are.

    They are compared byte for byte.
    """
    model = skeleton.model
    tables = [model.get_output_embeddings(), model.get_input_embeddings()]
    weights = {id(p) for table in tables if table is not None for p in table.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    known = [each for name, p in named if id(p) in weights for each in skeleton.sources.get(name, [])]
    shapes = {each.shape for each in known}
    found_copies = {}
    for name, stored in skeleton.draft_tensors.items():
        if stored.shape in shapes:
            equal = (each.name for each in known if stored_weights.is_copy(each, stored))
            if (original := next(equal, None)) is not None:
                found_copies[name] = original
    return found_copies


def can_open(skeleton: Skeleton) -> str | None:
    """Return why heads cannot be run, None if they can; nothing is read."""
    try:
        tensors = {name: torch.empty(x.shape, device="meta") for name, x in skeleton.draft_tensors.items()}
        with no_bars():
            draft_heads.open_heads(skeleton.model, tensors, device="meta")
    except CheckpointError as error:
        return str(error)
    return None


def load(skeleton: Skeleton, device: torch.device) -> nn.Module:
    """Return the heads with their weights; embeddings and head are those of the skeleton, loaded or not."""
    tensors = {name: stored.read() for name, stored in skeleton.draft_tensors.items()}
    with no_bars():
        heads: nn.Module = draft_heads.open_heads(skeleton.model, tensors)
    heads.get_submodule("layers").to(device)
    return heads


def linears(heads: nn.Module, names: Iterable[str], skeleton: Skeleton) -> dict[str, nn.Module]:
    """Return those of the linears, by their stored names, that opened heads have as modules."""
    layers = skeleton.config.get_text_config().num_hidden_layers
    modules = dict(heads.named_modules())
    paths = {name: draft_heads.path_in_opened(name, layers) for name in names}
    return {name: modules[path] for name, path in paths.items() if isinstance(modules.get(path), nn.Linear)}


def run(heads: Any, hidden: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """Yield what each head gives, [batch, tokens - 1 - i, hidden]: at t, what the output head reads for t + 2 + i.

    hidden [batch, tokens, hidden]: of the model behind its last norm. tokens: int64 [batch, tokens], the text. Head
    number i reads what the one before it gives, and the embeddings of the tokens i + 1 later.
    """
    for number in range(len(heads.layers)):
        behind = tokens[:, 1 + number :]
        positions = torch.arange(1 + number, tokens.shape[1], device=tokens.device)[None].expand(tokens.shape[0], -1)
        hidden = heads.forward_layer(number, hidden[:, :-1], positions, None, input_ids=behind)
        yield hidden


def count_numbers(tensors: Iterable[Readable]) -> int:
    """Return the numbers in tensors."""
    return sum(torch.Size(stored.shape).numel() for stored in tensors)


def count_heads(skeleton: Skeleton) -> int:
    """Return how many heads a checkpoint has."""
    layers = skeleton.config.get_text_config().num_hidden_layers
    return len({draft_heads.place(name, layers)[0] for name in skeleton.draft_tensors})
