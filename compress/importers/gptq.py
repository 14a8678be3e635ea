"""Read GPTQ's integers of 2 to 8 bits: W[o, i] = (code[i, o] - zero[g, o]) * scale[g, o], g the group of i.

qweight int32 [in * bits / 32, out] holds the codes along its columns, qzeros int32 [groups, out * bits / 32] the zeros
along its rows, scales are [groups, out]. g_idx int32 [in] is the group of each input: they are in order without it. The
first version of the layout stores every zero less one, modulo 2^bits. Bits are those of the shapes, because modules may
differ from the configuration.
"""

from __future__ import annotations

from compress.errors import shown
from compress.importers import options, turned
from compress.importers.source import CheckpointSource
from compress.storage.checkpoint import CONFIG, Readable

LAYOUTS = ("gptq", "gptq_v2")
OPTIONS: options.Options = {
    **options.PLAIN_MODULES,
    **dict.fromkeys(("desc_act", "sym", "static_groups", "true_sequential", "is_marlin_format"), options.FLAG),
    **{
        "bits": turned.WIDTHS,
        "group_size": (int, None),
        "checkpoint_format": (*LAYOUTS, None),
        "dynamic": (dict, None),
    },
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
    less, size = int(source.settings.get("checkpoint_format") != LAYOUTS[1]), source.number("group_size", -1, -1)
    return {f"{module}.weight": turned.gptq(source, module, size, less) for module in source.ending(".qweight")}
