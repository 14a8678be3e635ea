"""Channel shrinking: fewer channels, shared by all heads of a layer (CSKV, arXiv 2409.10593); calibrated.

Keys before the rotary embedding and values of all heads of a layer, C = h width numbers a token, lie close to a
subspace. A token keeps its r = `keep` C coefficients there, in 16, 8 or 4 bits. The newest tokens stay exact: the
window of the paper is `residual_length` here.

    x = mean + back z,   z = forward (x - mean),   back [C, r]

Values are read without being rebuilt: probabilities meet the coefficients, and one product turns the sum back. Keys are
rebuilt at each step, because the rotary embedding stands between, which costs tokens * r * C products.

The paper factors the weights, W = B A, from a start by ASVD (inputs scaled by the square root of their mean magnitude)
and fine-tunes A and B for the squared error of keys and values. What B A x can be is any rank-r map of x, so that this
loss cannot be below that of the projection of k = W x on the leading eigenvectors of its second moment, which that
projection reaches: no gradient descent is needed, and no hidden states, since it depends on keys and values alone.
`metric: states` is this closed form, about the mean. `metric: scores` takes, for keys, the error of scores in place of
that of keys: with S the second moments of the queries of each KV head, the leading eigenvectors of S^1/2 cov S^1/2.

Differences from the paper: the closed form in place of fine-tuning; a mean; `metric: scores`; the window slides by
`flush` tokens and is never empty, where the published one empties at each multiple of its length; numbers of fewer bits
are rounded, without training for it.
Static: the mean and `back` in float16, C (r + 1) numbers, and S for keys, h width^2; at run time `back` and `forward`
in float32. What it does not do: ranks by layer (set `layers`, or let a budget choose); folding into weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv.codec import Block, Codec, Spec, head_rows, token_rows
from compress.kv.codecs.number_rows import Rows
from compress.numerics import checks

NEEDS = frozenset({"keys_pre", "queries_pre", "values"})
WORK = 24  # bytes that calibrating takes for each number of its largest sample
DAMP = 1e-3  # of the mean of its diagonal, added to the second moment of queries
LEAST = 1e-6  # variance of a coefficient, relative to the mean


@dataclass(frozen=True)
class Config:
    keep: float = 0.5  # [share] of the channels of all heads of a layer that stay
    bits: Literal[16, 8, 4] = 16  # [bits] of a coefficient: 16 is float16, 8 and 4 are levels times a norm
    metric: Literal["scores", "states"] = "scores"  # of keys: the least error of scores, or of the keys themselves

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep {self.keep} is not above 0 and at most 1")


def rank(config: Config, spec: Spec) -> int:
    """Return r, the coefficients of a token."""
    return max(1, round(config.keep * spec.heads * spec.width))


def has_metric(config: Config, spec: Spec) -> bool:
    """Return whether the queries play a part."""
    return spec.kind == "keys" and config.metric == "scores"


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples [tokens, h or H, width]; sums over tokens in float64, so that their order does not matter."""
    x = samples["keys_pre" if spec.kind == "keys" else "values"].flatten(1).double()
    mean = x.mean(0)
    x = x - mean
    covariance = x.T @ x / x.shape[0]
    found = {"mean": mean.half()}
    root = torch.eye(x.shape[1], dtype=torch.float64, device=x.device)
    if has_metric(config, spec):
        found["metric"] = moments(samples["queries_pre"], spec.heads).half()
        values, vectors = torch.linalg.eigh(_whole(found["metric"].double()))
        root = (vectors * values.clamp(min=1e-9).sqrt()) @ vectors.T
    variances, vectors = torch.linalg.eigh(root @ covariance @ root)
    count = rank(config, spec)
    variances, vectors = variances.flip(0), vectors.flip(1)[:, :count]
    sizes = variances.clamp(min=LEAST * float(variances.mean())).clamp(min=1e-12)[:count].sqrt()
    found["back"] = (torch.linalg.solve(root, vectors) * sizes).half()
    return found


def moments(queries: Tensor, heads: int) -> Tensor:
    """Return second moments float64 [h, width, width] of queries [tokens, H, width], with a mean diagonal of 1."""
    grouped = queries.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2).double()
    found = grouped.mT @ grouped / grouped.shape[1]
    found = found / found.diagonal(dim1=1, dim2=2).mean().clamp(min=1e-12)  # a factor of the layer changes nothing
    size = found.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-3)
    return found + DAMP * size[:, None, None] * torch.eye(found.shape[-1], dtype=torch.float64, device=found.device)


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives, for keys and for values."""
    channels = spec.heads * spec.width
    found = {"mean": ((channels,), torch.float16), "back": ((channels, rank(config, spec)), torch.float16)}
    if has_metric(config, spec):
        found["metric"] = ((spec.heads, spec.width, spec.width), torch.float16)
    return found


class Shrunk(Codec):
    """Coefficients of all heads together in one row for each token."""

    def __init__(self, spec: Spec, config: Config, static: Mapping[str, Tensor]) -> None:
        back = static["back"].double()
        metric = back
        if has_metric(config, spec):
            metric = _whole(static["metric"].double()) @ back
        forward, info = torch.linalg.solve_ex(back.T @ metric, metric.T)
        if bool(info.any()) or not bool(forward.isfinite().all()):
            raise RecipeError(f"{spec.where}: back holds a singular matrix; calibrate the cache again")
        held = {
            "mean": static["mean"].float(),
            "back": back.float(),
            "forward": forward.T.float().contiguous(),
        }
        super().__init__(spec, held)
        self.rope = "pre" if spec.kind == "keys" else "post"
        self.rows = Rows([back.shape[1]], config.bits)
        self.fields = self.rows.fields

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        z = (token_rows(x) - self._on("mean", x)) @ self._on("forward", x)
        return self.rows.encode(z[:, None])

    def decode(self, block: Block) -> Tensor:
        z = self.rows.decode(block)[:, 0]
        return head_rows(z @ self._on("back", z).T + self._on("mean", z), self.spec.heads)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        """Return sums of coefficients [B, h, m, r]."""
        mixed = p.flatten(1, 2) @ self.rows.decode(block)[:, 0]
        return mixed.unflatten(1, p.shape[1:3])

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        back = self._on("back", mixed).unflatten(0, (self.spec.heads, -1))
        mean = self._on("mean", mixed).view(self.spec.heads, 1, -1)
        return mixed @ back.mT + mass * mean

    def _on(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the type of `like`, at least float32."""
        return self.static[name].to(like.device, torch.promote_types(like.dtype, torch.float32))


def _whole(blocks: Tensor) -> Tensor:
    """[h, width, width] -> the block-diagonal matrix [h width, h width]."""
    return torch.block_diag(*blocks)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Shrunk(spec, config, static)
