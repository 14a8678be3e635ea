"""Read auto-round's checkpoints: integers as GPTQ or AWQ lays them, FP4 and FP8 with scales of groups, and float8.

`packing_format` names the layout of integers: that of GPTQ whose zeros are stored less one (auto_gptq) or as they are
(gptqmodel, or auto_round alone), of 2 to 8 bits, or that of AWQ. FP4 lies in weight_packed, FP8 in weight. Their
weight_scale is

    nv_fp       a float8 number for 16 columns; the codes are multiplied with 1 / weight_global_scale first
    mx_fp       an exponent for 32 columns
    nvfp4_v2    an exponent of five bits and a mantissa of three for 16 columns

mx_int is a sign and three bits of a fraction in quarters, with exponents as mx_fp has. Other float8 weights have a
scale of all, of rows, or of blocks (weight_scale_inv).

`extra_config` says for names, or for regular expressions, what differs there. Bits are those of the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled, turned
from compress.importers.source import CheckpointSource, Decoded
from compress.storage.checkpoint import CONFIG, Readable

OPTIONS: options.Options = {
    **{"bits": (int,), "data_type": options.TEXT, "packing_format": options.TEXT, "sym": options.FLAG},
    **{"group_size": (int, list, None), "extra_config": (dict, None), "act_dynamic": options.FLAG},
    **{"fmt": ("e4m3", "e5m2", None), "activation_scheme": ("dynamic", "static", None)},
    **dict.fromkeys(("act_bits", "iters", "nsamples", "seqlen", "batch_size"), (int, None)),
}
PREFIX = "auto_round:"
STORED_LESS = {"auto_gptq": 1, "gptq": 1, "auto": 1, "auto_round": 0, "gptqmodel": 0}  # layout -> what zeros lack
AWQ_LAYOUTS = ("auto_awq", "awq")
LAYOUTS = (*STORED_LESS, *AWQ_LAYOUTS, "llm_compressor", "llm_compressor_nvfp4_e5m3", "fp8", "fp8_static")
AWQ_WIDTHS = (4, 5, 6, 7)  # its own reader has no others for this layout
REFUSED = ("hadamard_matrix", "w_bf16_to_fp8_scale", "rotation", "svd")  # words in names of what weights depend on
FOUR_GROUP, MX_GROUP = 16, 32
E5M3 = "nvfp4_v2"


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for a layout that cannot be read."""
    if _layout(source) not in LAYOUTS:
        raise source.error(
            f"{CONFIG}: packing_format {shown(source.settings['packing_format'])} cannot be read; what can be: "
            f"{', '.join(LAYOUTS)}; give the original checkpoint"
        )
    if source.settings.get("rotation_config"):
        raise source.error(f"{CONFIG}: rotation_config: weights in a rotated basis cannot be read")
    size, mixed = source.settings.get("group_size"), ", mixed" if source.settings.get("extra_config") else ""
    groups = f"in groups of {size}" if type(size) is int and size > 0 else "by rows or blocks"
    return f"auto-round {source.settings.get('data_type', 'int')} of {source.number('bits')} bits {groups}{mixed}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    for name in source.stored:
        if any(word in name.rpartition(".")[2] for word in REFUSED):
            raise source.error(f"{name}: weights with this beside them cannot be read; give the original model")
    weights: dict[str, Readable] = {}
    for module in source.ending(".qweight"):
        weights[f"{module}.weight"] = _integers(source, module)
    for ending in (".weight_scale", ".weight_scale_inv"):
        for module in source.ending(ending):
            weights[f"{module}.weight"] = _floats(source, module, ending)
    source.drop(*scaled.RUNTIME_ENDINGS, ".input_global_scale", ".act_scales")
    return weights


def _layout(source: CheckpointSource) -> str:
    return str(source.settings.get("packing_format") or "auto").removeprefix(PREFIX)


def _scheme(source: CheckpointSource, module: str) -> Mapping[str, Any]:
    """Return the settings of a module: those of its name or else of the first pattern in it, then those of all."""
    extra = source.settings.get("extra_config")
    extra = extra if isinstance(extra, dict) else {}
    own = extra.get(module)
    for pattern in extra if own is None else ():
        try:
            if extra[pattern] and options.has_match(pattern, module):
                own = extra[pattern]
                break
        except ValueError as error:
            raise source.error(f"{CONFIG}: {shown(pattern)} of extra_config {error}") from error
    if own is not None and not isinstance(own, dict):
        raise source.error(f"{CONFIG}: extra_config has {shown(own)} for {module}, which is no table")
    return {**source.settings, **(own or {})}


def _integers(source: CheckpointSource, module: str) -> Decoded:
    layout, size = _layout(source), _scheme(source, module).get("group_size", -1)
    if type(size) is not int:
        raise source.error(f"{CONFIG}: group_size {shown(size)} of {module} is no number")
    if layout in AWQ_LAYOUTS:
        return turned.awq(source, module, size, AWQ_WIDTHS)
    return turned.gptq(source, module, size, STORED_LESS.get(layout, 1), wraps=False)


def _floats(source: CheckpointSource, module: str, ending: str) -> Decoded:
    """Return a weight of floats, or of mx_int."""
    scheme, name = _scheme(source, module), f"{module}.weight"
    if f"{name}_packed" in source.stored:
        stored = source.take(f"{name}_packed", (torch.uint8,))
        codes = scaled.halves(stored, _fractions if "int" in str(scheme.get("data_type")) else None)
    else:
        codes = scaled.plain(source.take(name, scaled.FLOAT8))
    is_four = codes.stored.dtype == torch.uint8
    scale = source.take(module + ending, (*scaled.FLOATS, torch.uint8, torch.float8_e4m3fn))
    if is_four and scale.dtype == torch.uint8 and (scheme.get("data_type") == E5M3 or "e5m3" in _layout(source)):
        grid = scaled.ScaleGrid(scale, (1, FOUR_GROUP), values=_e5m3)
    elif scale.dtype == torch.uint8:
        grid = scaled.ScaleGrid(scale, (1, MX_GROUP))
    elif is_four:
        divisor, rows = source.take(f"{name}_global_scale", scaled.FLOATS, (1,)), codes.rows
        codes = codes._replace(rows=lambda start, stop: rows(start, stop).mul_(1 / divisor.read().float()))
        grid = scaled.ScaleGrid(scale, (1, FOUR_GROUP), others=(divisor,))
    else:
        grid = scaled.ScaleGrid(scale, _block(source, module, scheme) if ending.endswith("_inv") else None)
    return scaled.weight(source, name, codes, grid, scaled.decoded_dtype(source, scale))


def _block(source: CheckpointSource, module: str, scheme: Mapping[str, Any]) -> scaled.Block:
    size = scheme.get("group_size")
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        raise source.error(f"{CONFIG}: group_size {shown(size)} of {module} is no pair of sizes")
    return size[0], size[1]


def _fractions(packed: Tensor) -> Tensor:
    """Return the numbers [..., 2 n] of bytes [..., n]: a sign and a fraction in quarters, the low half first."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return (codes & 7).float().mul_(0.25).mul_(1 - 2 * (codes >> 3).float())


def _e5m3(scale: Tensor) -> Tensor:
    """Return scales of bytes: five bits of exponent with an offset of 15, three of mantissa; 255 is no number."""
    exponent, mantissa = (scale >> 3).int(), (scale & 7).float() / 8
    values = torch.ldexp(mantissa + (exponent > 0), exponent.clamp(min=1) - 15)
    return values.masked_fill_(scale == 255, torch.nan)
