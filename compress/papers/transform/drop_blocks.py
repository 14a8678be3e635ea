"""Drop whole decoder blocks: a plain, smaller checkpoint that every program which knows the model runs.

`share: 0.25` of the blocks go. Which ones is chosen on calibration text, by one of the published rules
(compress/papers/transform/block_choice.py): consecutive blocks over which hidden states turn least (arXiv 2403.17887),
those with the least influence each (ShortGPT, arXiv 2403.03853), at even distances (arXiv 2404.06954), by the
divergence of the predictions one after the other, or by EvoPress's search (arXiv 2410.14649).

Everything else is told from structure. Of the configuration of the text model, lists with an entry for each layer are
cut, and lists of numbers of layers are renumbered. The smaller model is then built, and each of its blocks compared
with the one that it stands for: shapes of parameters, and all plain attributes of its modules. A rule by which a
smaller model would have other blocks (which attend to a window, which have no positions) shows there, and is refused.

`heal` refits the projection before each gap by least squares, so that what the dropped blocks gave is given by it as
far as one matrix can (gap_healing.py; the idea of ReplaceMe, arXiv 2505.02819). The checkpoint stays plain.
`tune: end_to_end` of a recipe that also quantizes goes on from there, against the predictions of the original model.

A choice and refitted weights are kept beside the run until it ends, so that an interrupted run goes on behind them. The
passes hold one block and hidden states in a file.

Refused, each in one line: encoders with decoders, draft heads, blocks that share weights or keys, models in which fewer
layers change what is left of them, and more blocks than are alike in a row (models that mix kinds of layers).
What it costs beside fewer bits (docs/results/sparsity.md) keeps this out of the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from compress.errors import CalibrationError, RecipeError, UnsupportedModelError
from compress.model import stored_weights
from compress.model.edits import EditContext, WeightEdits
from compress.model.skeleton import Skeleton
from compress.papers.transform import reshaping
from compress.papers.transform.block_choice import BlockChoice, Choosing, Rule, choose_evenly
from compress.papers.transform.gap_healing import GapHealing
from compress.storage.checkpoint import Readable

SCOPE = "model"
SEARCHES = ("kl", "evolve")
LAYERS = "num_hidden_layers"
ADVICE = "remove drop_blocks from the recipe's transform"
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Config:
    """Which blocks are dropped, and what becomes of the gaps."""

    share: float = 0.25  # [fraction] of all decoder blocks that are dropped
    blocks: int = 0  # how many, in place of the share; 0: by the share
    numbers: tuple[int, ...] = ()  # which ones, counted from 0, in place of both; empty: they are chosen
    by: Rule = "influence"  # how they are chosen: block_choice.py
    heal: Literal["none", "linear", "low_rank"] = "linear"  # the projection before each gap is refitted, its change
    # of any rank or of rank `rank`
    rank: int = 64  # of the change with heal: low_rank
    samples: int = 64  # [samples] of calibration on which blocks are compared and projections refitted
    search_samples: int = 8  # [samples] on which kl and evolve measure
    generations: int = 20  # of evolve
    offspring: int = 8  # [choices] of a generation of evolve

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share {self.share} is not between 0 and 1")
        least = {"blocks": 0, "rank": 1, "samples": 2, "search_samples": 1, "generations": 0, "offspring": 1}
        if len(set(self.numbers)) < len(self.numbers):
            raise ValueError("numbers names a block twice")
        for key, minimum in least.items():
            if getattr(self, key) < minimum:
                raise ValueError(f"{key} {getattr(self, key)} is less than {minimum}")


def apply(skeleton: Skeleton, config: Config, seed: int) -> Dropping:
    """Give the skeleton fewer blocks, as yet evenly chosen; no weight is read. UnsupportedModelError, RecipeError."""
    original = Skeleton(skeleton.checkpoint)
    candidates = find_droppable(original)
    layers = len(original.blocks)
    count = count_dropped(config.share, len(config.numbers) or config.blocks, layers, candidates)
    dropped = config.numbers or choose_evenly(layers, candidates, count)
    if strange := sorted(set(dropped) - set(candidates)):
        raise RecipeError(
            f"drop_blocks: block {strange[0]} cannot be dropped; numbers are of {candidates[0]} to {candidates[-1]}"
        )
    keep_blocks(skeleton, original, [each for each in range(layers) if each not in dropped])
    return Dropping(skeleton, original, config, (candidates, count, seed))


class Dropping(WeightEdits):
    """Lets a model go without the blocks that `choose` names; until then, evenly chosen ones."""

    def __init__(self, skeleton: Skeleton, original: Skeleton, config: Config, what: tuple[range, int, int]) -> None:
        self.skeleton, self.original, self.config = skeleton, original, config
        self.candidates, self.count, self.seed = what
        self.layers = len(original.blocks)
        looks = not (config.numbers or config.by == "even") or config.heal != "none"
        self.samples = max(config.samples, config.search_samples if config.by in SEARCHES else 0) if looks else 0
        self.says: tuple[str, ...] = (f"{self.count} of {self.layers} decoder blocks are dropped",)

    def choose(self, bench: EditContext) -> list[str]:
        """Choose the blocks, refit what stands before the gaps, and return the notes for the report."""
        config, folder = self.config, bench.folder / reshaping.FOLDER
        samples = config.search_samples if config.by in SEARCHES else config.samples
        choosing = Choosing(self.original, self.candidates, self.count, bench, folder / "choice.json", samples)
        choice = BlockChoice(sorted(config.numbers))
        if not config.numbers:
            choice = choosing.choose(config.by, config.generations, config.offspring, self.seed)
        kept = [each for each in range(self.layers) if each not in choice.dropped]
        keep_blocks(self.skeleton, self.original, kept)
        self.skeleton.edits = self
        how = "as the recipe says" if config.numbers else f"by {config.by}"
        notes = [*self.says, f"dropped {how}, counted from 0: {', '.join(map(str, choice.dropped))}"]
        if choice.kl is not None:
            notes.append(_describe(choice))
        if config.heal != "none":
            rank = config.rank if config.heal == "low_rank" else 0
            healing = GapHealing(self.original, kept, rank, bench, folder)
            if not healing.is_done:
                if bench.tokens is None:
                    raise CalibrationError("drop_blocks refits on a calibration text, and there is none; give --calib")
                healing.run(bench.tokens[: config.samples])
            for index, path in healing.files.items():
                reshaping.replace_parameters(path, self.skeleton, self.skeleton.block_prefix(kept.index(index)))
            notes += healing.notes()
        return notes


def _describe(choice: BlockChoice) -> str:
    """Return the trace of a search: its divergence by what had been computed, where it fell, and at its end."""
    rows = zip(choice.trace, [None, *choice.trace], strict=False)
    fallen = [row for row, before in rows if before is None or row[1] != before[1] or row is choice.trace[-1]]
    steps = ", ".join(f"{kl:.4f} at {forwards:,.0f}" for forwards, kl in fallen)
    return f"KL of the search without refits, at tokens through the whole model: {steps}"


# ---------------------------------------------------------------- a model of fewer layers


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


def keep_blocks(skeleton: Skeleton, original: Skeleton, kept: Sequence[int]) -> None:
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
                moved = [stored.renamed(_renumber(stored.name, before, index)) for stored in group]
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


def _renumber(name: str, old: int, new: int) -> str:
    """Return the stored name of a tensor of block `old` with the number `new`."""
    parts = name.split(".")
    if str(old) not in parts:
        raise UnsupportedModelError(f"drop_blocks: {name} does not have the number of its block, {old}; {ADVICE}")
    parts[parts.index(str(old))] = str(new)
    return ".".join(parts)
