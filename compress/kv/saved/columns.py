"""Code a matrix of integers by its columns, without loss: predict, look up a table, and rANS (numerics/rans.py).

A row is a token, a column a channel. Four numbers say how a column is coded, and nothing adapts, so that the rows can
be cut into chunks that are decoded alone:

    offset   what is subtracted from all of the column, its rounded mean
    predict  sixteenths of the value one row earlier that are subtracted, 0 to 15; the first row of a chunk has no row
             before it
    table    which table of frequencies of the file its codes follow

A code that is left is a symbol: code + 128 from 1 to 255, or symbol 0 with the code beside the stream as int16. Columns
of bytes (uint8) are their own symbols. Tables are shared by all matrices of a file: columns are put together by what
they cost with each table (a k-means whose distance is bits), so that 32 tables cost 16 KiB where one for each channel
would cost 2 bits a number (CacheGen's, with chunks of 256 tokens).

CacheGen (arXiv 2310.07240) takes the differences of nine tokens to a tenth one, the anchor. Here a value is predicted
by a share of the one before it, chosen for each column: whole differences cost bits wherever neighbours correlate by
less than a half (docs/kv_saved.md has the figures). Prediction is of integers, after rounding, so that it changes no
value and errors do not add up.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.loops import rans as compiled
from compress.numerics import rans

CHUNK = 256  # rows
SIXTEENTHS = 16
CENTRE = 128  # symbol of the code 0
MAX_INTEGER = 8191  # then every code is an int16
MOST_TABLES = 32
TABLE_SYMBOLS = 1 << 15  # symbols that are worth a table
CLUSTERING_ROUNDS = 6
ABSENT = 1e-3  # counts that a table is taken to have of a symbol that it lacks


@dataclass(frozen=True)
class Columns:
    """How the columns of a matrix are coded, int16 [columns] each."""

    offset: Tensor
    predict: Tensor
    table: Tensor

    def to_matrix(self) -> Tensor:
        """Return int16 [3, columns]."""
        return torch.stack((self.offset, self.predict, self.table))


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix as it is stored."""

    stream: Tensor  # int16: for each chunk the rANS stream, then the codes that are no symbols
    chunks: Tensor  # int64 [chunks, 3]: words of the rANS stream, codes beside it, crc32 of both
    columns: Columns


def fit_columns(matrix: Tensor) -> tuple[Columns, Tensor]:
    """Return how to code the columns of a matrix int16 or uint8 [rows, columns], tables aside, and their counts.

    Counts are int64 [columns, 256]: how often each symbol comes up. int16 values are at most MAX_INTEGER in size.
    """
    count = matrix.shape[1]
    zeros = torch.zeros(count, dtype=torch.int16)
    columns = Columns(zeros, zeros, zeros)
    if matrix.dtype != torch.uint8:
        values = matrix.double()
        centred = values - values.mean(0)
        share = (centred[1:] * centred[:-1]).sum(0) / centred.square().sum(0).clamp(min=1e-9)
        predict = (SIXTEENTHS * share).round().clamp(0, SIXTEENTHS - 1)
        columns = Columns(values.mean(0).round().to(torch.int16), predict.to(torch.int16), zeros)
    counts = torch.zeros(count * rans.SYMBOLS, dtype=torch.int64)
    start = torch.arange(count) * rans.SYMBOLS
    for rows in matrix.split(CHUNK):
        symbols, _ = _symbols(rows, columns)
        counts += torch.bincount((symbols.long() + start).flatten(), minlength=len(counts))
    return columns, counts.reshape(count, rans.SYMBOLS)


def tables(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Put columns with counts [columns, 256] into tables: int64 frequencies [tables, 256], the table of each column."""
    most = max(1, min(MOST_TABLES, len(counts), int(counts.sum()) // TABLE_SYMBOLS))
    weights = counts.double()
    order = _entropy(weights).argsort(stable=True)
    chosen = torch.empty(len(counts), dtype=torch.int64)
    chosen[order] = torch.arange(len(counts)) * most // max(1, len(counts))
    for _ in range(CLUSTERING_ROUNDS):
        sums = torch.zeros(most, rans.SYMBOLS, dtype=torch.float64).index_add_(0, chosen, weights)
        chosen = _bits(weights, sums).argmin(1)
    used, chosen = chosen.unique(return_inverse=True)
    sums = torch.zeros(len(used), rans.SYMBOLS, dtype=torch.int64).index_add_(0, chosen, counts)
    return rans.frequencies(sums), chosen


def _entropy(weights: Tensor) -> Tensor:
    """Return the bits of a symbol of each row of counts."""
    shares = weights / weights.sum(1, keepdim=True).clamp(min=1)
    return -(shares * shares.clamp(min=1e-30).log2()).sum(1)


def _bits(weights: Tensor, sums: Tensor) -> Tensor:
    """Return the bits [columns, tables] that each column costs with each table of these counts."""
    known = sums + ABSENT
    return -(weights @ (known / known.sum(1, keepdim=True)).log2().T)


def encode(matrix: Tensor, columns: Columns, freqs: Tensor) -> CodedMatrix:
    """Code a matrix int16 or uint8 [rows, columns] in chunks of CHUNK rows; freqs: int64 [tables, 256]."""
    contexts, parts, sizes = columns.table.long(), [], []
    for rows in matrix.split(CHUNK):
        symbols, beside = _symbols(rows, columns)
        coder = compiled if compiled.available() else rans
        words = coder.encode(symbols.reshape(1, -1), contexts, freqs)[0]
        parts += [words, beside]
        sizes.append((len(words), len(beside), _checksum(torch.cat((words, beside)))))
    stream = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int16)
    return CodedMatrix(stream, torch.tensor(sizes, dtype=torch.int64).reshape(-1, 3), columns)


def decode(coded: CodedMatrix, freqs: Tensor, rows: int, kind: torch.dtype, span: tuple[int, int]) -> Tensor:
    """Return rows of the chunks span[0] to span[1] - 1 of a matrix of `rows` rows: `kind` (int16, uint8) [n, columns].

    Raises ValueError for a stream that is not as it was written.
    """
    first, last = span
    counts = [min(CHUNK, rows - CHUNK * chunk) for chunk in range(first, last)]
    pieces = list(_pieces(coded, first, last))
    width, pieces_by_size = len(coded.columns.table), []
    for size in dict.fromkeys(counts):  # all whole chunks at once; the last one may be shorter
        same = [piece for piece, count in zip(pieces, counts, strict=True) if count == size]
        coder = compiled if compiled.available() else rans
        symbols = coder.decode([words for words, _ in same], coded.columns.table.long(), freqs, size * width)
        symbols = symbols.reshape(len(same), size, width)
        pieces_by_size.append(_values(symbols, [beside for _, beside in same], coded.columns, kind).flatten(0, 1))
    return torch.cat(pieces_by_size) if pieces_by_size else torch.empty(0, width, dtype=kind)


def _pieces(coded: CodedMatrix, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rANS stream and the codes beside it of each chunk."""
    sizes = coded.chunks[:, :2].tolist()
    start = sum(map(sum, sizes[:first]))
    for chunk in range(first, last):
        words, beside = sizes[chunk]
        piece = coded.stream[start : start + words + beside]
        if len(piece) != words + beside or _checksum(piece) != int(coded.chunks[chunk, 2]):
            raise ValueError(f"chunk {chunk} does not have the checksum that it was written with")
        yield piece[:words], piece[words:]
        start += words + beside


def _symbols(rows: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """Return the symbols uint8 of the rows of a chunk, and the codes int16 of those that are symbol 0."""
    if rows.dtype == torch.uint8:
        return rows, torch.empty(0, dtype=torch.int16)
    codes = rows.int() - columns.offset.int()
    codes[1:] -= _predict_from(codes[:-1], columns.predict.int())
    is_beside = codes.abs() >= CENTRE
    return torch.where(is_beside, 0, codes + CENTRE).to(torch.uint8), codes[is_beside].to(torch.int16)


def _values(symbols: Tensor, beside: list[Tensor], columns: Columns, kind: torch.dtype) -> Tensor:
    """Undo `_symbols` for symbols uint8 [chunks, rows, columns]."""
    if kind == torch.uint8:
        return symbols
    codes = symbols.transpose(0, 1).int() - CENTRE  # rows first: neighbours are added one after the other
    is_beside = symbols == 0
    if int(is_beside.sum()) != sum(map(len, beside)):
        raise ValueError("the codes beside a stream are not as many as it says")
    codes.transpose(0, 1)[is_beside] = torch.cat(beside).int()
    predict = columns.predict.int()
    if bool(predict.any()):
        for row in range(1, len(codes)):
            codes[row] += _predict_from(codes[row - 1], predict)
    return (codes + columns.offset.int()).to(kind).transpose(0, 1)


def _predict_from(before: Tensor, predict: Tensor) -> Tensor:
    """Return the part of the row before that is subtracted, rounded to an integer."""
    return (before * predict + SIXTEENTHS // 2) >> 4


def _checksum(words: Tensor) -> int:
    return zlib.crc32(words.contiguous().view(torch.uint8).numpy().tobytes())
