"""Define what kernels that read keys and values are given: the layouts of codes, and the limits that all keep.

A kernel is the file `compress/kernels/<folder of the device>/kv_<name>.py`, which `dispatch.kv(device, name)` finds:

- affine: scores and mixed values of min-max integers (compress/kv/codecs/kivi.py), `decode`: the same written out;
- levels: scores and mixed values of codes of one table with a norm for each token (compress/kv/codecs/lloyd.py);
- mixed: values whose bits differ between channels; prerope: keys of this sort before the rotary embedding
  (compress/kv/codecs/pca.py); encode: such codes made of vectors;
- attention: attention of one token in one launch (compress/kv/fused.py).

Each has `supports`, which says what it can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from compress.numerics.packing import FIELDS

MOST_ROWS = 16  # queries up to which reading codes beats unpacking them once and a product of matrices
SMALL = 1 << 16  # codes up to which nothing is gained
BLOCK = 32  # tokens of values that are read together: kernels take multiples
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # keys and values that are written, cos and sin

PIECE = 16  # channels that have the same bits, or tokens of table codes, that are read together
LARGEST_LEVEL = 127  # levels are multiples of a step by at most this, so that sums over 512 channels fit int32
MOST_LEVEL_BITS = 4  # codes of more bits have levels that are no such multiples

PLANES = (4, 2, 1)  # bits of a field of codes of mixed bits
MOST_MIXED_BITS = sum(PLANES)
NORM_STEPS = 16  # norms of 8 bits: steps in an octave
LevelTables = tuple[tuple[float, ...], ...]  # levels by bits, from 0 to MOST_MIXED_BITS


class PlanarCodes(NamedTuple):
    """Codes of `bits` bits for `width` channels of a head; `group` tokens or channels share a scale."""

    bits: int
    width: int
    group: int

    @property
    def words(self) -> int:
        """Of a token, in each plane."""
        return self.width // FIELDS[self.bits]

    @property
    def planes(self) -> int:
        return 3 if self.bits == 3 else 1


class MixedCodes(NamedTuple):
    """Tokens of codes of mixed bits as they are stored, and how to read them."""

    codes: Tensor  # uint8 [B, 1, n, bytes], rows contiguous
    norms: Tensor  # uint8 [B, h, n, 1], contiguous along n
    starts: Tensor  # int32 [pieces, 4]: first byte of each plane; fields of the head before the piece
    bounds: Tensor  # int32 [h, MOST_MIXED_BITS + 1]: first piece of each number of bits, falling from the most
    most: int  # pieces of a head, at most


class Rotary(NamedTuple):
    """The rotary embedding of some tokens; nothing is read where no channel turns."""

    width: int  # channels that turn
    cos: Tensor  # [B or 1, n, width / 2 or more], contiguous along the last axis
    sin: Tensor


@dataclass(frozen=True)
class HeadLayout:
    """How one of keys and values is coded for attention in one launch.

    "channel": x = scale code + minimum, both float16 [B, h, n / group, width], for `group` tokens and each channel;
    "token": the same, [B, h, n, width / group], for each token and `group` channels;
    "norm": x = norm levels[code], norm float16 [B, h, n] for each token, levels float16 [2^bits].
    """

    bits: int
    width: int  # channels of a head
    kind: Literal["channel", "token", "norm"]
    group: int = 1


class CodedHeads(NamedTuple):
    """The tensors of one of keys and values, [B, h, ...]; rows of a head are contiguous."""

    layout: HeadLayout
    planes: Sequence[Tensor]  # int16 [B, h, n, words]: three of 3 bits, else one
    scales: Tensor  # or norms
    minima: Tensor | None = None
    levels: Tensor | None = None


class Query(NamedTuple):
    """Queries of the new token of each sequence."""

    q: Tensor  # [B, H, width], for exact keys
    coded: Tensor | None = None  # the same for codes, where they are in another basis
    bias: Tensor | None = None  # float32 [B, H]: added to the products with codes


class Attended(NamedTuple):
    """The attention's output [B, H, value width] of the type of q; of values with norms (whose basis is their own) only
    what coded tokens add to it, float32, and apart what exact ones add and [B, H], the weight of all coded tokens.
    """

    out: Tensor
    exact: Tensor | None = None
    mass: Tensor | None = None


def is_worthwhile(rows: Tensor, codes: int | None = None) -> bool:
    """Return whether kernels should read so many codes (None: enough) for queries or probabilities [B, h, m, ...]."""
    return rows.dtype == torch.float32 and rows.shape[2] <= MOST_ROWS and (codes is None or codes > SMALL)
