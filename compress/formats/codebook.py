"""Vector codes: each code names an entry of a learned codebook, and an entry holds `vector_dim` weights.

A vector lies along the input (axis "in": d consecutive columns of one row, as in GPTVQ) or the output (axis "out":
d consecutive rows of one column, VPTQ). The entries of all `stages` (residual or additive codebooks) are summed:

    w = norm_scale * (block_scale * sum_s codebook_s[group, code_s]) + norm_bias + outlier

N = padded out_features, K = padded in_features, R x C = code matrix, N x K/d (axis "in") or N/d x K (axis "out").
Stored tensors; those of stage s > 0 have the prefix `stage<s>_`:
- `words<w>` int16, the planes of `bits[s]`-bit codes (compress/numerics/packing.py), so that neighbours in a kernel
  hold neighbouring codes;
- `codebook` int8 or float16 [column groups, row groups, 2**bits, d]; an int8 entry of d = 4 is one 32-bit element of
  a table;
- `codebook_scales` float16 [column groups, row groups], int8 only;
- instead of both, `codebook_left` int8 [column groups, row groups, r], `codebook_left_scale` float16 [r] and
  `codebook_right` float16 [r, 2**bits] if svd_rank = r (d = 1, one stage): the entries of a group are
  (left * left_scale) @ right, so that many small codebooks cost r bytes each;
- `scales` uint8 [blocks, N/2] and `scale_grid` float16 [blocks, 2] if scale_columns: for each block of columns of each
  row a 4-bit code e (low nibble: even row), the factor is 2 ** (grid[block, 0] + e * grid[block, 1]);
- `norm_scale`, `norm_bias` float16 [K] or [N] if norm is "columns" or "rows" (the bias if `bias`);
- `outliers` uint8 [count, N * outlier_bits / 8], `outlier_scale` float16 [count], `outlier_index` int32 [count]:
  whole columns that are added to what the codes give, as scaled integers of outlier_bits. A second layer of integers
  was chosen over a codebook of its own because its cost does not depend on a codebook that few columns must pay for,
  and because a kernel runs it as a thin extra product: nothing of the main product is masked or moved;
- `order` int16 (int32 past 32767 columns) [in] if permuted: stored column i is column order[i] of the weight; a kernel
  gathers the input once. Outlier indices and column norms count original and stored columns respectively.
Codes of the padding are 0 and belong to the last group; decoded padding is cut off. Rows can be cut at multiples of
vector_dim (axis "out") and of group_rows; columns at vectors, group_columns and scale_columns, if not permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.numerics import checks
from compress.numerics.packing import pack_planes, pack_stream, plane_fields, planes_shape, unpack_planes, unpack_stream

ROW_MULTIPLE = 16
TILE_WORDS = (128, 64, 32, 16, 8, 4, 2, 1)
DECODE_CHUNK = 1 << 21  # weights decoded at a time: bounds the temporaries to about 60 MB
DTYPES = {"int8": torch.int8, "float16": torch.float16}
SCALE_LEVELS = 16


@dataclass(frozen=True)
class Params:
    bits: tuple[int, ...]  # [bits] of a code, one number for each stage: 1 to 16
    vector_dim: int  # [weights] of an entry
    tile_words: int  # [words] of a tile along the codes, from `tile_words()`
    axis: str = "in"  # along which a vector lies: "in" or "out"
    group_columns: int = -1  # [columns] that share a codebook; -1: all
    group_rows: int = -1  # [rows] that share a codebook; -1: all
    codebook_dtype: str = "int8"  # of the entries: int8 (beside float16 scales) or float16
    scale_columns: int = 0  # [columns] that share a 4-bit scale; 0: no scales
    norm: str = "none"  # float16 scales stored beside the codes: none, or one for each of "columns" or "rows"
    bias: bool = False  # a stored bias beside each scale of `norm`
    outliers: int = 0  # [columns] with an added integer part
    outlier_bits: int = 4  # [bits] of the added integer part: 4 or 8
    permuted: bool = False  # columns are stored in an order of their own
    svd_rank: int = 0  # of the codebooks as a product of two factors; 0: stored whole

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", tuple(self.bits))  # a list after a round trip through JSON
        if not self.bits or not all(1 <= bits <= 16 for bits in self.bits):
            raise ValueError(f"bits {list(self.bits)} are not one or more of 1..16")
        if self.vector_dim < 1:
            raise ValueError(f"vector_dim {self.vector_dim} is not positive")
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{key} {getattr(self, key)!r} is not one of {', '.join(map(str, known))}")
        for key, unit in (("group_columns", self.width), ("group_rows", self.height)):
            size = getattr(self, key)
            if size != -1 and (size < 1 or size % unit):
                raise ValueError(f"{key} {size} is neither -1 nor a positive multiple of {unit}")
        for key in ("scale_columns", "outliers", "svd_rank"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} {getattr(self, key)} is negative")
        if self.bias and self.norm == "none":
            raise ValueError("bias needs norm columns or rows")
        self._check_rank()

    def _check_rank(self) -> None:
        if self.svd_rank and (self.vector_dim, len(self.bits), self.codebook_dtype) != (1, 1, "int8"):
            raise ValueError("svd_rank needs vector_dim 1, one stage and codebook_dtype int8")
        if self.svd_rank > 2 ** self.bits[0]:
            raise ValueError(f"svd_rank {self.svd_rank} is more than the {2 ** self.bits[0]} entries of a codebook")

    @property
    def width(self) -> int:
        """Columns of a vector."""
        return self.vector_dim if self.axis == "in" else 1

    @property
    def height(self) -> int:
        """Rows of a vector."""
        return self.vector_dim if self.axis == "out" else 1


CHOICES = {
    "tile_words": TILE_WORDS,
    "axis": ("in", "out"),
    "codebook_dtype": tuple(DTYPES),
    "norm": ("none", "columns", "rows"),
    "outlier_bits": (4, 8),
}


def tile_words(bits: tuple[int, ...], columns: int) -> int:
    """The widest tile among those that pad `columns` codes of a row least."""
    fields = max(plane_fields(b) for b in bits)
    return min(TILE_WORDS, key=lambda words: (_round_up(columns, words * fields), -words))


def code_shape(params: Params, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the code matrix without padding."""
    return -(-shape[0] // params.height), -(-shape[1] // params.width)


def padded_shape(params: Params, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the code matrix as stored."""
    rows, columns = code_shape(params, shape)
    unit = ROW_MULTIPLE
    while params.height > 1 and unit > 1 and unit * params.height % (2 * ROW_MULTIPLE) == 0:
        unit //= 2  # the fewest code rows that are a multiple of ROW_MULTIPLE rows
    fields = max(plane_fields(b) for b in params.bits)
    return _round_up(rows, unit), _round_up(columns, params.tile_words * fields)


def groups(params: Params, shape: tuple[int, int]) -> tuple[int, int]:
    """Numbers of column groups and row groups; the last of each may be shorter."""
    return _groups(shape[1], params.group_columns), _groups(shape[0], params.group_rows)


def specs(params: Params, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    code_rows, code_columns = padded_shape(params, shape)
    rows, columns = code_rows * params.height, code_columns * params.width
    count = groups(params, shape)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for stage, bits in enumerate(params.bits):
        prefix = stage_prefix(stage)
        for name, size in planes_shape(code_rows, code_columns, bits).items():
            stored[prefix + name] = (size, torch.int16)
        if params.svd_rank:
            stored["codebook_left"] = ((*count, params.svd_rank), torch.int8)
            stored["codebook_left_scale"] = ((params.svd_rank,), torch.float16)
            stored["codebook_right"] = ((params.svd_rank, 2**bits), torch.float16)
            continue
        stored[f"{prefix}codebook"] = ((*count, 2**bits, params.vector_dim), DTYPES[params.codebook_dtype])
        if params.codebook_dtype == "int8":
            stored[f"{prefix}codebook_scales"] = (count, torch.float16)
    if params.scale_columns:
        blocks = _groups(shape[1], params.scale_columns)
        stored["scales"] = ((blocks, rows // 2), torch.uint8)
        stored["scale_grid"] = ((blocks, 2), torch.float16)
    if params.norm != "none":
        size = (columns if params.norm == "columns" else rows,)
        stored["norm_scale"] = (size, torch.float16)
        if params.bias:
            stored["norm_bias"] = (size, torch.float16)
    if params.outliers:
        stored["outliers"] = ((params.outliers, rows * params.outlier_bits // 8), torch.uint8)
        stored["outlier_scale"] = ((params.outliers,), torch.float16)
        stored["outlier_index"] = ((params.outliers,), torch.int32)
    if params.permuted:
        stored["order"] = ((shape[1],), torch.int16 if shape[1] <= 32767 else torch.int32)
    return stored


def check(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> None:
    """Check that outliers are different columns of the weight, and the order one of all its columns; ValueError."""
    if params.outliers:
        checks.distinct("outlier_index", tensors["outlier_index"], shape[1])
    if params.permuted:
        checks.distinct("order", tensors["order"], shape[1])


@dataclass(frozen=True)
class Parts:
    """What a method chose, before packing. Scales and codebooks are already in their storage types."""

    codes: list[Tensor]  # for each stage [code rows, code columns], any integer type
    codebooks: list[Tensor]  # [column groups, row groups, 2**bits, d] int8 or float16; empty if factored
    codebook_scales: list[Tensor]  # [column groups, row groups] float16; empty for float16 codebooks, or if factored
    scales: Tensor | None = None  # [out, blocks] uint8 < 16
    scale_grid: Tensor | None = None  # [blocks, 2] float16: offset and step of the log2
    norm_scale: Tensor | None = None  # [in] or [out] float16
    norm_bias: Tensor | None = None
    outliers: Tensor | None = None  # [out, count] uint8, the integer plus 2**(outlier_bits - 1)
    outlier_scale: Tensor | None = None  # [count] float16
    outlier_index: Tensor | None = None  # [count] integers, original columns
    order: Tensor | None = None  # [in] integers
    codebook_left: Tensor | None = None  # [column groups, row groups, r] int8
    codebook_left_scale: Tensor | None = None  # [r] float16
    codebook_right: Tensor | None = None  # [r, 2**bits] float16


FACTORS = ("codebook_left", "codebook_left_scale", "codebook_right")
PLAIN = ("scale_grid", "norm_scale", "norm_bias", "outlier_scale", "outlier_index", "order", *FACTORS)  # stored as is


def pack(parts: Parts, params: Params, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The stored tensors of a weight [out, in]."""
    wanted = specs(params, shape)
    code_rows, code_columns = padded_shape(params, shape)
    rows = code_rows * params.height
    tensors: dict[str, Tensor] = {}
    for stage, bits in enumerate(params.bits):
        prefix, codes = stage_prefix(stage), parts.codes[stage]
        codes = torch.nn.functional.pad(codes, (0, code_columns - codes.shape[1], 0, code_rows - codes.shape[0]))
        for name, words in pack_planes(codes, bits, params.tile_words).items():
            tensors[prefix + name] = words
        if params.svd_rank:
            continue
        tensors[f"{prefix}codebook"] = parts.codebooks[stage]
        if params.codebook_dtype == "int8":
            tensors[f"{prefix}codebook_scales"] = parts.codebook_scales[stage]
    if parts.scales is not None:
        tensors["scales"] = pack_stream(_pad_columns(parts.scales.T, rows), 4)
    if parts.outliers is not None:
        tensors["outliers"] = pack_stream(_pad_columns(parts.outliers.T, rows), params.outlier_bits)
    for name in PLAIN:
        value = getattr(parts, name)
        if value is not None:
            size, dtype = wanted[name]
            exact = dtype.is_floating_point or value.is_floating_point()
            assert not exact or value.dtype == dtype, f"{name} was not rounded to its storage type"
            tensors[name] = _pad_columns(value, size[0]).to(dtype) if name.startswith("norm") else value.to(dtype)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == wanted
    return tensors


def cut(
    tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], rows: range, columns: range
) -> tuple[Params, dict[str, Tensor]]:
    """Return some rows and columns of a weight, packed anew; compress/formats/__init__.py has the contract."""
    if params.permuted and len(columns) < shape[1]:
        raise ValueError("columns are stored in an order of their own")
    if rows.start % max(params.height, params.group_rows):
        raise ValueError(f"row {rows.start} lies within a vector, or within rows that share a codebook")
    if any(columns.start % max(unit, 1) for unit in (params.width, params.group_columns, params.scale_columns)):
        raise ValueError(
            f"column {columns.start} lies within a vector, or within columns that share a codebook or scale"
        )
    part, count = slice(rows.start, rows.stop), range(len(params.bits))
    blocks = _units_of(columns, params.scale_columns or -1)
    side = {name: tensors[name] for name in PLAIN if name in tensors}
    side |= {name: side[name][blocks] for name in ("scale_grid",) if name in side}
    along = part if params.norm == "rows" else slice(columns.start, columns.stop)
    side |= {name: side[name][along] for name in ("norm_scale", "norm_bias") if name in side}
    books = _units_of(columns, params.group_columns), _units_of(rows, params.group_rows)
    side |= {name: side[name][books] for name in ("codebook_left",) if name in side}
    if params.outliers:
        index = tensors["outlier_index"]
        inside = (index >= columns.start) & (index < columns.stop)
        side |= {"outlier_index": index[inside] - columns.start, "outlier_scale": tensors["outlier_scale"][inside]}
        side["outliers"] = unpack_stream(tensors["outliers"], params.outlier_bits).T[part][:, inside]
        if not inside.any():
            side = {name: tensor for name, tensor in side.items() if not name.startswith("outlier")}
    if params.scale_columns:
        side["scales"] = unpack_stream(tensors["scales"], 4).T[part, blocks]
    names = [f"{stage_prefix(stage)}codebook" for stage in count]
    code_rows, code_columns = _units_of(rows, params.height), _units_of(columns, params.width)
    parts = Parts(
        [codes[code_rows, code_columns] for codes in unpack_codes(tensors, params, shape)],
        [tensors[name][books] for name in names if name in tensors],
        [tensors[f"{name}_scales"][books] for name in names if f"{name}_scales" in tensors],
        **side,
    )
    chosen = replace(
        params, outliers=len(side.get("outlier_index", ())), tile_words=tile_words(params.bits, parts.codes[0].shape[1])
    )
    return chosen, pack(parts, chosen, (len(rows), len(columns)))


def _units_of(part: range, unit: int) -> slice:
    """Return which units a part of the rows or columns has some of; -1: all are one unit."""
    return slice(0, 1) if unit == -1 else slice(part.start // unit, -(-part.stop // unit))


def unpack_codes(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int]) -> list[Tensor]:
    """Codes of each stage, [code rows, code columns] int32, without the padding."""
    rows, columns = code_shape(params, shape)
    return [_codes(tensors, params, stage, slice(0, rows))[:, :columns] for stage in range(len(params.bits))]


def decode(tensors: Mapping[str, Tensor], params: Params, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dequantized weight [out, in]; computed in float32, rounded once to `dtype`."""
    out_features, in_features = shape
    code_rows, code_columns = code_shape(params, shape)
    tables = [entries(tensors, params, stage).flatten(0, 2) for stage in range(len(params.bits))]
    order = tensors["order"].long() if params.permuted else slice(None)
    factors = _block_scales(tensors, params) if params.scale_columns else None  # N, blocks
    weight = torch.empty(shape, dtype=dtype, device=tables[0].device)
    column_group = group_of_codes(code_columns, params.width, params.group_columns, weight.device)
    row_group = group_of_codes(code_rows, params.height, params.group_rows, weight.device)
    row_groups = groups(params, shape)[1]
    step = max(1, DECODE_CHUNK // (code_columns * params.vector_dim))
    for start in range(0, code_rows, step):
        codes_of = slice(start, min(start + step, code_rows))
        book = column_group * row_groups + row_group[codes_of].unsqueeze(1)  # code row, code column
        vectors = torch.zeros((), device=weight.device)
        for stage, table in enumerate(tables):
            codes = _codes(tensors, params, stage, codes_of)[:, :code_columns]
            vectors = vectors + table[book * 2 ** params.bits[stage] + codes]  # row, column, d
        matrix = vectors.flatten(1) if params.axis == "in" else vectors.transpose(1, 2).flatten(0, 1)
        rows = slice(start * params.height, min(codes_of.stop * params.height, out_features))
        values = matrix[: rows.stop - rows.start, :in_features]
        if factors is not None:
            values = values * factors[rows].repeat_interleave(params.scale_columns, 1)[:, :in_features]
        values = _outliers(_apply_norm(values, tensors, params, rows), tensors, params, rows, order)
        weight[rows, order] = values.to(dtype)
    return weight


def entries(tensors: Mapping[str, Tensor], params: Params, stage: int) -> Tensor:
    """Codebooks of a stage as float32, [column groups, row groups, 2**bits, d]."""
    if params.svd_rank:
        left = tensors["codebook_left"].float() * tensors["codebook_left_scale"].float()
        return product(left, tensors["codebook_right"].float()).unsqueeze(3)
    book = tensors[f"{stage_prefix(stage)}codebook"].float()
    return (
        book
        if params.codebook_dtype != "int8"
        else book * tensors[f"{stage_prefix(stage)}codebook_scales"].float()[..., None, None]
    )


def product(left: Tensor, right: Tensor) -> Tensor:
    """left [..., r] @ right [r, k], the terms summed in order, so that every machine finds the same entries."""
    total = left[..., :1] * right[0]
    for i in range(1, len(right)):
        total = total + left[..., i : i + 1] * right[i]
    return total


def block_factors(codes: Tensor, grid: Tensor) -> Tensor:
    """Scales [rows, blocks] float32 of 4-bit codes [rows, blocks] and their grid [blocks, 2]."""
    # in float64, so that the float32 result does not depend on how a machine vectorizes exp2
    return torch.exp2(grid[:, 0].double() + codes.double() * grid[:, 1].double()).float()


def _block_scales(tensors: Mapping[str, Tensor], params: Params) -> Tensor:
    return block_factors(unpack_stream(tensors["scales"], 4).T, tensors["scale_grid"])


def _apply_norm(values: Tensor, tensors: Mapping[str, Tensor], params: Params, rows: slice) -> Tensor:
    for name, apply in (("norm_scale", torch.mul), ("norm_bias", torch.add)):
        if name in tensors:
            norm = tensors[name].float()
            values = apply(values, norm[rows, None] if params.norm == "rows" else norm[: values.shape[1]])
    return values


def _outliers(
    values: Tensor, tensors: Mapping[str, Tensor], params: Params, rows: slice, order: Tensor | slice
) -> Tensor:
    """Values [rows, stored columns] with the integer parts of the outlier columns added."""
    if not params.outliers:
        return values
    codes = unpack_stream(tensors["outliers"], params.outlier_bits)[:, rows].T.float()  # row, outlier
    added = (codes - 2 ** (params.outlier_bits - 1)) * tensors["outlier_scale"].float()
    place = tensors["outlier_index"].long()
    if isinstance(order, Tensor):
        place = torch.argsort(order)[place]
    return values.index_add(1, place, added)


def _codes(tensors: Mapping[str, Tensor], params: Params, stage: int, rows: slice) -> Tensor:
    bits, prefix = params.bits[stage], stage_prefix(stage)
    names = planes_shape(1, 0, bits)
    return unpack_planes({name: tensors[prefix + name][rows] for name in names}, bits, params.tile_words)


def group_of_codes(count: int, unit: int, group: int, device: torch.device) -> Tensor:
    """Return the group of each of `count` codes along one side, [count] int64."""
    first = torch.arange(count, device=device) * unit
    return first // group if group != -1 else torch.zeros_like(first)


def stage_prefix(stage: int) -> str:
    """Return what the names of a stage's tensors begin with."""
    return f"stage{stage}_" if stage else ""


def _groups(size: int, group: int) -> int:
    return 1 if group == -1 else -(-size // group)


def _pad_columns(values: Tensor, size: int) -> Tensor:
    """Zeros appended along the last dimension."""
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
