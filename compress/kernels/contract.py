"""Define kernels' contracts: of stored weights, and of caches of keys and values.

A kernel for a format on a device is the file `compress/kernels/<folder of the device>/<format>.py` with one function,

    prepare(tensors, params, shape) -> Prepared | None

None means that the weight has to be decoded by its format. The file is found by its name: a kernel for an existing
format is one new file and no changed line elsewhere (tests/kernels/test_kernel_contract.py adds one).

Where a kernel looks single rows of a weight up, the file has one more function,

    look_up(tensors, params, shape, ids, dtype) -> Tensor | None

It returns the rows ids [n], contiguous and of any integer type, as [n, in] of `dtype`, to the bit what `decode_rows` of
the format gives. None means that the format has to decode them.

`prepare` must not read the elements of the tensors. They may be on the meta device, where dispatch asks what a kernel
would do, and their elements may change afterwards as long as they stay where they are.

Kernels that read keys and values are given the layouts of codes, and keep the limits below. Such a kernel is the file
`compress/kernels/<folder of the device>/kv_<name>.py`, which `dispatch.kv(device, name)` finds:

- affine: scores and mixed values of min-max integers (compress/kv/codecs/kivi.py), `decode`: the same written out;
- levels: scores and mixed values of codes of one table with a norm for each token (compress/kv/codecs/lloyd.py);
- mixed: values whose bits differ between channels; prerope: keys of this sort before the rotary embedding
  (compress/kv/codecs/pca.py); encode: such codes made of vectors;
- attention: attention of one token in one launch (compress/kv/fused.py).

Each has `supports`, which says what it can read. Those of packed pages are `paged.py` (compress/kernels/paged.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from compress.kernels.calls import ActivationRows, CompiledCall, Take
from compress.numerics.packing import FIELDS

Shape = tuple[int, int]  # of a weight, [out, in]
Decoder = Callable[[Tensor, int], None]  # (rows [n, in] to write, contiguous; the first of them, see PANEL_ROWS)
Joined = Callable[[Sequence[Any], Tensor], Tensor]  # (kernels, activations as `__call__` takes them)
PANEL_ROWS = 16  # a decoder begins at multiples of it

# Of keys and values:
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


class Prepared(ABC):
    """A stored weight [out, in] that a kernel reads, as long as its tensors stay where they are."""

    types: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)  # of activations and decoded weights
    most_rank: ClassVar[int] = 0  # of a low-rank part that `plus` adds faster than a second product

    def __init__(self, tensors: Mapping[str, Tensor], params: Any, shape: Shape) -> None:
        self.tensors, self.params, self.shape = tensors, params, shape

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return x [..., in], contiguous and of one of `types`, times the weight: [..., out] of the same type."""

    @abstractmethod
    def most_rows(self, dtype: torch.dtype) -> int:
        """Return up to how many rows of activations a call beats decoding the weight and F.linear."""

    @abstractmethod
    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] of one of `types`."""

    def decoder(self, dtype: torch.dtype) -> Decoder | None:
        """Return a function that writes some rows of the weight, columns ordered as `arranged` does; None: `decode`."""
        return None

    def panel_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which decoded rows are multiplied with activations of `dtype`: the faster one here."""
        return dtype

    def arranged(self, x: Tensor) -> Tensor:
        """Return x [..., in] with its columns in the order in which `decoder` writes those of the weight."""
        return x

    def fuse(self, others: Sequence[Prepared]) -> Joined | None:
        """Return what multiplies with this weight and then others in one call; None: there is nothing that does.

        It is given these kernels in this order, and keeps none of them. It returns outputs behind each other.
        """
        return None

    def calls(self, rows: ActivationRows, take: Take, others: Sequence[Prepared] = ()) -> Iterable[CompiledCall] | None:
        """Return the compiled calls that multiply rows with this weight and then others, outputs behind each other.

        rows: any number, of one of `types`. take: gives memory for them. They are valid as long as the tensors
        of all weights stay where they are. None: there are none.
        """
        return None

    def plus(self, x: Tensor, hidden: Tensor, factor: Tensor) -> Tensor:
        """Return the product with x, plus hidden [..., rank] times factor [rank, out] for a rank up to `most_rank`."""
        return self(x) + hidden @ factor


class PlanarCodes(NamedTuple):
    """Codes of `bits` bits for `width` channels of a head; `group` tokens or channels share a scale.

    With a `lower` plane of as many bits, x = minimum + scale (upper + (lower - 2^(bits - 1)) / 2^bits).
    """

    bits: int
    width: int
    group: int
    lower: bool = False  # not of 3 bits

    @property
    def words(self) -> int:
        """Of a token, in each plane."""
        return self.width // FIELDS[self.bits]

    @property
    def planes(self) -> int:
        return 3 if self.bits == 3 else 1 + self.lower


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
