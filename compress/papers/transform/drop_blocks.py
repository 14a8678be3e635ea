"""Drop whole decoder blocks: a plain, smaller checkpoint that every program which knows the model runs.

`share: 0.25` of the blocks go. Which ones is chosen on calibration text, by one of the published rules
(compress/papers/transform/block_choice.py): consecutive blocks over which hidden states turn least (arXiv 2403.17887),
those with the least influence each (ShortGPT, arXiv 2403.03853), at even distances (arXiv 2404.06954), by the
divergence of the predictions one after the other, or by EvoPress's search (arXiv 2410.14649). The number of layers in
the configuration, and its lists by layer, are cut (fewer_layers.py).

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

from dataclasses import dataclass
from typing import Literal

from compress.errors import CalibrationError, RecipeError
from compress.model.edits import EditContext, WeightEdits
from compress.model.skeleton import Skeleton
from compress.papers.transform import fewer_layers, reshaping
from compress.papers.transform.block_choice import Choice, Choosing, Rule, choose_evenly
from compress.papers.transform.gap_healing import GapHealing

SCOPE = "model"
SEARCHES = ("kl", "evolve")


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
    candidates = fewer_layers.find_droppable(original)
    layers = len(original.blocks)
    count = fewer_layers.count_dropped(config.share, len(config.numbers) or config.blocks, layers, candidates)
    dropped = config.numbers or choose_evenly(layers, candidates, count)
    if strange := sorted(set(dropped) - set(candidates)):
        raise RecipeError(
            f"drop_blocks: block {strange[0]} cannot be dropped; numbers are of {candidates[0]} to {candidates[-1]}"
        )
    fewer_layers.keep(skeleton, original, [each for each in range(layers) if each not in dropped])
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
        choice = Choice(sorted(config.numbers))
        if not config.numbers:
            choice = choosing.choose(config.by, config.generations, config.offspring, self.seed)
        kept = [each for each in range(self.layers) if each not in choice.dropped]
        fewer_layers.keep(self.skeleton, self.original, kept)
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


def _describe(choice: Choice) -> str:
    """Return the trace of a search: its divergence by what had been computed, where it fell, and at its end."""
    rows = zip(choice.trace, [None, *choice.trace], strict=False)
    fallen = [row for row, before in rows if before is None or row[1] != before[1] or row is choice.trace[-1]]
    steps = ", ".join(f"{kl:.4f} at {forwards:,.0f}" for forwards, kl in fallen)
    return f"KL of the search without refits, at tokens through the whole model: {steps}"
