"""Measure what merged key/value heads and narrower keys cost, part by part, before any training.

    python benchmarks/kv_heads.py MODEL --calib TEXT --text TEXT --group 3

Every variant is put into the weights of the full-width model, in float32: keys become what queries see of them, values
what the output sees, so that parts can be measured alone, and also what cannot be folded (directions of keys before the
rotary embedding). One pass over the calibration text serves all. Prints KL(original || variant) over the vocabulary in
nats a token with its standard error over windows, and perplexity, of disjoint windows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.model.load import load_model, load_tokenizer
from compress.numerics import kl
from compress.papers.transform import kv_heads
from compress.papers.transform.kv_heads import ChannelLayout, HeadMoments, Merge, Shared

Edit = Callable[[int, Any, HeadMoments, Tensor], None]  # layer, its attention, moments, those of keys before RoPE


def windows(tokenizer: Any, path: Path, length: int, count: int) -> Tensor:
    """Return the first tokens of a text [count, length]."""
    tokens = tokenizer(path.read_text()[: 12 * length * count], return_tensors="pt").input_ids[0]
    return tokens[: length * count].view(count, length)


class Measured:
    """A model, its moments on a calibration text, and the original's logits on another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = load_model(args.model, torch.float32)
        tokenizer = load_tokenizer(args.model)
        self.tokens = windows(tokenizer, args.text, args.length, args.windows)
        self.layers = [layer.self_attn for layer in self.model.model.layers]
        config = self.model.config
        self.heads, self.all, self.size = (
            config.num_key_value_heads,
            config.num_attention_heads,
            self.layers[0].head_dim,
        )
        half = torch.arange(self.size // 2)
        self.layout = ChannelLayout(torch.stack((half, half + self.size // 2), 1), torch.empty(0, dtype=torch.int64))
        self.moments: list[HeadMoments] = []
        self.keys: list[Tensor] = []  # [h, d, h, d] of keys before the rotary embedding
        self._collect(windows(tokenizer, args.calib, args.calib_length, args.samples))
        self.kept = [(a.k_proj.weight.clone(), a.v_proj.weight.clone()) for a in self.layers]
        with torch.no_grad():
            self.original = [self.model(window[None]).logits[0] for window in self.tokens]

    @torch.no_grad()
    def _collect(self, tokens: Tensor) -> None:
        def watch(index: int, attention: Any) -> None:
            seen: dict[str, Tensor] = {}

            def note(name: str, output: Tensor) -> None:
                seen[name] = output.flatten(0, 1).unflatten(1, (-1, self.size))
                if len(seen) == 3:
                    q, k, v = seen["q"], seen["k"], seen["v"]
                    new = kv_heads.moments(q, k, v, self.layout, self.all // self.heads)
                    flat = k.flatten(1)
                    outer = (flat.T @ flat).double().view(*k.shape[1:], *k.shape[1:])
                    if index == len(self.moments):
                        outputs = attention.o_proj.weight.double().unflatten(1, (self.all, self.size)).transpose(0, 1)
                        self.moments.append(new._replace(outputs=kv_heads.read_by(outputs, self.heads)))
                        self.keys.append(outer)
                    else:
                        old = self.moments[index]
                        added = (a + b for a, b in zip(old[:-1], new[:-1], strict=True))
                        self.moments[index] = HeadMoments(*added, old.outputs)
                        self.keys[index] += outer
                    seen.clear()

            for name, linear in (("q", attention.q_proj), ("k", attention.k_proj), ("v", attention.v_proj)):
                linear.register_forward_hook(lambda _, inputs, output, name=name: note(name, output))

        for index, attention in enumerate(self.layers):
            watch(index, attention)
        for window in tokens:
            self.model.model(window[None])
        for module in self.model.modules():
            module._forward_hooks.clear()

    @torch.no_grad()
    def score(self, name: str, edit: Edit) -> None:
        """Print what a variant costs."""
        for index, (attention, (keys, values)) in enumerate(zip(self.layers, self.kept, strict=True)):
            attention.k_proj.weight.copy_(keys)
            attention.v_proj.weight.copy_(values)
            edit(index, attention, self.moments[index], self.keys[index])
        found, loss, count = [], 0.0, 0
        for window, original in zip(self.tokens, self.original, strict=True):
            logits = self.model(window[None]).logits[0]
            found.append(kl.from_logits(original, logits).mean().item())
            loss += nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum").item()
            count += len(window) - 1
        spread = torch.tensor(found).std().item() / math.sqrt(len(found))
        mean = sum(found) / len(found)
        perplexity = math.exp(loss / count)
        print(f"{name:20s} KL {mean:8.4f} +- {spread:.4f}   perplexity {perplexity:8.3f}", flush=True)


def by_pairs(weight: Tensor, layout: ChannelLayout, shared: Shared) -> Tensor:
    """Return the rows [h, d, n] of keys that queries see once they are merged, in float64."""
    rows = torch.complex(weight[:, layout.pairs[:, 0]], weight[:, layout.pairs[:, 1]])  # head, pair, input
    one = (shared.write[..., None] * rows).sum(0)
    seen = shared.read[..., None] * one
    found = torch.empty_like(weight)
    found[:, layout.pairs[:, 0]], found[:, layout.pairs[:, 1]] = seen.real, seen.imag
    return found


def in_full(weight: Tensor, shared: Shared) -> Tensor:
    """Return the rows [h, d, n] of values that the output sees once they are merged."""
    return shared.read @ (shared.write @ weight).sum(0)


def merging(bench: Measured, group: int, keys: str | None, values: str | None) -> Edit:
    """Return the edit that merges neighbours: keys by mean, plain, weighed or free (before rotary positions)."""

    def merge(how: str, found: HeadMoments) -> Merge:
        return kv_heads.mean_merge(found) if how == "mean" else kv_heads.fitted_merge(found, how == "weighed")

    def edit(index: int, attention: Any, found: HeadMoments, raw: Tensor) -> None:
        for heads in kv_heads.neighbours(bench.heads, group):
            part = found.of(heads)
            rows = torch.cat([torch.arange(bench.size) + head * bench.size for head in heads])
            for linear, how in ((attention.k_proj, keys), (attention.v_proj, values)):
                weight = linear.weight[rows].double().unflatten(0, (len(heads), -1))
                if how is None:
                    continue
                if linear is attention.v_proj:
                    new = in_full(weight, merge(how, part).values)
                elif how == "before RoPE":
                    eye = torch.eye(bench.size, dtype=torch.float64).expand(len(heads), -1, -1)
                    new = in_full(weight, kv_heads.leading(raw[heads][:, :, heads], eye))
                else:
                    new = by_pairs(weight, bench.layout, merge(how, part).keys)
                linear.weight[rows] = new.flatten(0, 1).float()

    return edit


def narrower(bench: Measured, keep: float) -> Edit:
    """Return the edit that leaves the share `keep` of the pairs of each head of keys, those of the largest squares."""

    def edit(index: int, attention: Any, found: HeadMoments, raw: Tensor) -> None:
        sizes = (found.keys.diagonal(dim1=1, dim2=2).real * found.queries).T  # head, pair: mean squares of both
        count = round(keep * sizes.shape[1])
        for head, order in enumerate(sizes.argsort(1, descending=True)):
            gone = bench.layout.pairs[order[count:]].flatten() + head * bench.size
            attention.k_proj.weight[gone] = 0

    return edit


def main() -> None:
    """Measure all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--group", type=int, default=2, help="key/value heads that become one")
    parser.add_argument("--samples", type=int, default=16, help="windows of the calibration text")
    parser.add_argument("--calib-length", type=int, default=512, help="tokens of each")
    parser.add_argument("--windows", type=int, default=8, help="windows that are scored")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--only", nargs="*", help="variants by name, as they are printed; all by default")
    args = parser.parse_args()
    bench = Measured(args)
    for name, edit in variants(bench, args.group).items():
        if not args.only or name in args.only:
            bench.score(name, edit)


def variants(bench: Measured, group: int) -> dict[str, Edit]:
    """Return what is measured, by name."""
    found: dict[str, Edit] = {"original": lambda *_: None}
    for how in ("mean", "plain", "weighed"):
        found[f"values, {how}"] = merging(bench, group, None, how)
    for how in ("mean", "plain", "weighed", "before RoPE"):
        found[f"keys, {how}"] = merging(bench, group, how, None)
    for how in ("mean", "plain", "weighed"):
        found[f"both, {how}"] = merging(bench, group, how, how)
    for keep in (0.875, 0.75, 0.5, 0.25):
        found[f"{keep:.1%} of the pairs"] = narrower(bench, keep)
    return found


if __name__ == "__main__":
    main()
