"""Build the parameters that typer reads the options of a command from; describe an option that is long."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Annotated, Any, Literal, get_args

from typer import Option

ComputeDtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Option(
        help="Compute in this type, not in the checkpoint's. config.json names it: the result loads in it, too. "
        "What is not packed stays as it is stored."
    ),
]


def with_help(annotation: Any, text: str) -> Any:
    """Return the type of an option, with another help."""
    kind, option = get_args(annotation)
    option = copy.copy(option)
    option.help = text
    return Annotated[kind, option]


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a parameter that is given by name, without a default where the dataclass field has none."""
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
