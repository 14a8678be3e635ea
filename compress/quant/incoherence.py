"""Incoherence: give a method the weight and its statistics in a random rotated basis (QuIP#, arXiv 2402.04396).

Signs and a Hadamard transform on both sides spread outliers over all entries, which are then nearly Gaussian. At run
time the same operations go around the stored matrix (compress/formats/transforms.py); the method knows nothing of them.
Input signs are drawn for each shared input, so that its rotated Hessian is made once for all the linears that read it.
Output signs are drawn for each linear. All draws depend on the job's seed and names alone, not on any order.

A recipe may store real numbers in place of signs: the drawn signs times scales. Behind the rotation an error of the
stored weight is spread evenly over the outputs, and their scales t multiply it. So a weight is divided by t before it
is rotated, and t says which outputs get more of the error (EXL3 1.6's `out_scales`):

    ones         t = 1; training moves them
    rms          t = sigma, the root mean square of an output's weights
    sensitivity  t = (sigma^2 / s)^(1/4), which minimizes the sum of s_k t_k^2 times that of sigma_k^2 / t_k^2; s is the
                 mean square of the loss's gradient at an output over its mean over outputs, plus 0.02

A recipe may ask for Hadamard transforms of blocks of inputs alone, without signs (`incoherence: 32`; MR-GPTQ, arXiv
2509.23202). They spread an outlier over the weights that share its scale, and engines fuse them with what quantizes
inputs. MXFP4 gains by them.

Scales of outputs have the geometric mean 1; an output of zeros has 1. Those of inputs are 1 (`in_vector`).
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor

from compress.formats import transforms
from compress.numerics import hadamard
from compress.numerics.hadamard import CHUNK
from compress.types import LayerPlan, LinearSpec, OutScales, PackedWeight, Scheme, Stats, WeightTransforms

OPS = WeightTransforms(input=("signs", "hadamard"), output=("hadamard", "signs"))  # a rotation without stored scales
DRAWN = ("signs", "channel_scale16", "channel_scale8")  # operations whose signs are drawn
# Inputs from which on scales of 8 bits pay: 7/n bits a weight for 5% of the KL at 576 inputs, for nothing at 256.
MIN_SCALED_INPUTS = 512
LEAST_SENSITIVITY = 0.02  # [mean of the outputs] that is added to each (EXL3)
BUFFERS = 8  # float32 temporaries of CHUNK numbers that a rotation has at a time, an upper bound


def derived_seed(seed: int, purpose: str, name: str) -> int:
    """Return a seed of its own for each purpose and name, 63 bits."""
    digest = hashlib.sha256(f"{seed} {purpose} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def with_chosen_scales(scheme: Scheme, shape: tuple[int, int]) -> Scheme:
    """Return the scheme of a linear [out, in] with the scales that `auto` stands for."""
    if scheme.out_scales != "auto":
        return scheme
    return dataclasses.replace(scheme, out_scales="rms" if shape[1] >= MIN_SCALED_INPUTS else "none")


def operations(scheme: Scheme) -> WeightTransforms:
    """Return the operations around a linear that is quantized in another basis."""
    if scheme.incoherence is not True:
        return WeightTransforms((f"block_hadamard/{scheme.incoherence}",))
    scales = f"channel_scale{scheme.vector_bits}"
    before, after = (scales if has else "signs" for has in (scheme.in_vector, scheme.out_scales != "none"))
    return WeightTransforms((before, "hadamard"), ("hadamard", after))


def draw(spec: LinearSpec, seed: int, around: WeightTransforms = OPS) -> dict[str, Tensor]:
    """Draw the stored tensors of the operations around this linear, on the CPU; scales are 1."""
    sides = {
        "out": ("output", spec.name, spec.shape[0], around.output),
        "in": ("input", spec.input_key, spec.shape[1], around.input),
    }
    return {
        f"{side}_{name}": transforms.pack_diagonal(name, _signs(size, derived_seed(seed, f"{word} signs", owner)))
        for side, (word, owner, size, names) in sides.items()
        for name in names
        if name in DRAWN
    }


def surroundings(layer: LayerPlan, seed: int, target: Tensor, sensitivities: Tensor | None = None) -> dict[str, Tensor]:
    """Return the stored tensors of the layer's operations, on the device of `target`.

    They depend on nothing but these arguments: all processes that quantize parts of a linear have the same bytes.
    target: what is approximated, [out, in], in the basis of the original. sensitivities: mean squares of the loss's
    gradients at the outputs, float32 [out], for scales by sensitivity; None: all alike.
    """
    drawn = draw_on_device(layer, seed, target)
    name = layer.stored.ops.output[-1] if layer.stored.ops.output else ""
    if layer.scheme.out_scales in ("none", "ones") or name not in DRAWN:
        return drawn
    signs = transforms.Diagonal(name, drawn[f"out_{name}"]).values(len(target), torch.float32)
    scales = output_scales(layer.scheme.out_scales, target, sensitivities)
    return {**drawn, f"out_{name}": transforms.pack_diagonal(name, signs * scales)}


def output_scales(kind: OutScales, target: Tensor, sensitivities: Tensor | None) -> Tensor:
    """Return the scales of a weight's outputs, float32 [out], before they are rounded to what is stored."""
    rows = max(1, CHUNK // target.shape[1])
    sizes = torch.cat([part.double().square().mean(1).sqrt() for part in target.split(rows)])
    scales = torch.ones_like(sizes) if kind in ("none", "ones") else sizes
    if kind == "sensitivity":
        known = torch.ones_like(sizes) if sensitivities is None else sensitivities.double()
        scales = (sizes.square() / (known / (known.mean() or 1.0) + LEAST_SENSITIVITY)) ** 0.25
    used = sizes > 0
    if not used.any():
        return torch.ones_like(sizes).float()
    return torch.where(used, scales / scales[used].log().mean().exp(), 1.0).float()


def rotated_stats(stats: Stats, layer: LayerPlan, seed: int) -> Stats:
    """Return the statistics of the layer's shared input in its rotated basis: the same for all its readers."""
    return Stats(
        transforms.rotate_hessian(stats.hessian, layer.stored.ops, draw_on_device(layer, seed, stats.hessian)),
        stats.count,
    )


def rotated_weight(weight: Tensor, layer: LayerPlan, around: dict[str, Tensor]) -> Tensor:
    """Return weight [out, in] in the rotated basis, float32, as the layer's method is given it.

    around: as `surroundings` returns them; the weight is divided by the scales that are stored.
    """
    return transforms.rotate(weight, layer.stored.ops, around)


def rotated_gradients(gradients: Tensor, layer: LayerPlan, around: dict[str, Tensor]) -> Tensor:
    """Return gradients [n, out] at the layer's outputs as those at the rows of its rotated weight."""
    return transforms.transpose_output(gradients, layer.stored.ops, around)


def wrap(packed: PackedWeight, layer: LayerPlan, around: dict[str, Tensor]) -> PackedWeight:
    """Return the packed rotated weight with the operations that turn it back, stored as `rotated_weight` had them."""
    stored = dataclasses.replace(packed.stored, ops=layer.stored.ops)
    return PackedWeight(stored, {**packed.tensors, **around}, packed.shape)


def notes(layer: LayerPlan) -> tuple[str, ...]:
    """Return what the report should say of the operations."""
    sides = zip(layer.spec.shape, (layer.stored.ops.output, layer.stored.ops.input), strict=True)
    sizes = dict.fromkeys(size for size, names in sides if "hadamard" in names)
    odd = {size: hadamard.order(size).K for size in sizes if hadamard.order(size).kind == "hartley"}
    return tuple(
        f"no Hadamard matrix of size {n} is known here: a Hartley matrix of {K} is used" for n, K in odd.items()
    )


def workspace(layer: LayerPlan, has_statistics: bool) -> int:
    """Return the bytes needed beside those of the method: rotated weight, rotated Hessian."""
    if not layer.stored.ops:
        return 0
    rows, columns = layer.spec.shape
    return 4 * (rows * columns + (columns * columns if has_statistics else 0))


def turning(layer: LayerPlan, has_statistics: bool) -> int:
    """Return the bytes of temporaries while these are made, before the method begins."""
    return 4 * BUFFERS * min(CHUNK, workspace(layer, has_statistics) // 4)


def draw_on_device(layer: LayerPlan, seed: int, like: Tensor) -> dict[str, Tensor]:
    """Draw the stored tensors of the layer's operations, scales 1, on the device of `like`."""
    return {key: tensor.to(like.device) for key, tensor in draw(layer.spec, seed, layer.stored.ops).items()}


def _signs(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 1.0 - 2.0 * torch.randint(2, (size,), generator=generator)
