"""Cut a table outside of the blocks into rows that are quantized at a time, so that memory stays that of a block."""

from __future__ import annotations

import dataclasses

from compress import formats
from compress.types import NO_TRANSFORMS, LayerPlan

CHUNK = 1 << 24  # weights that are quantized at a time, at least
ROW_MULTIPLE = 16  # of the rows of all chunks but the last


def chunk_rows(layer: LayerPlan) -> int:
    """Return the rows of a table that are quantized at a time: all of them where its format cannot join rows.

    A chunk has at least twice as many rows as columns, so that factoring the Hessian anew costs little beside it.
    """
    rows, columns = layer.spec.shape
    if not formats.has_rows(layer.stored):
        return rows
    return min(rows, max(CHUNK // columns, 2 * columns) // ROW_MULTIPLE * ROW_MULTIPLE)


def is_turned(layer: LayerPlan) -> bool:
    """Return whether a table is stored in another basis than the rest of the model, which a transform has turned.

    The operations around it are then the transform's; others are part of how it is quantized.
    """
    return bool(layer.stored.ops) and not layer.scheme.incoherence


def chunk(layer: LayerPlan, rows: int) -> LayerPlan:
    """Return the plan of so many rows of a table.

    It is that of the matrix alone: what a transform leaves to run time lies around all rows.
    """
    shape = (rows, layer.spec.shape[1])
    spec = dataclasses.replace(layer.spec, shape=shape)
    stored = dataclasses.replace(layer.stored, ops=NO_TRANSFORMS) if is_turned(layer) else layer.stored
    return dataclasses.replace(layer, spec=spec, stored=stored, nbytes=formats.nbytes(stored, shape))
