"""Write AWQ's integers of 4 bits in the layout `gemm`, for vLLM, SGLang, and transformers with GPTQModel.

qweight int32 [in, out / 8] and qzeros int32 [groups, out / 8] hold eight outputs in a word, in an order of their own;
scales are float16 [groups, out]. All weights have the same groups.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from compress.errors import ExportError
from compress.export import directory, integers
from compress.export.convert import Export
from compress.export.weights import ExportWeight, IntWeight

SUFFIX = ""
CACHE = "vllm serve --kv-cache-dtype fp8"
BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word holds, the lowest first


def refuses(weight: ExportWeight) -> str | None:
    """Return why a weight is no plain integers of 4 bits, with a multiple of 8 outputs."""
    if reason := integers.refusal(weight, (BITS,)) or integers.without_activations(weight):
        return reason
    if weight.shape[0] % len(ORDER):
        return f"its {weight.shape[0]} outputs are no multiple of {len(ORDER)}; keep it"
    return None


def check(export: Export) -> None:
    """Raise ExportError for weights whose groups differ."""
    export.check_packed()
    sizes = {weight.stored.params.group_size: weight.name for weight in export.held}
    if len(sizes) > 1:
        (first, one), (second, other), *_ = sizes.items()
        raise ExportError(
            f"awq has one group_size for all weights, but {one} has {first} and {other} {second}; set one for all"
        )
    integers.settle_type(export, ["float16"])


def write(export: Export, out: Path) -> None:
    """Write the directory, with the settings in config.json."""
    settings = {
        "quant_method": "awq",
        "bits": BITS,
        "group_size": export.held[0].stored.params.group_size,
        "zero_point": True,  # symmetric weights have the zero point 8
        "version": "gemm",
        "modules_to_not_convert": export.plain_linears() or None,
    }
    tensors = directory.held_tensors(export, lambda weight: _tensors(weight.integers()))
    directory.write(export, out, tensors, {"quantization_config": settings})


def _tensors(weight: IntWeight) -> dict[str, Tensor]:
    return {
        "qweight": _words(weight.codes.T),
        "qzeros": _words(weight.full_zeros().T),
        "scales": weight.scales_in(torch.float16).T.contiguous(),
    }


def _words(codes: Tensor) -> Tensor:
    """Return codes uint8 [rows, out] as int32 [rows, out / 8]."""
    return integers.pack_words(codes.unflatten(1, (-1, len(ORDER)))[:, :, list(ORDER)].flatten(1), BITS)
