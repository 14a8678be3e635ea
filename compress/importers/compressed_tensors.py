"""Read compressed-tensors: integers packed into words, int8, float8, and numbers of 4 bits with scales of groups.

A linear has weight_packed (int32: codes of 1 to 8 bits along its rows; uint8: e2m1) or weight (int8, float8), and
weight_scale. W = (code - zero) * scale. Zero points of packed integers are packed along the rows. weight_g_idx, where
it is not negative, is the group of each input. The group of the configuration that a linear belongs to says how many
bits it has and what shares a scale.

Of 2:4 sparse weights, quantized or not, two of four inputs are stored: compressed [out, in / 2] has them in order,
bitmask uint8 [out, ceil(in / 8)] a bit for each input, the lowest first, and shape [2, 1] the numbers out and in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.scaled import unpack_codes
from compress.importers.source import CheckpointSource, Decoded
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense"),
)
OPTIONS: options.Options = {
    "quantization_status": ("initialized", "calibration", "frozen", "compressed", None),
    **{"ignore": options.NAMES, "global_compression_ratio": options.NUMBER, "config_groups": (dict,)},
    **dict.fromkeys(("kv_cache_scheme", "sparsity_config", "transform_config"), (dict, None)),
}
SPARSE = "sparse-24-bitmask"
ARGUMENTS: options.Options = {  # options of the weights of a group
    **{"num_bits": (int,), "type": ("int", "float", None), "symmetric": options.FLAG, "group_size": (int, None)},
    "strategy": ("tensor", "channel", "group", "tensor_group", "block", None),
    **{"actorder": ("group", "weight", "static", "dynamic", bool, None), "dynamic": ("local", bool, None)},
    **{"block_structure": options.NAMES, "observer": options.TEXT, "observer_kwargs": (dict, None)},
}
SCALES = (*scaled.FLOATS, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
UNUSED = (*scaled.RUNTIME_ENDINGS, ".q_scale", ".input_zero_point", ".input_global_scale", ".output_scale")


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for a format or an option that cannot be read."""
    groups = _groups(source)
    for name in [source.settings.get("format"), *(group.get("format") for group in groups)]:
        if name is not None and name not in FORMATS:
            raise source.error(f"{CONFIG}: format {shown(name)} cannot be read; what can be: {', '.join(FORMATS)}")
    sparsity = source.settings.get("sparsity_config") or {}
    layout = sparsity.get("format", "dense") if isinstance(sparsity, dict) else "dense"
    if layout not in ("dense", SPARSE):
        raise source.error(f"{CONFIG}: sparse weights ({shown(layout)}) cannot be read, only dense ones and {SPARSE}")
    transforms = source.settings.get("transform_config") or {}
    if not isinstance(transforms, dict) or transforms.get("config_groups"):
        raise source.error(f"{CONFIG}: transform_config: weights in a rotated basis cannot be read")
    for group in groups:
        options.check(source, ARGUMENTS, group.get("weights") or {}, "config_groups")
    words = sorted({_words(group["weights"]) for group in groups if group.get("weights")})
    words += ["2:4 sparse"] if layout == SPARSE else []
    return f"compressed-tensors {' and '.join(words)}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    weights: dict[str, Readable] = {}
    for module in source.ending(".weight_packed"):
        weights[f"{module}.weight"] = _weight(source, module, _packed_codes(source, module))
    for module in source.ending(".compressed"):
        codes, mask = _sparse_codes(source, module)
        if f"{module}.weight_scale" in source.stored:
            weights[f"{module}.weight"] = _weight(source, module, codes, (mask,))
        else:
            weights[f"{module}.weight"] = scaled.decode_unscaled(f"{module}.weight", codes, (mask,))
    for module in source.ending(".weight_scale"):
        stored = source.take(f"{module}.weight", (torch.int8, *scaled.FLOAT8))
        weights[f"{module}.weight"] = _weight(source, module, scaled.plain(stored))
    source.drop(*UNUSED)
    return weights


def _groups(source: CheckpointSource) -> list[dict[str, Any]]:
    """Return the groups of the configuration."""
    groups = source.settings.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, dict) else []
    for group in listed:
        if not isinstance(group, dict) or not isinstance(group.get("weights") or {}, dict):
            raise source.error(f"{CONFIG}: config_groups has {shown(group)}, which cannot be read")
        if not isinstance(group.get("targets") or [], list):
            raise source.error(f"{CONFIG}: targets {shown(group['targets'])} of config_groups is no list")
    if not listed and not source.ending(".compressed"):
        raise source.error(f"{CONFIG}: quantization_config has no config_groups that can be read")
    return listed


def _words(weights: Mapping[str, Any]) -> str:
    """Return in words how a group stores weights."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    shared = {"group": f"in groups of {size}", "tensor_group": f"in groups of {size}", "channel": "by rows"}
    blocks = weights.get("block_structure")
    shared["block"] = "in blocks of " + " x ".join(map(str, blocks if isinstance(blocks, list) else ["?"]))
    kind = "fp" if weights.get("type") == "float" else "int"
    order = ", act-order" if weights.get("actorder") else ""
    return f"{kind}{weights.get('num_bits')} {shared.get(str(strategy), 'with one scale')}{order}"


def _arguments(source: CheckpointSource, module: str) -> Mapping[str, Any]:
    """Return the settings of a linear's weights: of the group that names it, else of one that names a class."""
    groups = [group for group in _groups(source) if group.get("weights")]
    if len(groups) == 1:
        return dict(groups[0]["weights"])
    for group in groups:
        for target in map(str, group.get("targets") or ()):
            if _is_target(source, target, module):
                return dict(group["weights"])
    classes = [group for group in groups if any(str(t)[:1].isupper() for t in group.get("targets") or ())]
    if not classes:
        raise source.error(f"{CONFIG}: no group of quantization_config is that of {module}")
    return dict(classes[0]["weights"])


def _is_target(source: CheckpointSource, target: str, module: str) -> bool:
    """Return whether a target of a group, a name or `re:` with a pattern, means a module."""
    if not target.startswith("re:"):
        return target == module
    try:
        return options.matches(target.removeprefix("re:"), module)
    except ValueError as error:
        raise source.error(f"{CONFIG}: {shown(target)} of config_groups {error}") from error


def _packed_codes(source: CheckpointSource, module: str) -> scaled.Codes:
    """Take the codes of a linear that are packed."""
    stored, arguments = source.take(f"{module}.weight_packed", (torch.int32, torch.uint8)), _arguments(source, module)
    if len(stored.shape) != 2:
        raise source.error(f"{stored.name} has the shape {list(stored.shape)}, a quantized weight has two dimensions")
    rows, words = stored.shape
    if stored.dtype == torch.uint8:
        return scaled.halves(stored)
    bits = _bits(source, module, arguments)
    sizes = source.take(f"{module}.weight_shape", (torch.int64, torch.int32), (2,)).read().tolist()
    if sizes[0] != rows or -(-sizes[1] * bits // 32) != words:
        raise source.error(
            f"{module}.weight_shape says {sizes}, but {stored.name} has the shape {list(stored.shape)} for {bits} bits"
        )

    def codes(start: int, stop: int) -> Tensor:
        return unpack_codes(stored.rows(start, stop), bits, sizes[1]).float().sub_(1 << (bits - 1))

    return scaled.Codes(stored, (rows, sizes[1]), codes)


def _sparse_codes(source: CheckpointSource, module: str) -> tuple[scaled.Codes, StoredTensor]:
    """Take the numbers of a 2:4 sparse linear, and the tensor that tells where they are."""
    is_scaled = f"{module}.weight_scale" in source.stored
    stored = source.take(f"{module}.compressed", (torch.int8, *scaled.FLOAT8) if is_scaled else scaled.FLOATS)
    sizes = source.take(f"{module}.shape", (torch.int64, torch.int32)).read().flatten().tolist()
    rows, columns = sizes if len(sizes) == 2 and min(sizes) > 0 else (0, 0)
    if 2 * math.prod(stored.shape) != rows * columns or stored.shape != (rows, columns // 2):
        raise source.error(f"{module}.shape says {sizes}, but {stored.name} has the shape {list(stored.shape)}")
    mask = source.take(f"{module}.bitmask", (torch.uint8,), (rows, -(-columns // 8)))

    def codes(start: int, stop: int) -> Tensor:
        places = unpack_codes(mask.rows(start, stop), 1, columns).bool()
        if (places.sum(1) != columns // 2).any():
            raise source.error(f"{mask.name} does not have half of the bits of each row; download it again")
        values = torch.zeros(places.shape)
        values[places] = stored.rows(start, stop).float().flatten()
        return values

    return scaled.Codes(stored, (rows, columns), codes), mask


def _bits(source: CheckpointSource, module: str, arguments: Mapping[str, Any]) -> int:
    bits = arguments.get("num_bits")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise source.error(f"{CONFIG}: num_bits {shown(bits)} of {module} is no number from 1 to 8")
    return bits


def _block(source: CheckpointSource, module: str, arguments: Mapping[str, Any]) -> scaled.Block | None:
    """Return the rows and columns that share a scale, None where rows or the whole weight do."""
    strategy = arguments.get("strategy")
    if strategy in ("channel", "tensor", None):
        return None
    block = arguments.get("block_structure") if strategy == "block" else [1, arguments.get("group_size")]
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise source.error(f"{CONFIG}: strategy {shown(strategy)} of {module}, with {shown(block)}, cannot be read")
    return sizes[0], sizes[1]


def _weight(
    source: CheckpointSource, module: str, codes: scaled.Codes, others: tuple[StoredTensor, ...] = ()
) -> Decoded:
    arguments = _arguments(source, module)
    scale = source.take(f"{module}.weight_scale", SCALES)
    is_float = codes.stored.dtype in (torch.uint8, *scaled.FLOAT8)
    if arguments.get("type") not in (None, "float" if is_float else "int"):
        raise source.error(
            f"{codes.stored.name} is stored as {str(codes.stored.dtype).removeprefix('torch.')}, and {CONFIG} says "
            f"that its numbers are of type {shown(arguments.get('type'))}; download it again"
        )
    block = _block(source, module, arguments)
    divisor = index = zeros = None
    if f"{module}.weight_global_scale" in source.stored:
        divisor = source.take(f"{module}.weight_global_scale", scaled.FLOATS, (1,))
    if f"{module}.weight_g_idx" in source.stored:
        index = source.take(f"{module}.weight_g_idx", shape=codes.shape[-1:])
    if f"{module}.weight_zero_point" in source.stored:
        point = source.take(f"{module}.weight_zero_point")
        if not arguments.get("symmetric", True):
            zeros, others = _zeros(source, module, codes, point, scale), (*others, point)
    is_coded = scale.dtype.itemsize == 1 or divisor is not None
    dtype = torch.bfloat16 if is_coded else scaled.decoded_dtype(source, scale)
    return scaled.weight(
        source, f"{module}.weight", codes, scaled.ScaleGrid(scale, block, zeros, index, divisor, others), dtype
    )


def _zeros(
    source: CheckpointSource, module: str, codes: scaled.Codes, point: StoredTensor, scale: StoredTensor
) -> scaled.Rows:
    """Return a reader of the rows of zero points [out, groups], of which there are as many groups as of the scales."""
    out, groups = codes.shape[0], scale.shape[1] if len(scale.shape) == 2 else 1
    if point.dtype != torch.int32 or codes.stored.dtype != torch.int32:
        if point.shape != scale.shape or len(point.shape) != 2 or point.shape[0] != out:
            raise source.error(f"{point.name} has the shape {list(point.shape)}, its scales {list(scale.shape)}")
        return lambda start, stop: point.rows(start, stop).float()
    bits = _bits(source, module, _arguments(source, module))
    if point.shape != (-(-out * bits // 32), groups):
        raise source.error(
            f"{point.name} has the shape {list(point.shape)}, not that of {out} x {groups} zero points of {bits} bits, "
            f"one for each of the scales {list(scale.shape)}"
        )

    def rows(start: int, stop: int) -> Tensor:
        return unpack_codes(point.read().t(), bits, out)[:, start:stop].t().float().sub_(1 << (bits - 1))

    return rows
