"""Write PTX that turns packed words (compress/numerics/packing.py) into pairs of floating-point numbers.

A register holds two adjacent int16 words of a row. A field that is masked in place and or-ed with the exponent of
1024 (float16) or 128 (bfloat16) is the number 1024 + q * 2**bit; one multiply-add takes it to q - middle, exactly:
    (1024 + q * 2**bit) * 2**-bit - (2**(10 - bit) + middle)
so that a shift is needed only where a field does not fit into the mantissa.

All functions are constexpr functions: plain Python that kernels call while they are compiled, and whose source is a
part of the key of Triton's cache.
"""

from __future__ import annotations

from triton import constexpr_function

from compress.numerics.packing import FIELDS


@constexpr_function
def field_text(width: int, field: int, middle: int, bf16: bool) -> str:
    """PTX for a field of the word $1 (of the words $1, $2, $3 for the 16th field of width 3): $0 = q - middle."""
    if width > mantissa(bf16):
        return byte_text(field, middle)
    if width == 3 and field == 15:
        bit, body = spare_bit(bf16), spare_text(bf16)
    else:
        shift, bit = place(width, field % 5 if width == 3 else field, bf16)
        body = masked("t", "$1", shift, ((1 << width) - 1) << bit, both(power(mantissa(bf16), bf16)))
    body += f"mov.b32 c, {both(0x8000 | power(mantissa(bf16) - bit, bf16) | middle << bit)}; "
    if bit == 0 and not bf16:
        body += "add.f16x2 $0, t, c; "
    else:  # bfloat16 has no addition before sm_90
        body += f"mov.b32 m, {both(power(-bit, bf16))}; {fma(bf16)} $0, t, m, c; "
    return f"{{ .reg .b32 t, u, c, m; {body}}}"


@constexpr_function
def combine_text(low_width: int, bf16: bool) -> str:
    """PTX that puts two planes together: $0 = $1 * 2**low_width + $2."""
    return f"{{ .reg .b32 m; mov.b32 m, {both(power(low_width, bf16))}; {fma(bf16)} $0, $1, m, $2; }}"


@constexpr_function
def place(width: int, field: int, bf16: bool) -> tuple[int, int]:
    """(shift, bit): after a shift right the field stands at `bit`, whole within the mantissa. Fields share shifts."""
    per_shift = mantissa(bf16) // width
    shift = field // per_shift * per_shift * width
    return shift, field * width - shift


@constexpr_function
def mantissa(bf16: bool) -> int:
    """Stored bits."""
    return 7 if bf16 else 10


@constexpr_function
def power(exponent: int, bf16: bool) -> int:
    """The 16 bits of 2**exponent."""
    return (127 + exponent) << 7 if bf16 else (15 + exponent) << 10


@constexpr_function
def fma(bf16: bool) -> str:
    return "fma.rn.bf16x2" if bf16 else "fma.rn.f16x2"


@constexpr_function
def both(half: int) -> str:
    """The same 16 bits in both halves of a register."""
    return f"0x{half << 16 | half:08x}"


@constexpr_function
def masked(target: str, source: str, shift: int, mask: int, rest: str) -> str:
    """target = (source >> shift) & mask | rest."""
    shifted = f"shr.u32 u, {source}, {shift}; " if shift else ""
    return f"{shifted}lop3.b32 {target}, {'u' if shift else source}, {both(mask)}, {rest}, 0xea; "


@constexpr_function
def spare_bit(bf16: bool) -> int:
    """Where the 16th code of width 3 is gathered, so that one word needs no shift but that of its last field."""
    return 15 - place(3, 4, bf16)[0] - 2


@constexpr_function
def spare_text(bf16: bool) -> str:
    """t = the top bits of three words at `spare_bit`, with the exponent."""
    bit, shift = spare_bit(bf16), place(3, 4, bf16)[0]
    text = masked("t", "$1", shift + 2, 1 << bit, both(power(mantissa(bf16), bf16)))
    text += masked("t", "$2", shift + 1, 2 << bit, "t")
    return text + masked("t", "$3", shift, 4 << bit, "t")


@constexpr_function
def byte_text(field: int, middle: int) -> str:
    """bfloat16 stores 7 bits: (128 + low bits) - (128 if the top bit is set, else 256) = q - 128."""
    assert middle == 128
    body = f"shr.u32 u, $1, {8 * field}; lop3.b32 t, u, 0x007f007f, 0x43004300, 0xea; "
    body += "lop3.b32 c, u, 0x00800080, 0xc380c380, 0x6a; "  # the top bit flips -256 to -128
    return f"{{ .reg .b32 t, u, c, m; {body}mov.b32 m, 0x3f803f80; fma.rn.bf16x2 $0, t, m, c; }}"


@constexpr_function
def fields(width: int) -> int:
    """Codes that a word (three words for width 3) of a plane holds."""
    return FIELDS[width]


@constexpr_function
def narrow_words(width: int, tiles: int) -> int:
    """Words of a plane (each of the three for width 3) in so many tiles of 32 columns."""
    return tiles * 32 // FIELDS[width]


@constexpr_function
def chain(count: int, group: int, tile_words: int) -> int:
    """Of the `count` fields of a tile, how many in a row share a group of `group` columns (0: the whole row)."""
    if group == 0 or group % (count * tile_words) == 0:
        return count
    if count * tile_words % group == 0 and group % tile_words == 0:
        return group // tile_words
    return 1
