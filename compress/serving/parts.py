"""Hold what one rank of an engine computes of the linears of a checkpoint, whatever the engine.

An engine may fuse several linears of the checkpoint into one layer (q, k and v; gate and up; all experts of a block).
Each of them has a format, parameters and transforms of its own, so nothing is fused here: a layer holds one
`LinearShard` for every linear and concatenates their outputs. The engine's loader sees placeholders
(`add_placeholders`), one for every name of a stored tensor, which hand a tensor to the shard that it belongs to.

Ranks of tensor parallelism take rows or columns of a linear, cut exactly (compress/formats/__init__.py). What cannot be
cut stays whole on every rank, which computes all of it and uses its share of the inputs or outputs: right, but nothing
is saved. `Totals` tells how much that is. Where inputs are rounded with the scale of a token and ranks have different
columns of it, each rank rounds with the scale of its own columns, so that numbers differ within the rounding.

At a level of a checkpoint (compress/formats/levels.py) tensors beyond it are passed over. What a model that was loaded
before holds, as the target of a draft model does, is not held twice (sharing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress import formats
from compress.errors import CheckpointError
from compress.formats import levels
from compress.runtime.linear import FusedLinears, PackedLinear
from compress.runtime.weight_cache import CACHE
from compress.serving.sharing import share
from compress.types import PackedWeight, Stored

PLAIN_KEY = "weight"  # the tensor of a linear that is not packed
UNLIMITED_NBYTES = 1 << 62
MIB = 1 << 20

WeightLoader = Callable[..., Any]  # (placeholder, tensor, and what else the engine's loader passes)


@dataclass(frozen=True)
class Region:
    """Which outputs and inputs of a linear [out, in] a rank computes."""

    shape: tuple[int, int]  # of the whole
    rows: tuple[range, ...]  # of outputs, in this order
    columns: range

    @classmethod
    def of_rows(cls, shape: tuple[int, int], *rows: range) -> Region:
        return cls(shape, rows, range(shape[1]))

    @property
    def is_whole(self) -> bool:
        return self.rows == (range(self.shape[0]),) and self.columns == range(self.shape[1])


def join_regions(regions: list[Region]) -> Region:
    """Return the region of a linear that the checkpoint stores below each other, from those of the fused ones."""
    rows: list[range] = []
    total = 0
    for region in regions:
        for span in region.rows:
            moved = range(span.start + total, span.stop + total)
            if rows and rows[-1].stop == moved.start:
                moved = range(rows.pop().start, moved.stop)
            rows.append(moved)
        total += region.shape[0]
    return Region((total, regions[0].shape[1]), tuple(rows), regions[0].columns)


class LinearShard(nn.Module):
    """Compute a rank's region of one linear of the checkpoint, without its bias.

    Its tensors come one by one. With the last of them it is cut and built.
    """

    def __init__(
        self, name: str, stored: Stored | None, region: Region, dtype: torch.dtype, level: int | None = None
    ) -> None:
        """Wait for the tensors of a linear; stored: None where it is not packed, and gets the type `dtype`.

        level: of its levels, the one that is computed with; None: the whole weight.
        Raises CheckpointError if transforms of the linear cannot have this shape.
        """
        super().__init__()
        self.name, self.region, self.dtype = name, region, dtype
        self.shared_nbytes = 0  # of tensors that another model in this process holds
        self.whole_because: str | None = None  # why it could not be cut
        self.linears = nn.ModuleList()  # one for each range of rows, once all tensors are here
        self._arrived: dict[str, Tensor] = {}
        try:
            self.specs = self._needed = self._specs_of(stored)
            if stored is not None:
                stored = levels.at_level(stored, level)
                self._needed = self._specs_of(stored)
        except ValueError as error:
            raise CheckpointError(f"quantization_config: {name}: {error}") from error
        self.stored = stored
        if not self._needed:  # zeros, of which nothing comes
            self._build({})

    def _specs_of(self, stored: Stored | None) -> dict[str, formats.Spec]:
        shape = self.region.shape
        return {PLAIN_KEY: (shape, self.dtype)} if stored is None else formats.specs(stored, shape)

    def load(self, key: str, tensor: Tensor, device: torch.device | str) -> None:
        """Take a copy of the stored tensor `key` to a device; CheckpointError if it does not belong here."""
        if key not in self.specs:
            raise CheckpointError(f"{self.name}.{key} is no tensor of this linear; it has {', '.join(self.specs)}")
        if key not in self._needed:
            return
        self._arrived[key] = tensor.to(device, copy=True)
        if len(self._arrived) == len(self._needed):
            self._build(self._arrived)
            self._arrived = {}

    def check(self) -> None:
        """Raise CheckpointError with the name of the first tensor that did not come."""
        if not self.linears:
            missing = next(key for key in self._needed if key not in self._arrived)
            raise CheckpointError(f"{self.name}.{missing} is not in the checkpoint; download or write it again")

    def _build(self, tensors: dict[str, Tensor]) -> None:
        self.linears = nn.ModuleList(self._linears_of(tensors))
        for number, linear in enumerate(self.linears):
            self.shared_nbytes += share((self.name, self.region, number), linear)

    def _linears_of(self, tensors: dict[str, Tensor]) -> list[nn.Module]:
        region = self.region
        if self.stored is None:
            return [self._plain(tensors[PLAIN_KEY], rows) for rows in region.rows]
        weight = PackedWeight(self.stored, tensors, region.shape)
        formats.check(weight, self.name)
        weight = formats.read_all(weight)  # an engine has tokens of several requests in one call
        try:
            weights = [formats.cut(weight, rows, region.columns) for rows in region.rows]
        except ValueError as error:
            self.whole_because, weights = str(error), [weight]
        return [PackedLinear.from_packed(each) for each in weights]

    def _plain(self, weight: Tensor, rows: range) -> nn.Linear:
        if tuple(weight.shape) != self.region.shape:
            raise CheckpointError(
                f"{self.name}.{PLAIN_KEY} is {list(weight.shape)}, expected {list(self.region.shape)}"
            )
        columns = self.region.columns
        linear = nn.Linear(len(columns), len(rows), bias=False, device="meta")
        region_values = weight[rows.start : rows.stop, columns.start : columns.stop].to(self.dtype, copy=True)
        linear.weight = nn.Parameter(region_values, requires_grad=False)
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs [..., rows] of its inputs x [..., columns]; the sum over ranks if they are cut."""
        if self.whole_because is not None:
            missing = (self.region.columns.start, self.region.shape[1] - self.region.columns.stop)
            y = self.linears[0](F.pad(x, missing) if any(missing) else x)
            return join_outputs([y[..., rows.start : rows.stop] for rows in self.region.rows])
        return join_outputs([linear(x) for linear in self.linears])


class FusedShards(nn.ModuleList):
    """The linears of the checkpoint that an engine has fused into one layer, in the order of its outputs."""

    _fused: FusedLinears | None = None

    def __iter__(self) -> Iterator[LinearShard]:
        return cast(Iterator[LinearShard], super().__iter__())

    def finish(self) -> None:
        """Find out whether one call can multiply with all of them, now that they are built."""
        linears = linears_of(self)
        bare = [each for each in linears if isinstance(each, PackedLinear) and each.is_bare]
        if len(bare) == len(linears) and all(shard.whole_because is None for shard in self):
            self._fused = FusedLinears(bare)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., rows] of all shards for inputs x [..., columns] of this rank, behind each other."""
        y = None if self._fused is None else self._fused.product(x)
        return join_outputs([shard(x) for shard in self]) if y is None else y


def join_outputs(outputs: list[Tensor]) -> Tensor:
    """Return outputs behind each other."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def add_placeholders(
    layer: nn.Module, specs: Iterable[Mapping[str, formats.Spec]], load: WeightLoader, prefix: str = ""
) -> None:
    """Give a layer an empty parameter for every stored tensor, whose `weight_loader` is `load`.

    `load` finds the name of the tensor as `stored_as` at the placeholder. The device is the current default.
    """
    for name, (_, dtype) in {name: spec for table in specs for name, spec in table.items()}.items():
        placeholder: Any = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        placeholder.weight_loader, placeholder.stored_as = load, name
        layer.register_parameter(prefix + name, placeholder)


def remove_placeholders(layer: nn.Module) -> torch.device:
    """Take the placeholders away, and return the device that they were on."""
    device = torch.device("cpu")
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if hasattr(parameter, "stored_as"):
            device = parameter.device
            delattr(layer, name)
    return device


def warm(linears: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Make whatever packed linears derive from their tensors and keep, such as decoded weights without a kernel.

    All of it is made while the model is loaded, so that an engine which measures memory then counts it.
    """
    CACHE.limit = UNLIMITED_NBYTES
    for linear in linears:
        if isinstance(linear, PackedLinear) and linear.specs:
            device = next(linear.parameters()).device
            with torch.inference_mode():
                linear(torch.zeros(1, linear.in_features, dtype=dtype, device=device))


class Totals:
    """What a rank holds, summed while its layers are finished."""

    def __init__(self) -> None:
        self.waiting = 0  # layers that are not finished
        self.count, self.nbytes = 0, 0  # packed linears, and their stored bytes on this rank
        self.shared = 0  # bytes of them that another model in this process holds
        self.sparse = 0  # linears that leave inputs unread in transformers
        self.whole: dict[str, int] = {}  # why linears could not be cut -> their bytes

    def finish(self, shards: Iterable[LinearShard]) -> list[str]:
        """Add the shards of a layer; return log lines once it was the last one.

        From then on nothing more is kept decoded: memory does not grow while requests are served.
        """
        for shard in shards:
            if shard.stored is not None:
                self.sparse += shard.stored.sparsity is not None
                self.add(sum(tensor.nbytes for tensor in shard.parameters()), shard.whole_because, shard.shared_nbytes)
        self.waiting -= 1
        if self.waiting:
            return []
        CACHE.limit = CACHE.nbytes
        return self.lines()

    def add(self, nbytes: int, whole_because: str | None, shared: int = 0) -> None:
        """Add the stored bytes of a linear or a table; shared: those of them that another model holds."""
        self.count, self.nbytes, self.shared = self.count + 1, self.nbytes + nbytes, self.shared + shared
        if whole_because is not None:
            self.whole[whole_because] = self.whole.get(whole_because, 0) + nbytes

    def lines(self) -> list[str]:
        """Return log lines: bytes on this rank, shared ones, linears that could not be split, weights kept decoded."""
        lines = [f"{self.count} packed weights, {self.nbytes / MIB:.1f} MiB on this rank"]
        if self.shared:
            lines.append(f"{self.shared / MIB:.1f} MiB of them are tensors of the model that was loaded before")
        if self.whole:
            reasons = "; ".join(sorted(self.whole))
            lines.append(f"{sum(self.whole.values()) / MIB:.1f} MiB of them are whole on every rank: {reasons}")
        if self.sparse:
            lines.append(f"{self.sparse} linears of activation sparsity read all inputs here; transformers skips them")
        if CACHE.nbytes:
            lines.append(
                f"{CACHE.nbytes / MIB:.1f} MiB are kept decoded beside them, where no kernel reads what is stored"
            )
        return lines


def linears_of(shards: Iterable[LinearShard]) -> list[nn.Module]:
    """Return the modules that shards consist of."""
    return [linear for shard in shards for linear in shard.linears]
