"""Read VPTQ's vectors along outputs: centroids of indices, with residuals, columns of outliers, a scale and a bias.

A column of a weight is cut into vectors of v outputs. For each, `indices` have an index of centroids and, above it, one
of res_centroids; their vectors are added. Indices of a row of vectors are a little-endian stream of bits in int32
[codebooks, out / v, words] (is_indice_packed), else int16 each. Columns of outliers have vectors, centroids and indices
of their own and come first. Columns are then put in the order of `perm`, multiplied with weight_scale [in], and
weight_bias [in] is added. Every step is rounded in the type of the centroids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compress.errors import shown
from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import CONFIG, Readable, StoredTensor

OPTIONS: options.Options = {
    **{"config_for_layers": (dict,), "shared_layer_config": (dict, None), "modules_to_not_convert": options.NAMES},
    "enable_proxy_error": options.FLAG,
}
INDICES = (torch.int16, torch.float16)  # of 16 bits without a sign
LARGEST = 1 << 16  # centroids of a codebook


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    return "vptq"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    ending = ".centroids.weight"
    modules = [module for module in source.ending(ending) if not module.endswith((".res", ".outlier"))]
    return {f"{module}.weight": _weight(source, module) for module in modules}


def _form(source: CheckpointSource, module: str) -> Mapping[str, Any]:
    """Return the settings of a module; CheckpointError for those that cannot be read."""
    layers = source.settings.get("config_for_layers")
    form = layers.get(module) if isinstance(layers, dict) else None
    form = form if isinstance(form, dict) else {}
    pairs = [form.get(key) for key in ("vector_lens", "num_centroids", "num_res_centroids")]
    sizes = [form.get(key) for key in ("in_features", "out_features", "group_size", "outlier_size")]
    is_good = all(isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs)
    is_good = is_good and all(type(size) is int and size >= 0 for size in sizes) and 1 <= pairs[0][1] <= sizes[1]
    if not is_good or not 1 < pairs[1][1] <= LARGEST or form.get("vector_quant_dim", "out") != "out":
        raise source.error(f"{CONFIG}: config_for_layers says {shown(form)} of {module}, which cannot be read")
    return form


def _weight(source: CheckpointSource, module: str) -> Decoded:
    form = _form(source, module)
    parts, widths = _parts(source, module, form), _widths(form)
    length, books = form["vector_lens"][1], parts["centroids"]
    outlier = form["vector_lens"][0]
    shape = (form["out_features"], form["in_features"])

    def decode(start: int, stop: int) -> Tensor:
        first, last = start // length, -(-stop // length)
        main, above = _indices(parts, first, last, widths, form["group_size"])
        values = _vectors(source, books, main, length)
        if above is not None:
            values = values + _vectors(source, parts["res_centroids"], above, length)
        values = values[start - first * length : stop - first * length]
        if "outlier_indices" in parts:
            first, last = start // outlier, -(-stop // outlier)
            own = _plain(parts["outlier_indices"])[:, first:last]
            own = _vectors(source, parts["outlier_centroids"], own, outlier)
            values = torch.cat([own[start - first * outlier : stop - first * outlier], values], 1)
        if "perm" in parts:
            values = values[:, torch.argsort(_plain(parts["perm"]))]
        if "weight_scale" in parts:
            values = values * parts["weight_scale"].read() + parts["weight_bias"].read()
        return values.to(books.dtype)

    return Decoded(f"{module}.weight", books.dtype, shape, tuple(parts.values()), decode, step(shape, length))


def _widths(form: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bits of an index of centroids, and of one of residuals."""
    centroids, residuals = form["num_centroids"][1], max(0, form["num_res_centroids"][1])
    return (centroids - 1).bit_length(), (residuals - 1).bit_length() if residuals else 0


def _parts(source: CheckpointSource, module: str, form: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Take the tensors of a module by their names in it, without `.weight`."""
    (outlier, length), (apart, size) = form["vector_lens"], form["num_centroids"]
    residuals, is_packed = max(0, form["num_res_centroids"][1]), bool(form.get("is_indice_packed"))
    group, vectors = form["group_size"], -(-form["out_features"] // length)
    columns = form["outlier_size"] if outlier > 1 and apart > 0 else 0
    count = (form["in_features"] - columns) // max(1, group)
    words = -(-group * sum(_widths(form)) // 32) if is_packed else group
    wanted: dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {
        "indices": ((torch.int32,) if is_packed else INDICES, (count, vectors, words)),
        "centroids": (scaled.FLOATS, (count, size * length)),
    }
    if residuals:
        wanted["res_centroids"] = scaled.FLOATS, (count, residuals * length)
    if residuals and not is_packed:
        wanted["res_indices"] = INDICES, (count, vectors, group)
    if columns:
        wanted["outlier_centroids"] = scaled.FLOATS, (1, apart * outlier)
        wanted["outlier_indices"] = INDICES, (1, -(-form["out_features"] // outlier), columns)
    if form.get("enable_perm"):
        wanted["perm"] = (*INDICES, torch.int64), (form["in_features"],)
    if form.get("enable_norm"):
        wanted |= dict.fromkeys(("weight_scale", "weight_bias"), (scaled.FLOATS, (form["in_features"],)))
    if count * group + columns != form["in_features"]:
        raise source.error(f"{CONFIG}: {module} has {form['in_features']} columns, which groups of {group} do not give")
    return {
        key: source.take(f"{module}.{key}{'.weight' * key.endswith('centroids')}", dtypes, shape)
        for key, (dtypes, shape) in wanted.items()
    }


def _plain(stored: StoredTensor) -> Tensor:
    """Return indices that are stored one by one, int64."""
    values = stored.read()
    return values if values.dtype == torch.int64 else values.view(torch.int16).long() & 0xFFFF


def _indices(
    parts: Mapping[str, StoredTensor], first: int, last: int, widths: tuple[int, int], group: int
) -> tuple[Tensor, Tensor | None]:
    """Return the indices [codebooks, last - first, group] of rows of vectors, and those of residuals."""
    if parts["indices"].dtype != torch.int32:
        others = parts.get("res_indices")
        return _plain(parts["indices"])[:, first:last], None if others is None else _plain(others)[:, first:last]
    low, total = widths[0], sum(widths)
    words = parts["indices"].read()[:, first:last]
    bits = (words.unsqueeze(-1) >> torch.arange(32) & 1).flatten(-2)[..., : group * total]
    both = (bits.unflatten(-1, (group, total)).long() << torch.arange(total)).sum(-1)
    return both & (1 << low) - 1, both >> low & (1 << low) - 1 if widths[1] else None


def _vectors(source: CheckpointSource, books: StoredTensor, indices: Tensor, length: int) -> Tensor:
    """Return the rows [vectors * length, codebooks * group] that indices [codebooks, vectors, group] give."""
    table = books.read().unflatten(1, (-1, length))
    scaled.check_groups(source, books.name, indices, table.shape[1])
    chosen = torch.stack([book[own] for book, own in zip(table, indices, strict=True)])  # [books, vectors, group, v]
    return chosen.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)
