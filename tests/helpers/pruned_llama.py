"""A Llama by plain loops in float64 that drops tokens between layers, one sequence and no padding: a slow reference.

slow = SlowLlama(model, stays={1: 0.6, 3: 0.36}, sink=4, recent=8)
slow.prompt(ids)        # logits [vocab] of the last token
slow.step(token)        # of one more
slow.lengths            # tokens that each layer has stored
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Rows = dict[int, Tensor]  # position -> float64 [hidden]


class SlowLlama:
    def __init__(
        self, model: Any, stays: Mapping[int, float], sink: int, recent: int, revive: bool = False, window: int = 1
    ) -> None:
        self.config, self.stays, self.sink, self.recent, self.revive = model.config, stays, sink, recent, revive
        self.window = window
        self.weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
        self.stored: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(self.config.num_hidden_layers)]
        self.left: dict[int, Rows] = {index: {} for index in stays}  # hidden states of tokens that were dropped behind
        self.seen = 0

    @property
    def lengths(self) -> list[int]:
        return [len(layer) for layer in self.stored]

    def prompt(self, ids: Sequence[int]) -> Tensor:
        return self._pass(ids, is_prompt=True)

    def step(self, token: int) -> Tensor:
        return self._pass([token], is_prompt=False)

    def _pass(self, ids: Sequence[int], is_prompt: bool) -> Tensor:
        last = self.seen + len(ids) - 1
        rows = {self.seen + i: self.weights["model.embed_tokens.weight"][token] for i, token in enumerate(ids)}
        self.seen += len(ids)
        for index in range(self.config.num_hidden_layers):
            rows, given = self._block(index, rows)
            if index in self.stays and (is_prompt or self.revive):
                newest = sorted(rows)[-self.window if is_prompt else -1 :]
                mean = {q: sum(given[p].get(q, 0.0) for p in newest) / len(newest) for q in given[last]}
                kept = self._best(mean, self.stays[index])
                waiting = self.left[index]
                waiting.update({p: row for p, row in rows.items() if p not in kept})
                rows = {p: row for p, row in rows.items() if p in kept}
                rows.update({p: waiting.pop(p) for p in kept & set(waiting)})
        return self.weights["lm_head.weight"] @ self._norm("model.norm", rows[last])

    def _best(self, attention: Mapping[int, float], fraction: float) -> set[int]:
        """The positions that stay: the first and newest of the text, and the best of those that the layer has."""
        count = min(self.seen, max(int(fraction * self.seen + 1e-9), self.sink + self.recent))
        fixed = {p for p in range(self.seen) if p < self.sink or p >= self.seen - self.recent}
        order = sorted(attention, key=lambda p: (p not in fixed, -attention[p], p))
        return set(order[:count])

    def _block(self, index: int, rows: Rows) -> tuple[Rows, dict[int, dict[int, float]]]:
        """The rows behind a block, and the attention that each gives: mean over heads, by position."""
        name, stored, heads = f"model.layers.{index}", self.stored[index], self.config.num_attention_heads
        groups, normed = heads // self.config.num_key_value_heads, {}
        for p, row in rows.items():
            normed[p] = self._norm(f"{name}.input_layernorm", row)
            key, value = (self.weights[f"{name}.self_attn.{kind}_proj.weight"] @ normed[p] for kind in "kv")
            width = len(key) // self.config.num_key_value_heads
            stored[p] = self._turned(key.view(-1, width), p), value.view(-1, width)
        out, given = {}, {}
        for p, row in rows.items():
            query = self._turned((self.weights[f"{name}.self_attn.q_proj.weight"] @ normed[p]).view(heads, -1), p)
            before = sorted(q for q in stored if q <= p)  # the mask of this layer
            mixed, given[p] = [], dict.fromkeys(before, 0.0)
            for head in range(heads):
                logits = [float(query[head] @ stored[q][0][head // groups]) / math.sqrt(width) for q in before]
                weights = [math.exp(x - max(logits)) for x in logits]
                weights = [w / sum(weights) for w in weights]
                for q, weight in zip(before, weights, strict=True):
                    given[p][q] += weight / heads
                mixed.append(sum(w * stored[q][1][head // groups] for q, w in zip(before, weights, strict=True)))
            row = row + self.weights[f"{name}.self_attn.o_proj.weight"] @ torch.cat(mixed)
            inner = self._norm(f"{name}.post_attention_layernorm", row)
            gate, up = (self.weights[f"{name}.mlp.{kind}_proj.weight"] @ inner for kind in ("gate", "up"))
            out[p] = row + self.weights[f"{name}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return out, given

    def _norm(self, name: str, row: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] * row / (row.square().mean() + self.config.rms_norm_eps).sqrt()

    def _turned(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        base = self.config.rope_parameters["rope_theta"]
        angles = position * base ** (-torch.arange(half, dtype=torch.float64) / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1)
