"""Trace what feeds what in a model: norms and their readers, writers of the residual stream, attention's values.

Found from the model itself, by one forward pass on the meta device: no family is known by name. Modules that read the
same memory read the same tensor, or views of it; a norm is a module with a vector for a weight, over the hidden size;
the values and the output of attention are seen where transformers calls its attention function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from compress.errors import NumericalError, UnsupportedModelError
from compress.model.blockwise import BlockInputs, attached, run_block, states_of
from compress.model.inputs import arguments
from compress.model.meta_pass import NEEDS_DATA, PROBE_TOKENS, SkippedExperts, without_experts
from compress.model.skeleton import Skeleton
from compress.model.stream import NORM, OTHER, STREAM, WRITER, Part, Parts, Watch, has_matrix, memory_of
from compress.runtime.expert_layouts import ExpertLayout
from compress.runtime.experts import Experts

WATCHED = "compress_watched"  # the name of our attention function while a forward pass is watched


class Site(NamedTuple):
    """A vector of channels between what makes it and what reads it; paths are those within the block."""

    producer: str  # the norm, or the linear whose rows the channels are
    is_norm: bool
    readers: tuple[str, ...]  # all linears and routers that read it, each with a `weight` [out, channels]
    scope: str  # the smallest module that holds all readers and whose output is worth comparing; "": the block
    repeats: int = 1  # head h of the reader reads head h // repeats of the producer
    head_dim: int = 0  # channels of such a head; 0: there are none
    offset: bool = False  # a norm that multiplies by 1 + weight


class Attention(NamedTuple):
    """The linears that attention takes its values from and leaves its result to."""

    values: str  # linear; channel j of key/value head h is its row first + h head_step + j step
    output: str  # linear, reads [heads * head_dim]
    first: int
    head_step: int
    step: int
    key_value_heads: int
    heads: int
    head_dim: int


class Sites(list[Site]):
    """The sites of a block, and its attention, for transforms that change more than scales."""

    def __init__(self, found: Iterable[Site], attention: Attention | None) -> None:
        super().__init__(found)
        self.attention = attention


@dataclass(frozen=True)
class Block:
    """One decoder block, or ("outside") what is around the blocks; paths within it."""

    norms: dict[str, tuple[str, ...]]  # norm over the hidden size -> what reads it
    writers: tuple[str, ...]  # linears that write to the residual stream
    post_norms: tuple[str, ...]  # norms with weights whose output goes to the residual stream itself
    attention: Attention | None
    unknown: str = ""  # what else goes to the residual stream that no rotation passes; "": nothing


@dataclass(frozen=True)
class Graph:
    """The whole model."""

    blocks: tuple[Block, ...]
    outside: Block  # writers: the embeddings


class _Seen(NamedTuple):
    name: str
    module: nn.Module
    read: int  # memory of its input
    written: int  # memory of its output
    version: int  # of its output: counts changes in place


class _Values(NamedTuple):
    value: Tensor  # [batch, key/value heads, tokens, head_dim]
    output: Tensor  # [batch, tokens, heads, head_dim]


def trace(skeleton: Skeleton) -> Graph:
    """Return the graph of a model; UnsupportedModelError if its forward pass cannot be followed without data."""
    try:
        seen, attentions, watch = _watch(skeleton, watch_attention)
    except NEEDS_DATA:  # of a model that makes no mask where its attention is not its own
        try:
            seen, attentions, watch = _watch(skeleton, lambda *_: nullcontext())
        except NEEDS_DATA as error:
            reason = " ".join(str(error).split())[:150]
            raise UnsupportedModelError(
                f"{type(skeleton.model).__name__} cannot be followed without data ({reason}); use a recipe without "
                "transforms"
            ) from error
    parts = []
    for index in range(len(skeleton.blocks)):
        prefix = skeleton.block_prefix(index)
        own = [entry._replace(name=entry.name.removeprefix(prefix)) for entry in seen if entry.name.startswith(prefix)]
        block = _block(prefix, own, watch, watch.after.get(prefix.rstrip("."), frozenset()))
        parts.append(replace(block, attention=_attention(own, attentions)))
    outside = [entry for entry in seen if not entry.name.startswith(skeleton.in_blocks)]
    return Graph(tuple(parts), _block("", outside, watch, watch.before))


def _watch(
    skeleton: Skeleton, watching: Callable[..., AbstractContextManager[None]]
) -> tuple[list[_Seen], list[_Values], Watch]:
    """Run the model on the meta device; return what its weighted modules read and wrote, and every attention.

    watching: what puts a function in the place of attention, if that is to be.
    """
    model = without_experts(skeleton.config, skeleton.dtype)
    seen: list[_Seen] = []
    attentions: list[_Values] = []
    alive: list[Any] = []  # memory that is freed would be used again
    width = skeleton.config.get_text_config().hidden_size
    blocks = [skeleton.block_prefix(index).rstrip(".") for index in range(len(skeleton.blocks))]
    watch = Watch(model, blocks, width, lambda module: _is_norm(module, width))

    def record(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        result = states_of(output)
        if inputs and isinstance(inputs[0], Tensor) and isinstance(result, Tensor):
            alive.extend((inputs[0], result))
            seen.append(_Seen(name, module, memory_of(inputs[0]), memory_of(result), result._version))

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = torch.empty(query.transpose(1, 2).shape[:-1] + value.shape[-1:], dtype=query.dtype, device="meta")
        attentions.append(_Values(value, output))
        return output, None

    for name, module in model.named_modules():
        if (
            name in watch.plain
            or isinstance(module, SkippedExperts)
            or any(p.dim() in (1, 2) for _, p in module.named_parameters(recurse=False))
        ):
            module.register_forward_hook(lambda found, inputs, output, name=name: record(name, found, inputs, output))
    with watching(model.config, attend), watch.flow:
        tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
        model(**arguments(model, tokens), use_cache=False)
    return seen, attentions, watch


@contextmanager
def watch_attention(config: Any, function: Callable[..., Any], name: str = WATCHED) -> Iterator[None]:
    """While active, let models of this configuration call `function` for attention, registered under `name`."""
    parts = {id(c): c for c in (config, config.get_text_config())}.values()
    before = [part._attn_implementation for part in parts]
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    for part in parts:
        part._attn_implementation = name
    try:
        yield
    finally:
        for part, former in zip(parts, before, strict=True):
            part._attn_implementation = former


def norm_kind(norm: nn.Module, width: int) -> tuple[bool, bool]:
    """Return (multiplies by 1 + weight, takes the mean away) of a norm module, found by running it."""
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    for parameter in probe.parameters():
        parameter.data.zero_()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=generator)
    has_weight = next(probe.parameters(), None) is not None
    with torch.no_grad():
        offset = has_weight and bool(probe(x).abs().max() > 0)
        if has_weight:
            probe.get_parameter("weight").fill_(0 if offset else 1)
        plain, shifted = probe(x), probe(x + 3)
    expected = x - x.mean(-1, keepdim=True) if (centred := torch.allclose(plain, shifted, atol=1e-3)) else x
    expected = expected / expected.square().mean(-1, keepdim=True).sqrt()
    if not torch.allclose(plain, expected, rtol=0.01, atol=1e-3):
        raise UnsupportedModelError(f"{type(norm).__name__} is no norm that a transform can pass; remove `transform`")
    return offset, centred


def sites(graph: Block, block: nn.Module, batches: BlockInputs, where: str) -> Sites:
    """Return where a loaded block's channels can be scaled: behind norms, between values and output, up and down.

    That the channels of a linear are just multiplied into what another reads is found by doubling them. A norm that
    something else reads, too (the residual stream itself), is found by doubling what it gives and halving it for them.
    """
    every_site = []
    hidden, call = next(iter(batches()))
    for norm, readers in graph.norms.items():
        if next(block.get_submodule(norm).parameters(), None) is None:  # no weight to fold into
            continue
        if not _reach_all(block, norm, readers, lambda: run_block(block, call, hidden, where)):
            continue
        module = block.get_submodule(norm)
        offset, _ = norm_kind(module, module.get_parameter("weight").shape[0])
        every_site.append(Site(norm, True, readers, _scope(readers), offset=offset))
    attention = graph.attention
    if attention is not None and _is_whole(attention, block):
        repeats = attention.heads // attention.key_value_heads
        reader = (attention.output,)
        every_site.append(Site(attention.values, False, reader, attention.output, repeats, attention.head_dim))
    gated = [name for readers in graph.norms.values() for name in readers]
    for writer in graph.writers:
        if attention is not None and writer == attention.output:
            continue
        experts = block.get_submodule(_parent(writer, 2))
        if isinstance(experts, Experts):
            if experts.layout.is_bilinear:
                every_site.append(Site(f"{_parent(writer)}.{experts.layout.projections[-2]}", False, (writer,), writer))
            continue
        columns = cast(nn.Linear, block.get_submodule(writer)).in_features
        same = [name for name in gated if getattr(block.get_submodule(name), "out_features", 0) == columns]
        every_site += [
            Site(name, False, (writer,), writer)
            for name in same
            if _doubles(block, name, writer, lambda: run_block(block, call, hidden, where))
        ]
    return Sites(every_site, attention)


def _parent(path: str, levels: int = 1) -> str:
    return ".".join(path.split(".")[:-levels])


def _scope(readers: tuple[str, ...]) -> str:
    """Return the innermost module that holds all these and is none of them."""
    parents = [name.split(".")[:-1] for name in readers]
    common = [parts[0] for parts in zip(*parents, strict=False) if len(set(parts)) == 1]
    depth = next((i for i, parts in enumerate(zip(*parents, strict=False)) if len(set(parts)) > 1), len(common))
    return ".".join(parents[0][:depth])


def _is_whole(attention: Attention, block: nn.Module) -> bool:
    """Return True if the values are the rows of a linear of their own, in order."""
    rows = cast(nn.Linear, block.get_submodule(attention.values)).out_features
    in_order = (attention.first, attention.head_step, attention.step) == (0, attention.head_dim, 1)
    return in_order and rows == attention.key_value_heads * attention.head_dim


def _doubles(block: nn.Module, producer: str, reader: str, run: Callable[[], Tensor]) -> bool:
    """Return True if doubling the output of `producer` doubles the input of `reader`, to the bit."""
    given: list[Tensor] = []
    source, hooks = block.get_submodule(producer), []
    hooks.append(block.get_submodule(reader).register_forward_pre_hook(lambda _, x: given.append(x[0].clone())))
    with attached(hooks):
        run()
        hooks.append(source.register_forward_hook(lambda _, inputs, output: 2 * output))
        try:
            run()
        except NumericalError:  # twice as much leaves the type
            return False
    return len(given) == 2 and torch.equal(given[1], 2 * given[0])


def _reach_all(block: nn.Module, norm: str, readers: tuple[str, ...], run: Callable[[], Tensor]) -> bool:
    """Return True if doubling the output of `norm` and halving each reader's input leaves the block's output."""
    before = run()
    hooks = [block.get_submodule(norm).register_forward_hook(lambda _, inputs, output: 2 * output)]
    for name in readers:
        reader = block.get_submodule(name)
        hooks.append(reader.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 2, *inputs[1:])))
    try:
        with attached(hooks):
            after = run()
    except NumericalError:
        return False
    # equal to the bit where sums are always taken in the same order
    return bool((after.float() - before.float()).norm() <= 1e-3 * before.float().norm())


def _is_norm(module: nn.Module, width: int) -> bool:
    """Return whether a module has a vector for a weight, over this width, and nothing else than vectors."""
    weights = dict(module.named_parameters(recurse=False))
    return "weight" in weights and all(p.dim() == 1 for p in weights.values()) and len(weights["weight"]) == width


def _block(prefix: str, entries: list[_Seen], watch: Watch, written: Parts) -> Block:
    """Return the structure of the modules of one block, without its attention. written: what the stream is then."""
    called = {entry.name: entry for entry in entries}
    reads = {name: watch.reads.get(prefix + name, frozenset()) for name in called}
    norms: dict[str, tuple[str, ...]] = {}
    for name, parts in reads.items():
        if not any(part.kind == STREAM for part in parts):
            continue
        reading = [
            r for r, given in reads.items() if given == {Part(NORM, prefix + name)} and has_matrix(called[r].module)
        ]
        if reading:
            norms[name] = tuple(each for r in reading for each in _names(called[r], slice(0, -1)))
    made = {part.name.removeprefix(prefix) for part in written if part.kind == NORM}
    behind = {part.name for norm in made for part in reads.get(norm, ()) if part.kind == WRITER}
    writing = {part.name for part in written if part.kind == WRITER} | behind
    writers = [each for n, e in called.items() if prefix + n in writing for each in _names(e, slice(-1, None))]
    post = [name for name in called if name in made and prefix + name not in watch.plain]
    others = sorted(part for part in written if part.change or part.kind == OTHER)
    return Block(norms, tuple(writers), tuple(post), None, _describe_part(others[0]) if others else "")


def _describe_part(part: Part) -> str:
    """Return what a part of the stream is that no rotation passes, for messages."""
    if part.kind == OTHER:
        return f"{part.name or 'something'} ({part.change})"
    return f"{part.name or 'the residual stream itself'}, changed channel by channel ({part.change})"


def _names(entry: _Seen, projections: slice) -> list[str]:
    """Return the paths of a module in the loaded block, where experts are linears: of these projections of each."""
    if not isinstance(entry.module, SkippedExperts):
        return [entry.name]
    layout = entry.module.layout
    if isinstance(layout, ExpertLayout) and layout.is_open:
        return [f"{entry.name}.{i}.{name}" for i in range(layout.experts) for name in layout.projections[projections]]
    reason = layout if isinstance(layout, str) else "experts that are more, or given something else, than linears"
    raise UnsupportedModelError(f"{entry.name} holds {reason}; use a recipe without transforms")


def _attention(entries: list[_Seen], attentions: list[_Values]) -> Attention | None:
    """Return the linears of this block's attention; None where not one linear's rows go in, or out."""
    linears = [e for e in entries if isinstance(e.module, nn.Linear)]
    for value, output in attentions:
        made = [e for e in linears if e.written == memory_of(value) and e.version == value._version]
        read = [e for e in linears if e.read == memory_of(output)]
        if len(made) == 1 and len(read) == 1 and value.stride(2) == made[0].module.out_features:
            return Attention(
                made[0].name, read[0].name, int(value.storage_offset()), value.stride(1), value.stride(3),
                value.shape[1], output.shape[2], value.shape[3],
            )  # fmt: skip
    return None
