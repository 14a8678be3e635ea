"""Read Quark's checkpoints: float8 and e2m1 numbers with few scales, groups or blocks, and integers of 2, 4 and 8 bits.

`weight` and `weight_scale` are

    fp8     float8 [out, in]; one scale, [out], [out, in / group], or [out / rows, in / columns] of blocks
    fp4     uint8 [out, in / 2], the low half first; [out, in / group]: floats, exponents, or float8 with weight_scale_2
    int     int32 of eight codes, uint8 of four (uint2, the first in the highest bits), or a code each; in groups they
            lie turned, [in, out / 8], scales [in / group, out]; weight_zero_point is packed alike

The eight codes of a word are in order, or in the order of AWQ (`pack_method`). Specifications of modules come from
layer_quant_config, by names, patterns or `re:`, else from global_quant_config. Second scales are multiplied with the
first ones before the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled, turned
from compress.importers.source import CheckpointSource, Decoded
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

OPTIONS: options.Options = {
    **{"exclude": options.NAMES, "global_quant_config": (dict, None), "layer_type_quant_config": (dict, None)},
    **{"layer_quant_config": (dict, None), "export": (dict, None), "quant_mode": options.TEXT},
}
PACKED = {"int4": 8, "uint4": 8, "uint2": 4, "int8": 1, "uint8": 1}  # type of integers -> codes in a stored number
WORDS = (torch.int32, torch.int8, torch.uint8)
FLOAT_TYPES = ("fp8_e4m3", "fp8_e5m2", "fp4")
SCHEMES = ("per_tensor", "per_channel", "per_group", "per_block")
ORDERS = ("order", "reorder")
SCALES = (*scaled.FLOATS, *scaled.EXPONENTS, torch.float8_e4m3fn)


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for a specification that cannot be read."""
    tables = [source.settings.get("global_quant_config"), *_layers(source).values()]
    specs = [_check(source, table) for table in tables if isinstance(table, dict) and table.get("weight")]
    if _order(source) not in ORDERS:
        raise source.error(f"{CONFIG}: pack_method {shown(_order(source))} is none of {', '.join(ORDERS)}")
    words = {f"{spec['dtype']} {str(spec['qscheme']).replace('_', ' ')}" for spec in specs}
    return f"quark {' and '.join(sorted(words)) or 'without a quantized weight'}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    weights: dict[str, Readable] = {}
    for module in source.ending(".weight_scale"):
        spec = _spec(source, module)
        read = _floats if spec["dtype"] in FLOAT_TYPES else _integers
        weights[f"{module}.weight"] = read(source, module, spec)
    source.drop(*(f".{part}{end}" for part in ("input", "output") for end in ("_scale", "_scale_2", "_zero_point")))
    return weights


def _layers(source: CheckpointSource) -> Mapping[str, Any]:
    layers = source.settings.get("layer_quant_config")
    return layers if isinstance(layers, dict) else {}


def _order(source: CheckpointSource) -> str:
    export = source.settings.get("export")
    return str((export if isinstance(export, dict) else {}).get("pack_method") or ORDERS[1])


def _check(source: CheckpointSource, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a table says of weights; CheckpointError for types and schemes that cannot be read."""
    given = table.get("weight")
    listed = given if isinstance(given, list) else [given]
    spec = next((spec for spec in listed if isinstance(spec, dict) and not spec.get("is_scale_quant")), None)
    if spec is None or spec.get("dtype") not in (*PACKED, *FLOAT_TYPES) or spec.get("qscheme") not in SCHEMES:
        raise source.error(
            f"{CONFIG}: weights as {shown(given)} says cannot be read; what can be: "
            f"{', '.join((*PACKED, *FLOAT_TYPES))}, {', '.join(SCHEMES)}"
        )
    return spec


def _spec(source: CheckpointSource, module: str) -> Mapping[str, Any]:
    """Return what the settings say of a module's weight: by its name, by its class, else of all."""
    types = source.settings.get("layer_type_quant_config")
    tables = [types.get("Linear") if isinstance(types, dict) else None, source.settings.get("global_quant_config")]
    for pattern, table in _layers(source).items():
        try:
            is_re = pattern.startswith("re:")
            if options.has_match(pattern[3:], module) if is_re else fnmatchcase(module, pattern):
                tables.insert(0, table)
                break
        except ValueError as error:
            raise source.error(f"{CONFIG}: {shown(pattern)} of layer_quant_config {error}") from error
    table = next((table for table in tables if isinstance(table, dict) and table.get("weight")), None)
    if table is None:
        raise source.error(f"{CONFIG}: nothing in quantization_config is of {module}, whose weight has a scale")
    return _check(source, table)


def _size(source: CheckpointSource, spec: Mapping[str, Any]) -> int:
    size = spec.get("group_size")
    if type(size) is not int or size < 1:
        raise source.error(f"{CONFIG}: group_size {shown(size)} of weights is no number from 1 on")
    return size


def _floats(source: CheckpointSource, module: str, spec: Mapping[str, Any]) -> Decoded:
    stored = source.take(f"{module}.weight", (torch.uint8,) if spec["dtype"] == "fp4" else scaled.FLOAT8)
    codes = scaled.halves(stored) if stored.dtype == torch.uint8 else scaled.plain(stored)
    scale, second = source.take(f"{module}.weight_scale", SCALES), f"{module}.weight_scale_2"
    factor = source.take(second, scaled.FLOATS) if second in source.stored else None
    return scaled.weight(
        source, stored.name, codes, scaled.ScaleGrid(scale, _block(source, spec), factor=factor), source.dtype
    )


def _block(source: CheckpointSource, spec: Mapping[str, Any]) -> scaled.Block | None:
    """Return the rows and columns that share a scale, None where rows or the whole weight do."""
    if spec["qscheme"] == "per_group":
        return 1, _size(source, spec)
    if spec["qscheme"] != "per_block":
        return None
    sizes = spec.get("block_size")
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise source.error(f"{CONFIG}: block_size {shown(sizes)} of weights is no pair of sizes")
    return sizes[0], sizes[1]


def _integers(source: CheckpointSource, module: str, spec: Mapping[str, Any]) -> Decoded:
    kind, per = spec["dtype"], PACKED[spec["dtype"]]
    packed, scale = source.take(f"{module}.weight", WORDS), source.take(f"{module}.weight_scale", scaled.FLOATS)
    if len(packed.shape) != 2:
        raise source.error(f"{packed.name} has the shape {list(packed.shape)}, a quantized weight has two dimensions")
    point = f"{module}.weight_zero_point"
    zeros = source.take(point, (*WORDS, *scaled.FLOATS)) if point in source.stored else None
    in_order = _order(source) == ORDERS[0]

    def unpack(part: Tensor) -> Tensor:
        return part if part.is_floating_point() else _unpack(part, kind, in_order=in_order)

    if spec["qscheme"] == "per_group":
        return _read_turned(source, _size(source, spec), (packed, scale, zeros), per, unpack)
    shape = (packed.shape[0], per * packed.shape[1])

    def offsets(start: int, stop: int) -> Tensor:
        if zeros is None or not zeros.shape:
            return torch.zeros(1) if zeros is None else unpack(zeros.read().reshape(1, 1))[:, :1].float()
        return unpack(zeros.read().reshape(1, -1)).float().reshape(-1, 1)[start:stop]

    codes = scaled.Codes(packed, shape, lambda start, stop: unpack(packed.rows(start, stop)).float())
    grid = scaled.ScaleGrid(scale, zeros=offsets if zeros is not None else None)
    grid = grid._replace(others=() if zeros is None else (zeros,))
    return scaled.weight(source, packed.name, codes, grid, source.dtype)


def _read_turned(
    source: CheckpointSource,
    size: int,
    stored: tuple[StoredTensor, StoredTensor, StoredTensor | None],
    per: int,
    unpack: Callable[[Tensor], Tensor],
) -> Decoded:
    """Return a weight whose codes, scales and zeros lie turned."""
    packed, scale, zeros = stored
    inner, words = packed.shape
    groups, out = -(-inner // size), scale.shape[-1] if scale.shape else 0
    others = () if zeros is None else (zeros,)
    fitting = [zeros.shape == (groups, out if zeros.dtype in scaled.FLOATS else words) for zeros in others]
    if scale.shape != (groups, out) or -(-out // per) != words or not all(fitting):
        raise source.error(
            f"{packed.name} {list(packed.shape)}, its scales {list(scale.shape)} and zero points do not belong "
            f"together in groups of {size}"
        )

    def codes(part: Tensor, start: int, stop: int) -> Tensor:
        return unpack(part[:, start // per : -(-stop // per)])[:, : stop - start].t()

    parts = turned.TurnedParts(
        *(packed, scale, codes),
        zeros=None if zeros is None else lambda: unpack(zeros.read())[:, :out],
        group=lambda: turned.in_order(inner, size),
        others=others,
    )
    return turned.weight(packed.name, (out, inner), parts, source.dtype)


def _unpack(packed: Tensor, kind: str, *, in_order: bool) -> Tensor:
    """Return the codes [rows, n] of packed numbers; in_order: whether those of a word are."""
    if PACKED[kind] == 1:
        return packed
    if kind == "uint2":
        return torch.stack([packed >> shift & 3 for shift in (6, 4, 2, 0)], -1).flatten(-2)
    codes = scaled.unpack_codes(packed, 4, 8 * packed.shape[-1]) if in_order else turned.unpack_ordered(packed, 4)
    return (codes ^ 8).to(torch.int8) - 8 if kind == "int4" else codes
