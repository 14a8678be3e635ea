"""Compare a compressed model with its original part by part, each part on the original's own inputs.

Errors of a layer spread to all later ones, so that the outputs of two running models do not tell which layer is broken.
Here each decoder block of the compressed model is given the hidden states that the original has in front of the same
block. What differs behind it is the block's own doing. Inside, hooks see what each linear takes and gives.

A rotated model has its hidden states in another basis. The rotation R is found from the two tables of embeddings: the
orthogonal matrix with the least |E R - E'| (Schoenemann's solution of the Procrustes problem, 1966), and hidden states
are given as h R. Heads that are rotated each for itself are compared by their Gram matrices over tokens, which no
rotation changes. Scales that a transform moves from one linear to the next change outputs in between: `findings` looks
at what is unlike the same linear in other blocks.

Behind the blocks lie the last norm and the output head. Both models are run once more, the output of their last block
replaced by what the original has there (rotated, where the compressed model is). Logits that are like the original's
clear both parts, whatever was moved between them: the weight of the norm may be in the head. Where they are not, what
the head takes tells which of the two is broken: it is the original's, or, where the weight of the norm has moved, the
hidden states brought to a mean square of 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.evaluate import feature_order
from compress.evaluate.feature_order import LIKE, MIN_SHIFTED_ROWS, correlations
from compress.model.block_calls import BlockArgs, record
from compress.model.text_path import find_blocks
from compress.runtime import experts, linears
from compress.runtime.expert_layouts import SORTED
from compress.runtime.linear import PackedLinear

SAME_BASIS = 0.5  # relative squared distance of embeddings below which they are alike
EXPERT = re.compile(r"\.\d+\.")
TOKENS_PER_EXPERT = 128
MIN_EMBEDDING_ROWS = 4096  # the rotation is computed from so many
SEARCHED_ROWS = 512  # rows of the head that are looked for at other places, at most


@dataclass(frozen=True)
class LinearFacts:
    """How the output of a linear differs from that of the original's, on the same block input."""

    name: str
    path: str  # inside its block; numbers of experts are "*", so that all are compared with each other
    block: int
    ratio: float  # norm of a token's output, to the original's; median over tokens
    gain: float  # the same of output over input; of those that read what the block is given, `ratio`
    unlike: float  # 1 - mean correlation of output features, weighted by their energy
    strange: float  # share of the energy in features whose correlation is below LIKE
    moved: str  # what stands in another order, in words; "" for nothing


@dataclass(frozen=True)
class BlockFacts:
    """How far what a block adds to the hidden states is from what the original adds: relative squared error."""

    name: str
    error: float
    linears: tuple[LinearFacts, ...]


@dataclass(frozen=True)
class TailPart:
    """How the output of a part differs from the original's; norms and correlations are over a token's features."""

    name: str
    ratio: float  # norm of a token's output, to the original's; median over tokens
    unlike: float  # 1 - correlation; median over tokens


@dataclass(frozen=True)
class Tail:
    """What lies behind the blocks. `norm` is compared with the version of it that is most alike."""

    norm: TailPart
    head: TailPart  # on its own model's norm, on logits less their mean
    moved: str  # which rows of the head stand in another order, in words; "" for none


@dataclass(frozen=True)
class Facts:
    """What was compared."""

    embeddings: float  # relative squared distance of the tables, in the basis that fits better
    is_rotated: bool
    blocks: tuple[BlockFacts, ...]
    tail: Tail | None = None  # last norm and output head; None for a model without a head


@torch.no_grad()
def compare(base: Any, model: Any, tokens: Tensor) -> Facts:
    """Compare two models on tokens int64 [samples, seq_len].

    Raises UnsupportedModelError where their blocks cannot be run beside each other: of another number or width.
    """
    name, blocks = find_blocks(base)
    others = model.get_submodule(name)
    if len(others) != len(blocks):
        raise UnsupportedModelError(f"the models have {len(blocks)} and {len(others)} decoder blocks")
    given, taken = (record(m, m.get_submodule(name), tokens.to(m.device)) for m in (base, model))
    if given.hidden[0].shape != taken.hidden[0].shape:
        raise UnsupportedModelError("the hidden states of the models are not of the same width")
    rotation, distance = _rotation(base, model)
    config = base.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, compared = given.hidden[0].float(), []
    for i, block in enumerate(blocks):
        if any(given.extra[i]) and any(x.numel() for x in given.extra[i]):
            raise UnsupportedModelError("the blocks give more than hidden states")
        out, seen = _run(block, hidden, given.calls[i])
        turned = hidden if rotation is None else hidden @ rotation
        other, other_seen = _run(others[i], turned, taken.calls[i])
        other = other if rotation is None else other @ rotation.T
        added = (out - hidden).square().sum().clamp_min(1e-30)
        error = float((other - out).square().sum() / added)
        first = next((taken for taken, _ in seen.values()), hidden)
        pairs = [
            _linear(_Place(f"{name}.{i}", path, i), seen[path], other_seen[path], _Basis(rotation, head_dim, first))
            for path in seen
            if path in other_seen and seen[path][1].shape == other_seen[path][1].shape
        ]
        compared.append(BlockFacts(f"{name}.{i}", error, tuple(pairs)))
        hidden = out
    dim = given.calls[-1].batch_dim
    behind = hidden.narrow(dim, 0, 1)
    turned = behind if rotation is None else behind @ rotation
    tail = compare_tails((base, model), (blocks[-1], others[-1]), tokens[:1], (behind, turned))
    return Facts(distance, rotation is not None, tuple(compared), tail)


def _run(block: nn.Module, hidden: Tensor, call: BlockArgs) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return float32 hidden states behind a block, and what each of its linears takes and gives: [tokens, features]."""
    dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), hidden.dtype)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    with _watch(block, seen) as given:
        out = block(hidden.to(dtype), *call.args, **call.kwargs)
    for path, x in given.items():
        seen.update(_experts(block.get_submodule(path), path, x))
    return (out[0] if isinstance(out, tuple) else out).float(), seen


@contextmanager
def _watch(block: nn.Module, seen: dict[str, tuple[Tensor, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """While active, keep input and output of each linear, in the order of their calls; yield what experts take."""
    given: dict[str, Tensor] = {}

    def watch_linear(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                seen[path] = (args[0].flatten(0, -2).float(), out.flatten(0, -2).float())

        return hook

    def watch_experts(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter((*args, *kwargs.values())))
            given[path] = x.flatten(0, -2)[:: max(1, x.shape[:-1].numel() // TOKENS_PER_EXPERT)]

        return hook

    handles = [
        module.register_forward_pre_hook(watch_experts(path), with_kwargs=True)
        for path, module in block.named_modules()
        if _are_experts(module)
    ]
    handles += [
        module.register_forward_hook(watch_linear(path))
        for path, module in block.named_modules()
        if path and _is_linear(module)
    ]
    try:
        yield given
    finally:
        for handle in handles:
            handle.remove()


def _are_experts(module: nn.Module) -> bool:
    """Tell whether a module holds all experts of a block, and is given the tokens in their own order."""
    layout = module.layout if isinstance(module, experts.Experts) else None
    if layout is None and experts.is_supported(module):
        layout = experts.layout_of(module)
    return layout is not None and layout.call != SORTED


def _experts(module: nn.Module, path: str, x: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield path, input and output of each linear of each expert, all of them given x [tokens, hidden]."""
    apart = module if isinstance(module, experts.Experts) else experts.Experts.from_fused(module)
    for number in range(len(apart)):
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def project(name: str, x: Tensor, number: int = number, seen: Any = seen) -> Tensor:
            out: Tensor = apart.get_submodule(f"{number}.{name}")(x)
            seen[name] = (x.float(), out.float())
            return out

        apart.compute(number, x, project)
        yield from ((f"{path}.{number}.{name}", pair) for name, pair in seen.items())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, PackedLinear) or linears.shape_of(module) is not None


def _rotation(base: Any, model: Any) -> tuple[Tensor | None, float]:
    """Return the orthogonal matrix that turns the embeddings of `base` into those of `model`, and what is left.

    None where they are alike as they stand, or in no rotation.
    """
    tables = [m.get_input_embeddings() for m in (base, model)]
    count = min(m.config.get_text_config().vocab_size for m in (base, model))
    width = base.config.get_text_config().hidden_size
    ids = torch.arange(0, count, max(1, count // max(MIN_EMBEDDING_ROWS, 2 * width)))
    rows, others = (table(ids.to(m.device)).float().cpu() for table, m in zip(tables, (base, model), strict=True))
    size = rows.square().sum()
    distance = float((rows - others).square().sum() / size)
    if distance < SAME_BASIS or rows.shape != others.shape:
        return None, distance
    left, _, right = torch.linalg.svd(rows.double().T @ others.double())
    rotation = (left @ right).float()
    turned = float((rows @ rotation - others).square().sum() / size)
    return (rotation.to(base.device), turned) if turned < SAME_BASIS else (None, distance)


class _Place(NamedTuple):
    """A linear of a block."""

    prefix: str
    path: str
    block: int


class _Basis(NamedTuple):
    """What the comparison of a block's linears needs to know."""

    rotation: Tensor | None  # of the hidden states
    head_dim: int
    first: Tensor  # what the first linear of the original's block takes


def _linear(place: _Place, pair: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], basis: _Basis) -> LinearFacts:
    """Compare input and output [tokens, features] of a linear with those of the compressed one."""
    (x, y), (x_other, y_other) = pair, other
    ratio = _norms(y_other) / _norms(y)
    gain = ratio if torch.equal(x, basis.first) else ratio / (_norms(x_other) / _norms(x))
    versions = [y_other]
    if basis.rotation is not None and y.shape[1] == len(basis.rotation):
        versions.append(y_other @ basis.rotation.T)
    energy = y.square().sum(0) / y.square().sum().clamp_min(1e-30)
    alike, best = max(((float((energy * correlations(y, v)).sum()), v) for v in versions), key=lambda scored: scored[0])
    strange = float(energy[correlations(y, best) < LIKE].sum())
    moved = feature_order.find_moved(y, best, basis.head_dim)
    name, gains = f"{place.prefix}.{place.path}", float(gain.median())
    return LinearFacts(
        name, EXPERT.sub(".*.", place.path), place.block, float(ratio.median()), gains, 1 - alike, strange, moved
    )


def _norms(rows: Tensor) -> Tensor:
    return rows.norm(dim=1).clamp_min(1e-20)


def compare_tails(
    models: tuple[Any, Any], blocks: tuple[nn.Module, nn.Module], tokens: Tensor, hidden: tuple[Tensor, Tensor]
) -> Tail | None:
    """Compare the last norm and the output head of (base, model); None where one has no head.

    blocks: the last one of each. tokens int64 [1, seq_len]; hidden: what stands for the output of the blocks, each in
    the basis of its model.
    """
    if any(model.get_output_embeddings() is None for model in models):
        return None
    name, z, y = _run_tail(models[0], blocks[0], tokens, hidden[0])
    _, z_other, y_other = _run_tail(models[1], blocks[1], tokens, hidden[1])
    if y.shape != y_other.shape or z.shape != z_other.shape:
        return None
    unit = [(h / h.square().mean(-1, keepdim=True).sqrt()).reshape(z.shape) for h in hidden]
    norm = min((_compare_part(name, version, z_other) for version in (z, *unit)), key=lambda part: part.unlike)
    y, y_other = (each - each.mean(-1, keepdim=True) for each in (y, y_other))
    head = next(name for name, module in models[0].named_modules() if module is models[0].get_output_embeddings())
    return Tail(norm, _compare_part(head, y, y_other), _moved_rows(y, y_other))


def _run_tail(model: Any, block: nn.Module, tokens: Tensor, hidden: Tensor) -> tuple[str, Tensor, Tensor]:
    """Return the name of what stands in front of the head, and what the head takes and gives: float32 [tokens, n]."""
    head, seen, given = model.get_output_embeddings(), dict[str, Any](), dict[int, str]()

    def replace(_: nn.Module, args: Any, out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        put = hidden.to(first.dtype)
        return (put, *out[1:]) if isinstance(out, tuple) else put

    def keep(_: nn.Module, args: Any, out: Any) -> None:
        seen["z"], seen["y"] = args[0], out

    def note_name(name: str) -> Any:
        def hook(_: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                given[out.data_ptr()] = name

        return hook

    with ExitStack() as stack:
        stack.callback(block.register_forward_hook(replace).remove)
        stack.callback(head.register_forward_hook(keep).remove)
        for name, module in model.named_modules():
            if module is not head and not any(module.children()):
                stack.callback(module.register_forward_hook(note_name(name)).remove)
        model(tokens.to(model.device), use_cache=False)
    z, y = (seen[key].flatten(0, -2).float() for key in "zy")
    return given.get(seen["z"].data_ptr(), "the last norm"), z, y


def _compare_part(name: str, y: Tensor, other: Tensor) -> TailPart:
    """Compare outputs [tokens, features] token by token."""
    norms = [each.norm(dim=1).clamp_min(1e-20) for each in (y, other)]
    alike = (y * other).sum(1) / (norms[0] * norms[1])
    return TailPart(name, float((norms[1] / norms[0]).median()), 1 - float(alike.median()))


def _moved_rows(y: Tensor, other: Tensor) -> str:
    """Return in words which tokens of the original's logits stand elsewhere; "" for few, or where none are found."""
    y, other = (each - each.mean(0) for each in (y, other))
    lost = (feature_order.correlations(y, other) < LIKE).nonzero()[:, 0]
    rows = lost[torch.linspace(0, len(lost) - 1, min(len(lost), SEARCHED_ROWS)).long()] if len(lost) else lost
    if len(rows) < MIN_SHIFTED_ROWS:
        return ""
    pairs = feature_order.elsewhere(y, other, rows, max(MIN_SHIFTED_ROWS, len(rows) / 2))
    return feature_order.describe(pairs) if pairs else ""
