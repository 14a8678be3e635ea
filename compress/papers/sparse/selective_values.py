"""Selective values: read the values of those tokens only whose attention is above a bound.

The training-free part of DiffQKV (Sigma, arXiv 2501.13629), which loads values for the highest scores only. All keys
are read; behind the softmax, a value whose weight is at most `eps` for all query heads of its KV head is left out, and
the other weights stay as they are. With D the weight that was left out, sum of p over those tokens, the output of a
query head is wrong by at most D times the largest norm of a value that was left out, whatever the text.

Differences from the paper: it trains models for this, with fewer key heads and a fixed number of values; here the
number follows from the weights. Values of sinks and of the exact tail are always read.
What it does not do: save more than the values, half of the traffic.

Outside the core because at a ninth of the values it has a KL of 0.0956, ten times that of Double Sparsity at a
sixteenth of keys and values (docs/results/kv_reading.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from compress.kv.codec import Spec
from compress.kv.sparse.layer import ReadingLayer
from compress.kv.sparse.reader import Reader

NEEDS: frozenset[str] = frozenset()
LAYER = ReadingLayer


@dataclass(frozen=True)
class Config:
    eps: float = 0.0001  # weight behind the softmax up to which a token's value is not read; 0: all are
    dense_layers: int = 0  # first layers of the model, which read everything

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1:
            raise ValueError(f"eps {self.eps:g} is not 0 or more and below 1")
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers {self.dense_layers} is not 0 or more")


class SelectiveValues(Reader):
    """It keeps nothing."""

    def __init__(self, config: Config, spec: Spec) -> None:
        super().__init__(config, spec)
        self.drops_values = config.eps > 0 and spec.layer >= config.dense_layers

    def reads_values(self, p: Tensor) -> Tensor:
        kept: Tensor = p.amax(2) > self.config.eps
        return kept


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Reader:
    return SelectiveValues(config, spec)
