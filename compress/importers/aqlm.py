"""Read AQLM's additive codes: groups of a weight are sums of vectors from codebooks, times a scale for their outputs.

codes [out / a, in / b, codebooks] are indices of `nbits_per_codebook` bits in signed integers, codebooks
[codebooks, 2^bits, a, b], scales [out / a, 1, 1, 1]. A sum and its product are rounded to the type of the codebooks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from compress.importers import options, scaled
from compress.importers.source import CheckpointSource, Decoded, step
from compress.storage.checkpoint import Readable

OPTIONS: options.Options = {
    **dict.fromkeys(("in_group_size", "out_group_size", "num_codebooks", "nbits_per_codebook"), (int, None)),
    "linear_weights_not_to_quantize": options.NAMES,
}
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def describe(source: CheckpointSource) -> str:
    """Return how the weights are stored."""
    books, bits = source.number("num_codebooks", 1), source.number("nbits_per_codebook", 16)
    return f"aqlm of {books} x {bits} bits for {source.number('in_group_size', 8)} weights"


def tensors(source: CheckpointSource) -> dict[str, Readable]:
    """Return the weights by name; CheckpointError for one that lacks a part, or has one of another shape."""
    return {f"{module}.weight": _weight(source, module) for module in source.ending(".codebooks")}


def _weight(source: CheckpointSource, module: str) -> Decoded:
    codes, books = source.take(f"{module}.codes", INTEGERS), source.take(f"{module}.codebooks", scaled.FLOATS)
    fits = len(codes.shape) == 3 and len(books.shape) == 4 and all((*codes.shape, *books.shape))
    if not fits or codes.shape[2] != books.shape[0]:
        raise source.error(f"{codes.name} {list(codes.shape)} and {books.name} {list(books.shape)} do not fit together")
    (down, across, count), (_, size, rows, columns) = codes.shape, books.shape
    scales = source.take(f"{module}.scales", scaled.FLOATS, (down, 1, 1, 1))
    shape, dtype = (down * rows, across * columns), books.dtype

    def decode(start: int, stop: int) -> Tensor:
        first, last = start // rows, -(-stop // rows)
        indices = codes.rows(first, last).long() % size + torch.arange(count) * size
        sums = embedding_bag(indices.flatten(0, 1), books.read().flatten(0, 1).flatten(1), mode="sum")
        blocks = sums.view(last - first, across, rows, columns) * scales.rows(first, last)
        return blocks.transpose(1, 2).reshape(-1, shape[1])[start - first * rows : stop - first * rows].to(dtype)

    return Decoded(f"{module}.weight", dtype, shape, (codes, books, scales), decode, step(shape, rows))
