"""Principal components with bits where the energy is, then Lloyd-Max levels; calibrated (KVTC, arXiv 2511.01815).

Keys before the rotary embedding and values lie close to a subspace: in the basis of their principal components most
variance is in a few channels of a head. A rotation to equal variances throws that away; here component c, of variance
v_c, has b_c bits of 0 to 7, given greedily where a bit lowers sum_c v_c D(b_c) most, D being the error of Gaussian
Lloyd-Max levels, over all heads of the layer together. The bits are chosen for UNIT components at a time. For keys the
components are those of the scores: with S the second moment of the queries of a KV head and C the covariance of its
keys, both before the rotary embedding, eigenvectors of S^1/2 C S^1/2, in whose basis the error of a score is the sum of
the components' errors. In mean and covariance a token counts by what attention reads of it (components.py).

    x = mean + s back (level_c(code_c))_c,   back = S^-1/2 V diag(sd), s one byte for each token and head

Bits per element: bits + 8 / width. What fills runs of equal bits up to 8 components (nothing with a `unit` of 8) comes
out of the bits, and a row of codes has the same bytes whatever the calibration text is.
Static: the mean and `back` in float16, h width^2 numbers for keys and as many for values of a layer, `bits` for each
component; at run time `back` and its inverse in float32, 16 columns for each piece, and for compiled readers a third
copy. Levels of 5 to 7 bits are rounded to bfloat16, which costs up to 0.7 % of their error.

On CPUs with AVX-512 compiled code chooses and packs the codes (compress/kernels/cpu/kv_encode.py), blocks of tokens
are decoded, turned and multiplied with the queries, or written out (compress/kernels/cpu/kv_prerope.py: in float32 for
float32 models, else in products of int16 or bfloat16), and probabilities meet the codes of values
(compress/kernels/cpu/kv_mixed.py).

Differences from the paper: bits by the greedy rule on a Gaussian model instead of dynamic programming on measured
errors; a basis for each head, so that values are read in it (probabilities meet codes, one product turns the sum back);
score-weighted keys, tokens weighted by attention and the norm of a token are ours; codes are not entropy-coded, which
one token cannot be alone.
What it does not do: read keys without decoding them (the rotary embedding stands between); follow text that is unlike
the calibration text, but for its norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from compress.errors import RecipeError
from compress.kernels import contract, dispatch
from compress.kernels.contract import (
    MOST_LEVEL_BITS,
    MOST_MIXED_BITS,
    NORM_STEPS,
    PIECE,
    LevelTables,
    MixedCodes,
    Rotary,
)
from compress.kv.codec import ALL, Block, Codec, Field, Spec
from compress.kv.codecs.components import components, fitting, moments, token_weights
from compress.kv.codecs.lloyd import Norms, levels, nearest
from compress.kv.codecs.packed import Pieces
from compress.numerics import checks

NEEDS = frozenset({"keys_pre", "queries_pre", "values", "attended"})
WORK = 16  # bytes that calibrating takes for each number of its largest sample
FINE = 2.0**-10  # unit of levels of more than 4 bits, to which products of integers round them
TOKENS_PER_WRITE = 2048
NO_TURNS = Rotary(0, *(torch.empty(1, 1, 0, device="cpu") for _ in range(2)))


@dataclass(frozen=True)
class Config:
    bits: float = 2.0  # [bits] of one element on average, codes and what fills them up
    unit: int = 8  # [components] that have the same number of bits

    def __post_init__(self) -> None:
        if not 0 < self.bits <= MOST_MIXED_BITS:
            raise ValueError(f"bits {self.bits} is not above 0 and at most {MOST_MIXED_BITS}")
        if self.unit < 1:
            raise ValueError(f"unit {self.unit} is not 1 or more")


def calibrate(config: Config, spec: Spec, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Samples [tokens, h, width], and `attended` [tokens, h, 1], without which all tokens count alike.

    Sums over tokens are in float64, so that their order does not matter.
    """
    x = samples["keys_pre" if spec.kind == "keys" else "values"]
    read = samples["attended"][..., 0] if "attended" in samples else x.new_ones(x.shape[:2])
    counted = token_weights(read, 0.5)
    if spec.kind == "keys":
        moment = moments(samples["queries_pre"], spec.heads)
        mean, back, variances = components(x, moment, counted, counted)
    else:
        mean, back, variances = components(x, None, counted, token_weights(read, 1.0))
    bits = fitting(variances.cpu(), _budget(config, spec), config.unit)
    return {"mean": mean.half(), "back": back.half(), "variances": variances.float(), "bits": bits}


def specs(config: Config, spec: Spec) -> dict[str, checks.Spec]:
    """Return what `calibrate` gives, for keys and for values."""
    channels = (spec.heads, spec.width)
    return {
        "mean": (channels, torch.float16),
        "back": ((*channels, spec.width), torch.float16),
        "variances": (channels, torch.float32),
        "bits": (channels, torch.uint8),
    }


def check(static: Mapping[str, Tensor], config: Config, spec: Spec) -> None:
    """Check that bits are possible and within the budget, and variances are some; ValueError."""
    checks.within("bits", static["bits"], 0, MOST_MIXED_BITS)
    if (total := int(static["bits"].sum())) > _budget(config, spec):
        raise ValueError(f"bits sum to {total}, more than the {_budget(config, spec)} of the settings")
    checks.positive("variances", static["variances"])


def _budget(config: Config, spec: Spec) -> int:
    """Return how many bits the codes of a token of all heads may have."""
    return int(config.bits * spec.heads * spec.width + 1e-6)


def _row(config: Config, spec: Spec) -> int:
    """Return the bytes that the codes of a token of all heads take."""
    return -(-_budget(config, spec) // 8)


class Principal(Codec):
    """Codes of all heads in one row for each token, [B, 1, n, at least `row` bytes]; norms uint8 [B, h, n, 1].

    What is read of a long past is divided between compiled code, which takes whole blocks, and plain code.
    """

    def __init__(self, spec: Spec, static: Mapping[str, Tensor], row: int = 0) -> None:
        back = static["back"].double()
        inverse, info = torch.linalg.inv_ex(back)
        if bool(info.any()):
            raise RecipeError(f"{spec.where}: back holds a singular matrix; calibrate the cache again")
        self.pieces = Pieces(static["bits"], row)
        self.places = self.pieces.lanes.where(self.pieces.lanes >= 0, PIECE * self.pieces.most)
        tensors = {
            "mean": static["mean"].float()[:, None],
            "back": back.mT.float().contiguous(),
            "forward": self._by_pieces(inverse.float()).mT.contiguous(),
            "weights": (static["variances"] * (static["bits"] > 0))[:, None],
            "bits": static["bits"],
        }
        super().__init__(spec, tensors)
        self.rope = "pre" if spec.kind == "keys" else "post"
        self.norms = Norms(8, NORM_STEPS)
        self.fields = {"norms": Field("scales"), "codes": Field("codes")}
        self.table = torch.cat([table(b) for b in range(MOST_MIXED_BITS + 1)])  # those of b bits from 2^b - 1 on
        self.starts = (1 << static["bits"].long()) - 1
        self._lanes: Any = None  # of compiled code that encodes
        self._transforms: dict[int, Any] = {}  # channels that turn -> `back` as compiled code reads it

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        turned = state["cos"].shape[-1] if "cos" in state else 0
        if turned and can_turn(turned) and (kernel := self._kernel("prerope", x)) is not None:
            self._transform(kernel, turned)  # now, for its bytes to be counted from the start
        kernel = self._kernel("encode", x) if x.dtype == torch.float32 else None
        if kernel is not None:
            return self._encode_compiled(kernel, x)
        y = torch.nn.functional.pad((x - self._static("mean", x)) @ self._static("forward", x), (0, 1))
        y = y.gather(-1, self._on(y, self.places)[None, :, None].expand(*y.shape[:3], -1))
        weights = self._static("weights", y)
        active = (weights > 0).to(y.dtype)
        norms = ((y.square() * active).sum(-1, keepdim=True) / active.sum(-1, keepdim=True).clamp(min=1)).sqrt()
        values = self._levels(self._nearest(y, norms))
        norms = (y * values * weights).sum(-1, keepdim=True) / (values.square() * weights).sum(-1, keepdim=True)
        stored_norms = self.norms.store(norms.nan_to_num(0.0).clamp(min=0))
        codes = self._nearest(y, self.norms.load(stored_norms)).transpose(1, 2)  # B, n, h, width
        return {"norms": stored_norms, "codes": self.pieces.pack(codes)[:, None]}

    def _encode_compiled(self, kernel: Any, x: Tensor) -> dict[str, Tensor]:
        """Return what `encode` does, by compiled code."""
        if self._lanes is None:
            counts = torch.tensor([len(piece.channels) for piece in self.pieces.pieces], dtype=torch.int32)
            weights = self._by_pieces(self.static["weights"].mT)[..., 0].contiguous()
            active = (self.static["bits"] > 0).sum(1).clamp(min=1).float()
            self._lanes = kernel.Lanes(self.pieces.starts, self.pieces.bounds, counts, weights, active)
        lanes, y = self._lanes, (x - self.static["mean"]) @ self.static["forward"]
        norms = kernel.fit(y, lanes, _tables(False))
        stored_norms = self.norms.store(norms.nan_to_num(0.0, 0.0, 0.0).clamp(min=0))
        rows = kernel.pack(y, self.norms.load(stored_norms), lanes, _tables(False), self.pieces.nbytes)
        return {"norms": stored_norms, "codes": rows[:, None]}

    def _by_pieces(self, rows: Tensor) -> Tensor:
        """rows [h, width, n], one for each component -> [h, 16 for each piece, n], zero where there is none."""
        ordered = rows.new_zeros(len(rows), PIECE * self.pieces.most + 1, rows.shape[2])
        return ordered.scatter_(1, self.places[..., None].expand_as(rows), rows)[:, :-1]

    def decode_levels(self, block: Block) -> tuple[Tensor, Tensor]:
        """Levels [B, h, n, width] and norms [B, h, n, 1], float32."""
        codes = self.pieces.unpack(block["codes"][:, 0]).transpose(1, 2)
        return self._levels(codes), self.norms.load(block["norms"])

    def decode(self, block: Block) -> Tensor:
        values, norms = self.decode_levels(block)
        return (values * norms) @ self._static("back", values) + self._static("mean", values)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        kernel = self._reader(p, block)
        whole = self._whole(block) if kernel is not None else 0
        mixed = p.new_zeros(*p.shape[:3], self.spec.width)
        if kernel is not None and whole:
            lanes = kernel.mix(p[..., :whole], self.mixed_codes(block, whole), _tables(False))
            lanes = torch.nn.functional.pad(lanes, (0, 1))  # the last one: channels without codes
            mixed += lanes.gather(-1, self.places[None, :, None].expand_as(mixed))
        if whole < p.shape[-1]:
            values, norms = self.decode_levels({name: block[name][:, :, whole:] for name in self.fields})
            mixed += (p[..., whole:] * norms.mT) @ values
        return mixed

    def output(self, mixed: Tensor, mass: Tensor, state: Block) -> Tensor:
        return mixed @ self._static("back", mixed) + mass * self._static("mean", mixed)

    def at_once(self, rows: Tensor) -> int:
        return ALL if self._reader(rows) is not None else self.block

    def write_scores(self, query: Tensor, block: Block, out: Tensor) -> None:
        kernel = self._reader(query, block)
        whole, operands = self._operands(kernel, block)
        if whole:
            kernel.scores(query, *operands, out[..., :whole])
        for tokens, rows in self._rest(block, whole):
            out[..., tokens] = self.scores(query, rows)

    def write_at_once(self, out: Tensor) -> int:
        return TOKENS_PER_WRITE if self._writer(out) is not None else self.block

    def write(self, block: Block, out: Tensor) -> None:
        kernel = self._writer(out)
        whole, operands = self._operands(kernel, block)
        if whole:
            kernel.write(*operands, out[:, :, :whole])
        for tokens, rows in self._rest(block, whole):
            out[:, :, tokens] = self.dense(rows)

    def _reader(self, rows: Tensor, block: Block | None = None) -> Any:
        """Return the kernel that reads the codes (of a block) for these queries or probabilities, None if none does."""
        codes = None if block is None else block["codes"].shape[2] * len(rows) * self.spec.heads * self.spec.width
        name = "prerope" if self.spec.kind == "keys" else "mixed"
        return self._kernel(name, rows) if contract.is_worthwhile(rows, codes) else None

    def _writer(self, out: Tensor) -> Any:
        is_large = out.dtype in contract.DTYPES and out.numel() > contract.SMALL
        return self._kernel("prerope", out) if is_large else None

    def _kernel(self, name: str, like: Tensor) -> Any:
        kernel = dispatch.kv(like.device, name)
        is_within = 0 < self.pieces.reach <= 2 * self.pieces.nbytes  # its row and the next one
        return kernel if kernel is not None and is_within and kernel.supports(self.spec.width) else None

    def _operands(self, kernel: Any, block: Block) -> tuple[int, tuple[Any, ...]]:
        """Return how many of the first tokens a kernel (None: there is none) reads, and what it takes to read them."""
        whole = 0 if kernel is None else self._whole(block)
        rotary = NO_TURNS
        if self.rope == "pre" and whole:
            halves = block.get("halves")
            if halves is None or halves.dtype not in contract.DTYPES or not can_turn(2 * halves.shape[-1]):
                return 0, ()
            rotary = Rotary(2 * halves.shape[-1], halves[:, 0], halves[:, 1])
        if not whole:
            return 0, ()
        return whole, (self.mixed_codes(block, whole), self._transform(kernel, rotary.width), _tables(True), rotary)

    def _whole(self, block: Block) -> int:
        """Return how many of the first tokens compiled code may read.

        It reads `reach` bytes of a row of codes [B, 1, n, bytes], so that it may read some of those that follow.
        """
        codes = block["codes"]
        more = -(-max(0, self.pieces.reach - codes.shape[3]) // max(1, codes.shape[3]))
        return max(0, codes.shape[2] - more) // contract.BLOCK * contract.BLOCK

    def _rest(self, block: Block, first: int) -> Iterator[tuple[slice, Block]]:
        """Yield the tokens from `first` on, as plain code reads them."""
        for start in range(first, block["codes"].shape[2], self.block):
            tokens = slice(start, start + self.block)
            rows = {name: block[name][:, :, tokens] for name in self.fields}
            rows |= {name: block[name][:, tokens] for name in ("cos", "sin") if name in block}
            if "halves" in block:
                both = torch.cat((block["halves"][:, :, tokens],) * 2, -1)
                rows |= {"cos": both[:, 0], "sin": both[:, 1]}
            yield tokens, rows

    def _transform(self, kernel: Any, rotary: int) -> Any:
        """Return `back` as the kernel reads it where `rotary` channels turn: made once, its memory counts as static."""
        if rotary not in self._transforms:
            bits = self.static["bits"].long()
            back = self.static["back"] * _steps()[bits][..., None]
            largest = torch.tensor([max(map(abs, levels_of)) for levels_of in _tables(True)])[bits]
            mean, is_exact = self.static["mean"][:, 0], self.spec.dtype == torch.float32
            made = kernel.transform(back, mean, largest, self.pieces.columns, rotary, is_exact)
            self._transforms[rotary] = made
            self.static[f"turned{rotary}"] = made.back
        return self._transforms[rotary]

    def mixed_codes(self, block: Block, count: int) -> MixedCodes:
        """Return the rows of the first `count` tokens as kernels take them."""
        codes, norms = (block[name][:, :, :count] for name in ("codes", "norms"))
        return MixedCodes(codes, norms, self.pieces.starts, self.pieces.bounds, self.pieces.most)

    def _nearest(self, y: Tensor, norms: Tensor) -> Tensor:
        """Return codes int64 of y [B, h, n, width] for norms [B, h, n, 1]."""
        y, bits = y / norms.clamp(min=1e-12), self.static["bits"]
        codes = torch.zeros(y.shape, dtype=torch.int64, device=y.device)
        for b in self.static["bits"].unique().tolist():
            is_such = bits == b
            codes.transpose(2, 3)[:, is_such] = nearest(y.transpose(2, 3)[:, is_such], self._on(y, table(b)))
        return codes

    def _levels(self, codes: Tensor) -> Tensor:
        """Return the levels of codes [B, h, n, width]."""
        return self._on(codes, self.table)[codes.int() + self._on(codes, self.starts)[:, None]]

    def _on(self, like: Tensor, tensor: Tensor) -> Tensor:
        return tensor.to(like.device)


def can_turn(rotary: int) -> bool:
    """Return whether compiled code can turn so many channels: half of them must be whole pieces."""
    return rotary % (2 * contract.PIECE) == 0


def table(bits: int) -> Tensor:
    """Levels: multiples of `step` by whole numbers, or of more than 4 bits, by bfloat16."""
    return levels(bits) if bits <= MOST_LEVEL_BITS else levels(bits).bfloat16().float()


@cache
def _steps() -> Tensor:
    """Return the steps that levels are multiples of, by bits; of more than 4 bits nearly, see FINE."""
    whole = range(1, MOST_LEVEL_BITS + 1)
    step_by_bits = {b: float(levels(b).max()) / contract.LARGEST_LEVEL for b in whole}
    return torch.tensor([step_by_bits.get(b, FINE) for b in range(MOST_MIXED_BITS + 1)], device="cpu")


@cache
def _tables(in_steps: bool) -> LevelTables:
    """Return levels by bits, for compiled code."""
    tables = []
    for b, size in enumerate(_steps().tolist()):
        multiples = (table(b) / size).round() if b <= MOST_LEVEL_BITS else table(b) / size
        tables.append(tuple((multiples if in_steps else table(b)).tolist()))
    return tuple(tables)


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Principal(spec, static, _row(config, spec))
