"""Read the directories of MLX: integers with a scale and a bias for a group, and FP4 and FP8 with scales of groups.

    weight uint32 [out, in * bits / 32]   codes, a little-endian stream of bits in each row
    scales, biases [out, in / group]      affine: w = code * scale + bias; 2, 3, 4, 5, 6 or 8 bits
    scales uint8 [out, in / group]        mxfp4, mxfp8: exponents, groups of 32; nvfp4: float8, groups of 16
    global_scale                          nvfp4: w = e2m1 * (scale * (global_scale / 2688))

A module is quantized if it has scales. The configuration says how, for all and for single modules. Affine weights are
made in float32 and rounded once. That is what mx.dequantize gives for scales in float32; for 16 bits it rounds the
product, too, by which half of a step may be lost. Its products for single tokens do not. The others equal
mx.dequantize in the model's type.

Experts lie in one tensor (switch_mlp) and are named one by one here. Convolutions are turned back. Models of which
mlx-lm changes values when it converts (mlx.yaml beside this file) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import yaml
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

AFFINE = "affine"
MODES = {AFFINE: (0, 0), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # mode -> bits, group that it has
OPTIONS: options.Options = {"group_size": (int,), "bits": (int,), "mode": (*MODES, None)}
CHANGED: Mapping[str, list[str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))["changed"]
WIDTHS = (2, 3, 4, 5, 6, 8)
LARGEST_PRODUCT = 2688  # of an e2m1 number and a float8 scale, which the largest magnitude of a tensor is stored as
SWITCH = re.compile(r"(.*)\.switch_mlp\.(gate_proj|up_proj|down_proj)")
WEIGHT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}  # of experts of blocks called as in EARLIER
EARLIER = "block_sparse_moe"


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for a model whose values mlx-lm changes."""
    kind = source.config.get("model_type")
    for reason, kinds in CHANGED.items():
        if kind in kinds:
            raise source.error(f"models of type {shown(kind)} cannot be read from MLX: {reason}; give the original")
    mode = source.settings.get("mode") or AFFINE
    mixed = ", mixed" if any(isinstance(value, dict) for value in source.settings.values()) else ""
    return f"mlx {mode} of {source.number('bits')} bits in groups of {source.number('group_size')}{mixed}"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    weights: dict[str, Readable] = {}
    for module in source.ending(".scales"):
        weights |= {weight.name: weight for weight in _weights(source, module)}
    for module in [module for module in source.ending(".weight") if weights and SWITCH.fullmatch(module)]:
        stored = source.take(f"{module}.weight")
        weights |= {name: _expert(stored, index).renamed(name) for index, name in enumerate(_names(module, stored))}
    for name, stored in source.stored.items():
        if "conv" in name and len(stored.shape) == 3 and stored.shape[2] == 1 < stored.shape[1]:
            source.stored[name] = stored._replace(shape=(stored.shape[0], 1, stored.shape[1]))
    return weights


def _weights(source: CheckpointSource, module: str) -> Iterator[Decoded]:
    """Yield the weight of a module, or those of its experts."""
    form = source.settings.get(module)
    form = {**source.settings, **(form if isinstance(form, dict) else {})}
    bits, group, mode = form.get("bits"), form.get("group_size"), form.get("mode") or AFFINE
    words = source.take(f"{module}.weight", (torch.uint32,))
    scales = source.take(f"{module}.scales", scaled.FLOATS if mode == AFFINE else (torch.uint8,))
    inner = 32 * words.shape[-1] // bits if type(bits) is int and bits in WIDTHS and words.shape else 0
    is_known = mode in MODES and (mode == AFFINE or MODES[mode] == (bits, group)) and type(group) is int and group > 0
    if not is_known or scales.shape != (*words.shape[:-1], inner // group) or inner % group:
        raise source.error(
            f"{words.name} has the shape {list(words.shape)} and scales of {list(scales.shape)}, which is not "
            f"{shown(mode)} of {shown(bits)} bits in groups of {shown(group)} as {CONFIG} says; download it again"
        )
    parts = [words, scales]
    if mode == AFFINE:
        parts.append(source.take(f"{module}.biases", scaled.FLOATS, scales.shape))
    elif f"{module}.global_scale" in source.stored:
        parts.append(source.take(f"{module}.global_scale", scaled.FLOATS))
    for index, name in enumerate(_names(module, words)):
        own = parts if len(words.shape) == 2 else [_expert(part, index) for part in parts]
        yield _affine(source, name, own, bits, group) if mode == AFFINE else _floats(source, name, own, mode)


def _names(module: str, stored: StoredTensor) -> list[str]:
    """Return the name of a module's weight, or those of its experts in order."""
    match = SWITCH.fullmatch(module)
    if match is None or len(stored.shape) != 3:
        return [f"{module}.weight"]
    name = WEIGHT_NAMES[match[2]] if EARLIER in match[1] else match[2]
    return [f"{match[1]}.experts.{index}.{name}.weight" for index in range(stored.shape[0])]


def _expert(stored: StoredTensor, index: int) -> StoredTensor:
    """Return an entry of the first dimension; the whole of a single number."""
    if len(stored.shape) < 2 and stored.nbytes == stored.dtype.itemsize:
        return stored
    nbytes = stored.nbytes // stored.shape[0]
    return stored._replace(shape=stored.shape[1:], offset=stored.offset + index * nbytes, nbytes=nbytes)


def _affine(source: CheckpointSource, name: str, parts: list[StoredTensor], bits: int, group: int) -> Decoded:
    words, scales, biases = parts
    shape, dtype = (words.shape[0], 32 * words.shape[1] // bits), scaled.decoded_dtype(source, scales)

    def decode(start: int, stop: int) -> Tensor:
        codes = scaled.unpack_codes(words.rows(start, stop), bits, shape[1]).float().unflatten(1, (-1, group))
        factors, offsets = (part.rows(start, stop).float().unsqueeze(-1) for part in (scales, biases))
        return codes.mul_(factors).add_(offsets).flatten(1).to(dtype)

    return Decoded(name, dtype, shape, tuple(parts), decode, step(shape))


def _floats(source: CheckpointSource, name: str, parts: list[StoredTensor], mode: str) -> Decoded:
    words, scales, *largest = parts
    octets = words._replace(dtype=torch.uint8, shape=(words.shape[0], 4 * words.shape[1]))
    bits, group = MODES[mode]
    if bits == 4:
        codes = scaled.halves(octets)
    else:
        codes = scaled.plain(octets._replace(dtype=torch.float8_e4m3fn))

    def values(stored: Tensor) -> Tensor:
        factors = stored.view(torch.float8_e4m3fn if mode == "nvfp4" else torch.float8_e8m0fnu).float()
        return factors * (largest[0].read().float().reshape(()) / LARGEST_PRODUCT) if largest else factors

    grid = scaled.ScaleGrid(scales, (1, group), values=values, others=tuple(largest))
    return scaled.weight(source, name, codes, grid, source.dtype)
