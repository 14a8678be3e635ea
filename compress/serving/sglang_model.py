"""Complete a model that SGLang has built, before its weights are loaded.

Many of SGLang's models do not tell embeddings and heads of the quantization method, and its loaders pass over tensors
for which no layer asks. So layers are looked up by their names in the model, and what no layer holds is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.serving import names
from compress.serving.experts import PackedExpertLayer
from compress.serving.layers import PackedLinears
from compress.serving.listed import Listed
from compress.serving.sglang_tables import TableMethod
from compress.serving.tables import PackedTable

Weights = Iterable[tuple[str, Tensor]]


def complete(model: Any, listed: Listed) -> None:
    """Give packed tables to layers that SGLang has built plain, and rename stored experts for the model's loader.

    Raises UnsupportedModelError with the name of a packed module that no layer of the model holds.
    """
    _complete_tables(model, listed)
    elsewhere = [name for name, layer in model.named_modules() if isinstance(layer, PPMissingLayer)]
    held = {name for layer in model.modules() for name in _held(layer)}
    for name in listed.stored:
        if name not in held and not any(f"{name}.".startswith(f"{other}.") for other in elsewhere):
            raise UnsupportedModelError(
                f"{name} is packed, and no layer that SGLang builds for {type(model).__name__} has this name; "
                "serve with transformers"
            )
    if listed.renamed:
        model.load_weights = _renaming(model.load_weights, listed)


def _held(layer: nn.Module) -> Iterable[str]:
    """Return the names of the checkpoint's modules that a layer holds."""
    method = getattr(layer, "quant_method", None)
    if isinstance(method, PackedLinears):
        return method.linears
    if isinstance(method, PackedExpertLayer):
        return method.listed
    return method.candidates if isinstance(method, PackedTable) else ()


def _complete_tables(model: Any, listed: Listed) -> None:
    """Let embeddings and heads hold their packed tables; a head that is tied holds the embedding's."""
    tables = names.tables(listed.stored)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, VocabParallelEmbedding)}
    for name, layer in layers.items():
        if name in tables and not isinstance(layer.quant_method, TableMethod):
            _build(layer, TableMethod({name: listed.stored[name]}, name, listed.totals))
    is_tied = getattr(model.config, "tie_word_embeddings", False)
    packed = {name: layer for name, layer in layers.items() if name in tables and not isinstance(layer, ParallelLMHead)}
    for name, layer in layers.items():
        is_head = isinstance(layer, ParallelLMHead)
        embedding = _embedding_of(name, layer, packed) if is_head and is_tied and name not in tables else None
        if embedding is not None:
            _build(layer, TableMethod({}, name, listed.totals))
            layer.quant_method.tie_weights(layer, embedding)
        if isinstance(layer.quant_method, TableMethod):
            layer.quant_method.is_head = is_head or is_tied  # SGLang may have no layer but the embedding for both


def _embedding_of(name: str, head: Any, packed: Mapping[str, Any]) -> Any:
    """Return the packed embedding whose table a tied head multiplies with, None if none has its shape."""
    found = {other: each for other, each in packed.items() if _shape(each) == _shape(head)}
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{name} is tied to one of {', '.join(found)}, and which one is not known; serve with transformers"
        )
    return next(iter(found.values()), None)


def _shape(layer: Any) -> tuple[int, int]:
    """Return the size [tokens, hidden] of a table on all ranks."""
    return layer.org_vocab_size, layer.embedding_dim


def _build(layer: Any, method: TableMethod) -> None:
    """Take the plain weight of a layer away, and let it be built by a method."""
    dtype = layer.weight.dtype
    del layer.weight
    layer.quant_method = method
    sizes = [layer.num_embeddings_per_partition]
    method.create_weights(layer, layer.embedding_dim, sizes, layer.embedding_dim, layer.num_embeddings_padded, dtype)


def _renaming(load_weights: Callable[..., Any], listed: Listed) -> Callable[..., Any]:
    """Return a model's loader that sees the stored tensors by the names that it looks for."""
    patterns = listed.patterns()

    def renamed(name: str) -> str:
        for old, new in patterns.items():
            name = old.sub(new, name)
        return name

    def load(weights: Weights, *arguments: Any, **options: Any) -> Any:
        return load_weights(((renamed(name), tensor) for name, tensor in weights), *arguments, **options)

    return load
