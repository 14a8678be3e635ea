"""Read AWQ's integers of 4 bits: W[o, i] = (code[i, o] - zero[g, o]) * scale[g, o], g the group of i.

qweight int32 [in, out / 8] and qzeros int32 [groups, out / 8] hold eight outputs in a word, in an order of their own;
scales are [groups, out].
"""

from __future__ import annotations

from compress.errors import shown
from compress.importers import options, turned
from compress.importers.source import CheckpointSource
from compress.storage.checkpoint import CONFIG, Readable

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
    size = _group_size(source)
    return {f"{module}.weight": turned.awq(source, module, size) for module in source.ending(".qweight")}


def _group_size(source: CheckpointSource) -> int:
    return source.number("group_size" if "group_size" in source.settings else "q_group_size", -1, -1)
