"""Give a skeleton fewer decoder blocks: which configuration says so, and where the blocks that stay are stored.

Everything is told from structure. Of the configuration of the text model, lists with an entry for each layer are cut,
and lists of numbers of layers are renumbered. The smaller model is then built, and each of its blocks compared with
the one that it stands for: shapes of parameters, and all plain attributes of its modules. A rule by which a smaller
model would have other blocks (which attend to a window, which have no positions) shows there, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from compress.errors import RecipeError, UnsupportedModelError
from compress.model import stored_weights
from compress.model.skeleton import Skeleton
from compress.storage.checkpoint import Readable

LAYERS = "num_hidden_layers"
ADVICE = "remove drop_blocks from the recipe's transform"
PLAIN = (bool, int, float, str, type(None))


def find_droppable(skeleton: Skeleton) -> range:
    """Return the blocks that may be dropped: the longest run of blocks whose parameters have the same shapes.

    Whichever of them go, block i of the smaller model has the same shapes, so that it can be planned before. Raises
    UnsupportedModelError for models that cannot be given fewer blocks.
    """
    if (reason := _why_not(skeleton)) is not None:
        raise UnsupportedModelError(f"drop_blocks: {reason}; {ADVICE}")
    kinds = [_shapes(block) for block in skeleton.blocks]
    best, start = range(0), 0
    for index, kind in enumerate(kinds):
        if kind != kinds[start]:
            start = index
        if index + 1 - start > len(best):
            best = range(start, index + 1)
    return best


def _why_not(skeleton: Skeleton) -> str | None:
    """Return why a model cannot be given fewer blocks, None if nothing is known against it."""
    text = skeleton.config.get_text_config()
    by_number = [key for key, value in vars(text).items() if "layer_idx" in key and value]
    shared = [names for names in skeleton.aliases if sum(name.startswith(skeleton.in_blocks) for name in names) > 1]
    heads = min(skeleton.draft_tensors, default="")
    reasons = {
        "this model has two stacks of blocks": skeleton.second is not None,
        "text skips some blocks of this model, which count among them": bool(skeleton.text_path.skipped),
        f"this model has draft heads ({heads}), which go by what all blocks give": bool(heads),
        "the last blocks of this model use keys of earlier ones": bool(getattr(text, "num_kv_shared_layers", 0)),
        "blocks of this model share weights": bool(shared),
        f"the configuration of this model gives no {LAYERS}": getattr(text, LAYERS, None) != len(skeleton.blocks),
        f"blocks of this model go by their number ({', '.join(by_number)})": bool(by_number),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def keep(skeleton: Skeleton, original: Skeleton, kept: Sequence[int]) -> None:
    """Make the skeleton one of these blocks of the original; no weight is read. Its edits may be lost.

    Raises UnsupportedModelError where a block of the smaller model would differ from the one that it stands for.
    """
    text = original.config.get_text_config()
    values = cut_settings({**text.to_dict(), LAYERS: len(original.blocks)}, kept)
    values[text.attribute_map.get(LAYERS, LAYERS)] = values.pop(LAYERS)
    if values != skeleton.reshaped:
        skeleton.rebuild(values)
    if len(skeleton.blocks) != len(kept):
        raise UnsupportedModelError(f"drop_blocks: fewer {LAYERS} do not give this model fewer blocks; {ADVICE}")
    for index, before in enumerate(kept):
        _compare(original.blocks[before], skeleton.blocks[index], (before, index))
    outside = [
        {name: tuple(p.shape) for name, p in each.model.named_parameters() if not name.startswith(each.in_blocks)}
        for each in (original, skeleton)
    ]
    if changed := [name for name, shape in outside[0].items() if outside[1].get(name) != shape]:
        raise UnsupportedModelError(f"drop_blocks: {changed[0]} has a part for each block; {ADVICE}")
    sources: dict[str, list[Readable]] = {
        name: group for name, group in original.sources.items() if not name.startswith(original.in_blocks)
    }
    for index, before in enumerate(kept):
        old, new = original.block_prefix(before), skeleton.block_prefix(index)
        for name, group in original.sources.items():
            if name.startswith(old):
                moved = [stored.renamed(_renumbered(stored.name, before, index)) for stored in group]
                sources[new + name.removeprefix(old)] = moved
    skeleton.sources = sources
    skeleton.split = stored_weights.split(sources)


def cut_settings(config: dict[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return what differs in the configuration of a text model of the kept layers: their number, and lists by layer."""
    layers = config[LAYERS]
    values: dict[str, Any] = {LAYERS: len(kept)}
    for key, value in config.items():
        if not isinstance(value, (list, tuple)) or not value or key.endswith(("token_id", "token_ids")):
            continue
        whole = all(isinstance(entry, PLAIN) for entry in value)
        numbers = "layer" in key and all(type(entry) is int and 0 <= entry < layers for entry in value)
        if numbers and list(value) == sorted(set(value)) and (len(value) != layers or layers > 2):
            values[key] = [kept.index(entry) for entry in value if entry in kept]  # numbers of layers
        elif whole and len(value) == layers and key != "architectures":
            values[key] = [value[index] for index in kept]
    return values


def count_dropped(share: float, blocks: int, layers: int, droppable: range) -> int:
    """Return how many blocks go: `blocks`, or a share of all layers. Raises RecipeError where that leaves too few."""
    count = blocks or round(share * layers)
    if not 0 < count < len(droppable):
        raise RecipeError(
            f"drop_blocks: {count} of {layers} blocks cannot be dropped, of which {len(droppable)} in a row are alike; "
            f"set blocks to a number between 1 and {len(droppable) - 1}"
        )
    return count


def _shapes(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters()]


def _compare(old: nn.Module, new: nn.Module, numbers: tuple[int, int]) -> None:
    """Raise UnsupportedModelError unless two blocks are alike but for their own numbers."""
    if _shapes(old) != _shapes(new):
        raise UnsupportedModelError(
            f"drop_blocks: block {numbers[1]} of the smaller model would not have the shapes of block {numbers[0]}, "
            f"which it stands for; {ADVICE}"
        )
    for (name, first), (_, second) in zip(old.named_modules(), new.named_modules(), strict=True):
        for key, value in vars(first).items():
            other = vars(second).get(key)
            if not isinstance(value, PLAIN) or value == other or (value, other) == numbers:
                continue
            raise UnsupportedModelError(
                f"drop_blocks: {key} of block {numbers[0]} is {value}, and a smaller model would have {other} there "
                f"({name or type(first).__name__}); {ADVICE}"
            )


def _renumbered(name: str, old: int, new: int) -> str:
    """Return the stored name of a tensor of block `old` with the number `new`."""
    parts = name.split(".")
    if str(old) not in parts:
        raise UnsupportedModelError(f"drop_blocks: {name} does not have the number of its block, {old}; {ADVICE}")
    parts[parts.index(str(old))] = str(new)
    return ".".join(parts)
