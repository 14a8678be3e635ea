"""Remove experts of a mixture of experts: a plain checkpoint that the same class loads (REAP, arXiv 2510.13999).

`remove: 0.25` takes a quarter of the experts of each layer away, with the rows of the router, of its biases and of its
corrections that belong to them; the others keep their order. A token then goes to the best of the experts that are
left. The configuration names fewer experts, so that every program that knows the model runs it. Dense layers and
shared experts stay as they are. Where a router chooses groups of experts first, all groups lose as many.

An expert goes by its score on calibration text, which one pass of the unchanged model gives before anything is
quantized (compress/calib/expert_scores.py); memory holds one block:

- `reap`: the mean over its tokens of g ||f||_2, router weight times the norm of what the expert gives. Lasby et al.
  2025: what a layer loses with it, which no mixing of other experts replaces.
- `frequency`: its number of tokens.
- `router_mean`: the mean of g over its tokens.
- `random`: by chance, from the run's seed; no text is read.

An expert without tokens has the score 0 and goes first; a note names experts whose score comes from few tokens.

Refused: experts in a layout that is not known, or that are not told the routing; experts of draft heads, which the same
number in the configuration counts; more than one module of experts in a block; numbers that differ between layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.calib import expert_scores
from compress.calib.expert_scores import ExpertSums
from compress.errors import CalibrationError, RecipeError, UnsupportedModelError
from compress.importers.source import Decoded
from compress.model.architectures import experts_of_a_token
from compress.model.edits import EditContext, WeightEdits
from compress.model.skeleton import Skeleton
from compress.runtime import expert_layouts
from compress.runtime.expert_layouts import ROUTED, ExpertLayout
from compress.storage.checkpoint import Readable

SCOPE = "model"
ADVICE = "remove prune_experts from the recipe's transform"
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
GROUPS = ("n_group", "num_expert_group")
NUMBER = re.compile(r"(?<=experts\.)\d+(?=\.)")  # [regex] the number of an expert in a stored tensor's name
ENOUGH_TOKENS = 128  # an expert of fewer is named
LISTED = 8  # experts of few tokens that are named


@dataclass(frozen=True)
class Config:
    """Which experts are removed."""

    remove: float = 0.25  # of the experts of each layer: a share below 1, else their number
    by: Literal["reap", "frequency", "router_mean", "random"] = "reap"  # what the experts that go have least of
    samples: int = 128  # [samples] of calibration that the pass before quantizing looks at

    def __post_init__(self) -> None:
        if self.remove < 0 or (self.remove >= 1 and self.remove != int(self.remove)):
            raise ValueError(f"remove {self.remove} is neither a share from 0 to 1 nor a number of experts")
        if self.samples < 1:
            raise ValueError(f"samples {self.samples} is less than 1")


class _Mixture(NamedTuple):
    """The experts of a model."""

    blocks: list[int]  # those with experts
    experts: int  # of each of these
    groups: int  # that a router chooses from first; 1: none

    def count_removed(self, config: Config) -> int:
        """Return how many experts each layer loses. Raises RecipeError for none, or too many."""
        count = int(config.remove) if config.remove >= 1 else int(config.remove * self.experts + 1e-6)
        count -= count % self.groups if config.remove < 1 else 0
        if not count and config.remove:
            each = f"{self.groups} of them, one of each group" if self.groups > 1 else "one of them"
            raise RecipeError(
                f"prune_experts: remove {config.remove:g} of {self.experts} experts is none; the least is {each}"
            )
        if count % self.groups:
            raise RecipeError(
                f"prune_experts: the {self.experts} experts are in {self.groups} groups that lose equally many; "
                f"remove a multiple of {self.groups}"
            )
        return count


def apply(skeleton: Skeleton, config: Config, seed: int) -> FewerExperts:
    """Give the skeleton fewer experts; no weight is read. Raises RecipeError and UnsupportedModelError."""
    mixture = _find(skeleton)
    removed = mixture.count_removed(config)
    left = mixture.experts - removed
    _check_routing(skeleton, mixture, left)
    sources, before = skeleton.sources, _shapes(skeleton)
    skeleton.rebuild(dict.fromkeys(_counts(skeleton, mixture.experts), left))
    if removed and _find(skeleton)._replace(groups=mixture.groups) != mixture._replace(experts=left):
        raise UnsupportedModelError(
            f"the number of experts in the configuration is not that of all layers with experts; {ADVICE}"
        )
    after = _shapes(skeleton)
    narrower = [name for name, shape in before.items() if after.get(name) != shape]
    cuts = {name: _cut(skeleton, name, before[name], after.get(name), mixture.experts, left) for name in narrower}
    edits = FewerExperts(
        skeleton, config, seed, mixture, {name: (sources.get(name, []), cuts[name]) for name in narrower}
    )
    edits.put([list(range(left)) for _ in mixture.blocks])
    return edits


def _find(skeleton: Skeleton) -> _Mixture:
    """Return the experts of a model. Raises UnsupportedModelError for those that cannot be removed."""
    counts: dict[int, int] = {}
    for index, block in enumerate(skeleton.blocks):
        for name, module in block.named_modules():
            layout, full = expert_layouts.describe(module), skeleton.block_prefix(index) + name
            if layout is None:
                continue
            if not isinstance(layout, ExpertLayout) or layout.call != ROUTED or layout.identities:
                reason = layout if isinstance(layout, str) else "experts that are not told the routing as it is"
                raise UnsupportedModelError(f"{full} has {reason}; {ADVICE}")
            if index in counts:
                raise UnsupportedModelError(f"{full} is not the only module of experts of its block; {ADVICE}")
            counts[index] = layout.experts
    if not counts:
        raise UnsupportedModelError(f"this model has no experts; {ADVICE}")
    if len(set(counts.values())) > 1:
        raise UnsupportedModelError(
            f"the layers have different numbers of experts, {sorted(set(counts.values()))}; {ADVICE}"
        )
    text = skeleton.config.get_text_config()
    groups = next((n for key in GROUPS if isinstance(n := getattr(text, key, None), int)), 1)
    return _Mixture(list(counts), next(iter(counts.values())), groups)


def _check_routing(skeleton: Skeleton, mixture: _Mixture, left: int) -> None:
    """Raise RecipeError where a token asks for more experts than are left, UnsupportedModelError for draft heads'."""
    text = skeleton.config.get_text_config()
    _check_left(experts_of_a_token(text), left)
    if mixture.groups > 1:
        chosen, size = getattr(text, "topk_group", None) or mixture.groups, left // mixture.groups
        if size < 2 or chosen * size < (experts_of_a_token(text) or 1):
            raise RecipeError(
                f"prune_experts leaves {size} experts in each of {mixture.groups} groups, of which a token takes "
                f"{chosen}: too few; remove fewer"
            )
    if any(NUMBER.search(name) for name in skeleton.draft_tensors):
        raise UnsupportedModelError(
            "this model's draft heads have experts of their own, which the same number in the configuration counts; "
            + ADVICE
        )


def _check_left(top_k: int | None, left: int) -> None:
    if top_k is not None and top_k > left:
        raise RecipeError(f"prune_experts leaves {left} experts, and a token takes {top_k}; remove fewer")


def _counts(skeleton: Skeleton, experts: int) -> list[str]:
    """Return the keys of the text model's configuration that count the experts, those of config.json among them."""
    text, stored = skeleton.config.get_text_config(), skeleton.checkpoint.config
    written = {*text.to_dict(), *stored, *(stored.get("text_config") or {})}
    keys = [key for key in COUNTS if key in written and getattr(text, key, None) == experts]
    if not keys:
        raise UnsupportedModelError(f"this model's configuration gives no number of experts; {ADVICE}")
    return keys


def _shapes(skeleton: Skeleton) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and stored buffers."""
    return {name: tuple(tensor.shape) for name, tensor in skeleton.model.state_dict().items()}


def _cut(
    skeleton: Skeleton, name: str, shape: tuple[int, ...], becomes: tuple[int, ...] | None, experts: int, left: int
) -> _Cut:
    """Return where the experts are in a parameter that has become narrower. Raises UnsupportedModelError."""
    index = next((i for i in range(len(skeleton.blocks)) if name.startswith(skeleton.block_prefix(i))), None)
    dims = [d for d, (a, b) in enumerate(zip(shape, becomes or (), strict=False)) if a != b]
    if index is None or becomes is None or len(dims) != 1 or shape[dims[0]] * left != becomes[dims[0]] * experts:
        raise UnsupportedModelError(f"fewer experts change {name} in a way that is not known; {ADVICE}")
    return _Cut(index, dims[0], experts)


class _Cut(NamedTuple):
    """Where the experts are in a parameter."""

    block: int
    dim: int
    experts: int

    def apply(self, name: str, stored: Sequence[Readable], kept: Sequence[int]) -> list[Readable]:
        """Return these stored tensors of a parameter without the other experts, named as of the first ones."""
        numbers = {each.name: NUMBER.search(each.name) for each in stored}
        if len(stored) == 1 and numbers[stored[0].name] is None and stored[0].shape[self.dim] % self.experts == 0:
            return [self._within(stored[0], kept)]
        by_name = {each.name: each for each in stored}
        chosen: list[Readable] = []
        for each in stored:
            if (number := numbers[each.name]) is None:
                raise UnsupportedModelError(f"{name} is stored as {each.name}, which has no expert's number; {ADVICE}")
            if int(number[0]) < len(kept):
                other = f"{each.name[: number.start()]}{kept[int(number[0])]}{each.name[number.end() :]}"
                chosen.append(by_name[other].renamed(each.name))
        return chosen

    def _within(self, stored: Readable, kept: Sequence[int]) -> Readable:
        """Return a tensor that holds all experts without the others."""
        size = stored.shape[self.dim] // self.experts
        shape = (*stored.shape[: self.dim], size * len(kept), *stored.shape[self.dim + 1 :])

        def rows(start: int, stop: int) -> Tensor:
            chosen = kept[start // size : stop // size]
            return torch.cat([stored.rows(number * size, (number + 1) * size) for number in chosen])

        def columns(start: int, stop: int) -> Tensor:
            index = torch.tensor([number * size + i for number in kept for i in range(size)])
            return stored.rows(start, stop).index_select(self.dim, index)

        decode, step = (columns, shape[0]) if self.dim else (rows, size)
        return Decoded(stored.name, stored.dtype, shape, stored.sources, decode, step)


class FewerExperts(WeightEdits):
    """Gives a model the experts that `choose` decides for; until then, the first ones.

    cuts: parameter that has become narrower -> its stored tensors, and where the experts are.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        config: Config,
        seed: int,
        mixture: _Mixture,
        cuts: dict[str, tuple[list[Readable], _Cut]],
    ) -> None:
        self.skeleton, self.config, self.seed, self.mixture, self.cuts = skeleton, config, seed, mixture, cuts
        self.removed = mixture.count_removed(config)
        self.samples = config.samples if self.removed and config.by != "random" else 0
        count, layers = mixture.experts, len(mixture.blocks)
        says = f"{self.removed} of the {count} experts of each of {layers} layers are removed, by {config.by}"
        self.says: tuple[str, ...] = (says,) if self.removed else ()

    def put(self, kept: Sequence[Sequence[int]], sums: ExpertSums | None = None) -> None:
        """Let the skeleton read these experts of each block that has some; sums: of all blocks, if measured."""
        by_block = dict(zip(self.mixture.blocks, kept, strict=True))
        chosen = {name: cut.apply(name, stored, by_block[cut.block]) for name, (stored, cut) in self.cuts.items()}
        self.skeleton.sources = {**self.skeleton.sources, **chosen}

    def choose(self, bench: EditContext) -> list[str]:
        """Score the experts unless an interrupted run has, and remove those of the lowest scores; return the notes."""
        if not self.removed:
            return []
        sums = self._measure(bench) if self.samples else None
        kept = [self._choose_kept(number, sums) for number in range(len(self.mixture.blocks))]
        self.put(kept, sums)
        return [*self.says, *self._notes(kept, sums)]

    def _measure(self, bench: EditContext) -> ExpertSums:
        if bench.tokens is None and not (bench.folder / expert_scores.SUMS_FILE).is_file():
            raise CalibrationError("prune_experts looks at a calibration text, and there is none; give --calib")
        original, left = Skeleton(self.skeleton.checkpoint), self.mixture.experts - self.removed

        def check(top_k: int) -> None:
            _check_left(top_k, left)

        return expert_scores.measure(original, self.mixture.blocks, self.samples, bench, check)

    def _choose_kept(self, number: int, sums: ExpertSums | None) -> list[int]:
        """Return the experts of a block that stay, in order; number: among the blocks with experts."""
        experts, groups = self.mixture.experts, self.mixture.groups
        if self.config.by == "random":
            generator = torch.Generator().manual_seed(self.seed * 65_537 + number)
            scores = torch.rand(experts, dtype=torch.float64, generator=generator)
        else:
            assert sums is not None, "all others are measured"
            scores = score(self.config.by, sums.block(number))
        order = scores.view(groups, -1).argsort(dim=1, stable=True)[:, self.removed // groups :]
        starts = torch.arange(groups)[:, None] * (experts // groups)
        kept: list[int] = (order + starts).flatten().sort().values.tolist()
        return kept

    def _notes(self, kept: Sequence[Sequence[int]], sums: ExpertSums | None) -> Iterator[str]:
        """Yield what the report should say: which experts went, and which the text has hardly reached."""
        every, names = range(self.mixture.experts), [self._name(block) for block in self.mixture.blocks]
        gone = [[number for number in every if number not in each] for each in kept]
        listed = "; ".join(f"{name} {', '.join(map(str, each))}" for name, each in zip(names, gone, strict=True))
        yield f"experts that went: {listed}"
        if sums is None:
            return
        pairs = sum(float(sums.counts[i, each].sum()) for i, each in enumerate(gone)) / float(sums.counts.sum())
        yield f"they had {100 * pairs:.1f}% of the pairs of a token and an expert, over all layers"
        few = [(int(sums.counts[i, j]), names[i], j) for i in range(len(names)) for j in every]
        few = sorted(each for each in few if each[0] < ENOUGH_TOKENS)
        if few:
            named = ", ".join(f"{name} {j} ({count})" for count, name, j in few[:LISTED])
            yield (
                f"{len(few)} experts got fewer than {ENOUGH_TOKENS} tokens of the text, whose scores say little "
                f"(0 of an expert without any, which goes first): {named}{' and others' * (len(few) > LISTED)}; "
                "give more calibration text, and prune_experts more samples"
            )

    def _name(self, block: int) -> str:
        return self.skeleton.block_prefix(block).rstrip(".")


def score(by: str, sums: ExpertSums) -> Tensor:
    """Return the scores of one block's experts, float64 [experts]; the lowest ones are removed."""
    scores = {
        "reap": sums.mean(sums.norms),
        "frequency": sums.counts,
        "router_mean": sums.mean(sums.weights),
    }
    return scores[by]
