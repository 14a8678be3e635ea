"""TidalDecode (arXiv 2410.05076): one layer chooses tokens, and the layers behind it read the same ones.

Tokens that matter to one layer matter to its neighbours. The first `dense_layers` layers read everything; the layer
behind them reads everything, too, and takes the tokens with the highest scores; all following layers read these, until
a correction layer chooses anew. Choosing costs nothing but the scores that such a layer computes anyway, and nothing is
stored. `layers` names the layers that choose; by default the one behind the dense ones and one at 13/32 of the depth,
where the paper has it for 32 layers.

What was compared with the authors' code (DerrickYLJ/TidalDecode, its attention for transformers): the layers that read
everything, those that choose and read everything themselves, and what later layers read. Where each query head has keys
of its own, the same coded tokens are chosen (tests/papers/sparse/test_tidal.py).

Differences from that code: sinks and the exact tail are always read and come on top of `keep`, a share of the coded
tokens, where it has a fixed number that counts them; query heads that share keys have one choice, by the mean of the
softmax of their scores, where it repeats the keys and each query head has its own. Its default for the correction layer
is 9, its compiled model has 12, counted from 0, and leaves the newest token out of the choice; the paper has 13.
`heads: all` takes the mean over all heads of the layer, so that all heads of the later layers read the same tokens;
`each` hands the tokens of a head on to the head of the same number, as the published code does.
What it does not do: find the correction layer by itself (the paper tunes it for each model).

Outside the core because at a sixteenth of the tokens it has 20 times the KL of Double Sparsity (0.1885 and 0.0092,
docs/results/kv_reading.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compress.errors import CompressError
from compress.kv.codec import Spec
from compress.kv.sparse.layer import ReadingLayer
from compress.kv.sparse.reader import QueryPiece, Reader, TokenChoice, check_keep, top

NEEDS: frozenset[str] = frozenset()
LAYER = ReadingLayer
CORRECTION_DEPTH = 13 / 32  # the correction layer by default


@dataclass(frozen=True)
class Config:
    keep: float = 0.0625  # share of the coded tokens that attention reads; sinks and the exact tail come on top
    dense_layers: int = 2  # first layers of the model, which read everything
    layers: tuple[int, ...] = ()  # layers that read everything and choose, in ascending order; []: the one behind the
    # dense ones and one at 13/32 of the depth
    heads: Literal["each", "all"] = "each"  # whose scores choose: of each KV head for the same head of later layers, or
    # the mean over all heads for all

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers {self.dense_layers} is not 0 or more")
        if list(self.layers) != sorted(set(self.layers)) or any(x < self.dense_layers for x in self.layers):
            raise ValueError("layers must be in ascending order, behind the dense ones")


def choosing(config: Config, layers: int) -> tuple[int, ...]:
    """Return the layers that choose, of a model of so many."""
    if config.layers:
        return config.layers
    return tuple(sorted({config.dense_layers, max(config.dense_layers, round(CORRECTION_DEPTH * layers))}))


class Tidal(Reader):
    """A layer's part: what it chose in this forward pass, by the first query of each piece of it."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.found: dict[int, tuple[int, TokenChoice | None]] = {}  # first query -> candidates, choice

    def choose(self, piece: QueryPiece) -> TokenChoice | None:
        sources = [index for index in choosing(self.config, self.spec.layers) if index <= self.spec.layer]
        if not sources or self.config.keep == 1:
            return None
        if sources[-1] == self.spec.layer:
            if not piece.start:
                self.found = {}
            self.found[piece.start] = piece.count, self._best(piece)
            return None
        source = getattr(piece.layer.cache.layers[sources[-1]], "reader", None)
        if not isinstance(source, Tidal):
            raise CompressError(
                f"kv_cache.read: layer {sources[-1]} chooses tokens for layer {self.spec.layer}, but it is not coded, "
                "or is skipped; set read.layers"
            )
        count, choice = source.found.get(piece.start, (0, None))
        if choice is None or count != piece.count or choice.places.shape[1] != self.spec.heads:
            return None  # fewer are coded in one of the layers: all are read
        return choice

    def select(self, index: Tensor) -> None:
        self.found = {}

    def _best(self, piece: QueryPiece) -> TokenChoice | None:
        keys, rows = piece.layer.stores["keys"], piece.rows
        scores = rows.new_empty(*rows.shape[:3], len(keys))
        keys.scores(rows, scores)
        shared = piece.mean_softmax(scores[..., keys.sink.length : keys.sink.length + piece.count])
        if self.config.heads == "all":
            shared = shared.mean(1, keepdim=True).expand_as(shared)
        return top(shared, piece, self.config.keep)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Reader:
    return Tidal(config, spec)
