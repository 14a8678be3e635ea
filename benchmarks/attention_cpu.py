"""Time attention of few tokens over plain keys and values on a CPU, beside torch's.

    python benchmarks/attention_cpu.py [--avx2] [--tokens 128 512 2048 8192] [--shape 9 3 64] [--again]
    python benchmarks/attention_cpu.py show

One thread, whose own seconds count. Layers of random bfloat16 keys and values take turns, 48 MB in all and two layers
at least, so that what is read comes from memory as it does in a model. Ways take turns too: the compiled function
(compress/kernels/cpu/attention.py), scaled_dot_product_attention as transformers calls it in bfloat16 and in float32
(whose keys are twice as long), and a copy of keys and values, which reads as much. Figures are medians of TURNS turns
and the least. `error` is the relative error against float64, and `error_torch` that of torch in bfloat16. --avx2 plays
a processor without AVX-512. Rows go to benchmarks/results/attention_cpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import result_file
from measure import ROOT
from rich.table import Table

sys.path.insert(0, str(ROOT))

FILE = ROOT / "benchmarks" / "results" / "attention_cpu.json"
SHAPES = [(9, 3, 64), (32, 4, 64), (32, 8, 128), (4, 1, 256), (16, 16, 64)]  # query heads, heads of keys, channels
TOKENS = [128, 512, 2048, 8192]
CASES = [(1, 1), (8, 1), (1, 4)]  # sequences, new tokens of each
NBYTES = 48 << 20  # bytes of all layers
MOST_LAYERS = 64
TURNS = 9
WAYS = ("compiled", "bfloat16", "float32", "copy")


def make_parser(description: str, tokens: list[int]) -> argparse.ArgumentParser:
    """Return what reads the arguments of a benchmark of attention on a CPU; tokens: the default contexts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["show"])
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens)
    parser.add_argument("--shape", type=int, nargs=3, metavar=("HEADS", "KV_HEADS", "WIDTH"))
    parser.add_argument("--again", action="store_true", help="measure rows that the file has anew")
    return parser


def main() -> None:
    """Read the arguments, and measure or show."""
    arguments = make_parser(__doc__, TOKENS).parse_args()
    if arguments.command != "show":
        if arguments.avx2:
            sys.path.insert(0, str(ROOT / "tests"))
            import avx2_only  # noqa: F401  # before torch
        for shape in [tuple(arguments.shape)] if arguments.shape else SHAPES:
            for tokens in arguments.tokens:
                for batch, new in CASES:
                    _measure(arguments, shape, tokens, batch, new)
    _show()


def _measure(arguments: argparse.Namespace, shape: tuple[int, ...], tokens: int, batch: int, new: int) -> None:
    heads, kv_heads, width = shape
    identity = {
        "set": "avx2" if arguments.avx2 else "all",
        **{"heads": heads, "kv_heads": kv_heads, "width": width},
        **{"tokens": tokens, "batch": batch, "new": new},
    }
    row = result_file.add(FILE, identity, arguments.again, str(identity), lambda: figures(shape, tokens, batch, new))
    if row is not None:
        print(identity, {name: row[f"{name}_ms"] for name in WAYS}, flush=True)


def figures(shape: tuple[int, ...], tokens: int, batch: int, new: int) -> dict[str, Any]:
    """Return times of a layer in milliseconds, ratios to the compiled function, and errors."""
    import torch
    from torch import nn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from compress.kv import plain

    torch.set_num_threads(1)
    heads, kv_heads, width = shape
    nbytes = 4 * batch * kv_heads * tokens * width
    layers = max(2, min(MOST_LAYERS, NBYTES // nbytes))
    generator = torch.Generator().manual_seed(0)
    sizes = layers, batch, kv_heads, tokens, width
    keys, values = (torch.randn(sizes, generator=generator).bfloat16() for _ in range(2))
    q = torch.randn(batch, heads, new, width, generator=generator).bfloat16()
    mask = torch.ones(new, tokens, dtype=torch.bool).tril(tokens - new).expand(batch, 1, -1, -1) if new > 1 else None
    module: Any = nn.Module()
    module.num_key_value_groups = heads // kv_heads
    wide = q.float(), keys.float(), values.float()
    space = torch.empty_like(keys[0])

    def run(attend: Callable[..., Any], query: Any, all_keys: Any, all_values: Any) -> list[Any]:
        with torch.inference_mode():
            return [attend(module, query, k, v, mask)[0] for k, v in zip(all_keys, all_values, strict=True)]

    ways: dict[str, Callable[[], Any]] = {
        "compiled": lambda: run(plain.attention, q, keys, values),
        "bfloat16": lambda: run(sdpa_attention_forward, q, keys, values),
        "float32": lambda: run(sdpa_attention_forward, *wide),
        "copy": lambda: [space.copy_(x) for pair in zip(keys, values, strict=True) for x in pair],
    }
    exact = run(sdpa_attention_forward, q.double(), keys[:1].double(), values[:1].double())[0]
    errors = [float((ways[name]()[0] - exact).norm() / exact.norm()) for name in ("compiled", "bfloat16")]
    spent = _turns(ways)
    middle = {name: statistics.median(times) / layers for name, times in spent.items()}
    return {
        **{f"{name}_ms": round(time, 4) for name, time in middle.items()},
        **{f"{name}_least_ms": round(min(times) / layers, 4) for name, times in spent.items()},
        **{f"x_{name}": round(middle[name] / middle["compiled"], 2) for name in WAYS[1:]},
        "gb_per_s": round(nbytes / middle["compiled"] / 1e6, 1),
        "error": errors[0],
        "error_torch": errors[1],
    }


def _turns(ways: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return milliseconds of this thread for each way, in turns."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, run in ways.items():
            begin = time.thread_time()
            run()
            spent[name].append(1e3 * (time.thread_time() - begin))
    return spent


def _show() -> None:
    table = Table(
        "set", "heads", "tokens", "batch", "new", "us a layer", "GB/s", "x bfloat16", "x float32", "error", "torch"
    )
    for row in result_file.read(FILE):
        shape = f"{row['heads']} / {row['kv_heads']} x {row['width']}"
        times = [f"{1e3 * row['compiled_ms']:.0f}", str(row["gb_per_s"]), str(row["x_bfloat16"]), str(row["x_float32"])]
        errors = [f"{row[name]:.2e}" for name in ("error", "error_torch")]
        table.add_row(row["set"], shape, *(str(row[name]) for name in ("tokens", "batch", "new")), *times, *errors)
    result_file.show(table)


if __name__ == "__main__":
    main()
