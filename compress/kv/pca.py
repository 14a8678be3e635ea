"""Principal components with bits where the energy is, then Lloyd-Max levels; calibrated (KVTC, arXiv 2511.01815).

Keys before the rotary embedding and values lie close to a subspace: in the basis of their principal components most
variance is in a few channels of a head. A rotation to equal variances throws that away; here component c, of variance
v_c, has b_c bits of 0 to 7, given greedily where a bit lowers sum_c v_c D(b_c) most, D being the error of Gaussian
Lloyd-Max levels, over all heads of the layer together. The bits are chosen for UNIT components at a time. For keys the
components are those of the scores: with S the second moment of the queries of a KV head and C the covariance of its
keys, both before the rotary embedding, eigenvectors of S^1/2 C S^1/2, in whose basis the error of a score is the sum of
the components' errors.

    x = mean + s back (level_c(code_c))_c,   back = S^-1/2 V diag(sd), s one byte for each token and head

Bits per element: bits + 8 / width, and what fills the last word of a token. Static: the mean and `back` in float16, h
width^2 numbers for keys and as many for values of a layer; `bits` for each component.

Differences from the paper: bits by the greedy rule on a Gaussian model instead of dynamic programming on measured
errors; a basis for each head, so that values are read in it (probabilities meet codes, one product turns the sum back);
score-weighted keys and the norm of a token are ours; codes are not entropy-coded, which one token cannot be alone.
What it does not do: read keys without decoding them (the rotary embedding stands between); follow text that is unlike
the calibration text, but for its norms.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kv.codec import Block, Codec, Field, Spec
from compress.kv.codes import Codes
from compress.kv.lloyd import Norms, levels, nearest

NEEDS = frozenset({"keys_pre", "queries_pre", "values"})
PLANES = (4, 2, 1)  # widths of the planes that a code's bits lie in, highest bits first
MOST = sum(PLANES)  # bits of a component
DAMP = 1e-3  # of the mean of its diagonal, added to the second moment of queries
LEAST = 1e-6  # variance of a component, relative to the mean
STEPS = 16  # of a norm in an octave: norms are near 1
ERRORS = (1.0, 0.36338, 0.11748, 0.034548, 0.0095010, 0.0025036, 0.00064420, 0.00016352)  # of N(0, 1), by bits


@dataclass(frozen=True)
class Config:
    bits: float = 2.0  # of one element on average, codes alone
    unit: int = 8  # components that have the same bits

    def __post_init__(self) -> None:
        if not 0 < self.bits <= MOST:
            raise ValueError(f"bits {self.bits} is not above 0 and at most {MOST}")
        if self.unit < 1:
            raise ValueError(f"unit {self.unit} is not 1 or more")


def allocate(variances: Tensor, budget: int, unit: int) -> Tensor:
    """variances [h, width] descending along the last axis -> bits uint8 alike, with a sum of at most `budget`.

    Runs of `unit` components of a head get a bit together, those first whose error falls most; `ERRORS` falls by ever
    smaller steps, so that this is optimal but for the last bits.
    """
    heads, width = variances.shape
    runs = [variances[:, start : start + unit].sum(1).tolist() for start in range(0, width, unit)]
    sizes = [min(unit, width - start) for start in range(0, width, unit)]
    bits = torch.zeros(heads, width, dtype=torch.uint8)
    heap = [
        (-(1 - ERRORS[1]) * energy / sizes[run], run, head, 0)
        for run, energies in enumerate(runs)
        for head, energy in enumerate(energies)
    ]
    heapq.heapify(heap)
    while heap:
        _, run, head, held = heapq.heappop(heap)
        if sizes[run] > budget:
            continue
        budget -= sizes[run]
        bits[head, run * unit : run * unit + unit] += 1
        if held + 1 < MOST:
            gain = (ERRORS[held + 1] - ERRORS[held + 2]) * runs[run][head] / sizes[run]
            heapq.heappush(heap, (-gain, run, head, held + 1))
    return bits


def components(x: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, h, width] -> mean [h, width], back [h, width, width] with x = mean + back z for z of unit variance,
    and the variances [h, width] that an error of z stands for, descending; moment [h, width, width] of queries or none.
    """
    x = x.double().transpose(0, 1)
    mean = x.mean(1)
    x = x - mean[:, None]
    covariance = x.mT @ x / x.shape[1]
    if moment is None:
        variances, back = torch.linalg.eigh(covariance)
    else:
        moment = moment.double()
        damp = DAMP * moment.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-12)
        values, vectors = torch.linalg.eigh(moment + damp[:, None, None] * torch.eye(x.shape[2], dtype=torch.float64))
        root = (vectors * values.sqrt()[:, None]) @ vectors.mT
        variances, back = torch.linalg.eigh(root @ covariance @ root)
        back = (vectors / values.sqrt()[:, None]) @ vectors.mT @ back
    variances, back = variances.flip(-1), back.flip(-1)
    variances = variances.clamp(min=LEAST * variances.mean(-1, keepdim=True)).clamp(min=1e-12)
    return mean, back * variances.sqrt()[:, None], variances


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples [tokens, h, width]; sums over tokens in float64, so that their order does not matter."""
    moment = None
    x = samples["values"]
    if spec.kind == "keys":
        x = samples["keys_pre"]
        queries = samples["queries_pre"].unflatten(1, (spec.heads, -1)).transpose(0, 1).flatten(1, 2).double()
        moment = queries.mT @ queries / queries.shape[1]
    mean, back, variances = components(x, moment)
    budget = int(config.bits * spec.heads * spec.width + 1e-6)
    bits = allocate(variances.cpu(), budget, config.unit)
    return {"mean": mean.half(), "back": back.half(), "variances": variances.float(), "bits": bits}


class Principal(Codec):
    """Codes of all heads in one row for each token, [B, 1, n, words]; norms uint8 [B, h, n, 1]."""

    def __init__(self, spec: Spec, static: Mapping[str, Tensor]) -> None:
        back = static["back"].double()
        held = {
            "mean": static["mean"].float()[:, None],
            "back": back.mT.float().contiguous(),
            "forward": torch.linalg.inv(back).mT.float().contiguous(),
            "weights": (static["variances"] * (static["bits"] > 0))[:, None],
            "bits": static["bits"],
        }
        super().__init__(spec, held)
        self.rope = "pre" if spec.kind == "keys" else "post"
        bits = static["bits"].flatten().long()
        self.shape = (spec.heads, spec.width)
        self.norms = Norms(8, STEPS)
        self.places = {w: (bits & w).nonzero()[:, 0] for w in PLANES if bool((bits & w).any())}
        self.shifts = {w: bits[at] & (w - 1) for w, at in self.places.items()}
        self.codes = {w: Codes(len(at), w) for w, at in self.places.items()}
        self.fields = {"norms": Field("scales")}
        for codes in self.codes.values():
            self.fields |= codes.fields
        self.table = torch.cat([levels(b) for b in range(MOST + 1)])  # those of b bits from 2^b - 1 on
        self.starts = (1 << bits) - 1

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        y = (x - self._static("mean", x)) @ self._static("forward", x)
        weights = self._static("weights", y)
        active = (weights > 0).to(y.dtype)
        norms = ((y.square() * active).sum(-1, keepdim=True) / active.sum(-1, keepdim=True).clamp(min=1)).sqrt()
        found = self._levels(self._nearest(y, norms))
        norms = (y * found * weights).sum(-1, keepdim=True) / (found.square() * weights).sum(-1, keepdim=True)
        stored = self.norms.store(norms.nan_to_num(0.0).clamp(min=0))
        codes = self._nearest(y, self.norms.load(stored)).transpose(1, 2).flatten(2)[:, None]  # B, 1, n, h width
        rows = {"norms": stored}
        for w, at in self.places.items():
            part = codes[..., self._on(x, at)] >> self._on(x, self.shifts[w])
            rows |= self.codes[w].pack(part & ((1 << w) - 1))
        return rows

    def coded(self, block: Block) -> tuple[Tensor, Tensor]:
        """Levels [B, h, n, width] and norms [B, h, n, 1], float32."""
        norms = block["norms"]
        codes = torch.zeros(norms.shape[0], norms.shape[2], len(self.starts), dtype=torch.int32, device=norms.device)
        for w, at in self.places.items():
            codes[..., self._on(norms, at)] += (
                self.codes[w].unpack(block)[:, 0].int() << self._on(norms, self.shifts[w]).int()
            )
        codes = codes.unflatten(-1, self.shape).transpose(1, 2)
        return self._levels(codes), self.norms.load(norms)

    def decode(self, block: Block) -> Tensor:
        found, norms = self.coded(block)
        return (found * norms) @ self._static("back", found) + self._static("mean", found)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        found, norms = self.coded(block)
        return (p * norms.mT) @ found

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        return mixed @ self._static("back", mixed) + mass * self._static("mean", mixed)

    def _nearest(self, y: Tensor, norms: Tensor) -> Tensor:
        """Codes int64 of y [B, h, n, width] for norms [B, h, n, 1]."""
        y, bits = y / norms.clamp(min=1e-12), self.static["bits"]
        codes = torch.zeros(y.shape, dtype=torch.int64, device=y.device)
        for b in self.static["bits"].unique().tolist():
            is_such = bits == b
            codes.transpose(2, 3)[:, is_such] = nearest(y.transpose(2, 3)[:, is_such], self._on(y, levels(b)))
        return codes

    def _levels(self, codes: Tensor) -> Tensor:
        """Of codes [B, h, n, width]."""
        return self._on(codes, self.table)[codes + self._on(codes, self.starts).view(self.shape)[:, None]]

    def _static(self, name: str, like: Tensor) -> Tensor:
        """[h, ...] float32, or float64 for such tensors."""
        return self.static[name].to(like.device, torch.promote_types(like.dtype, torch.float32))

    def _on(self, like: Tensor, tensor: Tensor) -> Tensor:
        return tensor.to(like.device)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    missing = {"mean", "back", "variances", "bits"} - static.keys()
    if missing:
        raise RecipeError(f"{spec.where}: pca has no calibrated {min(missing)}; calibrate the cache first")
    if static["bits"].shape != (spec.heads, spec.width):
        found = tuple(static["bits"].shape)
        raise RecipeError(f"{spec.where}: calibrated for {found} heads and channels, not {spec.heads, spec.width}")
    return Principal(spec, static)
