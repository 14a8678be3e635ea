"""Two tiers of tokens in a fixed share of each span: `high` bits for those that matter, else `low`.

This is the part of ZipVL (arXiv 2410.08584) that a codec alone can do, which sees neither other layers nor the prompt
as a whole. The paper's method, in which attention chooses the share for each layer and input and the prompt's attention
runs on important tokens, is `evict: {method: zipvl}` (compress/papers/evict/zipvl.py), which the recipe zipkv has.

Of each SPAN tokens of a head the `important` share is coded with `high` bits, the rest with `low`, each by the rotated
Lloyd-Max levels of compress/kv/codecs/lloyd.py. A key is important if the probes look at it: the last PROBES queries of
the first tokens that attention shows (the prompt), for each of which the span's tokens compete in a softmax; the mass
is summed over probes and the query heads of the KV head. Keys are coded as they were before the rotary embedding, less
the mean of the first tokens, as there. Bits per element: important high + (1 - important) low + (norm_bits + 1) /
width; the last bit marks the tier.

Differences from the paper: a fixed share of each span instead of the smallest set that holds a share tau of the mass
(rows of a cache must not vary in size, and a choice within a span does not depend on how the prompt was cut); tiers for
each KV head, not for a layer; keys are judged by queries, values, which are stored apart from the keys and see no
scores, by their length: what a coding error does grows with it; no sparse attention in the prompt, which is no matter
of the cache; nothing is dropped. The base quantizer is ours, for all tiers.
What it does not do: work with path="decode" and `judge: probes`, since only fused attention shows queries to a codec;
judge again as the text goes on: the probes are those of the prompt, as published.

Outside the core because it has a KL of 0.035 on SmolLM2-135M at 2,048 tokens, where principal components have 0.0077 in
fewer bytes (docs/results/kv_frontier.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compress.kv.codec import Block, Codec, Field, Spec, rotate
from compress.kv.codecs import lloyd
from compress.kv.codecs.packed import PackedCodes
from compress.numerics.packing import pack_stream, unpack_stream

NEEDS: frozenset[str] = frozenset()
SPAN = 64  # tokens among which the important ones are chosen
PROBES = 32  # queries, at most
TIERS = ("high", "low")


@dataclass(frozen=True)
class Config:
    high: int = 4  # [bits] of one code of an important token
    low: int = 2  # [bits] of one code of the other tokens
    important: float = 0.25  # [fraction] of the tokens that are important, in whole tokens of a span of 64
    judge: Literal["probes", "length"] = "length"  # of importance: attention of the last queries of the prompt (probes,
    # for keys alone), or length of the vector
    norm_bits: Literal[8, 16] = 16  # [bits] of the length of a vector
    seed: int = 0  # of the random signs of the rotation

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= 8:
            raise ValueError(f"low {self.low} and high {self.high} are not 1 <= low <= high <= 8")
        if not 1 <= round(self.important * SPAN) < SPAN:
            raise ValueError(f"important {self.important} leaves a tier of {SPAN} tokens empty")

    def needs_queries(self, kind: str) -> bool:
        """Return whether the codec of keys or values must be given queries."""
        return kind == "keys" and self.judge == "probes"


class Tiers(lloyd.Lloyd):
    """For each span: codes of both tiers [B, h, spans, tokens words], norms by token, a bit for each token."""

    def __init__(self, spec: Spec, config: Config) -> None:
        base = lloyd.Config(bits=config.low, norm_bits=config.norm_bits, seed=config.seed)
        super().__init__(spec, base)
        self.granularity = SPAN
        self.judge = config.judge if spec.kind == "keys" else "length"
        self.needs_queries = config.needs_queries(spec.kind)
        high = round(config.important * SPAN)
        self.counts = {"high": high, "low": SPAN - high}
        self.tier_levels = {tier: self.coder(base, getattr(config, tier)) for tier in TIERS}
        self.tier_codes = {tier: PackedCodes(spec.width, getattr(config, tier), f"{tier}_") for tier in TIERS}
        self.fields = {"norms": Field("scales"), "tiers": Field("extras", SPAN)}
        for codes in self.tier_codes.values():
            self.fields |= dict.fromkeys(codes.fields, Field("codes", SPAN))

    def begin(self, x: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
        state = super().begin(x, queries)
        if self.needs_queries:
            assert queries is not None
            state["probes"] = queries[:, :, -PROBES:].unflatten(1, (x.shape[1], -1)).flatten(2, 3)
        return state

    def importance(self, x: Tensor, state: Block) -> Tensor:
        """x [B, h, n, width], whole spans -> [B, h, n / SPAN, SPAN]."""
        if self.judge == "length":
            x = x - state["mean"] if "mean" in state else x
            return x.square().sum(-1).unflatten(-1, (-1, SPAN))
        keys = rotate(x, state["cos"], state["sin"]) if self.rope == "pre" else x
        scores = state["probes"].to(keys.dtype) @ keys.mT * self.spec.width**-0.5  # B, h, probe, token
        return scores.unflatten(-1, (-1, SPAN)).softmax(-1).sum(2)

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        chosen = self.importance(x, state).topk(self.counts["high"], -1)[1]
        is_high = torch.zeros(*chosen.shape[:3], SPAN, dtype=torch.uint8, device=x.device).scatter_(-1, chosen, 1)
        spans = self.rotate_in(x, state).unflatten(2, (-1, SPAN))
        order, sizes = self._order(is_high), (self.counts["high"], self.counts["low"])
        parts = spans.gather(3, order[..., None].expand_as(spans)).split(sizes, 3)
        rows, norms = {"tiers": pack_stream(is_high, 1)}, []
        for tier, part in zip(TIERS, parts, strict=True):
            codes, tier_norms = self.tier_levels[tier].encode(part)
            packed = self.tier_codes[tier].pack(codes.flatten(2, 3))
            rows |= {name: words.unflatten(2, (-1, self.counts[tier])).flatten(3) for name, words in packed.items()}
            norms.append(tier_norms)
        rows["norms"] = torch.cat(norms, 3).gather(3, order.argsort(-1)[..., None]).flatten(2, 3)
        return rows

    def decode_levels(self, block: Block) -> tuple[Tensor, Tensor]:
        parts = []
        for tier in TIERS:
            codes, count = self.tier_codes[tier], self.counts[tier]
            words = {name: block[name].unflatten(3, (count, -1)).flatten(2, 3) for name in codes.fields}
            values = self.tier_levels[tier].values(codes.unpack(words))
            parts.append(values.unflatten(2, (-1, count)))
        places = self._order(unpack_stream(block["tiers"], 1)).argsort(-1)[..., None]
        whole = torch.cat(parts, 3)
        values = whole.gather(3, places.expand_as(whole)).flatten(2, 3)
        return values, self.levels.norms.load(block["norms"])

    def _reader(self, rows: Tensor, block: Block | None = None) -> Any:
        """No compiled code reads two tiers."""
        return None

    def _order(self, is_high: Tensor) -> Tensor:
        """Tokens of each span, important ones first, else as they come."""
        return is_high.argsort(dim=-1, descending=True, stable=True)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Tiers(spec, config)
