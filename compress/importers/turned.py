"""Decode integers whose parts lie turned, [in, out]: a weight is W[o, i] = (code[i, o] - zero[g, o]) * scale[g, o].

g is the group of input i, scales and zeros are [groups, out]. Codes are packed along the inputs or along the outputs,
as GPTQ and AWQ lay them, in one little-endian stream of bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compress.importers import scaled
from compress.importers.scaled import unpack_codes
from compress.importers.source import CheckpointSource, Decoded, fill_rows, step
from compress.storage.checkpoint import StoredTensor

WIDTHS = tuple(range(2, 9))
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of eight outputs that holds output 0, 1, ..., as AWQ has them
MULTIPLE = 32  # outputs that begin with a word, whatever the bits


class Parts(NamedTuple):
    """The parts of a weight.

    codes(packed, start, stop): the codes [stop - start, in] of these outputs, start a multiple of 32; zeros(): [groups,
    out], None where they are 0; group(): the group of each input, int64 [in].
    """

    packed: StoredTensor
    scales: StoredTensor
    codes: Callable[[Tensor, int, int], Tensor]
    zeros: Callable[[], Tensor] | None
    group: Callable[[], Tensor]
    others: tuple[StoredTensor, ...] = ()


def weight(name: str, shape: tuple[int, int], parts: Parts, dtype: torch.dtype) -> Decoded:
    """Return the weight [out, in] in `dtype`; a product is made in float32 and rounded once."""
    out, inner = shape

    def decode(start: int, stop: int) -> Tensor:
        packed, factors, group = parts.packed.read(), parts.scales.read().float(), parts.group()
        offsets = None if parts.zeros is None else parts.zeros().float()

        def rows(start: int, stop: int) -> Tensor:
            values = parts.codes(packed, start, stop).float()
            if offsets is not None:
                values.sub_(offsets[:, start:stop].t().index_select(1, group))
            return values.mul_(factors[:, start:stop].t().index_select(1, group)).to(dtype)

        return fill_rows((stop - start, inner), dtype, lambda a, b: rows(start + a, start + b), step(shape, MULTIPLE))

    return Decoded(name, dtype, shape, (parts.packed, parts.scales, *parts.others), decode, out)


def gptq(source: CheckpointSource, module: str, size: int, less: int, *, wraps: bool = True) -> Decoded:
    """Return a weight whose codes are packed along its inputs.

    qweight is int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32]. Bits are those of the shapes. g_idx
    [in], where it is stored, is the group of each input; else they are in order, of `size` inputs, at most 0 for all.
    less: what stored zeros lack, modulo 2^bits if it `wraps`. CheckpointError for parts that do not belong together.
    """
    packed, zeros = source.take(f"{module}.qweight", (torch.int32,)), source.take(f"{module}.qzeros", (torch.int32,))
    scales = source.take(f"{module}.scales", scaled.FLOATS)
    if any(len(stored.shape) != 2 for stored in (packed, zeros, scales)):
        raise source.error(f"{packed.name}, {zeros.name} and {scales.name} have two dimensions each, but not here")
    groups, out = scales.shape
    bits = 32 * zeros.shape[1] // max(1, out)
    inner = 32 * packed.shape[0] // max(1, bits)
    if bits not in WIDTHS or packed.shape[1] != out or zeros.shape != (groups, out * bits // 32):
        raise source.error(
            f"{packed.name} {list(packed.shape)}, {zeros.name} {list(zeros.shape)} and {scales.name} "
            f"{list(scales.shape)} do not belong together, or have codes of other than {WIDTHS[0]} to {WIDTHS[-1]} bits"
        )
    index = source.take(f"{module}.g_idx", shape=(inner,)) if f"{module}.g_idx" in source.stored else None
    if index is None:
        check_group_size(source, module, inner, groups, size)

    def offsets() -> Tensor:
        stored = unpack_codes(zeros.read(), bits, out).short() + less
        return stored & ((1 << bits) - 1) if wraps else stored

    def group() -> Tensor:
        if index is None:
            return in_order(inner, size)
        return scaled.check_groups(source, index.name, index.read().long(), groups)

    def codes(words: Tensor, start: int, stop: int) -> Tensor:
        return unpack_codes(words[:, start:stop].t(), bits, inner)

    others = (zeros,) if index is None else (zeros, index)
    parts = Parts(packed, scales, codes, offsets, group, others)
    return weight(f"{module}.weight", (out, inner), parts, scales.dtype)


def awq(source: CheckpointSource, module: str, size: int, widths: tuple[int, ...] = (4,)) -> Decoded:
    """Return a weight whose codes and zeros are packed along its outputs, eight of these in the order of AWQ.

    qweight is int32 [in, out * bits / 32], qzeros int32 [groups, out * bits / 32]. Bits are those of the shapes, one of
    `widths`. CheckpointError for parts that do not belong together.
    """
    packed = source.take(f"{module}.qweight", (torch.int32,))
    if len(packed.shape) != 2 or not all(packed.shape):
        raise source.error(f"{packed.name} has the shape {list(packed.shape)}, not [in, out * bits / 32]")
    inner, words = packed.shape
    groups = -(-inner // (size if size > 0 else inner))
    zeros = source.take(f"{module}.qzeros", (torch.int32,), (groups, words))
    stored = source.stored.get(f"{module}.scales")
    out = stored.shape[-1] if stored is not None and stored.shape else 0
    bits = next((bits for bits in widths if 32 * words == bits * out), widths[0])
    scales = source.take(f"{module}.scales", scaled.FLOATS, (groups, 32 * words // bits))
    out = scales.shape[1]

    def codes(packed: Tensor, start: int, stop: int) -> Tensor:
        return ordered(packed[:, start * bits // 32 : -(-stop * bits // 32)], bits)[:, : stop - start].t()

    parts = Parts(
        *(packed, scales, codes),
        zeros=lambda: ordered(zeros.read(), bits)[:, :out],
        group=lambda: in_order(inner, size),
        others=(zeros,),
    )
    return weight(f"{module}.weight", (out, inner), parts, scales.dtype)


def ordered(words: Tensor, bits: int) -> Tensor:
    """Return the codes uint8 [rows, n] of words [rows, n * bits / 32] in which eight outputs lie in AWQ's order."""
    codes = unpack_codes(words, bits, 32 * words.shape[1] // bits)
    return codes.unflatten(-1, (-1, len(ORDER)))[..., list(ORDER)].flatten(-2)


def in_order(inner: int, size: int) -> Tensor:
    """Return the groups of inputs that lie in order, int64 [in]; size: the inputs of one, at most 0 for all."""
    return torch.arange(inner) // (size if size > 0 else inner)


def check_group_size(source: CheckpointSource, module: str, inner: int, groups: int, size: int) -> None:
    """Raise CheckpointError if groups of this size are not as many as the stored ones."""
    size = size if size > 0 else inner
    if -(-inner // max(1, size)) != groups:
        raise source.error(
            f"{module}.scales has {groups} groups, {inner} inputs in groups of {size} have another number"
        )
