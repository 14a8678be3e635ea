"""Double Sparsity (arXiv 2408.07092): a few label channels of the keys say which tokens are worth reading.

Few channels carry most of a score, and they are the same for all tokens. So they are found offline: channels of a KV
head are ranked by the mean of |q_c k_c| over calibration tokens, of query and key of the same token after the rotary
embedding, summed over the query heads that share the KV head. While generating, the `channels` first of them, the
labels, give approximate scores of all tokens; the best `keep` of the tokens are read whole, and attention over them is
exact. The first `dense_layers` layers read everything.

Labels lie in a store of their own (`labels: store`): min-max integers of `label_bits` bits, in groups of 32 tokens of a
channel, contiguous, so that all that is read of other tokens is channels x (label_bits + 1) bits. `labels: codes` reads
them out of the stored keys instead, where a codec stores channels (kivi, squat): no byte more is kept, but the label
channels of a token lie in the same lines of memory as its other ones, so that less is computed and not much less read.

Differences from the published code: one selection for all query heads of a KV head, by the mean of the softmax of their
approximate scores (`mean: scores`: by the mean of the scores), where it chooses for each query head; sinks and the
exact tail are always read, and come on top of `keep`; labels of tokens are taken from their codes, which are what
attention reads.
What it does not do: the label channels of a GPU kernel; offloading of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv.buffer import Buffer
from compress.kv.codec import Spec
from compress.kv.codecs import kivi
from compress.kv.sparse.layer import ReadingLayer
from compress.kv.sparse.reader import QueryPiece, Reader, TokenChoice, check_keep, decode_tokens, top
from compress.kv.token_store import Store
from compress.numerics import checks
from compress.numerics.packing import FIELDS

NEEDS: frozenset[str] = frozenset({"keys", "queries"})
LAYER = ReadingLayer
WORK = 8  # bytes that calibrating takes for each number of its largest sample
GROUP = 32  # tokens of a label channel that share a scale
STEP = 2048  # tokens whose labels are made or read at a time
SINGLE = (1, 2, 4, 8)  # bits of codes that lie in one plane


@dataclass(frozen=True)
class Config:
    keep: float = 0.0625  # share of the coded tokens that attention reads; sinks and the exact tail come on top
    channels: int = 16  # label channels of each KV head, at most those of a head; compiled code reads multiples of 16
    labels: Literal["store", "codes"] = "store"  # where labels are read: in a store of their own, or in the stored keys
    label_bits: int = 4  # [bits] of a label in the store
    mean: Literal["softmax", "scores"] = "softmax"  # what query heads of a KV head add up: the softmax of their
    # approximate scores, or the scores, which is one product for all of them
    dense_layers: int = 2  # first layers of the model, which read everything

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.channels < 1:
            raise ValueError(f"channels {self.channels} is not 1 or more")
        if not 1 <= self.label_bits <= 8:
            raise ValueError(f"label_bits {self.label_bits} is not between 1 and 8")
        if self.dense_layers < 0:
            raise ValueError(f"dense_layers {self.dense_layers} is not 0 or more")


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the label channels, int16 [h, channels], the best first; samples are those of compress/kv/__init__.py."""
    keys = samples["keys"]
    queries = samples["queries"].unflatten(1, (spec.heads, -1))  # tokens, h, query heads, width
    sums = torch.zeros(spec.heads, spec.width, dtype=torch.float64)
    for start in range(0, len(keys), STEP):
        tokens = slice(start, start + STEP)
        sums += (queries[tokens].abs().sum(2) * keys[tokens].abs()).sum(0, dtype=torch.float64).cpu()
    order = sums.argsort(dim=-1, descending=True, stable=True)
    return {"channels": order[:, : min(config.channels, spec.width)].to(torch.int16).contiguous()}


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives."""
    return {"channels": ((spec.heads, min(config.channels, spec.width)), torch.int16)}


def typical(config: Config, spec: Spec) -> dict[str, Tensor]:
    """Return channels of which as many are chosen as calibration chooses."""
    return checks.distinct_numbers(specs(config, spec))


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Raise ValueError unless each head has channels of its own, none of them twice."""
    for row in static["channels"]:
        checks.distinct("channels", row.long(), spec.width)


class DoubleSparsity(Reader):
    """Labels of the first `labelled` coded tokens, as rows of a codec of the label channels."""

    unit = GROUP

    def __init__(self, config: Config, spec: Spec, channels: Tensor) -> None:
        super().__init__(config, spec)
        self.channels = channels.long()  # h, label channels
        self.codec = kivi.ByChannel(
            replace(spec, kind="keys", width=channels.shape[1]), kivi.Config(config.label_bits, GROUP)
        )
        self.labels = {name: Buffer() for name in self.codec.fields}
        self.labelled = 0

    def choose(self, piece: QueryPiece) -> TokenChoice | None:
        if self.spec.layer < self.config.dense_layers or self.config.keep == 1:
            return None
        is_one = self.config.mean == "scores"
        query = _of_channels(piece.q.mean(2) if is_one else piece.rows, self.channels)
        scores = query.new_empty(*query.shape[:3], piece.count)
        if self.config.labels == "codes":
            self._read_codes(piece.layer.stores["keys"], query, scores)
        else:
            self._label(piece.layer.stores["keys"], piece.count)
            for tokens, block in self._blocks(piece.count, self.codec.at_once(query)):
                self.codec.write_scores(query, block, scores[..., tokens])
            if self.tally is not None:
                self.tally.extra += sum(x.numel() * x.element_size() for x in self.kept_tensors()) * piece.q.shape[3]
        return top(scores if is_one else piece.mean_softmax(scores), piece, self.config.keep)

    def crop(self, coded: int, removed: int) -> None:
        self.labelled = min(self.labelled, coded // GROUP * GROUP)
        for name, field in self.codec.fields.items():
            buffer = self.labels[name]
            buffer.crop(buffer.length - self.labelled // field.tokens)

    def select(self, index: Tensor) -> None:
        for buffer in self.labels.values():
            buffer.take(index)

    def kept_tensors(self) -> list[Tensor]:
        return [buffer.view() for buffer in self.labels.values() if buffer.length]

    def static(self) -> list[Tensor]:
        return [self.channels.to(torch.int16)]

    def _label(self, keys: Store, count: int) -> None:
        """Make the labels of coded tokens that have none yet."""
        unit = max(GROUP, keys.codec.granularity)
        step = STEP // unit * unit or unit
        for start in range(self.labelled, count, step):
            stop = min(start + step, count)
            rows = self.codec.encode(_of_channels(decode_tokens(keys, start, stop), self.channels), {})
            for name, buffer in self.labels.items():
                buffer.append(rows[name])
        self.labelled = max(self.labelled, count)

    def _blocks(self, count: int, step: int) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Yield the labels of so many tokens, about `step` at a time."""
        for start in range(0, count, step):
            stop = min(start + step, count)
            rows = self.codec.fields.items()
            yield (
                slice(start, stop),
                {name: self.labels[name].view(start // field.tokens, stop // field.tokens) for name, field in rows},
            )

    def _read_codes(self, keys: Store, query: Tensor, out: Tensor) -> None:
        """Write the products of label queries [B, h, m, channels] with the label channels of the stored keys."""
        codec, name = _channels_of(keys, self.spec.where)
        words = codec.codes.padded_channels // FIELDS[codec.bits]
        channels = self.channels.to(query.device)
        place, shift = (channels % words)[None, :, None], (channels // words * codec.bits)[None, :, None]
        for start in range(0, out.shape[-1], STEP):
            stop = min(start + STEP, out.shape[-1])
            block = keys._rows_of(start, stop, 0)
            stored = block[name]
            codes = stored.gather(3, place.expand(*stored.shape[:3], -1)).int() >> shift & (1 << codec.bits) - 1
            low, high = (
                block[part].gather(3, channels[None, :, None].expand(*block[part].shape[:3], -1)).float()
                for part in ("minima", "scales")
            )
            grouped = codes.float().unflatten(2, (-1, codec.granularity)) * high[..., None, :] + low[..., None, :]
            out[..., start:stop] = query @ grouped.flatten(2, 3).mT


def _channels_of(keys: Store, where: str) -> tuple[kivi.ByChannel, str]:
    """Return the codec of keys and the field of its codes, where labels can be read out of these."""
    codec = keys.codec
    if isinstance(codec, kivi.ByChannel) and type(codec).decode is kivi.ByChannel.decode and codec.bits in SINGLE:
        return codec, next(iter(codec.codes.fields))
    raise RecipeError(
        f"{where}: read.labels: codes needs keys that are stored as channels (kivi or squat of 1, 2, 4 or 8 bits); "
        "set read.labels: store"
    )


def _of_channels(x: Tensor, channels: Tensor) -> Tensor:
    """x [B, h, n, width], channels [h, c] -> [B, h, n, c]."""
    return x.gather(3, channels.to(x.device)[None, :, None].expand(x.shape[0], -1, x.shape[2], -1))


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Reader:
    return DoubleSparsity(config, spec, static["channels"])
