"""Check one step of attention over a coded cache, and time it beside a bfloat16 cache.

    python benchmarks/kv_attention.py [--device cuda] [--threads 1] [--tokens 32768 131072] [--bits 2 3 4 8]
                                      [--methods kivi pca lloyd lloyd-pre] [--shape 32 8 128]
    python benchmarks/kv_attention.py show [--json FILE]

One sequence, 32 query heads, 8 KV heads of 128 channels, or another shape: min-max integers with groups of 32 (method
kivi), principal components (pca, calibrated on more such tokens), sums of codebook entries (commvq), rotated Lloyd-Max
codes of keys after the rotary embedding and, named lloyd-pre, before it. Keys and values are random, with principal
components of sizes from 3 to 0.06 and a mean. Each cache is first compared with attention in float64 over what it
decodes to, and one that is wrong ends the run; `exact` is the same error against the tokens before they were coded.
Then three ways are timed in turns (compress/evaluate/speed.py): fused attention, which reads what is stored;
decode-then-attend, which decodes and calls scaled_dot_product_attention; and that function on a bfloat16 cache, the
faster of two ways to call it: with enable_gqa, or with the query heads of a KV head as rows. With one CPU thread its
own seconds count, so that other processes do not. On a GPU these are CUDA graphs that go round over copies, so that
nothing is in its cache. Rows go to benchmarks/results/kv_attention_<device>.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import result_file
from measure import ROOT

sys.path.insert(0, str(ROOT))


class Shape(NamedTuple):
    """Query heads, KV heads, and channels of a head."""

    heads: int
    kv_heads: int
    width: int


SHAPE = HEADS, KV_HEADS, WIDTH = Shape(32, 8, 128)
TOKENS = {"cpu": [16384], "cuda": [32768, 131072]}
CHUNK = 8192  # tokens of keys and values that are made at a time
TOLERANCE = 1e-2  # relative error of outputs in bfloat16, with decoded keys and values that are not rounded to it
RECIPES: dict[str, dict[str, Any]] = {
    "kivi": {"method": "kivi"},
    "pca": {"method": "pca"},
    "commvq": {"method": "commvq", "tied": False, "steps": 0, "rounds": 0, "sweeps": 0},
    "lloyd": {"method": "lloyd", "keys": {"rope": "post", "centre": "none"}},
    "lloyd-pre": {"method": "lloyd", "keys": {"rope": "pre"}},
}
METHODS = {"cpu": ["kivi", "pca", "lloyd", "lloyd-pre"], "cuda": ["kivi", "lloyd"]}
MOST_BITS = {"pca": 7}
HEADER = "| method | bits | shape | tokens | MB | error | exact | fused us | GB/s | x decoded | x bfloat16 |"
SAMPLES = 2048  # tokens of calibration


@dataclass(frozen=True)
class Row:
    """One cache."""

    method: str
    bits: float
    tokens: int
    bytes: int  # of the coded cache of a layer
    error: float  # against what the cache decodes to
    exact: float  # error against the tokens before they were coded
    fused_s: float
    decoded_s: float
    bfloat16_s: float
    gb_per_s: float  # of stored bytes, fused
    ratio_decoded: float  # decode-then-attend over fused
    ratio: float  # bfloat16 over fused
    shape: Shape = SHAPE


def spread(x: Any, seed: int) -> Any:
    """Normal numbers [..., h, n, width] -> the same, with uneven components in a basis of each head, and a mean."""
    import torch

    generator, (heads, _, width) = torch.Generator(x.device).manual_seed(seed), x.shape[-3:]
    made = torch.randn(heads, width, width, generator=generator, device=x.device)
    basis, _ = torch.linalg.qr(made)
    sizes = torch.logspace(0.5, -1.2, width, device=x.device)
    return (x * sizes) @ basis.mT + 0.5 * torch.randn(heads, 1, width, generator=generator, device=x.device)


def turns(tokens: int, width: int, device: str) -> tuple[Any, Any]:
    """cos and sin [1, tokens, width] of a rotary embedding."""
    import torch

    rates = 10000.0 ** (-torch.arange(width // 2, device=device) / (width // 2))
    angles = (torch.arange(tokens, device=device)[:, None] * rates).repeat(1, 2)[None]
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def static(method: str, bits: float, device: str, shape: Shape) -> dict[str, Any]:
    """Calibrated tensors, where the method has any."""
    import torch

    from compress import plugins
    from compress.kv.codec import Spec

    plugin = plugins.load("kv", RECIPES[method]["method"])
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(7)
    for seed, kind in enumerate(("keys", "values") if plugin.NEEDS else ()):
        x = spread(torch.randn(shape.kv_heads, SAMPLES, shape.width, generator=generator), seed).transpose(0, 1)
        queries = torch.randn(SAMPLES, shape.heads, shape.width, generator=generator)
        samples = {"keys": x, "keys_pre": x, "values": x, "queries": queries, "queries_pre": queries}
        groups = shape.heads // shape.kv_heads
        spec = Spec(kind, 0, 1, shape.kv_heads, shape.width, groups, torch.bfloat16)  # type: ignore[arg-type]
        settings = {name: value for name, value in RECIPES[method].items() if name not in ("method", "keys")}
        made = plugin.calibrate(plugin.Config(bits=bits, **settings), spec, samples)
        found |= {f"layers.0.{kind}.{name}": tensor.to(device) for name, tensor in made.items()}
    return found


def layer(method: str, bits: float, tokens: int, device: str, seed: int, shape: Shape = SHAPE) -> tuple[Any, list[Any]]:
    """A CodedLayer, and the keys and values [1, h, tokens, width] that were put into it."""
    import torch
    from transformers import LlamaConfig

    from compress.kv.cache import make_cache
    from compress.kv.codec import rotate

    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        hidden_size=shape.heads * shape.width,
    )
    settings = RECIPES[method] | {"bits": bits, "sink": 4, "residual_length": 128}
    made = make_cache(config, settings, static(method, bits, device, shape), path="fused")
    generator = torch.Generator(device).manual_seed(seed)
    cos, sin = turns(tokens, shape.width, device)
    made.rope.append(cos, sin)
    found: Any = made.layers[0]
    parts: list[list[Any]] = [[], []]
    for start in range(0, tokens, CHUNK):
        sizes = 1, shape.kv_heads, min(CHUNK, tokens - start), shape.width
        keys, values = (spread(torch.randn(sizes, generator=generator, device=device), kind) for kind in range(2))
        rows = (x[:, start : start + sizes[2]] for x in (cos, sin))
        for own, x in zip(parts, (rotate(keys, *rows), values), strict=True):
            own.append(x.bfloat16())
        found.update(parts[0][-1], parts[1][-1])
        found.commit()
    return found, [torch.cat(own, 2) for own in parts]


def step(layer: Any, q: Any, new: Any) -> Any:
    """Return fused attention of one new token [B, H, 1, width], which is not stored."""
    from compress.kv import attention, fused
    from compress.kv.layer import Logits

    if not q.is_cuda:
        return attention._attend(layer, q, new, None, Logits(q.shape[3] ** -0.5, None))
    found = fused.attend(layer, q, new, None, q.shape[3] ** -0.5)
    if found is None:
        raise SystemExit("the kernel does not take this cache")
    return found


def decoded_step(layer: Any, q: Any, new: Any) -> Any:
    """Decode the keys and values of all tokens, then attend."""
    import torch.nn.functional as F

    keys, values = (layer.stores[kind].read(x) for kind, x in zip(("keys", "values"), new, strict=True))
    return F.scaled_dot_product_attention(rows_of(q, keys), keys, values)


def rows_of(q: Any, keys: Any) -> Any:
    """q [B, H, 1, width] as rows of the KV heads."""
    return q.view(1, keys.shape[1], -1, q.shape[3])


def errors(layer: Any, tokens: list[Any], q: Any, new: Any) -> tuple[float, float]:
    """Return relative errors of fused attention to decoded and to exact keys and values; SystemExit if it is wrong."""
    import torch

    found, query = step(layer, q, new).double(), rows_of(q.double(), new[0])
    wrong = []
    for pair in ([layer.stores[kind].read() for kind in ("keys", "values")], tokens):
        keys, values = (torch.cat(both, 2).double() for both in zip(pair, new, strict=True))
        exact = ((query @ keys.mT * q.shape[3] ** -0.5).softmax(-1) @ values).view_as(found)
        wrong.append(((found - exact).norm() / exact.norm()).item())
    if not wrong[0] < TOLERANCE:
        raise SystemExit(f"wrong, relative error {wrong[0]:.2e}")
    return wrong[0], wrong[1]


def time_row(
    method: str, bits: float, tokens: int, device: str, shape: Shape = SHAPE, clock: Any = time.perf_counter
) -> Row:
    import torch
    import torch.nn.functional as F

    from compress.evaluate import speed

    generator = torch.Generator(device).manual_seed(1)
    q, *new = (
        torch.randn(1, heads, 1, shape.width, generator=generator, device=device).bfloat16()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    first, exact = layer(method, bits, tokens, device, 0, shape)
    wrong, stored = errors(first, exact, q, new), first.nbytes().total
    del exact
    copies = max(2, -(-speed.ROTATED_NBYTES[device] // stored)) if device == "cuda" else 1
    layers = [first, *(layer(method, bits, tokens, device, seed, shape)[0] for seed in range(1, copies))]
    caches = [
        [torch.randn(1, shape.kv_heads, tokens + 1, shape.width, device=device).bfloat16() for _ in range(2)]
        for _ in range(max(1, min(copies, speed.ROTATED_NBYTES[device] // stored)))
    ]
    ways: list[list[Any]] = [
        [lambda one=one: step(one, q, new) for one in layers],
        [lambda one=one: decoded_step(one, q, new) for one in layers[:2]],
        [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in caches],
        [lambda k=k, v=v: F.scaled_dot_product_attention(rows_of(q, k), k, v) for k, v in caches],
    ]
    with torch.inference_mode():
        fused, decoded, *both = speed.in_turns(ways, device, clock)
    plain = min(both)
    rates = (stored / fused / 1e9, decoded / fused, plain / fused)
    return Row(method, bits, tokens, stored, *wrong, fused, decoded, plain, *rates, shape)


def line(row: dict[str, Any]) -> str:
    shape = " ".join(map(str, row.get("shape", SHAPE)))
    errors = f"{row['error']:.1e} | {row.get('exact', float('nan')):.1e}"
    return (
        f"| {row['method']} | {row['bits']:g} | {shape} | {row['tokens']} | {row['bytes'] / 1e6:.1f} | {errors} | "
        f"{row['fused_s'] * 1e6:.0f} | {row['gb_per_s']:.1f} | {row['ratio_decoded']:.2f} | {row['ratio']:.2f} |"
    )


def number(text: str) -> float:
    """Return a number, as int where it is whole."""
    value = float(text)
    return int(value) if value.is_integer() else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["run", "show"], default="run")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--tokens", nargs="+", type=int, help="default: 16384, on a GPU 32768 131072")
    parser.add_argument("--bits", nargs="+", type=number, default=[2, 3, 4, 8])
    parser.add_argument("--methods", nargs="+", choices=RECIPES, help="default: all that the device's kernels read")
    parser.add_argument("--shape", nargs=3, type=int, default=SHAPE, help="query heads, KV heads, width of a head")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/kv_attention_<device>.json")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.mode == "show":
        result_file.show_for_device("kv_attention", args.json, HEADER, line)
        return
    import torch

    torch.set_num_threads(args.threads)
    shape, rows = Shape(*args.shape), []
    clock = time.thread_time if args.device == "cpu" and args.threads == 1 else time.perf_counter
    for tokens in args.tokens or TOKENS[args.device]:
        for method in args.methods or METHODS[args.device]:
            for bits in (b for b in args.bits if b <= MOST_BITS.get(method, b)):
                rows.append(time_row(method, bits, tokens, args.device, shape, clock))
                print(line(asdict(rows[-1])), flush=True)
    facts = {"threads": args.threads, "torch": torch.__version__, "load_average": os.getloadavg()}
    result_file.write_for_device("kv_attention", args.device, args.json, facts, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
