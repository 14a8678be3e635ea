"""Count the bytes that each device of tensor parallelism holds of a model's weights.

The plan of the model's class in transformers (`_tp_plan`) says which side of a weight is cut. Attention is cut by heads
as engines do it: each device has the same number of query heads, and of KV heads one at least, which several devices
then hold alike. Tables are cut by rows. What nothing cuts is whole on every device, and so is a packed weight that its
format cannot cut (compress/formats/__init__.py). What counts is the device that holds the most.

Linears of draft heads are cut like those of the last block. A head's copies of tables that are plain are left out:
engines let heads use the model's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from compress import formats
from compress.errors import CompressError
from compress.formats import dense
from compress.model import draft_heads
from compress.model.cache_pass import CachedHeads, cached_layers
from compress.model.skeleton import Skeleton
from compress.model.told_linears import DOWN, EXPERT, UP
from compress.runtime.draft_heads import is_of_head, place
from compress.types import PackedWeight, Plan, Stored

ROWS, COLUMNS = "rows", "columns"
# How engines cut attention, whatever the plan says: last names of linears.
BY_HEADS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj"), ROWS),
    **dict.fromkeys(("o_proj", "out_proj"), COLUMNS),
}
OF_EXPERT = {**dict.fromkeys(UP, ROWS), **dict.fromkeys(DOWN, COLUMNS)}  # last names of what is an expert by itself
UNCUT = "norms, routers and what else is not cut"

Ranges = tuple[range, ...]  # rows or columns of one device


@dataclass
class HeldWeights:
    """What one device holds of the weights."""

    nbytes: int = 0
    whole: Counter[str] = field(default_factory=Counter)  # why weights are on every device -> their bytes

    def add(self, nbytes: int, whole_because: str = "") -> None:
        """Add a weight, or the device's part of it."""
        self.nbytes += nbytes
        if whole_because:
            self.whole[whole_because] += nbytes


class _Weight(NamedTuple):
    """A weight as a checkpoint stores it."""

    name: str  # of the linear or parameter
    asked: str  # name by which the plan of the class knows it
    shape: tuple[int, ...]
    nbytes: int
    stored: Stored | None = None  # None: its numbers all take the same


class _NoNumbers(TorchFunctionMode):
    """Let weights without numbers be cut: formats compare scales with what is stored of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func is torch.equal else func(*args, **(kwargs or {}))


class Devices:
    """Devices that share a model."""

    def __init__(self, skeleton: Skeleton, count: int) -> None:
        """Raise CompressError where the heads of the model cannot be shared by so many."""
        self.skeleton, self.count = skeleton, count
        cached = cached_layers(skeleton.config)
        self.queries, self.by_layer = cached.queries, cached.by_layer
        kv_heads = sorted({heads.keys[0] for heads in self.by_layer.values()})

        def can_share(devices: int) -> bool:
            return self.queries % devices == 0 and all(h % devices == 0 or devices % h == 0 for h in kv_heads)

        if count > 1 and not can_share(count):
            fitting = ", ".join(str(each) for each in range(1, self.queries + 1) if can_share(each))
            raise CompressError(
                f"{count} devices cannot share {self.queries} query heads and {', '.join(map(str, kv_heads))} KV "
                f"heads; give {fitting}"
            )
        self._part_of_packed = cache(self._cut)

    @cached_property
    def _tables(self) -> set[str]:
        """Names of embeddings and output head, without and with their parameter."""
        model = self.skeleton.model
        tables = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        names = {name for name, module in model.named_modules(remove_duplicate=False) if id(module) in tables}
        return names | {f"{name}.weight" for name in names}

    def weights(self, planned: Plan | None, dtype: torch.dtype) -> HeldWeights:
        """Return what a device holds: of a plan, or of the original in `dtype` where there is none."""
        held = HeldWeights()
        packed = [
            _Weight(name, (spec.parameters or (name,))[0], spec.shape, each.nbytes, each.stored)
            for each in (planned.packed if planned is not None else ())
            for spec in (each.spec,)
            for name in (self._name_in_block(spec.name),)
        ]
        for weight in (*packed, *self._plain(planned, dtype)):
            if self.count == 1:
                held.add(weight.nbytes)
                continue
            side = self._side(weight.asked)
            ranges = self._ranges(weight, side) if side else ()
            if not ranges:
                held.add(weight.nbytes, UNCUT)
            elif weight.stored is None or isinstance(weight.stored.params, dense.Params):
                held.add(_share(weight.nbytes, weight.shape, side, ranges))
            else:
                held.add(*self._part_of_packed(weight.stored, weight.shape, weight.nbytes, side, ranges))
        return held

    def _plain(self, planned: Plan | None, dtype: torch.dtype) -> Iterator[_Weight]:
        """Yield each stored tensor that is loaded as it is."""
        unused, seen = set(self.skeleton.unused_tensors()), set[str]()
        kept = dict(planned.kept_nbytes) if planned is not None else {}
        copies = draft_heads.copies(self.skeleton).items()
        unused.update(name for name, original in copies if planned is None or original in kept)
        for known, group in self.skeleton.sources.items():
            name = self._name_in_block(known)
            for stored in group:
                if stored.name in unused or stored.name in seen:
                    continue
                seen.add(stored.name)
                size = dtype.itemsize if stored.dtype.is_floating_point else stored.dtype.itemsize
                plain = torch.Size(stored.shape).numel() * size if planned is None else kept.get(stored.name, 0)
                yield _Weight(name, name, stored.shape, plain)
        for name in kept.keys() - seen - unused:
            yield _Weight(name, "", (), kept[name])  # what a plan adds, such as biases of experts

    def _name_in_block(self, name: str) -> str:
        """Return the name in the last block of what a draft head names, and any other name as it is."""
        if not is_of_head(name, self.skeleton.config):
            return name
        inner = place(name, self.skeleton.config.get_text_config().num_hidden_layers)[1]
        return f"{self.skeleton.block_prefix(len(self.skeleton.blocks) - 1)}{inner}"

    def _side(self, name: str) -> str:
        """Return the side of a linear or parameter that is cut, "" for none."""
        if name in self._tables:
            return ROWS
        path, _, own = name.rpartition(".")
        module = path if own in ("weight", "bias") else name
        style = (self.skeleton.model._tp_plan or {}).get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module), "")
        side = ROWS if style.startswith(("colwise", "packed_colwise", "embedding_rowwise")) else ""
        side = COLUMNS if style.startswith(("rowwise", "packed_rowwise")) else side
        last = module.rpartition(".")[2]
        if EXPERT.search(module):
            side = OF_EXPERT.get(last, side)
        if self._attention(module) is not None:
            side = BY_HEADS.get(last, side)
        return "" if own == "bias" and side == COLUMNS else side

    def _attention(self, linear: str) -> int | None:
        """Return the layer whose cache the module of a linear writes, None for any other module."""
        try:
            layer = getattr(self.skeleton.model.get_submodule(linear.rpartition(".")[0]), "layer_idx", None)
        except AttributeError:
            return None  # an expert, which is no module by itself
        return layer if isinstance(layer, int) else None

    def _ranges(self, weight: _Weight, side: str) -> tuple[Ranges, ...]:
        """Return the rows or columns of each device."""
        size = _size(weight.shape, side)
        linear = weight.name.removesuffix(".weight").removesuffix(".bias")
        layer = self._attention(linear)
        heads = self.by_layer.get(-1 if layer is None else layer)
        makes_queries = linear.rpartition(".")[2].startswith("q_")  # a gated one has the rows of all three
        if side == ROWS and heads is not None and not makes_queries and (ranges := self._head_rows(size, heads)):
            return ranges
        if size % self.count and weight.name not in self._tables:
            raise CompressError(
                f"{self.count} devices cannot share the {size} {side} of {weight.name}; give a number that divides them"
            )
        own = -(-size // self.count)
        return tuple((range(min(size, i * own), min(size, (i + 1) * own)),) for i in range(self.count))

    def _head_rows(self, rows: int, heads: CachedHeads) -> tuple[Ranges, ...]:
        """Return the rows of each device of what makes keys, values, or queries and both; () for anything else."""
        (count, width), (_, value_width) = heads.keys, heads.values
        queries, keys, values = self.queries * width, count * width, count * value_width
        parts = {keys: (keys,), values: (values,), queries + keys + values: (queries, keys, values)}.get(rows)
        if parts is None or (len(parts) == 1 and count >= self.count):
            return ()

        def of_device(device: int) -> Iterator[range]:
            start = 0
            for part in parts:
                shares = self.count if len(parts) > 1 and start == 0 else min(self.count, count)
                own, place = part // shares, device * shares // self.count
                yield range(start + place * own, start + (place + 1) * own)
                start += part

        return tuple(tuple(of_device(device)) for device in range(self.count))

    def _cut(
        self, stored: Stored, shape: tuple[int, int], nbytes: int, side: str, ranges: tuple[Ranges, ...]
    ) -> tuple[int, str]:
        """Return the bytes of the largest part of a packed weight, or of the whole and why it is not cut."""
        specs, every = formats.specs(stored, shape), (range(shape[0]), range(shape[1]))
        empty = {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in specs.items()}
        weight = PackedWeight(stored, empty, shape)

        def part(own: range) -> int:
            return formats.cut(weight, *((own, every[1]) if side == ROWS else (every[0], own))).nbytes

        try:
            with _NoNumbers():
                return max(sum(map(part, own)) for own in dict.fromkeys(ranges)), ""
        except ValueError as error:
            reason = re.sub(r"(column|rows) \d+( to \d+)?", r"\1", str(error))
            return nbytes, f"packed weights that cannot be cut ({reason})"
        except (NotImplementedError, RuntimeError):  # bytes depend on numbers: in proportion
            return _share(nbytes, shape, side, ranges), ""


def _size(shape: Sequence[int], side: str) -> int:
    """Return how many rows or columns a weight, or each of a stack of weights, has."""
    return shape[-1] if side == COLUMNS or len(shape) == 1 else shape[-2]


def _share(nbytes: int, shape: Sequence[int], side: str, ranges: Sequence[Ranges]) -> int:
    """Return the bytes of the largest part of a weight whose numbers all take the same."""
    return max(nbytes * sum(map(len, own)) // _size(shape, side) for own in ranges)
