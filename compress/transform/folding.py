"""Move a scale and a shift of each channel out of a vector: x' = (x - shift) / scale, the function unchanged.

What makes the vector gives x' instead of x, and all that read it undo the change:
- a norm: weight / scale and (bias - shift) / scale; one that multiplies by 1 + weight: (1 + weight) / scale - 1,
- a linear: (rows of weight) / scale and (bias - shift) / scale,
- the readers: (columns of weight) * scale and bias + weight @ shift, with the weight from before.
Where heads of the reader share a head of the producer (v -> o under grouped-query attention) they share its scale.

Everything is computed in float64 and rounded once to the stored type. A norm's few numbers are rounded first, and the
readers are given the scale and shift that they then stand for, so that the rounding of the norm costs nothing: near -1
the weight of an offset norm in bfloat16 would be wrong by several percent of 1 + weight.

Not done: a shift where producer or readers have no bias (biases are not created); a producer or reader whose channels
are stored in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.model.graph import Site

CHUNK = 1 << 22  # weights in float64 at a time: 32 MiB


class _Norm(NamedTuple):
    """A norm's new parameters, and the scale and shift that they stand for, in float64."""

    weight: Tensor  # in the stored type, like bias
    bias: Tensor | None
    scale: Tensor
    shift: Tensor | None


def by_producer(site: Site, values: Tensor) -> Tensor:
    """Return values of the readers' channels [channels] as [repeats, the producer's channels]."""
    if site.repeats == 1:
        return values[None]
    return values.view(-1, site.repeats, site.head_dim).transpose(0, 1).reshape(site.repeats, -1)


def to_readers(site: Site, values: Tensor) -> Tensor:
    """Return values of the producer's channels for the readers' channels, in which heads may be repeated."""
    if site.repeats == 1:
        return values
    return values.view(-1, 1, site.head_dim).expand(-1, site.repeats, -1).reshape(-1)


def can_shift(block: nn.Module, site: Site) -> bool:
    """Return whether the producer can subtract a shift and all readers can add it again: all have biases."""
    return all(_parameter(block, name, "bias") is not None for name in (site.producer, *site.readers))


@torch.no_grad()
def fold(block: nn.Module, site: Site, scale: Tensor, shift: Tensor | None = None) -> bool:
    """Change the site's vector to (x - shift) / scale, of the producer's channels, in place.

    False, with nothing changed, where a number would not be finite in its stored type. A shift needs `can_shift`.
    """
    assert shift is None or can_shift(block, site), f"{site.producer} and its readers cannot take a shift"
    scale, shift = scale.double(), None if shift is None else shift.double()
    if not (torch.isfinite(scale).all() and (scale > 0).all() and (shift is None or torch.isfinite(shift).all())):
        return False
    weight, bias = _parameter(block, site.producer, "weight"), _parameter(block, site.producer, "bias")
    if weight is None:
        return False
    if site.is_norm:
        norm = _norm(weight, bias, site.offset, scale, shift)
        scale, shift, new_bias = norm.scale, norm.shift, norm.bias
        fits = bool(torch.isfinite(norm.weight).all())
    else:
        new_bias = None if bias is None else _folded_bias(bias, scale, shift)
        fits = _fits(weight, 1 / scale[:, None])
    fits &= new_bias is None or bool(torch.isfinite(new_bias).all())
    wide, moved = to_readers(site, scale), None if shift is None else to_readers(site, shift)
    readers = [_weight(block, name) for name in site.readers]
    biases = [_parameter(block, name, "bias") if moved is not None else None for name in site.readers]
    sums = [None if b is None or moved is None else _sum(w, b, moved) for w, b in zip(readers, biases, strict=True)]
    fits &= all(_fits(reader, wide) for reader in readers)
    if not fits or not all(total is None or torch.isfinite(total).all() for total in sums):
        return False
    if site.is_norm:
        weight.copy_(norm.weight)
    else:
        _multiply(weight, 1 / scale[:, None])
    if bias is not None and new_bias is not None:
        bias.copy_(new_bias)
    for reader, reader_bias, total in zip(readers, biases, sums, strict=True):
        _multiply(reader, wide)
        if reader_bias is not None and total is not None:
            reader_bias.copy_(total)
    return True


def _norm(weight: Tensor, bias: Tensor | None, offset: bool, scale: Tensor, shift: Tensor | None) -> _Norm:
    """Return the norm's new parameters, and the scale and shift that they stand for once they are rounded."""
    one = 1.0 if offset else 0.0
    gain = one + weight.double()
    stored = (gain / scale - one).to(weight.dtype)
    rounded = one + stored.double()
    lost = (rounded == 0) & (gain != 0)  # underflow: such a channel stays as it is
    stored, rounded = torch.where(lost, weight, stored), torch.where(lost, gain, rounded)
    scale = torch.where(lost, 1.0, torch.where(gain == 0, scale, gain / rounded))
    if bias is None:
        return _Norm(stored, None, scale, None)
    new_bias = _folded_bias(bias, scale, shift)
    return _Norm(stored, new_bias, scale, None if shift is None else bias.double() - new_bias.double() * scale)


def _folded_bias(bias: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """Return the producer's new bias [channels], in its stored type."""
    exact = bias.double() if shift is None else bias.double() - shift
    return (exact / scale).to(bias.dtype)


def _sum(weight: Tensor, bias: Tensor, shift: Tensor) -> Tensor:
    """Return a reader's bias [out] with the shift [in] put back, in its stored type."""
    parts = [rows.double() @ shift for rows in weight.split(_rows(weight))]
    return (bias.double() + torch.cat(parts)).to(bias.dtype)


def _fits(weight: Tensor, factor: Tensor) -> bool:
    """Return whether weight [out, in] times factor [in] or [out, 1] is finite in the stored type."""
    axis = 1 if factor.dim() == 2 else 0
    largest = weight.abs().amax(axis).double() * factor.reshape(-1)
    return bool((largest <= torch.finfo(weight.dtype).max).all())


def _multiply(weight: Tensor, factor: Tensor) -> None:
    """Multiply weight [out, in] by factor [in] or [out, 1], in place."""
    step = _rows(weight)
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step]
        rows.copy_(rows.double() * (factor[start : start + step] if factor.dim() == 2 else factor))


def _rows(weight: Tensor) -> int:
    return max(1, CHUNK // weight.shape[1])


def _weight(block: nn.Module, path: str) -> Tensor:
    return block.get_submodule(path).get_parameter("weight").detach()


def _parameter(block: nn.Module, path: str, name: str) -> Tensor | None:
    """Return a parameter of the module at `path`, a view; None if it has none of that name."""
    parameter = dict(block.get_submodule(path).named_parameters(recurse=False)).get(name)
    return None if parameter is None else parameter.detach()
