"""Merge experts of a mixture of experts into the most similar others (HC-SMoE, arXiv 2410.08589; M-SMoE, 2310.01334).

Experts that `prune_experts` would remove by the same settings go into that remaining one of which the mean output on
calibration text has the largest cosine with theirs. The weights of a group become their mean by the number of tokens.

The papers keep all rows of the router, so that a group gets the weights of all its experts together; HC-SMoE makes the
groups by hierarchical clustering, M-SMoE by the rows of the router. Here the result is a plain checkpoint that the same
class loads, which has as many rows as experts: those of merged experts go, too, as in `prune_experts`.

It loses more than leaving the experts out (docs/results/sparsity.md), as REAP's authors find of generating models
(arXiv 2510.13999): that keeps it out of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as nn_functional
from torch import Tensor

from compress.calib.expert_scores import ExpertSums
from compress.importers.source import Decoded
from compress.model.skeleton import Skeleton
from compress.runtime.experts import is_supported
from compress.storage.checkpoint import Readable
from compress.transform import prune_experts
from compress.transform.prune_experts import NUMBER, FewerExperts

SCOPE = "model"
Groups = Mapping[int, list[tuple[int, float]]]  # an expert that stays -> the experts it is made of, with their shares


class Config(prune_experts.Config):
    """Which experts are merged into others; by chance is not among the ways."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by == "random":
            raise ValueError("by random takes no text, without which similar experts are not known")


def apply(skeleton: Skeleton, config: Config, seed: int) -> MergedExperts:
    """Give the skeleton fewer experts; no weight is read. Raises RecipeError and UnsupportedModelError."""
    plain = prune_experts.apply(skeleton, config, seed)
    return MergedExperts(skeleton, config, seed, plain.mixture, plain.cuts)


class MergedExperts(FewerExperts):
    """Gives a model merged experts once `choose` has decided; until then, the first ones."""

    def put(self, kept: Sequence[Sequence[int]], sums: ExpertSums | None = None) -> None:
        """Let the skeleton read these experts of each block, merged with the others."""
        assert sums is not None, "it is measured"
        merged = {
            block: groups(each, sums.block(number))
            for number, (block, each) in enumerate(zip(self.mixture.blocks, kept, strict=True))
        }
        for name, (stored, cut) in self.cuts.items():
            if is_supported(self.skeleton.model.get_submodule(name.rpartition(".")[0])):
                self.cuts[name] = [mix(each, stored, cut.experts, merged[cut.block]) for each in stored], cut
        super().put(kept)


def groups(kept: Sequence[int], sums: ExpertSums) -> Groups:
    """Return what each expert that stays is made of: itself and those whose mean outputs are most like its own."""
    means = nn_functional.normalize(sums.outputs, dim=1)
    members = {number: [number] for number in kept}
    for number in range(len(means)):
        if number not in members:
            members[max(kept, key=lambda each: float(means[each] @ means[number]))].append(number)
    made = {}
    for number, group in members.items():
        counts = sums.counts[group] if sums.counts[group].sum() > 0 else torch.ones(len(group))
        made[number] = list(zip(group, (counts / counts.sum()).tolist(), strict=True))
    return made


def mix(tensor: Readable, stored: Sequence[Readable], experts: int, merged: Groups) -> Readable:
    """Return a stored tensor, of one expert or of all of them, with those that stay made of their groups."""
    number, by_name = NUMBER.search(tensor.name), {each.name: each for each in stored}
    size = tensor.shape[0] if number else tensor.shape[0] // experts

    def member(name: str, which: int) -> Tensor:
        if number is None:
            return tensor.rows(which * size, (which + 1) * size)
        return by_name[f"{name[: number.start()]}{which}{name[number.end() :]}"].read()

    def rows(start: int, stop: int) -> Tensor:
        asked = [int(number[0])] if number else range(start // size, stop // size)
        return torch.cat([_sum(merged.get(each, [(each, 1.0)]), lambda n: member(tensor.name, n)) for each in asked])

    return Decoded(tensor.name, tensor.dtype, tensor.shape, tensor.sources, rows, size)


def _sum(members: Sequence[tuple[int, float]], read: Callable[[int], Tensor]) -> Tensor:
    """Return the sum of tensors times their shares, in their type; one alone as it is."""
    if len(members) == 1:
        return read(members[0][0])
    first = read(members[0][0])
    total = first.float() * members[0][1]
    for number, share in members[1:]:
        total.add_(read(number).float(), alpha=share)
    return total.to(first.dtype)
