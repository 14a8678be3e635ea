"""Share the linears of a block among the processes of a run; a large one is divided by tiles of rows.

Those of an expert that read the same go to one process, which alone holds their statistics. Portions are dealt by cost,
the same in all processes. Those who hold tiles of a linear hand them to the process that has the first ones when all
are made: it joins them, and measures the errors of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from compress.ranks import Portion, Ranks
from compress.run import quantize_linear, sizes
from compress.run.quantize_linear import LinearTask, Tiles
from compress.types import LayerPlan, Quantized


class _Divided(NamedTuple):
    """A linear at one option, of which this process has made some tiles."""

    task: LinearTask
    tiles: Tiles


class DividedBlock:
    """The linears of a block, at each of their options, and who quantizes what of them."""

    def __init__(self, ranks: Ranks, layers: Sequence[LayerPlan], seed: int) -> None:
        self.ranks, self.seed = ranks, seed
        groups = {layer.spec.name: _group(layer, ranks) for layer in layers}
        costs = dict.fromkeys(groups.values(), 0.0)
        self.pieces = dict[str, int]()
        for layer in layers:
            group = groups[layer.spec.name]
            costs[group] += layer.spec.numel
            self.pieces[group] = min(self.pieces.get(group, layer.spec.shape[0]), _pieces(layer, ranks))
        dealt = ranks.divide(costs, self.pieces)
        self.portions = {name: dealt[group] for name, group in groups.items()}
        self.routed = {  # input of an expert -> process that holds its statistics
            layer.spec.input_key: self.portions[layer.spec.name][0].rank
            for layer in layers
            if layer.spec.is_expert and ranks.size > 1
        }
        self.own = {name for name, portions in self.portions.items() if any(p.rank == ranks.rank for p in portions)}
        self.waiting: dict[tuple[str, str], _Divided] = {}

    def is_whole(self, name: str) -> bool:
        """Whether one process quantizes all of a linear."""
        return len(self.portions[name]) == 1

    def quantize_tiles(self, task: LinearTask) -> None:
        """Quantize what this process has of a divided linear of `own`, and keep it until all is joined."""
        name = task.layer.spec.name
        numbers = next(self._numbers(task.layer, p) for p in self.portions[name] if p.rank == self.ranks.rank)
        tiles = quantize_linear.quantize_tiles(task, numbers, self.seed)
        task.statistics.rotated.clear()  # it waits for the others
        self.waiting[name, task.option] = _Divided(task, tiles)

    def join(self, options: Mapping[str, Mapping[str, LayerPlan]]) -> Iterator[tuple[LinearTask, Quantized, float]]:
        """Yield the divided linears whose first tiles this process has, and the seconds of all who made them.

        options: linear -> option -> how it is stored at that option.
        """
        for name, portions in self.portions.items():
            for option in options[name] if len(portions) > 1 else ():
                found = self.waiting.pop((name, option), None)
                if found is not None and (result := self._joined(found, portions)) is not None:
                    yield found.task, *result

    def _joined(self, found: _Divided, portions: list[Portion]) -> tuple[Quantized, float] | None:
        """Hand tiles to the process that has the first ones; return there the whole linear, and the seconds it took."""
        (first, _), *others = portions
        parts, seconds = list(found.tiles.parts), found.tiles.seconds
        for portion in others:
            if self.ranks.rank in (first, portion.rank):
                handed = self.ranks.hand((found.tiles.parts, found.tiles.seconds), portion.rank, first)
                parts, seconds = parts + handed[0], seconds + handed[1]
        if self.ranks.rank != first:
            return None
        return quantize_linear.join_tiles(found.task, found.tiles, parts, self.seed), seconds

    def _numbers(self, layer: LayerPlan, portion: Portion) -> slice:
        """Return the tiles of a portion; at another option a linear may have a few tiles more than pieces."""
        count, pieces = len(sizes.spans(layer)), self.pieces[layer.spec.name]
        return slice(*(-(-count * i // pieces) for i in (portion.pieces.start, portion.pieces.stop)))


def _group(layer: LayerPlan, ranks: Ranks) -> str:
    """Return the name under which a linear is dealt."""
    return f"input of {layer.spec.input_key}" if layer.spec.is_expert and ranks.size > 1 else layer.spec.name


def _pieces(layer: LayerPlan, ranks: Ranks) -> int:
    return len(sizes.spans(layer)) if ranks.size > 1 else 1
