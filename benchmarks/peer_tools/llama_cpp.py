"""llama.cpp: its own quantizer through libllama, with an importance matrix from the given windows.

`llama_model_quantize` reads and writes GGUF files. The model is written as one by compress; the importance matrix is
the mean square of every input of every linear over the windows, as the tool's own program computes it. The tool needs
the package llama-cpp-py-sync, which holds the library, beside compress and gguf. Files are read back by gguf.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .common import Clock, read_checkpoint, read_shapes

DISTRIBUTION = "llama-cpp-py-sync"
FILE, BASE = "model.gguf", "base.gguf"
TYPES = {  # llama_ftype
    **{"Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18},
    **{"IQ2_XXS": 19, "IQ2_XS": 20, "Q2_K_S": 21, "IQ3_XS": 22, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25},
    **{"IQ3_S": 26, "IQ3_M": 27, "IQ2_S": 28, "IQ2_M": 29, "IQ4_XS": 30, "IQ1_M": 31},
}
ROOT = Path(__file__).resolve().parents[2]


class _Importance(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t)]


class _Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("nthread", "ftype", "output_tensor_type", "token_embedding_type")),
        *((name, ctypes.c_bool) for name in ("allow_requantize", "quantize_output_tensor", "only_copy", "pure")),
        *((name, ctypes.c_bool) for name in ("keep_split", "dry_run")),
        ("imatrix", ctypes.POINTER(_Importance)),
        *((name, ctypes.c_void_p) for name in ("kv_overrides", "tt_overrides", "prune_layers")),
        ("max_buf_size", ctypes.c_size_t),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--type", choices=TYPES, help="of llama.cpp")
    parser.add_argument("--no-importance", action="store_true", help="llama.cpp without an importance matrix")


def quantize(args: argparse.Namespace, windows: Tensor, out: Path) -> Clock:
    """Quantize to the type args.type; the clock includes the importance matrix where it is used."""
    out.mkdir(parents=True, exist_ok=True)
    base = out / BASE
    names = _write_base(args.model, base)
    importance, spent = ({}, Clock()) if args.no_importance else _importance(args, windows)
    with Clock() as clock:
        _run_quantizer(base, out / FILE, TYPES[args.type], {names[name]: each for name, each in importance.items()})
    base.unlink()
    clock.wall, clock.cpu = clock.wall + spent.wall, clock.cpu + spent.cpu
    return clock


def _importance(args: argparse.Namespace, windows: Tensor) -> tuple[dict[str, Tensor], Clock]:
    """Return the importance matrix and what it took, which one type after the other reads from a file beside tokens."""
    file, clock = args.tokens.with_suffix(".importance"), Clock()
    if file.exists():
        with safe_open(file, "pt") as stored:
            clock.wall, clock.cpu = (float(stored.metadata()[name]) for name in ("wall", "cpu"))
        return load_file(file), clock
    with clock:
        importance = _mean_squares(args.model, windows, args.batch_size)
    save_file(importance, file, {"wall": str(clock.wall), "cpu": str(clock.cpu)})
    return importance, clock


def _mean_squares(model: Path, windows: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Return the mean square of each input of each linear of the decoder, float32 [in], by the weight's name."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    sums: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, arguments: tuple[Tensor, ...]) -> None:
            squares = arguments[0].float().square().flatten(0, -2).sum(0, dtype=torch.float64)
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    for name, module in loaded.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(f"model.{name}.weight"))
    with torch.no_grad():
        for batch in windows.split(batch_size):
            loaded.model(input_ids=batch, use_cache=False)
    return {name: (total / windows.numel()).float() for name, total in sums.items()}


def _run_quantizer(source: Path, target: Path, kind: int, importance: dict[str, Tensor]) -> None:
    """Call the library; SystemExit if it refuses."""
    library = _library()
    library.llama_model_quantize_default_params.restype = _Params
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread = kind, torch.get_num_threads()
    rows = [
        _Importance(name.encode(), ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float)), values.numel())
        for name, values in importance.items()
    ]
    table = (_Importance * (len(rows) + 1))(*rows)  # a row without a name ends it
    if rows:
        params.imatrix = ctypes.cast(table, ctypes.POINTER(_Importance))
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Params)]
    library.llama_model_quantize.restype = ctypes.c_uint32
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise SystemExit(f"{target.name}: llama_model_quantize failed")


def _library() -> Any:
    """Load libllama and what it needs from where the package lies."""
    import importlib.util

    spec = importlib.util.find_spec("llama_cpp_py_sync")
    if spec is None or spec.origin is None:
        raise SystemExit("llama-cpp-py-sync is not installed in this environment")
    folder = Path(spec.origin).parent
    for name in ("libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0"):
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libllama.so"))


def _describe(model: Path) -> Any:
    """Return how llama.cpp names a model's tensors, by compress's own exporter."""
    sys.path.insert(0, str(ROOT))
    from compress.export.targets.gguf import architecture
    from compress.model import load

    return architecture.describe(load.load_config(model))


def _write_base(model: Path, out: Path) -> dict[str, str]:
    """Write the model as it is as a GGUF file, norms in float32; return the names of the tensors in it."""
    described = _describe(model)
    import gguf

    from compress.export.targets.gguf import vocabulary

    tensors, names = read_checkpoint(model), _names(model)
    writer = gguf.GGUFWriter(out, described.architecture)
    keys = {**described.metadata, **vocabulary.metadata(model, len(tensors["model.embed_tokens.weight"]))}
    for key, value in keys.items():
        kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    if described.divisors:
        raise SystemExit(f"{model}: rotary frequencies with divisors are not written here")
    for name, tensor in tensors.items():
        values = _edit(described, name, tensor.float())
        if tensor.ndim == 1:
            writer.add_tensor(names[name], values.numpy())
        else:
            bits = values.to(torch.bfloat16).view(torch.uint8).numpy()
            writer.add_tensor(names[name], bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names


def _edit(described: Any, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of the source with the rows and values that it has in the file."""
    from compress.importers.source import Decoded

    source = Decoded(name, tensor.dtype, tuple(tensor.shape), (), lambda start, stop: tensor[start:stop], len(tensor))
    (edited,) = described.edit({name: source}).values()
    return edited.read()


def stored_bytes(packed: Path, model: Path) -> dict[str, int]:
    """Return the bytes of every tensor, by its name in the source model."""
    import gguf

    names = {described: name for name, described in _names(model).items()}
    return {names[tensor.name]: int(tensor.n_bytes) for tensor in gguf.GGUFReader(packed / FILE).tensors}


def _names(model: Path) -> dict[str, str]:
    described = _describe(model)
    return {name: described.place(name)[0] for name in read_shapes(model)}


def restore(packed: Path, model: Path) -> dict[str, Tensor]:
    """Return all tensors decoded, rows of queries and keys in the source's order."""
    import gguf

    described, stored = _describe(model), {}
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(packed / FILE).tensors}
    for name, shape in read_shapes(model).items():
        tensor = read[described.place(name)[0]]
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float().reshape(shape)
        offset = _edit(described, name, torch.zeros(len(values), *[1] * (values.ndim - 1)))
        order = _edit(described, name, torch.arange(len(values)).float().view_as(offset)) - offset
        stored[name] = torch.empty_like(values).index_copy_(0, order.flatten().long(), values - offset)
    return stored
