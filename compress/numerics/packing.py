"""Pack n-bit fields into words and unpack them, nothing else.

Two layouts, both exact for every width:
- `pack_planar` / `unpack_planar`: the weight codes, in the order a matmul kernel reads them; `pack_planes` /
  `unpack_planes` put codes of any width from 1 to 16 bits together from such planes.
- `pack_stream` / `unpack_stream`: a little-endian bit stream for small side information (zero points).

Planar layout. The unit is an int16 word with F = 16 // width fields. A tile is TW words along K, that is TW * F
consecutive columns; field f of word j in tile t holds column t*TW*F + f*TW + j, so that each field of a row-tile
meets a contiguous slice of the activations. Widths 1, 2, 4 and 8 fill a word exactly. Width 3 keeps three words for
sixteen codes: each word has five 3-bit fields (bits 0-14), and the three spare top bits form the sixteenth code.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FIELDS = {1: 16, 2: 8, 3: 16, 4: 4, 8: 2}  # codes that one word (three words for width 3) holds
WORDS = {1: 1, 2: 1, 3: 3, 4: 1, 8: 1}  # words that belong together
WIDE = 16  # bits of a code that fills a word by itself


def planar_shape(rows: int, columns: int, width: int) -> tuple[int, ...]:
    """Return the shape of the int16 words for codes [rows, columns]; columns must be a multiple of FIELDS[width]."""
    words = columns // FIELDS[width]
    return (rows, words) if WORDS[width] == 1 else (rows, WORDS[width], words)


def pack_planar(codes: Tensor, width: int, tile_words: int) -> Tensor:
    """Pack codes [rows, columns] uint8 < 2**width into int16 words of `planar_shape`.

    columns must be a multiple of tile_words * FIELDS[width].
    """
    rows, columns = codes.shape
    tiles = codes.reshape(rows, columns // (tile_words * FIELDS[width]), FIELDS[width], tile_words)  # row, tile, f, j
    if width != 3:
        words = torch.zeros(rows, tiles.shape[1], tile_words, dtype=torch.int16, device=codes.device)
        for f in range(FIELDS[width]):
            words |= tiles[:, :, f].to(torch.int16) << (f * width)
        return words.reshape(rows, -1)
    words = torch.zeros(rows, 3, tiles.shape[1], tile_words, dtype=torch.int16, device=codes.device)
    for plane in range(3):
        for i in range(5):
            words[:, plane] |= tiles[:, :, 5 * plane + i].to(torch.int16) << (3 * i)
        words[:, plane] |= ((tiles[:, :, 15].to(torch.int16) >> plane) & 1) << 15
    return words.reshape(rows, 3, -1)


def unpack_planar(words: Tensor, width: int, tile_words: int) -> Tensor:
    """Unpack what `pack_planar` packed: codes [rows, columns] uint8."""
    rows, fields = words.shape[0], FIELDS[width]
    tiles = words.reshape(*words.shape[:-1], -1, tile_words)  # row, (plane,) tile, j
    out = torch.empty(rows, tiles.shape[-2], fields, tile_words, dtype=torch.uint8, device=words.device)
    mask = (1 << width) - 1
    if width != 3:
        for f in range(fields):
            out[:, :, f] = (tiles >> (f * width)) & mask
        return out.reshape(rows, -1)
    for plane in range(3):
        for i in range(5):
            out[:, :, 5 * plane + i] = (tiles[:, plane] >> (3 * i)) & mask
    spare = (tiles >> 15) & 1  # row, plane, tile, j
    out[:, :, 15] = spare[:, 0] | spare[:, 1] << 1 | spare[:, 2] << 2
    return out.reshape(rows, -1)


def pack_stream(codes: Tensor, width: int) -> Tensor:
    """Pack codes [..., n] uint8 < 2**width, n * width a multiple of 8: uint8 [..., n * width / 8], lowest bit first."""
    bits = (codes.unsqueeze(-1) >> torch.arange(width, dtype=torch.uint8, device=codes.device)) & 1
    octets = bits.reshape(*codes.shape[:-1], -1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack_stream(stream: Tensor, width: int) -> Tensor:
    """Unpack what `pack_stream` packed: codes [..., n] uint8."""
    bits = (stream.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=stream.device)) & 1
    fields = bits.reshape(*stream.shape[:-1], -1, width)
    return (fields << torch.arange(width, dtype=torch.uint8, device=stream.device)).sum(-1, dtype=torch.uint8)


def plane_widths(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes of codes of 1 to 16 bits, high bits first: 9 = 8 + 1; 3 and 16 stand alone.

    A plane of 16 is one int16 word for each code (WIDE), the others are planar.
    """
    if not 1 <= bits <= 16:
        raise ValueError(f"bits {bits} is not one of 1..16")
    return (bits,) if bits in (3, WIDE) else tuple(width for width in (8, 4, 2, 1) if bits & width)


def plane_fields(bits: int) -> int:
    """Return the codes of a word of the narrowest plane: columns are padded to a multiple of tile_words * this."""
    return max(FIELDS.get(width, 1) for width in plane_widths(bits))


def planes_shape(rows: int, columns: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the int16 tensors that `pack_planes` gives for codes [rows, columns]."""
    return {f"words{w}": (rows, columns) if w == WIDE else planar_shape(rows, columns, w) for w in plane_widths(bits)}


def pack_planes(codes: Tensor, bits: int, tile_words: int) -> dict[str, Tensor]:
    """Pack codes [rows, columns] of any integer type, 0 <= code < 2**bits, bits 1..16: {"words<width>": int16}.

    columns must be a multiple of tile_words * plane_fields(bits).
    """
    widths, low = plane_widths(bits), bits
    if widths == (WIDE,):
        return {f"words{WIDE}": codes.to(torch.int16)}  # wraps: codes from 2**15 are negative words
    planes = {}
    for width in widths:
        low -= width
        planes[f"words{width}"] = pack_planar(((codes >> low) & ((1 << width) - 1)).to(torch.uint8), width, tile_words)
    return planes


def unpack_planes(planes: Mapping[str, Tensor], bits: int, tile_words: int) -> Tensor:
    """Unpack what `pack_planes` packed: codes [rows, columns] int32."""
    if bits == WIDE:
        return planes[f"words{WIDE}"].int() & 0xFFFF
    first, *rest = plane_widths(bits)
    codes = unpack_planar(planes[f"words{first}"], first, tile_words).int()
    for width in rest:
        codes = codes << width | unpack_planar(planes[f"words{width}"], width, tile_words)
    return codes
