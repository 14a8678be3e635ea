"""Choose launch configurations of the `int` kernel by bits and rows of activations.

Chosen by the instructions, registers and shared memory of the code compiled for sm_90, not by timings: a sweep on a
device may replace any row. tests/kernels/test_triton_int_code.py compiles all of them. Steps of 512 columns of every
width:
fewer pay more for each step, more do not leave the registers that several rows of activations need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.formats.int import PLANES
from compress.numerics.packing import FIELDS, WORDS

LEAST_WORDS = 16  # of a step: the tensor cores multiply 16 columns at a time


@dataclass(frozen=True)
class Config:
    block_n: int  # rows of the weight
    block_words: int  # words of a tile in one step, at most
    warps: int
    stages: int
    programs: int  # that a multiprocessor of sm_90 runs at once, by registers and shared memory
    with_zeros: int = 0  # the same where the loop takes sums for zero points (8 rows), if it is fewer


# (bits, rows of activations, at most) -> configurations from many to few rows of the weight: the first that fills the
# device is taken. More rows than the table has are computed in several launches.
TABLE: dict[tuple[int, int], tuple[Config, ...]] = {
    (2, 8): (Config(64, 64, 4, 4, 3), Config(16, 64, 1, 4, 7)),
    (2, 16): (Config(64, 64, 4, 3, 3),),
    (2, 32): (Config(64, 64, 4, 3, 2),),
    (2, 64): (Config(128, 64, 8, 2, 1), Config(64, 64, 4, 2, 1)),
    (3, 8): (Config(64, 32, 4, 4, 3), Config(16, 32, 1, 4, 6)),
    (3, 16): (Config(64, 32, 4, 3, 3),),
    (3, 32): (Config(64, 32, 4, 2, 2),),
    (3, 64): (Config(128, 32, 8, 2, 1), Config(64, 32, 4, 2, 1)),
    (4, 8): (Config(64, 128, 4, 3, 4), Config(16, 128, 1, 3, 9)),
    (4, 16): (Config(64, 128, 4, 3, 2), Config(64, 64, 4, 3, 4)),
    (4, 32): (Config(64, 128, 4, 2, 2), Config(64, 64, 4, 3, 3)),
    (4, 64): (Config(128, 128, 8, 2, 1), Config(64, 64, 4, 2, 2)),
    (5, 8): (Config(64, 32, 4, 3, 3),),
    (5, 16): (Config(64, 32, 4, 3, 2),),
    (5, 32): (Config(64, 32, 4, 2, 2),),
    (5, 64): (Config(128, 32, 8, 2, 1),),
    (6, 8): (Config(64, 64, 4, 3, 3, 2),),
    (6, 16): (Config(64, 64, 4, 3, 2),),
    (6, 32): (Config(64, 64, 4, 2, 2),),
    (6, 64): (Config(128, 64, 8, 2, 1),),
    (7, 8): (Config(64, 32, 4, 3, 3),),
    (7, 16): (Config(64, 32, 4, 3, 2),),
    (7, 32): (Config(64, 32, 4, 2, 2),),
    (7, 64): (Config(128, 32, 8, 2, 1),),
    (8, 8): (Config(64, 128, 4, 3, 5, 4), Config(16, 128, 1, 3, 13)),
    (8, 16): (Config(64, 128, 4, 3, 4), Config(64, 64, 4, 3, 6)),
    (8, 32): (Config(64, 128, 4, 2, 3), Config(64, 64, 4, 3, 4)),
    (8, 64): (Config(128, 128, 8, 2, 1), Config(64, 64, 4, 2, 2)),
}

# For 16 rows elsewhere, by bits. Other devices multiply more rows in several launches: their tensor cores take weights
# from registers for few rows (sm_80), or for less than a warpgroup (sm_100), only.
ELSEWHERE = {
    2: Config(32, 64, 2, 3, 5),
    3: Config(16, 32, 1, 3, 5),
    4: Config(32, 128, 2, 3, 4),
    5: Config(32, 32, 2, 3, 4),
    6: Config(32, 64, 2, 3, 3),
    7: Config(16, 32, 1, 3, 4),
    8: Config(32, 128, 2, 3, 6),
}


def table(bits: int, major: int) -> dict[int, tuple[Config, ...]]:
    """Rows of activations, ascending -> configurations, for devices of compute capability `major`."""
    known = {rows: TABLE[width, rows] for width, rows in sorted(TABLE) if width == bits}
    return known if major == 9 else {8: known[8], 16: (ELSEWHERE[bits],)}


def fitted(config: Config, bits: int, rows: int, most_words: int, shared: int) -> Config:
    """The configuration for steps of at most `most_words` words, a power of two, and `shared` bytes of memory."""
    config = replace(config, block_words=min(config.block_words, most_words))
    while shared_bytes(config, bits, rows) > shared and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    while shared_bytes(config, bits, rows) > shared and config.block_words > LEAST_WORDS:
        config = replace(config, block_words=config.block_words // 2)
    return config


def shared_bytes(config: Config, bits: int, rows: int) -> int:
    """Shared memory of a program, at most: words and activations of the steps in flight, and the split's barrier."""
    fields = max(FIELDS[width] for width in PLANES[bits])
    words = sum(WORDS[width] * fields // FIELDS[width] for width in PLANES[bits])  # of a row of the weight
    held = (config.stages - 1) * config.block_n * words + (config.stages - (rows == 8)) * rows * fields
    return 2 * config.block_words * held + 1024
