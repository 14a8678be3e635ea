"""Define the errors that the user's input can cause; the command line prints one line for each, no traceback.

CompressError
├── RecipeError            unknown key, wrong type, impossible combination
├── CheckpointError        missing, truncated or unsafe model files
├── OutputError            existing, locked, read-only or full output directory
├── MissingPackageError    a package that only a part of this one needs is not installed
├── UnsupportedModelError  no decoder blocks, no linears matched, unknown layout
├── CalibrationError       too little, empty or undecodable text
├── BudgetError            the memory budget cannot be met
├── UnreadCacheError       attention that cannot read the codes of the cache it was given
├── ExportError            what is stored cannot be written in another tool's format without loss
├── NotMeasuredError       something is not measured yet, and the job forbids measuring
├── ProcessLostError       another process of a distributed run has ended
└── NumericalError         non-finite weights, activations or Hessians

A message says what is wrong, where, and what to do next, in one line. Values of the user's files are in it only as
`shown` writes them.
"""

from __future__ import annotations

import errno
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHOWN = 80  # characters of a value in a message
REASON = 200  # characters of another library's message
MESSAGE = 600  # characters of a message: paths and lists of names are all that is long


class _Repr(reprlib.Repr):
    """Write values as repr does, with little work for large, deep or endless ones."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlong = 3, SHOWN, SHOWN, SHOWN

    def repr_int(self, value: int, level: int) -> str:
        """Python refuses to write integers of more than 4,300 digits."""
        if value.bit_length() < 256:
            return super().repr_int(value, level)
        return f"an integer of some {int(value.bit_length() * 0.30103) + 1} digits"


def shown(value: Any, limit: int = SHOWN) -> str:
    """Return a value as repr does, in one line of at most `limit` printable characters."""
    return cut(one_line(_Repr().repr(value)), limit)


def one_line(text: str) -> str:
    """Return text in one line: line ends and tabs as a space, other control characters as escapes such as \\x1b."""
    text = re.sub(r"[\r\n\t\v\f]+", " ", text)
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, cut; the name of its type if it has none."""
    return cut(one_line(str(error).strip().partition("\n")[0]), REASON) or type(error).__name__


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def cut(text: str, limit: int = SHOWN) -> str:
    """Return text of at most `limit` characters, what is too much taken from the middle."""
    if len(text) <= limit:
        return text
    end = limit // 4
    return f"{text[: limit - end - 3]}...{text[-end:]}"


class CompressError(Exception):
    """Base of all errors that a user can cause and mend; its text is one line of printable characters."""

    def __str__(self) -> str:
        return cut(one_line(super().__str__()), MESSAGE)


class ProcessLostError(CompressError):
    """Another process that shares this run's work has ended."""


class RecipeError(CompressError):
    """The recipe or a `--set` override cannot be used as written."""


class CheckpointError(CompressError):
    """The model directory cannot be read, or must not be."""


class OutputError(CompressError):
    """The output directory cannot be written."""


class AdapterError(CompressError, ValueError):
    """An adapter asks for what packed weights cannot give."""


class UnsupportedModelError(CompressError):
    """The model's structure is not one that can be quantized."""


class CalibrationError(CompressError):
    """The calibration or evaluation text is unusable."""


class BudgetError(CompressError):
    """The run does not fit the memory that it was given."""


class UnreadCacheError(CompressError, AttributeError):
    """A cache of stored codes was given to an attention that looks into keys and values as tensors."""


class TokenIdError(CompressError, IndexError):
    """A token id was looked up that the table of embeddings does not have."""


class ExportError(CompressError):
    """A checkpoint cannot be written in the format of another tool without loss."""


class NotMeasuredError(CompressError):
    """A measurement is missing that the job must not make."""


class MissingPackageError(CompressError, ImportError):
    """A package is not installed that only a part of this one needs."""


class NumericalError(CompressError):
    """Weights or statistics are not finite, or a factorization failed for good."""


# what compiled libraries say where the system gives no more memory, which has no type of its own
_NO_MEMORY = re.compile(
    "allocate memory|not enough memory|out of memory|std::bad_alloc|can't start new thread|failed to map segment", re.I
)


def out_of_memory(error: BaseException | None) -> str | None:
    """Return one line for an error that comes of memory which the system did not give, else None.

    It may have been turned into another error by those who met it.
    """
    while error is not None:
        is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
        is_library = isinstance(error, (RuntimeError, ImportError)) and _NO_MEMORY.search(str(error)) is not None
        if isinstance(error, MemoryError) or is_system or is_library:
            return (
                f"out of memory ({first_line(error)}); free some or raise the limit of this process (ulimit -v, a "
                "container's), or let it take less: --max-memory, a smaller batch, fewer or shorter samples"
            )
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def needs(package: str, what: str) -> Iterator[None]:
    """Import a package inside of this; raise MissingPackageError where it is not installed. `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingPackageError(
            f"{what} needs the package {package}, which is not installed here; pip install {package}"
        ) from error
