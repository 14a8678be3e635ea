"""Merge key/value heads: a cache of fewer heads, folded into the weights (arXiv 2406.07056).

`group: 2` makes one key/value head of each two, so that the cache and what attention reads of it are half as large. The
result is a plain checkpoint whose configuration names fewer heads: every program that knows the model runs it. How
heads are merged, and what may be folded behind a rotary embedding, is derived in compress/papers/transform/kv_heads.py.

The paper takes the leading singular vectors of calibration caches, for keys too; behind rotary positions these cannot
be folded, and what the paper does there is not known to us. Here the keys' vectors are restricted to those that commute
with the positions, and errors are weighed by what reads them (`weighed: false`: as in the paper). Which heads are
merged, the paper leaves to their order. Here heads that lose little change places first, with their query heads
(`order: similar`), which changes nothing else. `pooling: mean` is the start of grouped-query attention
(arXiv 2305.13245), to be compared with.

Merging is no transform that keeps the function, and without training it costs much. `heal` trains each block's
attention behind the merged blocks before it, against what the original model gives (kv_head_pass.py). The paper
fine-tunes the whole model. `tune: end_to_end` of a recipe that also quantizes goes on from there against the original
model; `blockwise` and target correction only make up for rounding: their target is the merged model.

A pass over `samples` of the calibration text collects the moments, block by block, before anything is quantized. It
holds one block of either model, and hidden states of both in a file. Merged attention weights are kept beside the run
until it ends, so that a run that was interrupted goes on behind the last merged block. Fewer heads cost more than fewer
bits at the same bytes of cache (docs/results/kv_heads.md), which keeps this out of the core.

Refused: a norm between the projection of queries or keys and their positions (its root mean square is that of each
head); one linear for several of the projections; numbers of heads that differ between layers; a group that does not
divide their number.
"""

from __future__ import annotations

from torch import nn

from compress.errors import CalibrationError, RecipeError, UnsupportedModelError
from compress.importers.source import Decoded
from compress.model.edits import EditContext, WeightEdits
from compress.model.graph import Attention, trace
from compress.model.skeleton import Skeleton
from compress.papers.transform import kv_head_pass, reshaping
from compress.storage.checkpoint import Readable

SCOPE = "model"
HEADS = "num_key_value_heads"
ADVICE = "remove merge_kv_heads from the recipe's transform"


class Config(kv_head_pass.MergeSettings):
    """Settings of merged heads."""


def apply(skeleton: Skeleton, config: Config, seed: int) -> Merging:
    """Give the skeleton fewer key/value heads; no weight is read. Raises RecipeError and UnsupportedModelError."""
    text = skeleton.config.get_text_config()
    heads = getattr(text, HEADS, None)
    if type(heads) is not int:
        raise UnsupportedModelError(f"this model's configuration gives no number of key/value heads; {ADVICE}")
    if heads % config.group:
        possible = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise RecipeError(
            f"merge_kv_heads: group {config.group} does not divide the {heads} key/value heads; set one of {possible}"
        )
    if config.group == 1:
        return Merging(skeleton, config, [])
    attentions = [block.attention for block in trace(skeleton).blocks]
    before = {name: tuple(p.shape) for name, p in skeleton.model.named_parameters()}
    checked = []
    for index, attention in enumerate(attentions):
        name = skeleton.block_prefix(index).rstrip(".")
        if attention is None:
            raise UnsupportedModelError(f"where the attention of {name} has its values from cannot be seen; {ADVICE}")
        checked.append(attention)
        _check(name, skeleton.blocks[index], attention)
    sources = skeleton.sources
    skeleton.rebuild({HEADS: heads // config.group})
    after = {name: tuple(p.shape) for name, p in skeleton.model.named_parameters()}
    skeleton.sources = dict(skeleton.sources)
    narrower = [name for name, shape in before.items() if after.get(name) != shape]
    for name in narrower:
        skeleton.sources[name] = [
            _first_heads(name, sources.get(name, []), before[name], after.get(name), config.group)
        ]
    _check_narrower(skeleton, checked, narrower)
    return Merging(skeleton, config, checked)


def _check(name: str, block: nn.Module, attention: Attention) -> None:
    """Raise UnsupportedModelError unless attention is four linears, the values' rows in the order of their heads."""
    owner, _, _ = attention.values.rpartition(".")
    inside = block.get_submodule(owner)
    others = [
        key for key, m in inside.named_modules() if list(m.parameters(recurse=False)) and not isinstance(m, nn.Linear)
    ]
    if others:
        raise UnsupportedModelError(
            f"{name}.{owner} has {others[0]} between its projections, through which merged heads cannot pass; {ADVICE}"
        )
    rows, count = block.get_submodule(attention.values).get_parameter("weight").shape[0], attention.key_value_heads
    in_order = (attention.first, attention.head_step, attention.step) == (0, attention.head_dim, 1)
    if not in_order or rows != count * attention.head_dim:
        raise UnsupportedModelError(
            f"{name}.{attention.values} makes more than values, or not head by head, which cannot be merged; {ADVICE}"
        )


def _check_narrower(skeleton: Skeleton, attentions: list[Attention], narrower: list[str]) -> None:
    """Raise UnsupportedModelError unless two linears of each block have become narrower, one of them the values'."""
    for index, attention in enumerate(attentions):
        prefix = skeleton.block_prefix(index)
        owners = {name.rpartition(".")[0] for name in narrower if name.startswith(prefix)}
        if len(owners) != 2 or prefix + attention.values not in owners:
            raise UnsupportedModelError(
                f"fewer key/value heads change other weights of {prefix.rstrip('.')} than those of one linear for keys "
                f"and one for values; {ADVICE}"
            )


def _first_heads(
    name: str, stored: list[Readable], shape: tuple[int, ...], becomes: tuple[int, ...] | None, group: int
) -> Readable:
    """Return the first rows of a weight [h d, in] or bias [h d], which stand for merged heads until there are some."""
    if len(stored) != 1 or stored[0].shape != shape or becomes != (shape[0] // group, *shape[1:]):
        raise UnsupportedModelError(f"{name} is not stored as a tensor of its own, as it is used; {ADVICE}")
    (whole,) = stored
    return Decoded(whole.name, whole.dtype, becomes, whole.sources, whole.rows, becomes[0])


class Merging(WeightEdits):
    """Gives a model merged heads: their weights are in the files that `choose` writes; until then, the first heads."""

    def __init__(self, skeleton: Skeleton, config: Config, attentions: list[Attention]) -> None:
        self.skeleton, self.config, self.attentions = skeleton, config, attentions
        self.samples = config.samples if attentions else 0
        now = getattr(skeleton.config.get_text_config(), HEADS)
        says = (
            f"{now * config.group} key/value heads of each layer become {now}: {now}/{now * config.group} of the cache"
        )
        self.says: tuple[str, ...] = (says,) if attentions else ()

    def choose(self, bench: EditContext) -> list[str]:
        """Merge the heads of all blocks that an interrupted run has not merged; return the notes for the report."""
        if not self.attentions:
            return []
        merged = kv_head_pass.find_merged(bench.folder, len(self.attentions))
        if merged is None:
            if bench.tokens is None:
                raise CalibrationError("merge_kv_heads looks at a calibration text, and there is none; give --calib")
            merged = kv_head_pass.run(self.skeleton, self.attentions, self.config, bench)
        for index, path in enumerate(merged):
            reshaping.replace_parameters(path, self.skeleton, self.skeleton.block_prefix(index))
        return [*self.says, *kv_head_pass.notes(merged, self.config)]
