"""Quantize a model with another tool, on given token windows, and read back what that tool wrote.

Quantize (run by the interpreter of the environment that has the tool; compress need not be installed there):
    python benchmarks/peers.py --tool llm-compressor --bits 4 --group-size 128 --model DIR --tokens F --out DIR
prints one JSON line: seconds of quantization alone (model loading, imports and saving excluded), peak memory, tool
version, stored bits per weight of the decoder's linears and bytes of the checkpoint, both counted from the files.

Decode (needs torch and safetensors only, none of the tools):
    python benchmarks/peers.py --decode PACKED --model DIR --out DIR
writes a plain float32 checkpoint, so that one evaluator scores all. The readers below follow the formats' documents
(compressed-tensors pack-quantized, GPTQ v1 and v2, AutoRound) and share no code with the tools or with compress.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import shutil
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Namespace = argparse.Namespace
SOURCE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


# quantizing with a tool


class Clock:
    """Wall and CPU (user + system, all threads) seconds of a `with` block."""

    wall = cpu = 0.0

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self._wall, _cpu_seconds() - self._cpu


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss() -> int:
    """Peak resident bytes of this process since its exec.

    VmHWM and not ru_maxrss: the latter starts at the size that the parent had when it started this process.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def llm_compressor(args: Namespace, windows: Tensor, out: Path) -> Clock:
    """GPTQModifier with its defaults (activation order static, damping 0.01, blocks of 128), or plain rounding."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    weights = {
        "num_bits": args.bits,
        "type": "int",
        "symmetric": not args.asymmetric,
        "strategy": "group",
        "group_size": args.group_size,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    modifier = {"gptq": GPTQModifier, "rtn": QuantizationModifier}[args.method](
        config_groups=groups, ignore=["lm_head"]
    )
    rows = windows.tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    with Clock() as clock:
        if args.method == "rtn":
            oneshot(model=model, recipe=modifier)
        else:
            oneshot(
                model=model,
                recipe=modifier,
                dataset=data,
                batch_size=args.batch_size,
                num_calibration_samples=len(rows),
                max_seq_length=windows.shape[1],
                shuffle_calibration_samples=False,
            )
    model.save_pretrained(out, save_compressed=True)
    return clock


def gptqmodel(args: Namespace, windows: Tensor, out: Path) -> Clock:
    """GPTQModel with its defaults, or its plain rounding."""
    vision = types.ModuleType("gptqmodel.models.definitions.internvl_chat")
    vision.__dict__["InternVLChatQModel"] = None
    sys.modules.setdefault(vision.__name__, vision)  # the one definition that needs torchvision, which is not declared
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import RTNConfig

    kind = {"gptq": QuantizeConfig, "rtn": RTNConfig}[args.method]
    config = kind(bits=args.bits, group_size=args.group_size, sym=not args.asymmetric)
    model = GPTQModel.load(str(args.model), config)
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in windows.tolist()]
    with Clock() as clock:
        model.quantize(data if args.method == "gptq" else None, batch_size=args.batch_size)
    model.save(str(out))
    return clock


def auto_round(args: Namespace, windows: Tensor, out: Path) -> Clock:
    """AutoRound with its defaults, 200 iterations a block; or plain rounding.

    The clock covers what it does in one go: calibration, tuning and the writing of the packed checkpoint.
    """
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    plain = {f"model.layers.{block}." for block in args.plain_blocks}
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    kept = {name: {"bits": 16} for name in linears if any(map(name.startswith, plain))}
    tuner = AutoRound(
        model,
        AutoTokenizer.from_pretrained(args.model),
        scheme={"bits": args.bits, "group_size": args.group_size, "sym": not args.asymmetric, "data_type": "int"},
        iters=0 if args.method == "rtn" else args.iterations,
        dataset=[row[None] for row in windows],
        nsamples=len(windows),
        seqlen=windows.shape[1],
        batch_size=min(args.batch_size, len(windows)),
        device_map="cpu",
        enable_alg_ext=args.extended,
        layer_config=kept,
    )
    with Clock() as clock:
        _, folder = tuner.quantize_and_save(str(out), format="auto_round")  # below `out`, under a name of its own
    for file in Path(folder).iterdir():
        file.rename(out / file.name)
    return clock


# --tool -> name of the distribution, function
TOOLS: dict[str, tuple[str, Callable[[Namespace, Tensor, Path], Clock]]] = {
    "llm-compressor": ("llmcompressor", llm_compressor),
    "gptqmodel": ("gptqmodel", gptqmodel),
    "auto-round": ("auto-round", auto_round),
}


def quantize(args: Namespace) -> dict[str, Any]:
    """Run the tool; the facts that the benchmark's table needs, seconds and bytes in the names."""
    distribution, tool = TOOLS[args.tool]
    windows = load_file(args.tokens)["tokens"]  # [n, seq_len] int64
    clock = tool(args, windows, args.out)
    return {
        "tool": args.tool,
        "version": importlib.metadata.version(distribution),
        "quantize_wall_s": clock.wall,
        "quantize_cpu_s": clock.cpu,
        "peak_rss_bytes": peak_rss(),
        "threads": torch.get_num_threads(),
        **sizes(args.out, args.model),
    }


# reading what tools wrote


def headers(directory: Path) -> dict[str, int]:
    """Stored bytes of every tensor of a checkpoint, from the files' headers."""
    stored: dict[str, int] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        stored |= {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
    return stored


def source_linears(model: Path) -> dict[str, tuple[int, int]]:
    """The decoder blocks' linear modules of the unquantized model and their shapes (out, in)."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                shape = tensors.get_slice(name).get_shape()
                if name.endswith(".weight") and ".layers." in name and len(shape) == 2:
                    shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def sizes(directory: Path, model: Path) -> dict[str, float]:
    """bpw: stored bits per weight of the packed linears, everything stored under their names but the bias."""
    stored = headers(directory)
    linears = {name: shape for name, shape in source_linears(model).items() if f"{name}.weight" not in stored}
    packed = sum(
        size for name, size in stored.items() if name.rpartition(".")[0] in linears and not name.endswith(".bias")
    )
    return {
        "bpw": 8 * packed / sum(rows * columns for rows, columns in linears.values()),
        "checkpoint_bytes": sum(file.stat().st_size for file in directory.glob("*.safetensors")),
    }


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 words [rows, w], a little-endian bit stream along each row -> codes [rows, count] int64 >= 0."""
    shifts = torch.arange(32, dtype=torch.int32)
    stream = ((words.unsqueeze(-1) >> shifts) & 1).reshape(words.shape[0], -1)[:, : count * bits]  # one bit an entry
    return (stream.reshape(words.shape[0], count, bits).long() << torch.arange(bits)).sum(-1)


def decode_compressed_tensors(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """pack-quantized: codes are stored + 2**(bits-1), zero points likewise and packed along the rows."""
    bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
    rows, columns = parts["weight_shape"].tolist()
    scale = parts["weight_scale"].float()  # [rows, groups]
    codes = unpack_words(parts["weight_packed"], bits, columns).float() - 2 ** (bits - 1)
    zero = torch.zeros_like(scale)
    if "weight_zero_point" in parts:
        zero = unpack_words(parts["weight_zero_point"].T.contiguous(), bits, rows).T.float() - 2 ** (bits - 1)
    repeats = columns // scale.shape[1]
    return (codes - zero.repeat_interleave(repeats, 1)) * scale.repeat_interleave(repeats, 1)


def decode_gptq(parts: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """GPTQ: codes packed along the inputs, zero points along the outputs; version 1 stores the zero point less one.

    AutoRound writes the same layout without the groups of the columns, and says the version in another place.
    """
    bits, rows = config["bits"], parts["scales"].shape[1]
    columns = parts["qweight"].shape[0] * 32 // bits
    size = columns if config["group_size"] == -1 else config["group_size"]
    group = parts.get("g_idx", torch.arange(columns) // size).long()  # of each input column
    codes = unpack_words(parts["qweight"].T.contiguous(), bits, columns)  # [rows, columns]
    zeros = unpack_words(parts["qzeros"], bits, rows).T  # [rows, groups]
    version = config.get("packing_format") or config.get("checkpoint_format", "gptq")
    if version in ("gptq", "auto_round:auto_gptq"):
        zeros = (zeros + 1) & (2**bits - 1)
    return (codes - zeros[:, group]).float() * parts["scales"].T.float()[:, group]


DECODERS = {"compressed-tensors": decode_compressed_tensors, "gptq": decode_gptq, "auto-round": decode_gptq}
MARKS = {"compressed-tensors": "weight_packed", "gptq": "qweight", "auto-round": "qweight"}


def decode(packed: Path, model: Path, out: Path) -> None:
    """Write the packed checkpoint as a plain float32 one; config and tokenizer come from the source model."""
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    method = config["quant_method"]
    stored: dict[str, Tensor] = {}
    for file in sorted(packed.glob("*.safetensors")):
        stored |= load_file(file)
    modules = [name.removesuffix(f".{MARKS[method]}") for name in stored if name.endswith(f".{MARKS[method]}")]
    expected = source_linears(model)
    if missing := [name for name in expected if name not in modules and f"{name}.weight" not in stored]:
        raise SystemExit(f"{packed}: {len(missing)} linears are neither packed nor plain, the first {missing[0]}")
    plain: dict[str, Tensor] = {}
    for module in modules:
        parts = {
            name.removeprefix(f"{module}."): stored.pop(name) for name in list(stored) if name.startswith(f"{module}.")
        }
        plain[f"{module}.weight"] = DECODERS[method](parts, config).contiguous()
        assert plain[f"{module}.weight"].shape == expected[module], module
        if "bias" in parts:
            plain[f"{module}.bias"] = parts["bias"].float()
    plain |= {name: tensor.float() for name, tensor in stored.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(plain, out / "model.safetensors", metadata={"format": "pt"})
    for name in SOURCE_FILES:
        if (model / name).exists():
            shutil.copy(model / name, out / name)
    plain_config = json.loads((out / "config.json").read_text()) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(plain_config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=sorted(TOOLS))
    parser.add_argument("--decode", type=Path, metavar="PACKED")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, help="safetensors file with `tokens` int64 [n, seq_len]")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--method", choices=("gptq", "rtn"), default="gptq")
    parser.add_argument("--iterations", type=int, default=200, help="of AutoRound, for each block")
    parser.add_argument(
        "--plain-blocks", type=int, nargs="*", default=[], help="blocks that AutoRound leaves as they are"
    )
    parser.add_argument("--extended", action="store_true", help="AutoRound with its algorithm extensions")
    parser.add_argument("--batch-size", type=int, default=1, help="calibration windows in one forward pass")
    args = parser.parse_args()
    if args.decode:
        decode(args.decode, args.model, args.out)
    elif args.tool and args.tokens:
        print(json.dumps(quantize(args)), file=sys.stdout, flush=True)
    else:
        parser.error("give --tool and --tokens, or --decode")


if __name__ == "__main__":
    main()
