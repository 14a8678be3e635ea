"""Make queries, keys and values of new tokens of sequences, on a CPU: norms of heads, rotary embedding, cache.

Queries are written to memory of their own, keys and values behind those of the cache, where its tables (see
compress/kernels/cpu/attention_tables.py) say that they lie. Everything is float32 until it is rounded once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from compress.kernels.cpu.attention_tables import CACHE, STATE
from compress.kernels.cpu.emitter import LANES
from compress.kernels.cpu.norm import NormKind, Rms


class HeadKinds(NamedTuple):
    """What becomes of the heads that lie behind each other in a row: of queries, keys and values."""

    queries: int
    stored: int  # heads of keys, and of values
    width: int
    turned: int  # channels of a head that are turned, the first ones: i with i + turned / 2; 0: none
    query_norm: NormKind | None = None
    key_norm: NormKind | None = None


class SplitHeads(Rms):
    """Turns rows of `stride` numbers, the new tokens of a sequence behind each other; cos and sin have `step` numbers
    from one row to the next.
    """

    def __init__(self, kinds: HeadKinds, dtype: torch.dtype) -> None:
        super().__init__("heads", "state cache x cos sin query_weight key_weight q", "rows stride step", dtype)
        state, cache, self.x, self.cos, self.sin, query_weight, key_weight, self.q = self.pointers
        rows, self.stride, self.step = self.integers
        self.kinds, width = kinds, kinds.width
        b = self.b
        tokens, new = (self.load(state, self.i64(STATE.index(name)), self.index) for name in ("tokens", "new"))
        held = {name: self.load(cache, self.i64(i), self.index) for i, name in enumerate(CACHE)}
        keys, values = (b.inttoptr(held[name], self.pointer) for name in ("keys", "values"))
        old = b.sub(tokens, new)
        with self.loop(rows) as row:
            place = b.udiv(row, new), b.add(old, b.urem(row, new))
            start, turn = b.mul(row, self.stride), b.mul(row, self.step)
            with self.loop(self.i64(kinds.queries)) as head:
                target = b.mul(b.add(b.mul(row, self.i64(kinds.queries)), head), self.i64(width))
                source = b.add(start, b.mul(head, self.i64(width)))
                self._head(source, turn, (self.q, target), kinds.query_norm, query_weight)
            with self.loop(self.i64(kinds.stored)) as head:
                source = b.add(start, b.mul(b.add(head, self.i64(kinds.queries)), self.i64(width)))
                target = self._place("key", held, head, *place)
                self._head(source, turn, (keys, target), kinds.key_norm, key_weight)
                source = b.add(source, self.i64(kinds.stored * width))
                target = self._place("value", held, head, *place)
                copy = partial(self._copy, source, (values, target), self.floats(1.0), None, None)
                self.in_chunks(self.i64(width), LANES, copy)
        b.ret_void()

    def _place(self, name: str, held: dict[str, Any], head: Any, sequence: Any, token: Any) -> Any:
        b, places = self.b, ((sequence, "batch"), (head, "head"), (token, "token"))
        products = [b.mul(index, held[f"{name}_{axis}"]) for index, axis in places]
        return b.add(b.add(products[0], products[1]), products[2])

    def _head(self, source: Any, turn: Any, target: tuple[Any, Any], kind: NormKind | None, weight: Any) -> None:
        """Write one head, normalized and turned."""
        b, width, half = self.b, self.kinds.width, self.kinds.turned // 2
        factors = self.floats(1.0)
        if kind is not None:
            factor, _ = self.square_factor(
                self.i64(width), kind, lambda first, rest: self._load(self.x, b.add(source, first), rest)
            )
            factors = self.splat(factor, LANES)

        def turn_pair(first: Any, rest: Any) -> None:
            places = first, b.add(first, self.i64(half))
            low, high = (self._value(source, place, factors, kind, weight, rest) for place in places)
            cos = [self._load(self.cos, b.add(turn, place), rest) for place in places]
            sin = [self._load(self.sin, b.add(turn, place), rest) for place in places]
            turned = (
                b.fsub(b.fmul(low, cos[0]), b.fmul(high, sin[0])),
                b.fadd(b.fmul(high, cos[1]), b.fmul(low, sin[1])),
            )
            for value, place in zip(turned, places, strict=True):
                self.store_some(self.rounded(value), target[0], b.add(target[1], place), rest)

        if half:
            self.in_chunks(self.i64(half), LANES, turn_pair)
        if self.kinds.turned < width:
            rest_of = self.i64(self.kinds.turned)
            copy = partial(self._copy, b.add(source, rest_of), (target[0], b.add(target[1], rest_of)), factors)
            weights = weight if kind is None else self._behind(weight, kind)
            self.in_chunks(self.i64(width - self.kinds.turned), LANES, partial(copy, kind, weights))

    def _behind(self, weight: Any, kind: NormKind) -> Any:
        """Return the address of the weights of the channels that are not turned."""
        element = {torch.float32: self.float, torch.float16: self.half, torch.bfloat16: self.short}
        return weight if kind.weight is None else self.at(weight, self.i64(self.kinds.turned), element[kind.weight])

    def _copy(
        self, source: Any, target: tuple[Any, Any], factors: Any, kind: NormKind | None, weight: Any, *chunk: Any
    ) -> None:
        first, rest = chunk
        value = self._value(source, first, factors, kind, weight, rest)
        self.store_some(self.rounded(value), target[0], self.b.add(target[1], first), rest)

    def _value(self, source: Any, place: Any, factors: Any, kind: NormKind | None, weight: Any, rest: Any) -> Any:
        value = self._load(self.x, self.b.add(source, place), rest)
        return value if kind is None else self.times_weight(self.b.fmul(value, factors), weight, place, kind, rest)

    def _load(self, pointer: Any, place: Any, rest: Any) -> Any:
        return self.load_floats(pointer, place, self.dtype, LANES, rest)
