"""Code bytes by their frequencies: range asymmetric numeral systems (rANS, Duda, arXiv 1311.2540).

    frequencies(counts)                          # int64 [tables, 256]; each row sums to 4,096
    streams = encode(symbols, contexts, freqs)   # one stream of int16 words for each row of symbols
    decode(streams, contexts, freqs, count)      # the same symbols

A state x stands for all symbols so far. A symbol of frequency f, whose slots of the 2^12 begin at c, turns x into
(x // f) 2^12 + c + x % f, which adds log2(2^12 / f) bits. States stay in [2^16, 2^32): before a symbol that would go
beyond, the low 16 bits leave as a word. Decoding undoes this from the last symbol coded to the first, so encoding runs
backwards and decoding forwards.

32 states share a stream: symbol i belongs to state i % 32, so that 32 symbols are independent and can be computed at
once. A stream holds the 32 states, low word first, then the words in the order in which decoding asks for them. It
costs 16 bits a state beyond the information: 64 bytes a stream.

This file is the plain form, in torch, which codes streams of equal length side by side. compress/kernels/loops/rans.py
is the compiled form; both give the same bytes. Neither adapts: frequencies are given. A stream that is damaged mostly
ends in another state than the first, and is found; a checksum beside it finds the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FREQUENCY_BITS = 12
TOTAL = 1 << FREQUENCY_BITS
LANES = 32  # states of a stream
SYMBOLS = 256
LEAST = 1 << 16  # least state, and the first one
HEAD = 2 * LANES  # words of the states
DAMAGED = "a stream of coded bytes is damaged: it does not end where it should"


def frequencies(counts: Tensor) -> Tensor:
    """Return int64 [tables, 256] in proportion to counts [tables, 256] (integers >= 0), each row with the sum 4,096.

    What was counted at least once has at least 1. A row without counts gets 16 for each symbol.
    """
    return torch.tensor([_shares(row) for row in counts.tolist()], dtype=torch.int64).reshape(-1, SYMBOLS)


def _shares(counts: list[int]) -> list[int]:
    """Return integers with the sum 4,096; what is left of rounding down goes to the largest remainders."""
    total = sum(counts)
    if not total:
        return [TOTAL // SYMBOLS] * SYMBOLS
    shares = [max(1, count * TOTAL // total) if count else 0 for count in counts]
    order = sorted(range(SYMBOLS), key=lambda s: (-(counts[s] * TOTAL % total), s))
    for symbol in [s for s in order if counts[s] * TOTAL >= total][: max(0, TOTAL - sum(shares))]:
        shares[symbol] += 1
    while (over := sum(shares) - TOTAL) != 0:  # rare symbols have more than their share: the most frequent ones pay
        largest = max(range(SYMBOLS), key=shares.__getitem__)
        shares[largest] -= 1 if over > 0 else -1
    return shares


def starts(freqs: Tensor) -> Tensor:
    """Return the first slot of each symbol, int64 [tables, 256]."""
    return freqs.cumsum(1) - freqs


def lookup(freqs: Tensor) -> Tensor:
    """Return what each slot decodes to, int64 [tables, 4096]: symbol | offset in it << 8 | (frequency - 1) << 20."""
    first = starts(freqs)
    symbols = torch.stack([torch.arange(SYMBOLS).repeat_interleave(row) for row in freqs])
    offsets = torch.arange(TOTAL) - first.gather(1, symbols)
    return symbols | (offsets << 8) | ((freqs.gather(1, symbols) - 1) << 20)


def encode(symbols: Tensor, contexts: Tensor, freqs: Tensor) -> list[Tensor]:
    """Return one int16 stream for each row of symbols uint8 [streams, count].

    contexts: int64 [columns], which table symbol i % columns of a stream belongs to. freqs: int64 [tables, 256], at
    least 1 for every symbol that comes up in its context.
    """
    streams, count = symbols.shape
    first, columns = starts(freqs), len(contexts)
    states = torch.full((streams, LANES), LEAST, dtype=torch.int64)
    words = torch.zeros(streams, count, dtype=torch.int64)
    emitted = torch.zeros(streams, count, dtype=torch.bool)
    for start in reversed(range(0, count, LANES)):
        stop = min(start + LANES, count)
        context = contexts[torch.arange(start, stop) % columns]
        symbol = symbols[:, start:stop].long()
        freq, base, x = freqs[context, symbol], first[context, symbol], states[:, : stop - start]
        full = x >= freq << (32 - FREQUENCY_BITS)
        words[:, start:stop], emitted[:, start:stop] = x & 0xFFFF, full
        x = torch.where(full, x >> 16, x)
        states[:, : stop - start] = ((x // freq) << FREQUENCY_BITS) + base + x % freq
    head = torch.stack((states & 0xFFFF, states >> 16), -1).flatten(1)
    return [_to_int16(torch.cat((h, w[e]))) for h, w, e in zip(head, words, emitted, strict=True)]


def decode(streams: Sequence[Tensor], contexts: Tensor, freqs: Tensor, count: int) -> Tensor:
    """Return the symbols uint8 [streams, count] of int16 streams; the rest as in `encode`.

    Raises ValueError for a stream that does not end in the first state with its last word.
    """
    check(streams)
    lengths = torch.tensor([len(stream) for stream in streams]) - HEAD
    words = torch.zeros(len(streams), int(lengths.max()) + 1, dtype=torch.int64)
    states = torch.stack([stream[:HEAD].long() & 0xFFFF for stream in streams]).unflatten(1, (LANES, 2))
    states = states[..., 0] | states[..., 1] << 16
    for row, stream in zip(words, streams, strict=True):
        row[: len(stream) - HEAD] = stream[HEAD:].long() & 0xFFFF
    table, columns = lookup(freqs).flatten(), len(contexts)
    out = torch.empty(len(streams), count, dtype=torch.uint8)
    used = torch.zeros(len(streams), 1, dtype=torch.int64)
    for start in range(0, count, LANES):
        stop = min(start + LANES, count)
        context = contexts[torch.arange(start, stop) % columns]
        x = states[:, : stop - start]
        entry = table[(context << FREQUENCY_BITS) + (x & (TOTAL - 1))]
        x = ((entry >> 20) + 1) * (x >> FREQUENCY_BITS) + ((entry >> 8) & (TOTAL - 1))
        empty = x < LEAST
        place = (used + empty.cumsum(1) - empty.long()).clamp(max=words.shape[1] - 1)
        states[:, : stop - start] = torch.where(empty, x << 16 | words.gather(1, place), x)
        used += empty.sum(1, keepdim=True)
        out[:, start:stop] = entry & 0xFF
    if not (torch.equal(used[:, 0], lengths) and bool((states == LEAST).all())):
        raise ValueError(DAMAGED)
    return out


def check(streams: Sequence[Tensor]) -> None:
    """Raise ValueError for a stream that is too short to hold its states."""
    if any(len(stream) < HEAD for stream in streams):
        raise ValueError(DAMAGED)


def _to_int16(words: Tensor) -> Tensor:
    """Return int64 numbers below 2^16 as int16 of the same bits."""
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
