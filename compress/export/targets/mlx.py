"""Write the affine format of MLX, which mlx-lm runs on Apple machines: integers with a scale and a bias, exact.

    weight uint32 [out, in * bits / 32]   codes, a little-endian stream of bits in each row
    scales, biases [out, in / group]      w = scale * code + bias

The bias is -scale * 2^(bits - 1), a product with a power of two, and so exact. A zero point of its own would make it
a rounded product. Asymmetric codes are therefore written less their zero points, with one bit more. MLX has 2, 3, 4, 5,
6 and 8 bits, and groups of 32, 64 and 128 columns: scales of larger groups are repeated. Where linears differ, the
configuration says so module by module. Experts of a layer are one tensor, as in the models of mlx-lm.

The types mxfp4 and mxfp8 of the grid format are the modes of these names: weight is a stream of their codes, scales
uint8 [out, in / 32] are their exponents. MLX's nvfp4 has no scale of the whole matrix, as ours have: it is refused.

All other numbers are written in the type of the scales, so that MLX computes in it; a checkpoint with nothing packed
keeps its types. mlx-lm reads settings of rotary positions by their former names, and some that transformers leaves out
where they are its defaults: both are written. What mlx-lm computes otherwise (mlx.yaml beside this file) is
refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import PretrainedConfig

from compress.errors import ExportError
from compress.export import directory, grids
from compress.export.convert import TIED, Export
from compress.export.directory import Named
from compress.export.integers import repeated_scales, signed_bits, signed_codes
from compress.export.weights import ExportWeight, StoredWeight
from compress.formats import grid
from compress.numerics.packing import pack_stream

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("mlx.yaml").read_text(encoding="utf-8"))
TOOL: str = DATA["tool"]
ELSEWHERE = "export to another target"
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
SUFFIX = ""
DRAFT_HEADS = "left out"
CACHE = "mlx_lm.generate --kv-bits 8"
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (128, 64, 32)
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # names of experts -> those of mlx-lm
AFFINE, MODES = "affine", ("mxfp4", "mxfp8")
Form = tuple[int, int, str]  # bits, columns of a group, mode


def refuses(weight: ExportWeight) -> str | None:
    """Return why no mode of MLX holds the weight in every bit, and what would have to be chosen."""
    if weight.stored.format == grids.FORMAT:
        return grids.refusal(weight, MODES)
    if (reason := weight.not_integers()) is not None:
        return reason
    if weight.is_turned:
        return "it is stored as [in, out], which mlx-lm does not read packed; keep it"
    if signed_bits(weight) > BITS[-1]:
        return "asymmetric codes of 8 bits have no exact bias in MLX; set symmetric: true, or bits: 7"
    params, columns = weight.stored.params, weight.shape[1]
    if _group(params.group_size, columns) is None:
        return f"groups of {params.group(columns)} of {columns} columns are no groups of 32; set group_size: 64, or -1"
    return None


def check(export: Export) -> None:
    """Raise ExportError for what mlx-lm computes otherwise, and for experts of a layer that differ in bits or groups.

    An architecture that was not tried gets a line.
    """
    kind = export.source.config["model_type"]
    if kind in DATA["others"]:
        raise ExportError(f"{TOOL} computes models of type {kind} otherwise: {DATA['others'][kind]}; {ELSEWHERE}")
    if kind in DATA["plain_only"] and export.held:
        raise ExportError(f"{TOOL} does not load models of type {kind} packed, only as plain numbers; {ELSEWHERE}")
    rounded = tuple(f".{name}" for name, kinds in DATA["rounded"].items() if kind in kinds)
    if names := [weight.name for weight in export.held if weight.name.endswith(rounded)]:
        pattern = f"*.{names[0].rpartition('.')[2]}"
        raise ExportError(
            f"{TOOL} cuts {names[0]} in two and rounds both anew; set ignore: ['{pattern}'], which keeps it"
        )
    if kind not in DATA["same"] and kind not in DATA["plain_only"]:
        export.notes.append(
            f"models of type {kind} were not tried with {TOOL} {DATA['version']}: compare what it computes"
        )
    for name, weights in _stacks(export).items():
        if len({_form(weight) for weight in weights}) > 1:
            raise ExportError(
                f"the experts of {name} differ in bits or groups, which one tensor of MLX cannot hold; give them the "
                "same in the recipe"
            )


def write(export: Export, out: Path) -> None:
    """Write a directory that mlx-lm loads; ExportError for scales or other numbers that its type does not hold."""
    dtype = _dtype(export)
    if any(weight.stored.activations is not None for weight in export.held):
        export.notes.append("inputs of linears are not quantized: MLX computes with them as they are")
    others = export if export.is_chosen or not export.held else replace(export, dtype=dtype, is_chosen=True)
    stacks = _stacks(export)
    forms = {name: _form(weights[0]) for name, weights in stacks.items()}
    config = _settings(others)
    if forms:
        config["quantization"] = config["quantization_config"] = _quantization(forms)
    directory.write(others, out, _tensors(export, stacks, dtype), config)


def _group(group_size: int, columns: int) -> int | None:
    """Return the largest group of MLX that divides the weight's own groups and its rows."""
    size = columns if group_size == -1 else group_size
    return next((group for group in GROUPS if size % group == 0 and columns % group == 0), None)


def _form(weight: StoredWeight) -> Form:
    if (kind := grids.type_of(weight)) is not None:
        return weight.stored.params.bits, weight.stored.params.block_columns, kind
    group = _group(weight.stored.params.group_size, weight.shape[1])
    assert group is not None
    return next(bits for bits in BITS if bits >= signed_bits(weight)), group, AFFINE


def _dtype(export: Export) -> torch.dtype:
    """Return the type of affine scales: bfloat16 if all are stored so (without any: if the model is), else float16."""
    stored = {weight.stored.params.scale_dtype for weight in export.held if grids.type_of(weight) is None}
    is_wide = stored == {"bfloat16"} or (not stored and export.dtype == torch.bfloat16)
    return torch.bfloat16 if is_wide else torch.float16


def _stacks(export: Export) -> dict[str, list[StoredWeight]]:
    """Return name of a module in mlx-lm -> its weight, or those of the experts that are stacked there, in order."""
    stacks: dict[str, dict[int, StoredWeight]] = {}
    for weight in export.held:
        expert = EXPERT.fullmatch(weight.name)
        if expert:
            name = f"{expert[1]}.switch_mlp.{PROJECTIONS.get(expert[3], expert[3])}"
            stacks.setdefault(name, {})[int(expert[2])] = weight
        else:
            stacks[weight.name] = {0: weight}
    return {name: [stack[index] for index in sorted(stack)] for name, stack in stacks.items()}


def _quantization(forms: dict[str, Form]) -> dict[str, Any]:
    """Return what config.json says: the form of most modules, and those that differ."""
    most = Counter(forms.values()).most_common(1)[0][0]
    others = {name: _section(form) for name, form in forms.items() if form != most}
    return {**_section(most), **others}


def _section(form: Form) -> dict[str, int | str]:
    return {"group_size": form[1], "bits": form[0], **({} if form[2] == AFFINE else {"mode": form[2]})}


def _settings(export: Export) -> dict[str, Any]:
    """Return the configuration with what transformers leaves out, and with the names of mlx-lm for what it renames."""
    own = export.source.skeleton.model.config
    every = json.loads(own.to_json_string(use_diff=False))
    every |= {alias: every[name] for alias, name in own.attribute_map.items() if name in every}
    general = PretrainedConfig().to_dict().keys() - {TIED}
    defaults = {key: value for key, value in every.items() if value is not None and key not in general}
    config = {**defaults, **export.config()}
    config |= _positions(config.get("rope_parameters") or {})
    added = {"head_dim": _head_dim(config), "sliding_window_pattern": _period(config.get("layer_types"))}
    return config | {key: value for key, value in added.items() if value is not None and config.get(key) is None}


def _positions(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, of which transformers has a table, or one for each kind of layer."""
    kinds = {kind: table for kind, table in rope.items() if isinstance(table, dict)}
    whole = kinds.get(FULL) or next(iter(kinds.values()), rope)
    if "rope_theta" not in whole:
        return {}
    theta, share = whole["rope_theta"], whole.get("partial_rotary_factor")
    is_plain = whole.get("rope_type", "default") == "default"
    settings = {"rope_theta": theta, "rotary_emb_base": theta}
    settings["rope_scaling"] = None if is_plain else {key: value for key, value in whole.items() if key != "rope_theta"}
    settings |= {} if share is None else {"partial_rotary_factor": share, "rotary_pct": share}
    return settings | ({"rope_local_base_freq": kinds[SLIDING]["rope_theta"]} if SLIDING in kinds else {})


def _head_dim(config: Mapping[str, Any]) -> int | None:
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _period(kinds: Sequence[str] | None) -> int | None:
    """Return after how many layers one follows that sees all tokens; None if that is not regular."""
    if not kinds or FULL not in kinds or SLIDING not in kinds:
        return None
    period = kinds.index(FULL) + 1
    regular = [SLIDING if number % period else FULL for number in range(1, len(kinds) + 1)]
    return period if kinds == regular else None


def _tensors(export: Export, stacks: dict[str, list[StoredWeight]], dtype: torch.dtype) -> Iterator[Named]:
    for number, (name, weights) in enumerate(stacks.items()):
        export.progress(f"writing {name}", number, len(stacks))
        parts = [_stored_tensors(weight, dtype) for weight in weights]
        for key in parts[0]:
            is_stack = EXPERT.fullmatch(weights[0].name) is not None
            yield f"{name}.{key}", torch.stack([part[key] for part in parts]) if is_stack else parts[0][key]


def _stored_tensors(weight: StoredWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what is stored for a weight."""
    bits, group, mode = _form(weight)
    if mode != AFFINE:
        stored, params = weight.read().tensors, weight.stored.params
        codes = grid.unpack_codes(stored["codes"], params, weight.shape[1]) if bits == 4 else stored["codes"]
        return {"weight": _words(codes.view(torch.uint8), bits), "scales": stored["scales"].view(torch.uint8)}
    integers = weight.integers()
    middle = 1 << (bits - 1)
    codes = (signed_codes(integers).to(torch.int16) + middle).to(torch.uint8)
    scales = repeated_scales(integers, group, dtype)
    biases = scales * -middle
    if not torch.isfinite(biases).all():
        raise ExportError(f"{weight.name} has scales too large for {dtype} biases in MLX; export to dense or gguf")
    return {"weight": _words(codes, bits), "scales": scales, "biases": biases}


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [out, in] as a stream of bits in each row, uint32 [out, in * bits / 32]."""
    words = torch.cat([pack_stream(rows, bits) for rows in codes.split(max(1, (1 << 22) // codes.shape[1]))])
    return words.view(torch.int32).view(torch.uint32)
