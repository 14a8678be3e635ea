"""Turn what is exported into the tensors of a GGUF file: names, types, order of rows, blocks.

A block of the types that hold signed codes is a float16 scale and 32 codes: w = scale * code. Scales of larger groups
are repeated. Experts of a layer are one tensor, of the widest type that one of them needs. Weights in the format
`kquant` are blocks of the K type whose grid they have, which holds no others. FP4, IQ4_NL and ternary weights are
blocks of the types that hold their codes; the tensor scale of NVFP4 is a tensor of its own, NAME.scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compress.errors import ExportError
from compress.export import grids
from compress.export.convert import Export, cast
from compress.export.integers import repeated_scales, signed_bits, signed_codes
from compress.export.targets.gguf.architecture import Model
from compress.export.weights import ExportWeight, StoredWeight
from compress.formats import grid, kquant, ternary
from compress.importers import gguf_blocks, gguf_points
from compress.importers.gguf_header import FREQUENCIES
from compress.storage.checkpoint import Readable

BLOCK = 32  # weights of a block
K_QUANT, TERNARY = "kquant", "ternary"  # formats: that with the grids of K types, and that of three values
POINTS = {"nvfp4": gguf_points.NVFP4, "mxfp4": gguf_points.MXFP4, "iq4_nl": gguf_points.IQ4_NL}
TRITS = {ternary.BASE3: gguf_points.TQ1_0, ternary.BINARY: gguf_points.TQ1_0, ternary.PLANAR: gguf_points.TQ2_0}
CHUNK = 1 << 24  # codes that are packed at a time
PLAIN = {dtype: number for number, dtype in gguf_blocks.PLAIN.items()}
FLOAT32_ENDINGS = (
    *("_norm.weight", ".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".bias"),
    *("conv1d.weight", "conv.weight"),  # kernels of convolutions
)


@dataclass
class GgufEntry:
    """A tensor of the file."""

    type: int  # its number in GGUF
    shape: tuple[int, ...]
    parts: list[Callable[[], Tensor]]  # what it is made of, read when called; experts in order

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        numel = torch.Size(self.shape).numel()
        if self.type in gguf_blocks.PLAIN:
            return numel * gguf_blocks.PLAIN[self.type].itemsize
        block = gguf_blocks.BLOCKS[self.type]
        return numel // block.elements * block.nbytes

    def read(self) -> Tensor:
        """Return the bytes of the tensor, uint8 [nbytes]."""
        read = [part().contiguous().reshape(-1).view(torch.uint8) for part in self.parts]
        return torch.cat(read) if len(read) > 1 else read[0]


def type_of(weight: ExportWeight) -> int | None:
    """Return the K type of a weight, or the narrowest type for its signed integers, None if there is none."""
    if weight.stored.format == K_QUANT:
        return gguf_blocks.k_type(weight.stored.params.type)
    if weight.stored.format == TERNARY:
        return TRITS[weight.stored.params.packing]
    if weight.stored.format == grids.FORMAT:
        return POINTS.get(grids.type_of(weight) or "")
    return next((number for number, bits in gguf_blocks.SIGNED.items() if bits >= signed_bits(weight)), None)


def block_of(weight: ExportWeight) -> int:
    """Return how many weights a block of its type holds, which there is."""
    number = type_of(weight)
    assert number is not None
    return gguf_blocks.BLOCKS[number].elements


def entries(export: Export, model: Model) -> dict[str, GgufEntry]:
    """Return the tensors of the file by name; ExportError for one that the model has in no such file."""
    sources: dict[str, dict[int | None, Readable | StoredWeight]] = {}
    packed = {f"{weight.name}.weight": weight for weight in export.held}
    for name, tensor in model.edit({**export.plain(), **packed}).items():
        place, expert = model.place(name)
        sources.setdefault(place, {})[expert] = tensor
    made = {name: _entry(export, name, parts) for name, parts in sources.items()}
    for name, parts in sources.items():
        if made[name].type == gguf_points.NVFP4:
            scale = f"{name.removesuffix('.weight')}.scale"
            made[scale] = _tensor_scales(scale, parts, made.get(scale))
    if model.divisors:
        made[FREQUENCIES] = GgufEntry(
            PLAIN[torch.float32], (len(model.divisors),), [partial(torch.tensor, model.divisors)]
        )
    return made


def _entry(export: Export, name: str, parts: dict[int | None, Readable | StoredWeight]) -> GgufEntry:
    """Return the tensor that is made of a weight, or of those of all experts of a layer."""
    ordered = [parts[expert] for expert in sorted(parts, key=lambda expert: expert or 0)]
    packed = [part for part in ordered if isinstance(part, StoredWeight)]
    if not packed:
        made = _plain_entry(export, name, [part for part in ordered if not isinstance(part, StoredWeight)])
    elif len(packed) == len(ordered):
        made = _packed_entry(packed)
    else:
        raise ExportError(
            f"{name} is one tensor of all experts of a layer, and {len(ordered) - len(packed)} of them are not "
            "quantized; quantize all, or none"
        )
    return made if None in parts else GgufEntry(made.type, (len(ordered), *made.shape), made.parts)


def _tensor_scales(name: str, parts: dict[int | None, Readable | StoredWeight], own: GgufEntry | None) -> GgufEntry:
    """Return the tensor scale of a weight, or of each expert of a layer, times that which the model itself has."""
    ordered = [parts[expert] for expert in sorted(parts, key=lambda expert: expert or 0)]
    stored = [part.tensors["tensor_scale"] for part in ordered if isinstance(part, StoredWeight) and part.tensors]
    if own is not None and own.shape != (len(ordered),):
        raise ExportError(f"{name} is a tensor of the model already, of another shape; leave its weight unquantized")

    def read() -> Tensor:
        scales = torch.cat([scale.read().reshape(1) for scale in stored])
        return scales if own is None else scales * own.read().view(torch.float32)

    return GgufEntry(PLAIN[torch.float32], (len(ordered),), [read])


def check_experts(weights: Iterable[ExportWeight], model: Model) -> None:
    """Raise ExportError where the experts of a tensor are of a K type, and not all of the same."""
    types: dict[str, tuple[str, int | None]] = {}
    for weight in weights:
        place, expert = model.place(f"{weight.name}.weight")
        first, kind = types.setdefault(place, (weight.name, type_of(weight)))
        if expert is not None and kind != type_of(weight) and not {kind, type_of(weight)} <= set(gguf_blocks.SIGNED):
            raise ExportError(
                f"{first} and {weight.name} are parts of one tensor in a GGUF file, which cannot hold a K-quant and "
                "another type; give all experts of a layer the same method and type"
            )


def _packed_entry(weights: list[StoredWeight]) -> GgufEntry:
    kind = max(number for weight in weights if (number := type_of(weight)) is not None)
    order = getattr(weights[0], "order", None)
    shape = weights[0].shape if order is None else (len(order), weights[0].shape[1])
    return GgufEntry(kind, shape, [partial(_blocks, weight, kind, order) for weight in weights])


def _plain_entry(export: Export, name: str, tensors: list[Readable]) -> GgufEntry:
    shape = tensors[0].shape if len(tensors[0].shape) == 1 or tensors[0].shape[0] > 1 else tensors[0].shape[1:]
    dtype = export.dtype if export.is_chosen else tensors[0].dtype
    if len(shape) == 1 or name.endswith(FLOAT32_ENDINGS):
        dtype = torch.float32
    if dtype not in PLAIN:
        raise ExportError(f"{tensors[0].name} is stored as {dtype}, which GGUF files do not have; set --dtype bfloat16")

    def read(stored: Readable) -> Tensor:
        return cast(stored.name, stored.read(), dtype)

    return GgufEntry(PLAIN[dtype], shape, [partial(read, stored) for stored in tensors])


def _blocks(weight: StoredWeight, kind: int, order: Tensor | None) -> Tensor:
    """Return a weight as blocks, uint8 [rows, bytes of a row], rows in the given order."""
    others = {K_QUANT: _k_blocks, TERNARY: _trit_blocks, grids.FORMAT: _point_blocks}
    if weight.stored.format in others:
        return others[weight.stored.format](weight, kind, order)
    integers = weight.integers()
    scales = repeated_scales(integers, BLOCK, torch.float16)
    rows = torch.arange(integers.shape[0]) if order is None else order
    parts = rows.split(max(1, CHUNK // integers.shape[1]))
    return torch.cat([gguf_blocks.pack(signed_codes(integers, part), scales[part], kind) for part in parts])


def _k_blocks(weight: StoredWeight, kind: int, order: Tensor | None) -> Tensor:
    codes, scales = kquant.unpack(weight.read().tensors, weight.stored.params, weight.shape)
    rows = torch.arange(weight.shape[0]) if order is None else order
    parts = rows.split(max(1, CHUNK // weight.shape[1]))

    def of(part: Tensor) -> kquant.Scales:
        return kquant.Scales(*(None if values is None else values[part] for values in scales))  # type: ignore[arg-type]

    return torch.cat([gguf_blocks.pack_k(codes[part], of(part), kind) for part in parts])


def _point_blocks(weight: StoredWeight, kind: int, order: Tensor | None) -> Tensor:
    tensors, columns = weight.read().tensors, weight.shape[1]
    rows = torch.arange(weight.shape[0]) if order is None else order
    scales = tensors["scales"].view(torch.uint8)
    parts = rows.split(max(1, CHUNK // columns))
    codes = (grid.unpack_codes(tensors["codes"][part], weight.stored.params, columns) for part in parts)
    return torch.cat([gguf_points.pack_points(own, scales[part], kind) for own, part in zip(codes, parts, strict=True)])


def _trit_blocks(weight: StoredWeight, kind: int, order: Tensor | None) -> Tensor:
    params, (count, columns) = weight.stored.params, weight.shape
    trits, scales = ternary.unpack(weight.read().tensors, params, weight.shape)
    scales = scales.expand(count, -1) if params.tensor_scale else scales
    halves = scales.half()
    if not torch.equal(halves.float(), scales.float()):
        raise ExportError(
            f"{weight.name} has scales too large or too small for float16, the only type there; leave it unquantized"
        )
    halves = halves.repeat_interleave(params.group(columns) // gguf_points.TRITS, 1)
    rows = torch.arange(count) if order is None else order
    parts = rows.split(max(1, CHUNK // columns))
    return torch.cat([gguf_points.pack_trits(trits[part], halves[part], kind) for part in parts])
