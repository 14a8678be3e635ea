"""Read GPTQ's integers of 2, 3, 4 or 8 bits: W[o, i] = (code[i, o] - zero[g, o]) * scale[g, o], g the group of i.

qweight int32 [in * bits / 32, out] holds the codes along its columns, qzeros int32 [groups, out * bits / 32] the zeros
along its rows, scales are [groups, out]. g_idx int32 [in] is the group of each input: they are in order without it. The
first version of the layout stores every zero less one, modulo 2^bits. Bits are those of the shapes, because modules may
differ from the configuration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.scaled import unpack_codes
from compress.importers.source import CheckpointSource, Decoded, fill_rows, step
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

WIDTHS = (2, 3, 4, 8)
LAYOUTS = ("gptq", "gptq_v2")
OPTIONS: options.Options = {
    **options.PLAIN_MODULES,
    **dict.fromkeys(("desc_act", "sym", "static_groups", "true_sequential", "is_marlin_format"), options.FLAG),
    **{"bits": WIDTHS, "group_size": (int, None), "checkpoint_format": (*LAYOUTS, None), "dynamic": (dict, None)},
    **{"pack_dtype": ("int32", None), "lm_head": options.FLAG},
}


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for a layout that is made for one kind of kernel."""
    layout = source.settings.get("checkpoint_format") or LAYOUTS[0]
    if source.settings.get("is_marlin_format") or layout not in LAYOUTS:
        named = "marlin" if source.settings.get("is_marlin_format") else layout
        raise source.error(
            f"{CONFIG}: checkpoint_format {shown(named)} is no layout that can be read; what can be: "
            f"{', '.join(LAYOUTS)}; give the original checkpoint"
        )
    bits, group = source.number("bits"), source.number("group_size", -1, -1)
    groups = f"in groups of {group}" if group > 0 else "with a scale for each row"
    return f"gptq of {bits} bits {groups}" + (", act-order" if source.settings.get("desc_act") else "")


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    return {f"{module}.weight": _weight(source, module) for module in source.ending(".qweight")}


def _weight(source: CheckpointSource, module: str) -> Decoded:
    codes = source.take(f"{module}.qweight", (torch.int32,))
    zeros, scales = source.take(f"{module}.qzeros", (torch.int32,)), source.take(f"{module}.scales", scaled.FLOATS)
    if any(len(stored.shape) != 2 for stored in (codes, zeros, scales)):
        raise source.error(f"{codes.name}, {zeros.name} and {scales.name} have two dimensions each, but not here")
    groups, out = scales.shape
    bits = 32 * zeros.shape[1] // max(1, out)
    inner = 32 * codes.shape[0] // max(1, bits)
    if bits not in WIDTHS or codes.shape[1] != out or zeros.shape != (groups, out * bits // 32):
        raise source.error(
            f"{codes.name} {list(codes.shape)}, {zeros.name} {list(zeros.shape)} and {scales.name} "
            f"{list(scales.shape)} do not belong together, or have codes of other than 2, 3, 4 or 8 bits"
        )
    index = source.take(f"{module}.g_idx", shape=(inner,)) if f"{module}.g_idx" in source.stored else None
    size = _group_size(source, module, inner, groups) if index is None else 0
    shift = 0 if source.settings.get("checkpoint_format") == LAYOUTS[1] else 1
    shape = (out, inner)

    def decode(start: int, stop: int) -> Tensor:
        words, factors = codes.read(), scales.read().float()
        offsets = ((unpack_codes(zeros.read(), bits, out) + shift) & ((1 << bits) - 1)).float()
        group = torch.arange(inner) // size if index is None else index.read().long()
        group = scaled.check_groups(source, f"{module}.g_idx", group, groups)

        def rows(start: int, stop: int) -> Tensor:
            values = unpack_codes(words[:, start:stop].t(), bits, inner).float()
            values.sub_(offsets[:, start:stop].t().index_select(1, group))
            return values.mul_(factors[:, start:stop].t().index_select(1, group)).to(scales.dtype)

        return fill_rows((stop - start, inner), scales.dtype, lambda a, b: rows(start + a, start + b), step(shape))

    parts: tuple[StoredTensor, ...] = (codes, zeros, scales)
    return Decoded(f"{module}.weight", scales.dtype, shape, parts if index is None else (*parts, index), decode, out)


def _group_size(source: CheckpointSource, module: str, inner: int, groups: int) -> int:
    """Return the inputs of a group where they are in order; CheckpointError if that does not give the stored groups."""
    size = source.number("group_size", -1, -1)
    size = size if size > 0 else inner
    if -(-inner // size) != groups:
        raise source.error(
            f"{module}.scales has {groups} groups, {inner} inputs in groups of {size} have another number"
        )
    return size
