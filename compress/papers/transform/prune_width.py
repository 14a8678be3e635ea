"""Prune width: fewer neurons in each MLP, fewer heads in each attention, as a plain checkpoint of smaller sizes.

The same number goes in every block, so that the configuration says it: `intermediate_size`, `num_key_value_heads` and
`num_attention_heads` (a key/value head goes with all query heads that read it). Which ones go is decided by what their
removal costs once the projection behind them is refitted (channel_choice.py: the optimal brain surgeon, as ZipLM,
arXiv 2302.04089, has it for structures). The projection behind is then refitted by least squares:

    W' = W_k + (W_d H_dk + C_k) (H_kk + ridge I)^-1

H: sum of a a^T of its inputs; k, d: channels that stay and go. `update: own` stops there (C = 0): the block gives what
it gave, as far as the kept channels can. `update: original` adds C = sum of e a^T, with e what is missing to the hidden
states of the original model behind the block, so that blocks make up for those before them. Tokens count by one over
the squares of these states, and the ridge is chosen on a quarter of the samples, as in gap_healing.py. Attention is
refitted to itself; what it has lost is left to the MLP. So is an MLP with a norm behind it (Gemma).

CLOVER (clover.py) decomposes the product of values and output and cuts directions within heads, which keeps more for
the same bytes of these two, but leaves sizes that no configuration says. This is the cheap complement for the MLP.

Every block's parameters go into a file beside the run, so that an interrupted run goes on behind them. Refused:
experts, one linear for gate and up or for queries, keys and values, and whatever else is not cut along with its
channels: each block is compared with the original one with these channels at zero. Fewer bits cost less than narrower
blocks (docs/results/sparsity.md), which keeps this out of the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from compress.errors import CalibrationError, RecipeError, UnsupportedModelError
from compress.importers.source import Decoded
from compress.model.edits import EditContext, WeightEdits
from compress.model.skeleton import Skeleton
from compress.papers.transform import reshaping, width_pass
from compress.papers.transform.channel_choice import Score
from compress.papers.transform.width_pass import Cut, PrunedPart
from compress.storage.checkpoint import Readable

SCOPE = "model"
NEURONS, HEADS, KV_HEADS, HEAD_DIM = "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"
ADVICE = "remove prune_width from the recipe's transform"


@dataclass(frozen=True)
class Config:
    """How much goes, and what is done about it."""

    neurons: float = 0.25  # [fraction] of the neurons of each MLP that goes
    heads: float = 0.0  # [fraction] of the key/value heads of each attention that goes, with their query heads
    multiple: int = 64  # of which the number of neurons that stay is one
    score: Score = "refit"  # by which they are chosen
    update: Literal["none", "own", "original"] = "original"  # what the projection behind them is refitted to
    samples: int = 64  # [samples] of calibration that are looked at

    def __post_init__(self) -> None:
        for key in ("neurons", "heads"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} {getattr(self, key)} is not at least 0 and below 1")
        for key, least in (("multiple", 1), ("samples", 2)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} {getattr(self, key)} is less than {least}")


class Sizes(NamedTuple):
    """A size of the model before and after, and the configuration's keys for it."""

    values: dict[str, int]  # of the configuration
    widths: dict[int, tuple[int, int]]  # [parameters' dimension] that changes -> its new one, and channels of a unit
    says: str


def apply(skeleton: Skeleton, config: Config, seed: int) -> Narrowing:
    """Give the skeleton smaller sizes; no weight is read. UnsupportedModelError, RecipeError."""
    original = Skeleton(skeleton.checkpoint)
    if original.second is not None or original.draft_tensors:
        what = "draft heads" if original.draft_tensors else "two stacks of blocks"
        raise UnsupportedModelError(f"prune_width: this model has {what}, which have these sizes, too; {ADVICE}")
    text = original.config.get_text_config()
    parts, says = dict[str, list[PrunedPart]](), list[str]()
    for sizes in (_neurons(text, config), _heads(text, config)):
        if sizes is None:
            continue
        before = _shapes(skeleton)
        skeleton.rebuild({text.attribute_map.get(key, key): value for key, value in sizes.values.items()})
        for block, part in _parts(skeleton, before, sizes).items():
            parts.setdefault(block, []).append(part)
        says.append(sizes.says)
    if not parts:
        raise RecipeError("prune_width removes nothing: neurons and heads are too small a share")
    skeleton.sources = {**skeleton.sources, **_cut_sources(original, skeleton)}
    cuts = [parts[skeleton.block_prefix(index)] for index in range(len(skeleton.blocks))]
    return Narrowing(skeleton, original, config, (cuts, tuple(says)))


def _neurons(text: object, config: Config) -> Sizes | None:
    now = getattr(text, NEURONS, None)
    if not config.neurons:
        return None
    if type(now) is not int:
        raise UnsupportedModelError(f"prune_width: the configuration of this model gives no {NEURONS}; {ADVICE}")
    after = round(now * (1 - config.neurons) / config.multiple) * config.multiple
    if not 0 < after < now:
        raise RecipeError(
            f"prune_width: {now} neurons less {config.neurons:.0%} are no smaller multiple of {config.multiple}; set "
            "another share or multiple"
        )
    return Sizes({NEURONS: after}, {now: (after, 1)}, f"{now} neurons of each MLP become {after}")


def _heads(text: object, config: Config) -> Sizes | None:
    if not config.heads:
        return None
    queries, head_dim = getattr(text, HEADS, None), getattr(text, HEAD_DIM, None)
    keys = getattr(text, KV_HEADS, None) or queries
    if type(queries) is not int or type(keys) is not int:
        raise UnsupportedModelError(f"prune_width: the configuration of this model gives no {KV_HEADS}; {ADVICE}")
    size = head_dim or getattr(text, "hidden_size", 0) // queries
    after, group = keys - round(config.heads * keys), queries // keys
    if not 0 < after < keys:
        raise RecipeError(
            f"prune_width: {config.heads:.0%} of {keys} key/value heads is none or all; set another share"
        )
    values = {KV_HEADS: after, HEADS: after * group, HEAD_DIM: size}
    widths = {keys * size: (after * size, size), queries * size: (after * group * size, group * size)}
    return Sizes(values, widths, f"{keys} key/value heads of each attention become {after}")


def _shapes(skeleton: Skeleton) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in skeleton.model.named_parameters()}


def _parts(skeleton: Skeleton, before: Mapping[str, tuple[int, ...]], sizes: Sizes) -> dict[str, PrunedPart]:
    """Return prefix of a block -> what becomes narrower in it; UnsupportedModelError for what cannot be cut."""
    after, cuts = _shapes(skeleton), dict[str, list[Cut]]()
    for name, shape in before.items():
        new = after.get(name, ())
        changed = [dim for dim, (a, b) in enumerate(zip(shape, new, strict=False)) if a != b]
        if not changed and shape == new:
            continue
        prefix = next((p for p in map(skeleton.block_prefix, range(len(skeleton.blocks))) if name.startswith(p)), None)
        if len(changed) != 1 or len(shape) > 2 or prefix is None:
            raise UnsupportedModelError(f"prune_width: {name} {list(shape)} cannot be cut to {list(new)}; {ADVICE}")
        (dim,) = changed
        target, unit = sizes.widths.get(shape[dim], (0, 0))
        if new[dim] != target:
            raise UnsupportedModelError(f"prune_width: {name} {list(shape)} holds more than one of a kind; {ADVICE}")
        cuts.setdefault(prefix, []).append(
            Cut(name.removeprefix(prefix), dim, unit, shape[dim] // unit, target // unit)
        )
    parts = {}
    for index in range(len(skeleton.blocks)):
        prefix = skeleton.block_prefix(index)
        behind = [cut for cut in cuts.get(prefix, []) if cut.dim == 1]
        if len(behind) != 1:
            raise UnsupportedModelError(f"prune_width: {prefix}* has not one projection behind what is cut; {ADVICE}")
        parts[prefix] = PrunedPart(behind[0], [cut for cut in cuts[prefix] if cut.dim == 0])
    return parts


def _cut_sources(original: Skeleton, skeleton: Skeleton) -> dict[str, list[Readable]]:
    """Return the first rows or columns of what is cut, which stand for what stays until that is known."""
    sources: dict[str, list[Readable]] = {}
    old, new = _shapes(original), _shapes(skeleton)
    for name, shape in new.items():
        if shape == old[name]:
            continue
        group = original.sources.get(name, [])
        if len(group) != 1 or group[0].shape != old[name]:
            raise UnsupportedModelError(f"prune_width: {name} is not stored as a tensor of its own; {ADVICE}")
        sources[name] = [_first(group[0], shape)]
    return sources


def _first(whole: Readable, shape: tuple[int, ...]) -> Readable:
    columns = shape[1:]

    def decode(start: int, stop: int):  # type: ignore[no-untyped-def]
        rows = whole.rows(start, stop)
        return rows[:, : columns[0]].contiguous() if columns else rows

    return Decoded(whole.name, whole.dtype, shape, whole.sources, decode, shape[0])


class Narrowing(WeightEdits):
    """Gives a model narrower blocks: their weights are in the files that `choose` writes."""

    def __init__(
        self,
        skeleton: Skeleton,
        original: Skeleton,
        config: Config,
        what: tuple[list[list[PrunedPart]], tuple[str, ...]],
    ) -> None:
        self.skeleton, self.original, self.config = skeleton, original, config
        self.parts, self.says = what
        self.samples = config.samples

    def choose(self, bench: EditContext) -> list[str]:
        """Prune all blocks that an interrupted run has not pruned; return the notes for the report."""
        folder, config = bench.folder / reshaping.FOLDER, self.config
        files = [folder / f"{index:05d}.safetensors" for index in range(len(self.parts))]
        if not all(path.is_file() for path in files):
            if bench.tokens is None:
                raise CalibrationError("prune_width looks at a calibration text, and there is none; give --calib")
            how = width_pass.How(config.score, config.update)
            work = width_pass.WidthPass((self.original, self.skeleton), self.parts, how, bench, files)
            work.run(bench.tokens[: config.samples])
        for index, path in enumerate(files):
            reshaping.replace_parameters(path, self.skeleton, self.skeleton.block_prefix(index))
        if config.update == "none":
            return [*self.says]
        facts = [reshaping.read_facts(path) for path in files]
        before, after = (sum(column) / len(facts) for column in zip(*facts, strict=True))
        return [
            *self.says,
            f"held-out error of refitted projections, mean over blocks: {before:.3g} -> {after:.3g}",
        ]
