"""Double Sparsity-Offload (arXiv 2408.07092): keys and values lie outside the fast memory, labels alone stay in it.

What double_sparsity reads of most tokens is their labels. So the rest can lie in slower memory, in that of the host for
a model on a GPU, and else in a file that is mapped. While one layer works, the tokens of the next one are brought: the
inputs of consecutive layers are much alike, so that the next layer's query projection of this layer's input, turned to
its position, tells in advance which tokens the next layer's query will choose. They are brought by a thread of its own,
and attention waits for what has not arrived. What is read is what was brought, right or not, as in the published
engine; `prefetch: false` chooses by the layer's own query and waits for every token, and gives what double_sparsity
gives, bit for bit.

Resident are labels, sinks, the exact tail, the tokens brought last, and all of the first `dense_layers` layers, which
read everything (`OffloadedLayer.resident_nbytes`).

Differences from the published code: those of double_sparsity; layers that have no layer in front of them are the dense
ones, where it has a list of layers that choose by their own queries (0, 1 and 31); one input, that of the layer's
attention behind its norm, as its engine has it (its evaluation leaves the norm out).
What it does not do: passes of several tokens and batches with left padding are not foreseen, they choose by their own
queries; rotary embeddings that change from layer to layer (the next layer's query is turned by this layer's); a stream
of its own on a GPU (nothing here was run on one); take the next layer's projection into one product with this layer's.

Outside the core because nothing here was measured on a device whose memory is short: docs/results/kv_reading.md has the
shares of tokens that are brought rightly.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError
from compress.kv.buffer import ROWS, Buffer
from compress.kv.codec import Block, Spec, rotate
from compress.kv.hooks import TURNS, decoder_blocks
from compress.kv.sparse import double_sparsity
from compress.kv.sparse.layer import ReadingLayer, take
from compress.kv.sparse.reader import QueryPiece, Reader, TokenChoice, group_queries
from compress.kv.token_store import Store

NEEDS = double_sparsity.NEEDS
WORK = double_sparsity.WORK
calibrate, specs, check = double_sparsity.calibrate, double_sparsity.specs, double_sparsity.check


@dataclass(frozen=True)
class Config(double_sparsity.Config):
    prefetch: bool = True  # tokens are brought ahead by the input of the layer in front; false: by their own query

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels == "codes":
            raise ValueError("labels must be store: the stored keys lie outside the fast memory")


class SlowBuffer(Buffer):
    """A buffer whose rows lie in the host's memory, or, where the model itself is there, in a mapped file."""

    device: torch.device  # of what was appended

    def view(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows start..stop on the device of what was appended."""
        return super().view(start, stop).to(self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows in use."""
        return 0 if self._data is None else self.view_slow().numel() * self._data.element_size()

    def view_slow(self) -> Tensor:
        """Return all rows where they lie."""
        return super().view()

    def take(self, index: Tensor) -> None:
        if self._data is not None:
            self._data = _slow_copy(self._data.index_select(0, index.to(self._data.device)), self.device)

    def _allocate(self, like: Tensor, rows: int) -> None:
        self.device = like.device if self._data is None else self.device
        shape = (*like.shape[:2], rows + max(ROWS, rows // 8), *like.shape[3:])
        self._data = slow_tensor(shape, like.dtype, self.device)


def slow_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of any content: pinned in the host for another device, of a nameless mapped file for the CPU."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    nbytes = max(torch.Size(shape).numel() * dtype.itemsize, 1)
    with tempfile.TemporaryFile() as file:
        file.truncate(nbytes)
        mapped = mmap.mmap(file.fileno(), nbytes)
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    return flat[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def _slow_copy(x: Tensor, device: torch.device) -> Tensor:
    return slow_tensor(tuple(x.shape), x.dtype, device).copy_(x)


@cache
def _carrier() -> ThreadPoolExecutor:
    """Return the thread that brings rows."""
    return ThreadPoolExecutor(1, "compress_kv_fetch")


def fetch_rows(store: Store, places: Tensor) -> Block:
    """Bring the rows of coded tokens, places int64 [B, h, k], from slow memory to the device of the places."""
    rows, fields = {}, store.codec.fields
    for name, field in fields.items():
        buffer = store.fields[name]
        slow = buffer.view_slow() if isinstance(buffer, SlowBuffer) else buffer.view()
        index = places // field.tokens if field.tokens > 1 else places
        rows[name] = take(slow, index.to(slow.device)).to(places.device)
    return rows


class Offloaded(double_sparsity.DoubleSparsity):
    """It reads the tokens that were chosen ahead, if there are some."""

    def __init__(self, config: Config, spec: Spec, channels: Tensor) -> None:
        super().__init__(config, spec, channels)
        self.ahead: tuple[int, TokenChoice] | None = None  # candidates, and what was chosen of them
        self.wanted = self.foreseen = 0  # while a tally is kept: tokens of own choices, and those brought ahead

    def choose_ahead(self, piece: QueryPiece) -> TokenChoice | None:
        """Choose for the next query by one that stands for it; None: all are read."""
        choice = super().choose(piece)
        self.ahead = None if choice is None else (piece.count, choice)
        return choice

    def choose(self, piece: QueryPiece) -> TokenChoice | None:
        ahead, self.ahead = self.ahead, None
        if ahead is None or piece.q.shape[3] != 1 or piece.allowed is not None or ahead[0] != piece.count:
            return super().choose(piece)
        if self.tally is not None and (own := super().choose(piece)) is not None:
            brought = torch.zeros(*own.places.shape[:3], piece.count, dtype=torch.bool, device=own.places.device)
            brought.scatter_(3, ahead[1].places, True)
            self.wanted += own.places.numel()
            self.foreseen += int(brought.gather(3, own.places).sum())
        return ahead[1]


class OffloadedLayer(ReadingLayer):
    """A `ReadingLayer` whose coded tokens lie in slow memory."""

    arriving: dict[str, Future[Block]] | None = None  # of keys and values
    places: Tensor | None = None  # of the tokens that arrive
    fetched_nbytes = 0  # of the tokens that were brought last

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        reader = self.reader
        if not isinstance(reader, Offloaded) or self.index < reader.config.dense_layers:
            return
        for kind, store in self.stores.items():
            if store.fetch is None:
                store.fields = {name: SlowBuffer() for name in store.fields}
                store.fetch = partial(self._chosen_rows, kind)

    def fetch_ahead(self, q: Tensor) -> None:
        """Begin to bring what a query [B, h, query heads, 1, width] chooses, which stands for the layer's next one."""
        reader, self.arriving, self.fetched_nbytes = self.reader, None, 0
        count = self.candidates()
        if not isinstance(reader, Offloaded) or not count or self.cache.pads is not None:
            return
        choice = reader.choose_ahead(QueryPiece(self, q, count, None, 0))
        if choice is None:
            return
        self.places = choice.places[:, :, 0]
        self.arriving = {kind: _carrier().submit(fetch_rows, store, self.places) for kind, store in self.stores.items()}

    def _chosen_rows(self, kind: str, places: Tensor) -> Block:
        """Return the rows of chosen tokens: those that were brought ahead, or brought now."""
        ahead = self.arriving is not None and self.places is not None and torch.equal(self.places, places)
        rows = self.arriving[kind].result() if ahead and self.arriving else fetch_rows(self.stores[kind], places)
        if kind == "values":
            self.arriving = self.places = None
        else:
            self.fetched_nbytes = 0
        self.fetched_nbytes += sum(x.numel() * x.element_size() for x in rows.values())
        return rows

    def enter(self, model: nn.Module, kwargs: Mapping[str, Any]) -> list[Any]:
        reading = self.cache.reading
        if not self.seen or reading is None or not reading.config.prefetch:
            return []
        blocks = decoder_blocks(model) or []
        attentions = [next((x for x in block.modules() if hasattr(x, "q_proj")), None) for block in blocks]
        modules = [module for module in attentions if module is not None]
        if not modules or len(modules) < len(attentions):
            raise CompressError(
                "kv_cache.read: tokens cannot be brought ahead for this model, whose attention has no q_proj; set "
                "read.prefetch: false"
            )
        layers = self.cache.layers
        return [
            module.register_forward_pre_hook(partial(_foresee, layer, after), with_kwargs=True)
            for module, after, layer in zip(modules, modules[1:], layers[1:], strict=False)
            if isinstance(layer, OffloadedLayer) and layer.index >= reading.config.dense_layers
        ]

    def offloaded_nbytes(self) -> int:
        """Return the bytes of rows that lie in slow memory."""
        self.commit()
        buffers = [buffer for store in self.stores.values() for buffer in store.fields.values()]
        return sum(buffer.nbytes for buffer in buffers if isinstance(buffer, SlowBuffer))

    def resident_nbytes(self) -> int:
        """Return the bytes that stay in fast memory, with the tokens that were brought last."""
        return self.nbytes().total - self.offloaded_nbytes() + self.fetched_nbytes


def _foresee(layer: OffloadedLayer, module: nn.Module, before: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Bring tokens for a layer, whose attention module is `module`, by the input of the one in front of it."""
    hidden, turns = kwargs.get("hidden_states", args[0] if args else None), kwargs.get(TURNS)
    if not isinstance(hidden, Tensor) or hidden.shape[1] != 1 or not isinstance(turns, tuple) or layer.reader is None:
        return
    source: Any = module
    q, norm, spec = source.q_proj(hidden), getattr(source, "q_norm", None), layer.reader.spec
    if norm is not None and norm.weight.numel() == q.shape[-1] != spec.width:  # of all heads at once
        q, norm = norm(q), None
    q = q.unflatten(-1, (-1, spec.width)).transpose(1, 2)
    if q.shape[1] != spec.heads * spec.queries:
        raise CompressError(
            "kv_cache.read: tokens cannot be brought ahead for this model, whose q_proj gives more than queries; set "
            "read.prefetch: false"
        )
    q = q if norm is None else norm(q)
    scaling = getattr(source, "scaling", None) or q.shape[-1] ** -0.5
    layer.fetch_ahead(group_queries(rotate(q, *turns), spec.heads, scaling))


LAYER = OffloadedLayer


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Reader:
    return Offloaded(config, spec, static["channels"])
