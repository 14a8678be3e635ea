"""Write GPTQ's integers of 2, 3, 4 or 8 bits, for GPTQModel, transformers, vLLM and SGLang.

qweight int32 [in * bits / 32, out] holds the codes along its columns, qzeros int32 [groups, out * bits / 32] the zeros
along its rows, scales float16 [groups, out]; g_idx int32 [in] is the group of each input, in order. The first version
of the layout stores zeros less one; it is written for symmetric weights that all have the same bits, the second
version for all others.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.export import directory, integers
from compress.export.convert import Export
from compress.export.weights import ExportWeight, IntWeight, StoredWeight
from compress.storage.checkpoint import write_text

SUFFIX = ""
CACHE = "vllm serve --kv-cache-dtype fp8"
BITS = (2, 3, 4, 8)
WORD = 32  # bits


def refuses(weight: ExportWeight) -> str | None:
    """Return why a weight is no plain integers of 2, 3, 4 or 8 bits, whose rows and columns fill whole words."""
    if reason := integers.refusal(weight, BITS) or integers.without_activations(weight):
        return reason
    bits = weight.stored.params.bits
    if any(size * bits % WORD for size in weight.shape):
        rows, columns = weight.shape
        return f"{rows} outputs or {columns} inputs of {bits} bits are no whole words of {WORD} bits; choose other bits"
    return None


def check(export: Export) -> None:
    """Raise ExportError for a checkpoint without packed linears."""
    export.check_packed()
    integers.settle_type(export, ["float16"])


def write(export: Export, out: Path) -> None:
    """Write the directory, with the settings in config.json and, for older readers, in quantize_config.json."""
    settings = _settings(export)
    is_first = settings["checkpoint_format"] == "gptq"
    tensors = directory.held_tensors(export, lambda weight: _tensors(weight.integers(), is_first))
    directory.write(export, out, tensors, {"quantization_config": settings})
    write_text(out / "quantize_config.json", json.dumps(settings, indent=2) + "\n")


def _settings(export: Export) -> dict[str, Any]:
    """Return what readers are told: the most common bits and groups, and what differs by names of modules."""
    schemes = {weight.name: _scheme(weight) for weight in export.held}
    common = Counter(map(json.dumps, schemes.values())).most_common(1)[0][0]
    default = json.loads(common)
    dynamic = {f"+:^{re.escape(name)}$": scheme for name, scheme in schemes.items() if scheme != default}
    dynamic |= {f"-:^{re.escape(name)}$": {} for name in export.plain_linears()}
    is_first = all(scheme["sym"] and scheme["bits"] == default["bits"] for scheme in schemes.values())
    return {
        "quant_method": "gptq",
        **default,
        "desc_act": False,
        "checkpoint_format": "gptq" if is_first else "gptq_v2",
        "lm_head": False,
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _scheme(weight: StoredWeight) -> dict[str, Any]:
    params = weight.stored.params
    return {"bits": params.bits, "group_size": params.group_size, "sym": params.symmetric}


def _tensors(weight: IntWeight, is_first: bool) -> dict[str, Tensor]:
    zeros = weight.full_zeros()
    if is_first:
        zeros = (zeros - 1) & ((1 << weight.bits) - 1)
    return {
        "qweight": integers.pack_words(weight.codes, weight.bits).T.contiguous(),
        "qzeros": integers.pack_words(zeros.T.contiguous(), weight.bits),
        "scales": weight.scales_in(torch.float16).T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // weight.group_size,
    }
