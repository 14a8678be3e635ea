"""Count what fits into the memory of an engine: the longest context of one sequence, the most sequences at a time.

    memory of a device = reserve + weights + calibrated tensors of the cache + sequences

Weights are stored bytes, as a plan or a checkpoint has them; copies that an engine makes are not counted. What a
sequence of t tokens takes is the sum over layers, in blocks of N tokens as engines give memory out:

    all tokens     ceil(t / N) blocks
    a window of W  at most ceil((W - 1) / N) + 1 blocks: W tokens that begin within a block
    a state        one block, whatever t is; blocks are then so many times N tokens that a state fits into one

A cache that keeps exact tokens at its start or its end cannot lie in blocks. It is that of transformers: bytes in use,
the most of them while a sequence grows to t tokens.

Several devices share a model by tensor parallelism (rank_weights.py). Each keeps its KV heads, one at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from compress.errors import CompressError
from compress.kv import hooks
from compress.kv.cache import layer_types
from compress.kv.settings import KINDS, CacheSettings
from compress.kv.states import StateCodes
from compress.model import meta_pass
from compress.model.cache_pass import cached_layers
from compress.run import kv_cache

CONTEXTS = (4096, 32768)  # tokens; of the sequences that are counted
TOKENS_PER_BLOCK = {"cuda": 16, "cpu": 128}  # vLLM's defaults
PLAIN = "bf16"  # weights that are not packed, and a cache that is not coded
DTYPE = torch.bfloat16
UNLIMITED = 1 << 30  # tokens of a sequence, where a model does not say how many it may have


class ServingMemory(NamedTuple):
    """What serves a model."""

    nbytes: int  # of one device
    devices: int = 1
    reserve: int = 0  # [bytes] of each device that neither weights nor sequences get
    block: int = TOKENS_PER_BLOCK["cuda"]  # [tokens]


class KeptLayer(NamedTuple):
    """What one sequence keeps of a layer on one device."""

    token: int  # [bytes]
    window: int = 0  # [tokens] that it keeps at most; 0: all
    state: int = 0  # [bytes], whatever the length


@dataclass(frozen=True)
class ServedCache:
    """What one sequence keeps on one device."""

    layers: Mapping[KeptLayer, int]  # -> how many there are
    block: int  # [tokens]; 1: not in blocks
    coded: kv_cache.CodedLayers | None = None  # beside these, where they do not lie in blocks
    static: int = 0  # [bytes] of calibrated tensors, once for all sequences

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of so many tokens, the most while it grows to that length."""
        block, page = self._blocks()
        total = self.coded.nbytes(tokens, at_most=True).total if self.coded is not None else 0
        for (token, window, state), count in self.layers.items():
            blocks = -(-tokens // block)
            if window:
                blocks = min(blocks, -(-(window - 1) // block) + 1)
            total += count * (blocks * block * token + (max(state, page) if state else 0))
        return total

    def _blocks(self) -> tuple[int, int]:
        """Return the tokens of a block, and the bytes that a state is padded to."""
        state = max((layer.state for layer in self.layers), default=0)
        token = max((layer.token for layer in self.layers), default=0)
        if self.block == 1 or not state or not token:
            return self.block, 0
        block = self.block * -(-state // (self.block * token))
        return block, block * token


def served_cache(
    config: Any, settings: CacheSettings | None, memory: ServingMemory, static: Mapping[str, Tensor] | None = None
) -> ServedCache:
    """Return what one sequence keeps with a cache of these settings, in bfloat16 without; RecipeError for misfits."""
    if settings is None:
        return ServedCache(_exact_layers(config, memory.devices), memory.block)
    codings = kv_cache.check(config, settings)
    coded = kv_cache.CodedLayers(config, settings, static or {}, DTYPE, memory.devices)
    has_states = settings.states is not None
    layers = _exact_layers(config, memory.devices, coded.coded, has_states)
    static_nbytes = coded.nbytes(1).static if coded.coded else 0
    policies = [codings[index][kind].policy for index in coded.coded for kind in KINDS]
    if has_states or settings.evict is not None or any(policy.sink or policy.residual_length for policy in policies):
        return ServedCache(layers, 1, coded, static_nbytes)
    near, far = (coded.nbytes(tokens).total for tokens in (1 << 14, 1 << 15))
    token, count = -(-(far - near) // (1 << 14)), max(1, len(coded.coded))
    wider = token % count  # as many have a byte more, so that the sum is exact
    layers += Counter({KeptLayer(token // count): count - wider, KeptLayer(token // count + 1): wider})
    return ServedCache(layers, memory.block, static=static_nbytes)


def _exact_layers(
    config: Any, devices: int, without: Collection[int] = (), has_coded_states: bool = False
) -> Counter[KeptLayer]:
    """Return what one sequence keeps of the layers of a model in bfloat16, but for some; states may be coded."""
    keywords = get_layer_types_and_kwargs(config.get_text_config(decoder=True))[1]
    cached, states = cached_layers(config), _state_nbytes(config)
    by_layer = cached.by_layer
    for index, shape in cached.states.items() if has_coded_states else ():
        state = torch.empty(shape, device="meta")  # float32
        states[index] += StateCodes(state).nbytes - state.nbytes
    layers: Counter[KeptLayer] = Counter()
    for index, options in enumerate(keywords):
        heads, token = by_layer.get(index), 0
        if heads is not None:
            shapes = heads.keys, heads.values
            token = sum(max(1, count // devices) * width for count, width in shapes) * DTYPE.itemsize
        window = (options.get("sliding_window") or 0) if token else 0
        kept = KeptLayer(token, window, -(-states.get(index, 0) // devices))
        if index not in without and (kept.token or kept.state):
            layers[kept] += 1
    return layers


def _state_nbytes(config: Any) -> dict[int, int]:
    """Return the bytes of the states of linear attention and of convolutions by layer, from a pass without data."""
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    if not any(hasattr(layer, "recurrent_states") for layer in cache.layers):
        return {}
    tokens = torch.zeros(1, meta_pass.PROBE_TOKENS, dtype=torch.long, device="meta")
    try:
        model = meta_pass.without_experts(config, DTYPE)
        model(input_ids=tokens, use_cache=True, **{hooks.cache_argument(model): cache})
    except meta_pass.NEEDS_DATA as error:
        types = ", ".join(sorted(set(layer_types(config))))
        raise CompressError(f"what layers of these types keep cannot be counted without data: {types}") from error
    kinds = ("conv_states", "recurrent_states")
    kept = {i: [x for kind in kinds for x in getattr(layer, kind, {}).values()] for i, layer in enumerate(cache.layers)}
    return {index: sum(x.nbytes for x in states if x is not None) for index, states in kept.items()}


def count(weights: int, kept: ServedCache, memory: ServingMemory, positions: int | None) -> dict[str, Any]:
    """Return what fits beside so many bytes of weights on each device, as JSON values.

    positions: the most tokens of a sequence. "batch" is None at contexts beyond that. Raises CompressError where a
    sequence keeps nothing: such as an encoder, or a model with a cache of its own.
    """
    if not kept.nbytes(1):
        raise CompressError("nothing that this model keeps of a sequence can be counted: it has no cache, or its own")
    room, longest = memory.nbytes - memory.reserve - weights - kept.static, positions or UNLIMITED
    fits, beyond = 0, longest + 1
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if kept.nbytes(middle) <= room else (fits, middle)
    usual = min(longest, CONTEXTS[0])
    return {
        "weights_nbytes": weights,
        "static_nbytes": kept.static,
        "room_nbytes": max(0, room),
        "bytes_per_token": kept.nbytes(usual) / usual,
        "block": kept.block,
        "context": fits,
        "is_all_positions": fits == positions,
        "batch": {str(n): max(0, room // kept.nbytes(n)) if n <= longest else None for n in CONTEXTS},
    }
