"""Checkpoints as other tools write them, made of pico models, and the same with the weights that their readers give.

    both = foreign.written(pico_dir("llama"), tmp_path, {"quant_method": "fp8"}, pack)
    foreign.check(both)         # every tensor of both, whole models and results of a run are the same

`pack` is given the name of a linear and its weight [out, in], float32. It returns the tensors that the tool stores, by
their endings, and the weight as the tool's own reader decodes them; None for a weight that stays as it is.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import api
from compress.errors import CheckpointError
from compress.importers import open_checkpoint
from compress.model.load import load_model
from helpers.runs import RTN, job, report_of, stored_tensors

Packed = tuple[dict[str, Tensor], Tensor]  # {".qweight": ...}, weight [out, in]
Pack = Callable[[str, Tensor], Packed | None]
Pico = Callable[..., Path]  # the fixture of checkpoints

LINEAR = re.compile(r"(.*_proj)(\.weight)?")


class Both(NamedTuple):
    """A checkpoint of another tool and its decoded counterpart."""

    quantized: Path
    plain: Path


def tool(name: str) -> Any:
    """A module of another tool; the test is skipped where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def stream(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, n] one after another in words, int32 [rows, ceil(n * bits / 32)], by numpy and not by our reader."""
    single = np.unpackbits(codes.to(torch.uint8).numpy()[..., None], axis=-1, bitorder="little")[..., :bits]
    flat = single.reshape(len(codes), -1)
    padded = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view("<i4").copy())


def written(
    model: Path,
    folder: Path,
    settings: Mapping[str, Any],
    pack: Pack,
    dtype: torch.dtype = torch.bfloat16,
    metadata: Mapping[str, str] | None = None,
) -> Both:
    """Write a model's linears as `pack` stores them, all else in `dtype`.

    settings: its quantization_config; metadata: of its file, which `pack` may add to.
    """
    both = Both(folder / "quantized", folder / "plain")
    quantized, plain = {}, {}
    for name, tensor in load_file(model / "model.safetensors").items():
        linear = LINEAR.fullmatch(name)
        packed = pack(linear[1], tensor.float()) if linear else None
        if linear and packed:
            module, (stored, decoded) = linear[1], packed
            quantized.update({module + ending: value.contiguous() for ending, value in stored.items()})
            plain[name] = decoded.contiguous()
        else:
            quantized[name] = plain[name] = tensor.to(dtype)
    for directory, tensors in zip(both, (quantized, plain), strict=True):
        shutil.copytree(model, directory)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt", **(metadata or {})})
        configure(directory, dtype=str(dtype).removeprefix("torch."))
    configure(both.quantized, quantization_config=dict(settings))
    return both


def configure(directory: Path, **changes: Any) -> None:
    """Change keys of a config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def restore(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Change stored tensors; None removes one."""
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, metadata={"format": "pt"})


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))


def check_tensors(both: Both) -> None:
    """Every tensor is decoded to the bit, whole, in rows and in parts."""
    source, wanted = open_checkpoint(both.quantized), stored_tensors(both.plain)
    assert source.tensors.keys() == wanted.keys()
    for name, tensor in source.tensors.items():
        found = tensor.read()
        assert same(found, wanted[name]), name
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == (found.dtype, found.shape, found.nbytes)
        if found.dim() > 1:
            assert same(tensor.rows(1, len(found) - 1), found[1:-1])
        assert torch.cat(list(tensor.parts())).equal(found.contiguous().view(-1).view(torch.uint8))


def check_model(both: Both) -> None:
    """The whole model is loaded with the same weights."""
    tokens = torch.arange(40).view(1, 40)
    one, other = (load_model(directory, "float32") for directory in both)
    for name, setting in one.generation_config.to_dict().items():
        assert other.generation_config.to_dict().get(name) == setting, name
    with torch.no_grad():
        assert one(tokens).logits.equal(other(tokens).logits)


def check_run(both: Both, out: Path) -> dict[str, Any]:
    """A run writes the same tensors from both; return its report."""
    for directory, name in zip(both, ("one", "other"), strict=True):
        api.quantize(job(directory, RTN, out / name))
    one, other = stored_tensors(out / "one"), stored_tensors(out / "other")
    assert one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    report, plain = report_of(out / "one"), report_of(out / "other")
    assert report["source_nbytes"] == plain["source_nbytes"] and report["nbytes"] == plain["nbytes"]
    assert plain["base"] is None
    return report


def refused(directory: Path, pattern: str) -> None:
    """It is refused with one line, before anything is read or when the tensor in question is."""
    with pytest.raises(CheckpointError, match=pattern) as caught:
        for tensor in open_checkpoint(directory).tensors.values():
            tensor.read()
    assert str(directory) in str(caught.value) and "\n" not in str(caught.value)


def check(both: Both, out: Path, base: str) -> None:
    """All of these; base: what the report says of how the weights were stored."""
    check_tensors(both)
    check_model(both)
    assert check_run(both, out)["base"] == base
    assert f"base: {base}" in (out / "one" / "README.md").read_text()
