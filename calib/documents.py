"""Read the texts of a source as they are asked for, and cut them into pieces that can be tokenized at a time.

Tokenizing takes some 200 bytes of memory a byte of text, so that no more than PIECE_NBYTES of it are tokenized at a
time. Shorter documents are never cut, and their tokens do not depend on what is tokenized beside them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from compress.calib import chats
from compress.errors import CalibrationError, cut, first_line, needs, one_line
from compress.storage import json_text, paths
from compress.storage.files import open_regular
from compress.storage.paths import TEXT_SUFFIXES

LINE_NBYTES = 1 << 16  # how much further a piece may go to end where a line ends
DEFAULT_COLUMN = "text"

Chat = chats.Writer | None
PIECE_NBYTES = 1 << 20  # so much text, as UTF-8, is tokenized at a time
CUT_SEARCH_NBYTES = 1 << 16  # the end of a piece, searched for a good place to cut
CONTINUATION_BYTES = range(0x80, 0xC0)  # any but the first one of a character in UTF-8


def documents(source: str | Path, column: str = DEFAULT_COLUMN, chat: Chat = None) -> Iterator[str]:
    """Yield the texts of a source, read as they are asked for.

    A .jsonl or .json file (an object a line), a .parquet file, or a data set ("name", "name:config" or
    "name:config:split", split "train" unless given; a directory that holds one will do) gives the texts in `column`.
    Where it has no such column, it gives the chats in `messages`, as `chat` writes them. Any other file is UTF-8 text
    and comes in consecutive pieces of some 1 MiB that end where a line ends, or where a character does if that is too
    far. Raises CalibrationError.
    """
    path = Path(source)
    try:
        if os.path.isfile(path):  # False for what no file can be called
            paths.check_kind(path)
            yield from _READERS.get(path.suffix.lower(), _read_text)(path, column, chat)
        elif path.suffix.lower() in TEXT_SUFFIXES:  # not there; asking for such a data set would take long
            raise CalibrationError(_unreachable(source))
        else:
            yield from _read_dataset(str(source), column, chat)
    except OSError as error:
        raise CalibrationError(f"cannot read {source}: {first_line(error)}") from error


def is_text_file(source: str | Path) -> bool:
    """Return True if the source is one running text, not a set of documents."""
    return os.path.isfile(source) and Path(source).suffix.lower() not in _READERS


def source_name(source: str | Path) -> str:
    """Return the source's name in reports: the last part of a path, or the name of a data set."""
    return one_line(Path(source).name if os.path.exists(source) else str(source))


def _read_text(path: Path, column: str, chat: Chat) -> Iterator[str]:
    offset = 0
    with open_regular(path) as stream:
        while raw := stream.read(PIECE_NBYTES):
            raw += stream.readline(LINE_NBYTES)
            for _ in range(3):  # where the line goes on, end at least where a character of up to four bytes ends
                if b"\x80" <= stream.peek(1)[:1] < b"\xc0":
                    raw += stream.read(1)
            text = _decode(raw, path, offset)
            yield text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(raw)


def _read_jsonl(path: Path, column: str, chat: Chat) -> Iterator[str]:
    offset = 0
    with open_regular(path) as stream:
        for number, raw in enumerate(stream, 1):
            line = _decode(raw, path, offset).removeprefix("\ufeff")
            offset += len(raw)
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json_text.loads(line)
            except ValueError as error:
                raise CalibrationError(
                    f"{where} is not JSON ({first_line(error)}); it needs an object a line"
                ) from error
            if not isinstance(row, dict):
                raise CalibrationError(f"{where} is not a JSON object; it needs an object a line")
            yield _text_of(row, column, chat, where)


def _read_parquet(path: Path, column: str, chat: Chat) -> Iterator[str]:
    with needs("pyarrow", "a .parquet file"):
        import pyarrow
        from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            fields = file.schema_arrow.names
            wanted = chats.COLUMN if column not in fields and chat is not None else column
            if wanted not in fields:
                raise CalibrationError(f"{path} has no column {column!r}; its columns: {cut(', '.join(fields))}")
            batches = file.iter_batches(columns=[wanted], batch_size=256)
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                yield _text_of(row, wanted, chat, f"{path}, row {number}")
    except pyarrow.ArrowInvalid as error:
        raise CalibrationError(f"{path} is not a readable parquet file ({first_line(error)})") from error


def _read_dataset(source: str, column: str, chat: Chat) -> Iterator[str]:
    from huggingface_hub.errors import HFValidationError

    name, config, split = [*source.split(":", 2), "", ""][:3]
    _check_json(Path(name))
    try:
        with _quiet():
            for number, row in enumerate(_stream(name, config or None, split or "train"), 1):
                yield _text_of(row, column, chat, f"data set {source}, row {number}")
    except (ConnectionError, FileNotFoundError, HFValidationError) as error:
        raise CalibrationError(_unreachable(source)) from error
    except (ValueError, RuntimeError, StopIteration) as error:  # no such configuration or split, a damaged or empty
        # file, or a script
        raise CalibrationError(f"data set {source} cannot be read: {first_line(error)}") from error


def _check_json(folder: Path) -> None:
    """Refuse a local data set with a JSON file that does not begin with an object: pyarrow dies of a null there."""
    for path in [*folder.rglob("*.json"), *folder.rglob("*.jsonl")]:
        with open_regular(path) as stream:
            if (start := stream.read(LINE_NBYTES).lstrip()[:1]) and start not in b"{[":
                raise CalibrationError(f"{path} does not begin with a JSON object; give objects, one a line")


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars and no logged errors of the data sets library, whose errors are raised as well."""
    with needs("datasets", "a data set"):
        from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
        from datasets.utils import logging as logs

    shown, level = not are_progress_bars_disabled(), logs.get_verbosity()
    disable_progress_bars()
    logs.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if shown:
            enable_progress_bars()


def _stream(name: str, config: str | None, split: str) -> Iterable[dict[str, Any]]:
    """Return the rows of a data set, fetched as they are asked for and not copied into a cache."""
    import datasets

    return cast(Iterable[dict[str, Any]], datasets.load_dataset(name, config, split=split, streaming=True))


_READERS: dict[str, Callable[[Path, str, Chat], Iterator[str]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".parquet": _read_parquet,
}


def _text_of(row: dict[str, Any], column: str, chat: Chat, where: str) -> str:
    if chat is not None and chats.COLUMN in row and (column == chats.COLUMN or column not in row):
        return chat(row[chats.COLUMN], where)
    if column not in row:
        raise CalibrationError(
            f"{where} has no field {column!r}; its fields: {cut(', '.join(map(str, row))) or 'none'}"
        )
    if not isinstance(row[column], str):
        raise CalibrationError(f"{where}: field {column!r} is {type(row[column]).__name__}, not text")
    return row[column]


def _decode(raw: bytes, path: Path, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"{path}: byte {offset + error.start} is not UTF-8; convert the file to UTF-8 text"
        ) from error


def _unreachable(source: str | Path) -> str:
    return (
        f"{source} is neither a file nor a data set that can be reached; give --calib a .txt, .jsonl or .parquet file"
    )


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
