"""Define the errors that the user's input can cause; the command line prints one line for each, no traceback.

CompressError
├── RecipeError            unknown key, wrong type, impossible combination
├── CheckpointError        missing, truncated or unsafe model files
├── OutputError            existing, locked, read-only or full output directory
├── UnsupportedModelError  no decoder blocks, no linears matched, unknown layout
├── CalibrationError       too little, empty or undecodable text
├── BudgetError            the memory budget cannot be met
├── UnreadCacheError       attention that cannot read the codes of the cache it was given
├── NotMeasuredError       something is not measured yet, and the job forbids measuring
└── NumericalError         non-finite weights, activations or Hessians

A message says what is wrong, where, and what to do next, in one line.
"""


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, the name of its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class CompressError(Exception):
    """Base of all errors that a user can cause and mend."""


class RecipeError(CompressError):
    """The recipe or a `--set` override cannot be used as written."""


class CheckpointError(CompressError):
    """The model directory cannot be read, or must not be."""


class OutputError(CompressError):
    """The output directory cannot be written."""


class UnsupportedModelError(CompressError):
    """The model's structure is not one that can be quantized."""


class CalibrationError(CompressError):
    """The calibration or evaluation text is unusable."""


class BudgetError(CompressError):
    """The run does not fit the memory that it was given."""


class UnreadCacheError(CompressError, AttributeError):
    """A cache of stored codes was given to an attention that looks into keys and values as tensors."""


class NotMeasuredError(CompressError):
    """A measurement is missing that the job must not make."""


class NumericalError(CompressError):
    """Weights or statistics are not finite, or a factorization failed for good."""
