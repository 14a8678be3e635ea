"""Changes of a checkpoint directory, each a small JSON object, applied to a copy made of hard links.

{"file": F, "at": [...], "value": V} or "delete": true     a JSON document (of a safetensors file: its header)
{"file": F, "bytes": ..., "truncate": ..., "append": ..., "insert": ...}                       the bytes of a file
{"file": F, "text": pieces}        the whole content           {"file": F, "copy": other file}
{"file": F, "remove": true}        {"file": F, "link": target}  {"file": F, "folder": true}   {"file": F, "fifo": true}
{"file": F, "tensor": name, "fill": value, "index": i, "shape": [...], "dtype": "int32", "drop": true}
{"sign": true}      last: hashes in the manifest and in config.json are made to fit, as somebody hostile would
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fuzz import values

MANIFEST = "compress_manifest.json"
CACHE = "kv_cache.safetensors"
FILLS = [
    0,
    1,
    -1,
    2,
    7,
    15,
    31,
    127,
    128,
    255,
    256,
    -128,
    65535,
    2**31 - 1,
    -(2**31),
    2**40,
    "nan",
    "inf",
    "-inf",
    1e30,
]
DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
EXTRAS = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json", "x.safetensors"),
    *("adapter_model.safetensors", "modeling_x.py", "generation_config.json", "chat_template.jinja", "vocab.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json", "added_tokens.json", "modules.json"),
    *("kv_cache.safetensors", "tokenizer.model", "processor_config.json", "special_tokens_map.json", "merges.txt"),
)


def sealed(directory: Path) -> Path:
    """Mark the files of a directory that cases share, so that `changed_since_sealed` finds those that were written."""
    for path in directory.iterdir():
        os.utime(path, (0, 0))
    return directory


def changed_since_sealed(folder: Path) -> list[str]:
    """Return the files of sealed directories that were changed."""
    return [str(path) for path in sorted(folder.glob("base-*/*")) if path.stat().st_mtime_ns]


def linked(source: Path, target: Path) -> Path:
    """Make a copy of a directory that shares its files; `apply` replaces the files that it changes."""
    target.mkdir()
    for path in source.iterdir():
        os.link(path, target / path.name)
    return target


def apply(directory: Path, edits: list[dict[str, Any]]) -> None:
    """Change a directory; an edit of what a former one has spoilt does nothing."""
    for edit in edits:
        if edit.get("sign"):
            _sign(directory)
            continue
        with contextlib.suppress(ValueError, OSError, struct.error, SafetensorError, RecursionError, MemoryError):
            path = directory / edit["file"]
            if not (path.is_fifo() and {"tensor", "at"} & edit.keys()):  # reading would wait for somebody to write
                _apply(path, edit)


def _apply(path: Path, edit: dict[str, Any]) -> None:
    if "tensor" in edit:
        return _change_tensor(path, edit)
    if "at" in edit:
        return _change_document(path, edit)
    if "copy" in edit:
        source = path.with_name(edit["copy"])
        data = source.read_bytes() if source.is_file() else b""
    elif "text" in edit:
        data = values.text_bytes(edit["text"])
    else:
        data = b"" if not path.is_file() else path.read_bytes()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if edit.get("folder"):
        path.mkdir()
    elif edit.get("fifo"):
        os.mkfifo(path)
    elif "link" in edit:
        path.symlink_to(edit["link"])
    elif "copy" in edit or "text" in edit:
        path.write_bytes(data)
    elif not edit.get("remove"):
        path.write_bytes(values.damaged(data, edit))


def _replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _change_document(path: Path, edit: dict[str, Any]) -> None:
    raw = path.read_bytes()
    is_tensors = path.suffix == ".safetensors"
    length = struct.unpack("<Q", raw[:8])[0] if is_tensors else 0
    document = json.loads(raw[8 : 8 + length] if is_tensors else raw)
    if edit.get("delete"):
        document = values.remove(document, edit["at"])
    else:
        document = values.put(document, edit["at"], edit["value"])
    changed = values.dumps(document)
    if is_tensors:
        changed += b" " * (-len(changed) % 8)
        changed = struct.pack("<Q", len(changed)) + changed + raw[8 + length :]
    _replace(path, changed)


def tensors_of(path: Path) -> dict[str, Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _change_tensor(path: Path, edit: dict[str, Any]) -> None:
    tensors = tensors_of(path)
    name = edit["tensor"]
    if edit.get("drop"):
        tensors.pop(name, None)
    elif name in tensors:
        tensors[name] = _changed(tensors[name], edit)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


def _changed(tensor: Tensor, edit: dict[str, Any]) -> Tensor:
    tensor = tensor.clone()
    if "shape" in edit:
        flat = torch.zeros(math.prod(edit["shape"]), dtype=tensor.dtype)
        count = min(flat.numel(), tensor.numel())
        flat[:count] = tensor.flatten()[:count]
        tensor = flat.view(edit["shape"])
    if "dtype" in edit:
        tensor = tensor.to(getattr(torch, edit["dtype"]))
    if "fill" in edit and tensor.numel():
        value = float(edit["fill"])
        if tensor.dtype.is_floating_point and math.isfinite(value):
            value = max(-torch.finfo(tensor.dtype).max, min(value, torch.finfo(tensor.dtype).max))
        if not tensor.dtype.is_floating_point:
            info = torch.iinfo(tensor.dtype) if tensor.dtype != torch.bool else torch.iinfo(torch.uint8)
            value = int(min(max(value, info.min), info.max)) if math.isfinite(value) else 0
        if "index" in edit:
            tensor.view(-1)[edit["index"] % tensor.numel()] = value
        else:
            tensor.fill_(value)
    return tensor.contiguous()


def _sign(directory: Path) -> None:
    """Make the hashes fit what is there; files that are no JSON any more are left."""
    with contextlib.suppress(ValueError, OSError, TypeError, KeyError, AttributeError):
        config = json.loads((directory / "config.json").read_bytes() if (directory / "config.json").is_file() else b"")
        config["quantization_config"]["kv_cache"]["static"]["sha256"] = _sha256(directory / CACHE)
        _replace(directory / "config.json", json.dumps(config, indent=2).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ValueError, OSError, TypeError, KeyError, AttributeError):
        manifest = json.loads((directory / MANIFEST).read_bytes() if (directory / MANIFEST).is_file() else b"")
        present = [name for name in manifest["files"] if (directory / name).is_file()]
        manifest["files"] |= {name: _sha256(directory / name) for name in present}
        if "sizes" in manifest:
            manifest["sizes"] |= {name: (directory / name).stat().st_size for name in present}
        _replace(directory / MANIFEST, json.dumps(manifest, indent=1).encode())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------- random ones


def random_edit(directory: Path, random: Random, names: list[str]) -> dict[str, Any]:
    """Return one change of one of the files `names` of a directory."""
    roll = random.random()
    name = random.choice(names)
    path = directory / name
    if roll < 0.06:
        kinds: list[dict[str, Any]] = [{"remove": True}, {"folder": True}, {"text": []}, {"text": ["{}"]}]
        return {"file": name, **(random.choice(kinds) if random.random() < 0.9 else {"fifo": True})}
    if roll < 0.12:
        return _swapped(name, random, names)
    if name.endswith(".safetensors"):
        return {"file": name, **_of_tensors(path, random)}
    if name.endswith((".json", ".index.json")) and roll < 0.9:
        document = json.loads(path.read_bytes())
        sections = [key for key in ("quantization_config", "files", "metadata") if key in document]
        if sections and random.random() < 0.7:  # most of the rest is not ours
            found = values.change(document[sections[0]], random)
            return {"file": name, **found, "at": [sections[0], *found["at"]]}
        return {"file": name, **values.change(document, random)}
    return {"file": name, **values.damage(path.read_bytes(), random)}


def _swapped(name: str, random: Random, names: list[str]) -> dict[str, Any]:
    return random.choice(
        [
            {"file": name, "copy": random.choice(names)},
            {"file": name, "link": random.choice(["/dev/zero", "/etc/passwd", "nowhere", ".", name])},
            {"file": random.choice(EXTRAS), "copy": name},
            {"file": random.choice(EXTRAS), "text": [random.choice(["{}", "", "[]", "{", "x = 1\n", "null"])]},
        ]
    )


def _of_tensors(path: Path, random: Random) -> dict[str, Any]:
    """Return a change of a safetensors file: its bytes, its header or one of its tensors."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    roll = random.random()
    if roll < 0.1:
        return values.damage(raw, random, 8 + length)
    if roll < 0.2:
        return values.damage(raw, random)
    if roll < 0.4:
        return values.change(json.loads(raw[8 : 8 + length]), random)
    tensors = tensors_of(path)
    name = random.choice(sorted(tensors))
    tensor = tensors[name]
    if roll < 0.5:
        return {"tensor": name, "shape": _other_shape(list(tensor.shape), random)}
    if roll < 0.57:
        return {"tensor": name, "dtype": random.choice(DTYPES)}
    if roll < 0.61:
        return {"tensor": name, "drop": True}
    edit = {"tensor": name, "fill": random.choice(FILLS)}
    return edit if random.random() < 0.3 else {**edit, "index": random.randrange(max(1, tensor.numel()))}


def _other_shape(shape: list[int], random: Random) -> list[int]:
    if not shape:
        return random.choice([[1], [0], [2]])
    axis = random.randrange(len(shape))
    size = max(0, random.choice([0, 1, shape[axis] - 1, shape[axis] + 1, shape[axis] * 2, shape[axis] // 2]))
    changed = [*shape[:axis], min(size, 4096), *shape[axis + 1 :]]
    return random.choice([changed, changed, [*shape, 1], shape[::-1], [math.prod(shape)], [1, *shape]])
