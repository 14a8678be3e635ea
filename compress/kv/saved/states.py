"""Save and restore layers of linear attention and Mamba: states of convolutions as they are, of recurrences as codes.

Codes of a cache that has them (compress/kv/states.py) are stored without loss. Other states are rounded to int8 once,
as SGLang's pool of prefixes has them, or kept as they are where nothing may be lost. The error of one rounding fades as
the state decays; that of one after every token would add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from compress.errors import CheckpointError
from compress.kv.saved import parts
from compress.kv.saved.file import SavedFile, Source
from compress.kv.saved.parts import SavedPart
from compress.kv.states import CodedStates, StateCodes, is_matrix
from compress.storage.checkpoint import DTYPES

STATES = "states"  # kind of a layer
PartsByName = Iterator[tuple[str, tuple[SavedPart, Source]]]


def exact(tensor: Tensor) -> tuple[SavedPart, Source]:
    """Return the part of a tensor that comes back bit for bit, and what gives it.

    Raises NumericalError for numbers that are not finite.
    """
    tensor = parts.check_finite(tensor.detach().cpu().contiguous())
    return parts.lossless(tensor), lambda: tensor


def is_linear(layer: Any) -> bool:
    """Return whether a layer of a cache keeps states, and no keys and values."""
    return isinstance(layer, LinearAttentionLayer) and not isinstance(layer, CacheLayerMixin)


def layer_facts(layer: Any) -> dict[str, Any]:
    """Return what is to be known of a layer: the types of its states, by number."""
    recurrent = {str(i): parts.NAMES[x.dtype] for i, x in layer.recurrent_states.items() if x is not None}
    return {"kind": STATES, "recurrent": recurrent}


def layer_parts(index: int, layer: Any, is_rounded: bool) -> PartsByName:
    """Yield the parts of a layer; is_rounded: states that are no codes may lose something."""
    for number, state in layer.conv_states.items():
        if state is not None:
            yield f"{index}.conv.{number}", exact(state)
    for number, state in layer.recurrent_states.items():
        if isinstance(state, Tensor) and is_rounded and is_matrix(state):
            state = StateCodes(parts.check_finite(state), 8)
        held = state.parts() if isinstance(state, StateCodes) else {} if state is None else {"exact": state}
        yield from ((f"{index}.recurrent.{number}.{name}", exact(tensor)) for name, tensor in held.items())


def restore(saved: SavedFile, index: int, layer: Any, fact: Mapping[str, Any], device: torch.device) -> None:
    """Fill a fresh layer. Raises CheckpointError for a layer of another kind, ValueError for parts that do not fit."""
    if not is_linear(layer):
        raise CheckpointError(
            f"a layer of linear attention was saved, and the model's is a {type(layer).__name__}; load the cache with "
            "the release of transformers that saved it"
        )
    prefixes = {"conv": f"{index}.conv.", "recurrent": f"{index}.recurrent."}
    held = {
        kind: {n.removeprefix(prefix): saved.tensor(n).to(device) for n in saved.parts if n.startswith(prefix)}
        for kind, prefix in prefixes.items()
    }
    batch = saved.parts["tokens"].shape[0]
    if any(len(x) != batch for tensors in held.values() for x in tensors.values()):
        raise ValueError("its states are not those of as many sequences")
    for number, state in ((int(name), x) for name, x in held["conv"].items()):
        layer.lazy_initialization(conv_states=state, state_idx=number)
        layer.conv_states[number].copy_(state)
        layer.has_previous_state[number] = True
    for name, dtype in fact["recurrent"].items():
        tensors = {n.removeprefix(f"{name}."): x for n, x in held["recurrent"].items() if n.startswith(f"{name}.")}
        held_state: Any = tensors["exact"] if "exact" in tensors else _join_parts(tensors, DTYPES[dtype])
        number = int(name)
        if isinstance(layer, CodedStates) and isinstance(held_state, StateCodes):
            layer.recurrent_states[number] = held_state  # type: ignore[assignment]
            layer.is_recurrent_states_initialized[number] = True
        else:
            layer.update_recurrent_state(held_state if isinstance(held_state, Tensor) else held_state.decode(), number)
        layer.has_previous_state[number] = True


def _join_parts(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> StateCodes:
    """Return the state of these parts; ValueError where they do not belong together."""
    codes, scales, residuals = tensors["codes"], tensors["scales"], tensors.get("residuals")
    shape, columns = tuple(codes.shape[:-1]), codes.shape[-1]
    is_whole = codes.dtype == torch.int8 and (scales.dtype, tuple(scales.shape)) == (torch.float32, (*shape, 1))
    if residuals is not None:
        wanted = torch.uint8, (*shape, -(-columns // 2))
        is_whole = is_whole and (residuals.dtype, tuple(residuals.shape)) == wanted
    if not is_whole or codes.dim() < 3 or not dtype.is_floating_point:
        raise ValueError("the parts of a state do not belong together")
    return StateCodes.of_parts(dict(tensors), dtype)


def raw_nbytes(saved: SavedFile, index: int, fact: Mapping[str, Any]) -> int:
    """Return the bytes of the states of a layer as the model computed them."""
    total = 0
    for name, part in saved.parts.items():
        owner, kind, number = (*name.split("."), "", "")[:3]
        if owner == str(index) and (kind == "conv" or name.endswith((".codes", ".exact"))):
            dtype = part.dtype if kind == "conv" else DTYPES[fact["recurrent"][number]]
            total += torch.Size(part.shape).numel() * dtype.itemsize
    return total
