"""Cut documents into pieces that are small enough to tokenize.

Tokenizing takes some 200 bytes of memory a byte of text, so that no more than PIECE_NBYTES of it are tokenized at a
time. Shorter documents are never cut, and their tokens do not depend on what is tokenized beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE_NBYTES = 1 << 20  # so much text, as UTF-8, is tokenized at a time
CUT_SEARCH_NBYTES = 1 << 16  # the end of a piece, searched for a good place to cut
CONTINUATION_BYTES = range(0x80, 0xC0)  # any but the first one of a character in UTF-8


class DocumentPiece(NamedTuple):
    """A document, or a part of one."""

    text: str
    begins: bool  # a document; False: goes on with the one before


def piece_batches(documents: Iterable[str]) -> Iterator[list[DocumentPiece]]:
    """Yield pieces of the documents that are not empty, in lists of at most PIECE_NBYTES."""
    batch: list[DocumentPiece] = []
    size = 0
    for document in filter(None, documents):
        begins = True
        for raw in cut_document(document.encode("utf-8", "surrogatepass")):
            if batch and size + len(raw) > PIECE_NBYTES:
                yield batch
                batch, size = [], 0
            batch.append(DocumentPiece(raw.decode("utf-8", "surrogatepass"), begins))
            size += len(raw)
            begins = False
            if size >= PIECE_NBYTES:  # before the next document is read
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def cut_document(document: bytes) -> Iterator[bytes]:
    """Yield the parts of a UTF-8 document, at most PIECE_NBYTES each."""
    start = 0
    while len(document) - start > PIECE_NBYTES:
        end = _end(document, start, start + PIECE_NBYTES)
        yield document[start:end]
        start = end
    yield document[start:]


def _end(document: bytes, start: int, most: int) -> int:
    """Return where a part from `start` ends, not behind `most`: after a line, else before a space, else a character.

    Most tokenizers have no token across the first two.
    """
    least = max(start, most - CUT_SEARCH_NBYTES)
    if (line := document.rfind(b"\n", least, most)) >= 0:
        return line + 1
    if (space := document.rfind(b" ", least + 1, most)) >= 0:
        return space
    while document[most] in CONTINUATION_BYTES:
        most -= 1
    return most
