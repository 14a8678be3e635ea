"""Check the entries of coded layers in a file before compiled code reads their codes, which trusts shapes and types.

Hashes find what was damaged on the way. They do not find a file that was made to mislead, because whoever makes it
computes them anew. So each tensor is compared with one of the same codec, which codes a few tokens for that. All
functions raise ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from compress.kv.rope import Rope
from compress.kv.saved.parts import TOKENS
from compress.kv.settings import KINDS, Policy
from compress.kv.static import head_shape, states_heads
from compress.kv.token_store import Store
from compress.numerics import checks
from compress.storage import json_text
from compress.storage.checkpoint import DTYPES

CODINGS = {
    "codings": [json_text.OBJECT],
    "coding_of": [json_text.INTEGER],
    "exact_prefill": (bool,),
    "path": json_text.TEXT,
    "static": json_text.TEXT,
}
STORE = {
    "shape": [json_text.INTEGER],
    "dtype": json_text.TEXT,
    "runs": [json_text.INTEGER],
    "coded": json_text.INTEGER,
    "waits": (bool,),
}
LAYER = {"seen": json_text.INTEGER, **dict.fromkeys(KINDS, STORE)}

Heads = tuple[int, int]  # KV heads and the width of a head


def check_codings(known: Any) -> None:
    """Check the settings of all layers."""
    if wrong := json_text.mismatch(known, CODINGS):
        raise ValueError(wrong)
    if any(coding.keys() != set(KINDS) for coding in known["codings"]):
        raise ValueError("its settings are not those of keys and values")
    if not known["coding_of"] or not all(0 <= number < len(known["codings"]) for number in known["coding_of"]):
        raise ValueError("it names settings that it does not have")


@torch.no_grad()
def heads_of(model: Any, layers: int) -> list[dict[str, Heads]]:
    """Return the heads of the keys and of the values of each layer: those that the configuration states.

    Where it does not tell, a token goes through the model.
    """
    config = model.config
    if states_heads(config):
        return [dict.fromkeys(KINDS, head_shape(config)[1:])] * layers
    cache = DynamicCache(config=config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    shapes = [{kind: getattr(layer, kind, None) for kind in KINDS} for layer in cache.layers]
    return [{k: (x.shape[1], x.shape[3]) for k, x in each.items() if x is not None} for each in shapes]


def check_layer(fact: Mapping[str, Any], heads: Mapping[str, Heads], tokens: int) -> None:
    """Check the entry of a layer of a model with these heads, which has seen so many tokens."""
    if wrong := json_text.mismatch(fact, LAYER):
        raise ValueError(wrong)
    if fact["seen"] != tokens:
        raise ValueError(f"it has seen {fact['seen']} tokens, of {tokens}")
    for kind in KINDS:
        shape, dtype = fact[kind]["shape"], DTYPES.get(fact[kind]["dtype"])
        if shape[1:] != [heads[kind][0], 0, heads[kind][1]]:
            raise ValueError(f"its {kind} have the shape {shape}, and the model has {heads[kind]} heads and channels")
        if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"its {kind} have no type that keys and values have")


def check_store(store: Store, held: Mapping[str, Tensor], fact: Mapping[str, Any], batch: int, seen: int) -> None:
    """Check the tensors of a store, by the names that `coded._store_tensors` gives them, before the store is filled."""
    spec, coded, runs = store.codec.spec, fact["coded"], fact["runs"]
    has_runs = any(field.tokens == 0 for field in store.codec.fields.values())
    if coded < 0 or coded % store.codec.granularity or (runs and min(runs) < 1) or sum(runs) != coded * has_runs:
        raise ValueError(f"{coded} tokens are not coded in whole groups")
    exact = {name: held[name].shape[TOKENS] for name in ("sink", "tail") if name in held and held[name].dim() == 4}
    if sum(exact.values()) + coded != seen or (fact["waits"] and set(exact) != {"tail"}):
        raise ValueError(f"it does not hold the {seen} tokens that it says")
    expected: dict[str, checks.Spec] = {
        name: ((batch, spec.heads, count, spec.width), spec.dtype) for name, count in exact.items()
    }
    if coded:
        like = _example(store, next(iter(held.values())).device)
        for name, field in store.codec.fields.items():
            rows = coded // field.tokens if field.tokens else len(runs)
            expected[f"fields.{name}"] = _with_rows(like.fields[name].view(), batch, rows)
        for name, tensor in like.state.items():
            tensor_given = held.get(f"state.{name}", tensor)
            # a codec that needs queries may keep a row for each of the last ones
            by_query = store.codec.needs_queries and tensor_given.dim() == tensor.dim() == 4
            expected[f"state.{name}"] = _with_rows(tensor, batch, (tensor_given if by_query else tensor).shape[TOKENS])
    moved = held["order"].shape[-1] if "order" in held and held["order"].dim() else 0
    if moved:
        expected |= dict.fromkeys(("order", "source"), ((batch, min(moved, seen)), torch.int64))
    checks.check_specs(held, expected)
    if moved:
        for row in held["order"]:
            checks.distinct("order", row, moved)
        checks.within("source", held["source"], 0, moved)


def check_shared(held: Mapping[str, Tensor], pads: Tensor | None, sizes: Sequence[int]) -> None:
    """Check rotary rows or positions by the names that `Rope.tensors` gives them, and pads [B]; sizes: B, tokens."""
    batch, tokens = sizes
    forms: dict[str, tuple[int, ...]] = {"rows": (2, -1, -1), "positions": (1, -1), "row": (2, 1, -1)}
    if held and set(held) not in ({"rows"}, {"positions", "row"}):
        raise ValueError("its rotary rows are not whole")
    for name, tensor in held.items():
        form, shape = forms[name], tuple(tensor.shape)
        fits = len(shape) == 1 + len(form) and all(size in (own, -1) for own, size in zip(shape[1:], form, strict=True))
        if not fits or shape[0] not in (1, batch) or tensor.is_floating_point() == (name == "positions"):
            raise ValueError(f"rope.{name} has the shape {list(shape)}")
    if pads is not None:
        checks.check_specs({"pads": pads}, {"pads": ((batch,), torch.int64)})
        checks.within("pads", pads, 0, tokens)


def check_rope(rope: Rope, store: Store, seen: int) -> None:
    """Check that there are rotary rows for the keys of a layer, no wider than these."""
    if store.codec.rope == "pre":
        if len(rope) < seen:
            raise ValueError(f"it has rotary rows of {len(rope)} tokens, of {seen}")
        if rope.rows(0, 1).shape[-1] > store.codec.spec.width:
            raise ValueError("its rotary rows are wider than a head")


def _example(store: Store, device: torch.device) -> Store:
    """Return a store of the same codec that holds as few coded tokens of one sequence as there can be."""
    spec, count = store.codec.spec, store.codec.granularity
    example = Store(store.codec, Policy(sink=0, residual_length=0, flush=1), store.rope)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, spec.heads, count, spec.width, generator=generator)
    queries = torch.randn(1, spec.heads * spec.queries, count, spec.width, generator=generator)
    example.append(x.to(device, spec.dtype), None, queries.to(device, spec.dtype))
    return example


def _with_rows(tensor: Tensor, batch: int, rows: int) -> checks.Spec:
    """Return the shape, with so many sequences and rows, and the type of a tensor."""
    return (batch, *tensor.shape[1:TOKENS], rows, *tensor.shape[TOKENS + 1 :]), tensor.dtype
