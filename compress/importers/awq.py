"""Read AWQ's integers of 4 bits: W[o, i] = (code[i, o] - zero[g, o]) * scale[g, o], g the group of i.

qweight int32 [in, out / 8] and qzeros int32 [groups, out / 8] hold eight outputs in a word, in an order of their own;
scales are [groups, out].
"""

from __future__ import annotations

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded, fill_rows, step
from compress.storage.checkpoint import CONFIG, Readable

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds output 0, 1, ... of its eight
LAYOUTS = ("gemm",)
OPTIONS: options.Options = {
    **options.PLAIN_MODULES,
    **dict.fromkeys(("bits", "w_bit"), (4, None)),
    **dict.fromkeys(("group_size", "q_group_size"), (int, None)),
    **{"zero_point": options.FLAG, "version": options.TEXT},
}


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored; CheckpointError for a layout that is made for one kind of kernel."""
    layout = str(source.settings.get("version", LAYOUTS[0])).lower()
    if layout not in LAYOUTS:
        raise source.error(
            f"{CONFIG}: version {shown(layout)} is no layout that can be read; what can be: {', '.join(LAYOUTS)}; give "
            "the original checkpoint"
        )
    bits = source.number("bits" if "bits" in source.settings else "w_bit")
    if bits != 4:
        raise source.error(f"{CONFIG}: {bits} bits in this layout cannot be read, only 4; give the original checkpoint")
    size = _group_size(source)
    return "awq of 4 bits " + (f"in groups of {size}" if size > 0 else "with a scale for each row")


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    return {f"{module}.weight": _weight(source, module) for module in source.ending(".qweight")}


def _group_size(source: CheckpointSource) -> int:
    return source.number("group_size" if "group_size" in source.settings else "q_group_size", -1, -1)


def _weight(source: CheckpointSource, module: str) -> Decoded:
    codes = source.take(f"{module}.qweight", (torch.int32,))
    if len(codes.shape) != 2 or not all(codes.shape):
        raise source.error(f"{codes.name} has the shape {list(codes.shape)}, not [in, out / 8]")
    inner, words = codes.shape
    size = _group_size(source)
    size = size if size > 0 else inner
    groups, out = -(-inner // size), 8 * words
    zeros = source.take(f"{module}.qzeros", (torch.int32,), (groups, words))
    scales = source.take(f"{module}.scales", scaled.FLOATS, (groups, out))
    shape = (out, inner)

    def decode(start: int, stop: int) -> Tensor:
        packed, offsets, factors = codes.read(), _nibbles(zeros.read()).float(), scales.read().float()
        group = torch.arange(inner) // size

        def rows(start: int, stop: int) -> Tensor:
            values = _nibbles(packed[:, start // 8 : -(-stop // 8)])[:, : stop - start].t().float()
            values.sub_(offsets[:, start:stop].t().index_select(1, group))
            return values.mul_(factors[:, start:stop].t().index_select(1, group)).to(scales.dtype)

        return fill_rows((stop - start, inner), scales.dtype, lambda a, b: rows(start + a, start + b), step(shape, 8))

    return Decoded(f"{module}.weight", scales.dtype, shape, (codes, zeros, scales), decode, out)


def _nibbles(words: Tensor) -> Tensor:
    """Return the codes uint8 [rows, 8 n] of words int32 [rows, n]."""
    shifts = torch.tensor([4 * place for place in ORDER], dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2)
