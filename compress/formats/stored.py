"""Write how a weight is stored as a table of JSON, and read it back.

config.json, report.json, the records of finished blocks and those of packed options all hold a `Stored` as

    {"format": "int", "params": {...}, "ops": {"input": [...], "output": [...]}, "activations": {...}, "lowrank": {...},
     "sparsity": {...}}

"params" has the fields of the format's `Params`, "ops" the names of compress/formats/transforms.py, "activations",
"lowrank" and "sparsity" the fields of `Activations`, `LowRank` and `InputSparsity`, or null. The last four may be
absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from compress import formats, plugins
from compress.errors import CheckpointError, first_line, shown
from compress.formats import transforms
from compress.types import INPUT_TYPES, Activations, InputSparsity, LowRank, Stored

KEYS = tuple(field.name for field in dataclasses.fields(Stored))

LARGEST = plugins.LARGEST

T = TypeVar("T")


def to_dict(stored: Stored) -> dict[str, Any]:
    """Return the table, with every key."""
    ops = {"input": list(stored.ops.input), "output": list(stored.ops.output)}
    return {**dataclasses.asdict(stored), "ops": ops}


def from_dict(values: Mapping[str, Any], where: str) -> Stored:
    """Return what a table says, a renamed format by its present name; CheckpointError at `where` if it cannot be."""
    if not {"format", "params"} <= set(values) <= set(KEYS) or not isinstance(values["format"], str):
        raise CheckpointError(
            f"{where} has {shown(sorted(values))}, needs just 'format' and 'params' "
            "('ops', 'activations', 'lowrank' and 'sparsity' if it has any)"
        )
    activations, lowrank, sparsity = (values.get(key) for key in ("activations", "lowrank", "sparsity"))
    return Stored(
        plugins.current("formats", values["format"]),
        params_from_dict(values["format"], values["params"]),
        transforms.from_dict(values.get("ops", {}), where),
        None if activations is None else _activations(activations, f"{where}: activations"),
        None if lowrank is None else from_table(LowRank, lowrank, f"{where}: lowrank", complete=True),
        None if sparsity is None else from_table(InputSparsity, sparsity, f"{where}: sparsity", complete=True),
    )


def _activations(values: Any, where: str) -> Activations:
    made = from_table(Activations, values, where)
    try:
        check_inputs(made)
    except ValueError as error:
        raise CheckpointError(f"{where}: {first_line(error)}") from error
    return made


def check_inputs(activations: Activations) -> None:
    """Raise ValueError for a type of inputs that is not known, or that has no such bits."""
    if not activations.is_coded:
        return
    if activations.dtype not in (known := plugins.names("inputs")):
        raise ValueError(plugins.unknown("dtype of activations", activations.dtype, [*INPUT_TYPES, *known]))
    plugins.load("inputs", activations.dtype).check_inputs(activations)


def params_from_dict(format: str, values: Any) -> Any:
    """Return the `Params` of a format; CheckpointError for unknown, missing or impossible ones."""
    return from_table(formats.get(format).Params, values, f"format {format!r}")


def from_table(cls: type[T], values: Any, where: str, complete: bool = False) -> T:
    """Return the dataclass whose fields a table of JSON holds; `complete`: all of them, even those with a default.

    Raises CheckpointError, which begins with `where`.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{where} is not a table; download or write the checkpoint again")
    hints = get_type_hints(cls)
    if unknown := sorted(map(str, set(values) - set(hints))):
        raise CheckpointError(f"{where} has unknown keys {shown(unknown)}; upgrade compress (known: {sorted(hints)})")
    required = [f.name for f in dataclasses.fields(cls) if complete or f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    if missing := [key for key in required if key not in values]:
        raise CheckpointError(f"{where} has no {', '.join(missing)}; download or write the checkpoint again")
    for key, value in values.items():
        if not _fits(value, hints[key]):
            raise CheckpointError(
                f"{where} has {key} {shown(value)}, which this version does not know; upgrade compress"
            )
    try:
        return cls(**values)
    except ValueError as error:
        raise CheckpointError(f"{where}: {first_line(error)}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON is of the type of a field."""
    choices = get_args(hint)
    if hint is Any:  # the dataclass itself says what it takes
        return True
    if get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in choices)
    if isinstance(hint, UnionType):
        return any(_fits(value, choice) for choice in choices)
    if choices:
        return isinstance(value, list | tuple) and all(_fits(item, choices[0]) for item in value)
    if hint is float:
        return type(value) in (int, float) and abs(value) <= LARGEST  # so that it is finite
    return type(value) is hint and (hint is not int or abs(value) <= LARGEST)
