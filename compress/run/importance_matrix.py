"""Read and write importance matrices of llama.cpp: the sums of squares of what each linear reads.

Such a matrix is the diagonal of the Hessians that methods quantize by. A run that is given one reads no text: every
linear gets a Hessian that is zero beside this diagonal, so that errors count by column and are not fed back.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.errors import CalibrationError, shown
from compress.importers import gguf_header
from compress.importers.gguf import values
from compress.model import gguf_names
from compress.model.skeleton import Skeleton
from compress.run import sizes
from compress.run.quantize_linear import InputStatistics
from compress.types import LayerPlan, Stats

SUMS, COUNTS = ".in_sum2", ".counts"  # ends of the names of tensors
HEAD = "output.weight"


@dataclass(frozen=True)
class InputSquares:
    """What a linear reads."""

    sums: Tensor  # float32 [in], over tokens, of the squares
    count: int  # tokens


@dataclass(frozen=True)
class ImportanceMatrix:
    """The inputs of linears, by their names in GGUF files, and those of experts by number, of a text."""

    inputs: Mapping[str, Mapping[int, InputSquares]]  # name -> expert (0 where there are none) -> inputs
    text: str  # where the text is from
    samples: int
    seq_len: int  # [tokens] of each
    unnamed: tuple[str, ...] = ()  # linears that have no name there


def write(matrix: ImportanceMatrix, out: Path) -> None:
    """Write a file as llama.cpp does, and its quantizer reads it; it appears whole, in place of any of its name."""
    import gguf

    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        part = Path(folder) / out.name
        _write(matrix, gguf.GGUFWriter(part, ""))
        os.replace(part, out)


def _write(matrix: ImportanceMatrix, writer: Any) -> None:
    """Write a matrix through a GGUFWriter."""
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [matrix.text])
    writer.add_uint32("imatrix.chunk_count", matrix.samples)
    writer.add_uint32("imatrix.chunk_size", matrix.seq_len)
    for name, experts in matrix.inputs.items():
        known = [experts.get(i) for i in range(max(experts) + 1)]
        none = torch.zeros_like(next(iter(experts.values())).sums)
        sums = torch.stack([none if each is None else each.sums for each in known])
        counts = torch.tensor([[0.0 if each is None else float(each.count)] for each in known])
        writer.add_tensor(f"{name}{SUMS}", sums.numpy())
        writer.add_tensor(f"{name}{COUNTS}", counts.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(file: Path) -> dict[str, dict[int, InputSquares]]:
    """Return name -> expert -> inputs of a file of llama.cpp or of ours; CalibrationError for any other."""
    header = gguf_header.read(file)
    if header.metadata.get("general.type") != "imatrix":
        raise CalibrationError(f"{file} is no importance matrix; make one with compress imatrix")
    inputs: dict[str, dict[int, InputSquares]] = {}
    for tensor, entry in header.tensors.items():
        name = tensor.removesuffix(SUMS)
        if name == tensor or f"{name}{COUNTS}" not in header.tensors:
            continue
        sums, counts = values(entry), values(header.tensors[f"{name}{COUNTS}"]).flatten()
        sums = sums.view(len(counts), -1)
        if not (sums.isfinite().all() and (sums >= 0).all() and counts.isfinite().all()):
            raise CalibrationError(f"{file}: {shown(name)} holds numbers that are no sums of squares; make it again")
        inputs[name] = {i: InputSquares(sums[i].clone(), int(counts[i])) for i in range(len(counts))}
    return inputs


class MatrixStatistics:
    """The statistics of linears by an importance matrix."""

    def __init__(self, file: Path, skeleton: Skeleton) -> None:
        self.file, self.skeleton, self.inputs = file, skeleton, read(file)

    def of(self, layers: Iterable[LayerPlan]) -> list[tuple[InputStatistics, list[str]]]:
        """Return the statistics of the inputs of linears whose methods need any, and who reads each.

        Raises CalibrationError for a linear that the matrix has nothing of.
        """
        made: dict[str, tuple[InputStatistics, list[str]]] = {}
        for layer in filter(sizes.needs_statistics, layers):
            spec = layer.spec
            if spec.input_key not in made:
                made[spec.input_key] = self._statistics(spec.name, spec.shape[1]), []
            if spec.name not in made[spec.input_key][1]:
                made[spec.input_key][1].append(spec.name)
        return list(made.values())

    def of_head(self, columns: int) -> InputStatistics:
        """Return the statistics of an output head; without any in the file, those of inputs that no token reached."""
        squares = self.inputs.get(HEAD, {}).get(0, InputSquares(torch.zeros(columns), 0))
        return InputStatistics(Stats(torch.diag(squares.sums), squares.count))

    def _statistics(self, linear: str, columns: int) -> InputStatistics:
        place = gguf_names.place_of(self.skeleton, linear)
        squares = self.inputs.get(place[0], {}).get(place[1]) if place is not None else None
        if squares is None or len(squares.sums) != columns:
            what = "nothing" if squares is None else f"{len(squares.sums)} inputs"
            raise CalibrationError(
                f"{self.file} has {what} of {linear}, which has {columns} inputs; make one of this model: compress "
                "imatrix"
            )
        return InputStatistics(Stats(torch.diag(squares.sums), squares.count))
