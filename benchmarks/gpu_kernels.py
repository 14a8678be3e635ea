"""The kernels of a GPU against what they stand for: cases of the section `kernels` of gpu.py."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_child import Case, Row, SkippedError

SHAPES = {"cuda": [(304, 1184), (512, 4096)], "cpu": [(64, 512)]}  # of compared weights
TIMED = {"cuda": [(4096, 4096), (28672, 8192), (14336, 4096)], "cpu": [(256, 512)]}
ROWS = {"cuda": [1, 3, 8, 16, 17, 64], "cpu": [1, 5]}  # of activations in bfloat16
FEW_ROWS = (1, 5, 17)  # of activations in float16
TIMED_ROWS = {"cuda": [1, 4, 16, 64], "cpu": [1]}
ENTRIES = ["int4", "vq2bit", "trellis4bit", "int2", "e8p2bit", "gptvq2bit", "int8", "trellis3bit", "int3", "vptq2bit"]
TOLERANCE = {"cuda": 4e-3, "cpu": 8e-3}  # in bfloat16, whose rounding is 2e-3; the interpreter truncates
SCALED = {  # type of inputs -> of the weight that is multiplied in the same type, as arguments of its parameters
    "fp8": ("e4m3", -1, "float32"),
    "fp8-block": ("e4m3", 128, "float32", 128),
    "mxfp8": ("e4m3", 32, "e8m0"),
    "mxfp4": ("e2m1", 32, "e8m0"),
    "nvfp4": ("e2m1", 16, "e4m3", 1, True),
}
PAGES = ["k8v8", "k8v4", "k4v4", "k3v3 levels", "k6v5", "k4v4 128"]  # bits of keys and values, width of heads
COMPILING = 120  # seconds that a case may take whose kernels are compiled in many forms
MORE: dict[str, list[dict[str, Any]]] = {  # settings whose kernels differ, at the first shape
    "gptq": [{"bits": bits, "symmetric": symmetric} for bits in range(2, 9) for symmetric in (True, False)],
    "trellis": [{"bits": bits, "code": code} for bits in (2, 4) for code in ("mul1", "1mad", "3inst", "mcg")]
    + [{"bits": 1}, {"bits": 3}],
}


def kernels(device: str) -> list[Case]:
    """Every stored form of every method, at several numbers of rows; then transforms, searches and cold caches."""
    cases = [Case(name, functools.partial(product, device, *form), COMPILING) for name, form in forms(device)]
    sizes = [128, 2048, 3072, 13824] if device == "cuda" else [128, 448]
    cases += [Case(f"hadamard {size}", functools.partial(transform, device, size)) for size in sizes]
    searches = [(2, 12, "mul1"), (2, 14, "mul1"), (3, 12, "3inst"), (4, 12, "mul1"), (1, 10, "mcg"), (2, 10, "hyb")]
    searches += [(2, 16, "mul1")] if device == "cuda" else []
    for bits, state_bits, code in searches if device == "cuda" else [(2, 8, "mul1")]:
        name = f"search {bits} bits, {state_bits} of a state, {code}"
        cases.append(Case(name, functools.partial(search, device, bits, state_bits, code)))
    cases += [Case(f"sum of two int of {bits} bits", functools.partial(two_planes, device, bits)) for bits in (2, 4)]
    cases.append(Case("columns", functools.partial(step_through, device)))
    for method, bits in [("kivi", 2), ("kivi", 4), ("kivi", 8), ("lloyd", 2), ("lloyd", 3), ("lloyd", 4)]:
        cases.append(Case(f"attention {method} {bits}", functools.partial(attend, device, method, bits)))
    cases += [
        Case(f"experts of {bits} bits", functools.partial(experts, device, bits), COMPILING) for bits in (2, 3, 4, 8)
    ]
    cases += [Case(f"pages {name}", functools.partial(attend_pages, device, name)) for name in PAGES]
    cases += [Case(f"inputs {dtype}", functools.partial(scaled_product, device, dtype)) for dtype in SCALED]
    if device == "cuda":  # compiles what is timed later, by several processes at once
        cases += [
            Case(f"{entry} at the shapes that are timed", functools.partial(timed_shapes, entry), COMPILING)
            for entry in ENTRIES
        ]
    return cases


def forms(device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield a name and (format, params, shape) of every distinct way in which a method stores a weight."""
    from compress import plugins
    from helpers import stored

    seen = set()
    asked = [(shape, stored.VARIANTS) for shape in SHAPES[device]]
    for shape, variants in [*asked, (SHAPES[device][0], MORE)] if device == "cuda" else asked:
        for method in plugins.names("quant"):
            plugin = plugins.load("quant", method)
            for settings in ({}, *variants.get(method, [])):
                form = plugin.FORMAT, plugin.plan_params(plugin.Config(**settings), shape), shape
                if form not in seen:
                    seen.add(form)
                    words = ", ".join(f"{key} {value}" for key, value in settings.items())
                    yield f"{method} {words} {shape[0]} x {shape[1]}".replace("  ", " "), form


def product(device: str, format: str, params: Any, shape: tuple[int, int]) -> Row:
    """Compare products, the decoded weight and its panels with what the format decodes to on a CPU in float64."""
    import torch

    from compress.formats import decode_stored
    from helpers import stored

    weight = stored.random_weight(format, params, shape)
    params = weight.params
    exact = decode_stored(weight, torch.float64).to(device)
    tensors = {name: tensor.to(device).contiguous() for name, tensor in weight.tensors.items()}
    folder = "compress.kernels.triton"
    if importlib.util.find_spec(f"{folder}.{format}") is None:
        raise SkippedError(f"no kernel for the format {format}")
    kernel = importlib.import_module(f"{folder}.{format}").prepare(tensors, params, shape)
    if kernel is None:
        raise SkippedError("these parameters are decoded")
    worst: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        worst[f"decode {kind}"] = apart(kernel.decode(dtype), exact.to(dtype).double())
        few = ROWS[device] if dtype == torch.bfloat16 else [n for n in ROWS[device] if n in FEW_ROWS]
        for rows in (n for n in few if n <= kernel.most_rows(dtype)):
            x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(device, dtype)
            worst[f"{rows} rows {kind}"] = apart(poisoned(kernel, x), x.double() @ exact.T)
    assert max(worst.values()) < TOLERANCE[device], f"wrong: {worst}"
    return {"worst": max(worst.values()), "compared": len(worst)}


def two_planes(device: str, bits: int) -> Row:
    """Compare products with a sum of two `int` weights of so many bits, in one launch."""
    from compress.formats import int as int_format
    from compress.formats import nested
    from compress.types import Stored

    shape = SHAPES[device][0]
    params = int_format.params_for(bits, 32, bits == 4, shape[1])
    both = nested.params_for([Stored("int", params)] * 2, (bits, 2 * bits))
    return product(device, "nested", both, shape)


def scaled_product(device: str, dtype: str) -> Row:
    """Compare products by tensor cores, of inputs and weights in one type, with simulated ones in float64."""
    import torch

    from compress.formats import decode_stored, grid
    from compress.runtime import activation_quant, integer
    from compress.types import Activations
    from helpers import stored

    params, shape = grid.Params(*SCALED[dtype]), (512, 4096)
    activations = Activations(4 if params.bits == 4 else 8, dtype=dtype)  # type: ignore[arg-type]
    asked = integer.IntegerProduct("grid", params, shape, activations)
    if reason := integer.obstacle(asked, torch.device(device)):
        raise SkippedError(reason)
    weight = stored.random_weight("grid", params, shape)
    tensors = {name: tensor.to(device) for name, tensor in weight.tensors.items()}
    held, exact = integer.operands(asked, tensors), decode_stored(weight, torch.float64).to(device)
    worst = 0.0
    for rows in ROWS[device]:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(device, torch.bfloat16)
        q, scale = activation_quant.quantize(x, activations)
        worst = max(worst, apart(integer.multiply(asked, x, held, None), q.double() * scale.double() @ exact.T))
    assert worst < TOLERANCE[device], f"wrong: {worst}"
    return {"worst": worst, "compared": len(ROWS[device])}


def poisoned(kernel: Callable[[Any], Any], x: Any) -> Any:
    """Call a kernel where uninitialized memory holds NaN."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return kernel(x)
    finally:
        torch.use_deterministic_algorithms(False)


def apart(found: Any, exact: Any) -> float:
    """Return the relative distance, infinity for what is not finite."""
    import torch

    distance = ((found.double() - exact).norm() / exact.norm()).item()
    return distance if torch.isfinite(found).all() else float("inf")


def transform(device: str, size: int) -> Row:
    """Compare the Hadamard transform, with each diagonal, with that of the package."""
    import torch

    from compress.formats.transforms import Diagonal, pack_diagonal
    from compress.kernels.triton import hadamard
    from compress.numerics import hadamard as reference

    generator = torch.Generator().manual_seed(size)
    x, scales = torch.randn(17, size, generator=generator).half(), torch.randn(size, generator=generator)
    errors = []
    for name in ("signs", "channel_scale16", "channel_scale8"):
        diagonal = Diagonal(name, pack_diagonal(name, scales))
        exact = reference.transform(x.double() * diagonal.values(size, torch.float64))
        before = Diagonal(name, diagonal.stored.to(device))
        errors.append(apart(hadamard.transform(x.to(device), before=before).cpu(), exact))
    assert max(errors) < 1e-3, f"wrong: {errors}"
    return {"worst": max(errors)}


def search(device: str, bits: int, state_bits: int, code: str) -> Row:
    """Compare the paths that the device finds with those of torch on a CPU: the same integers."""
    import torch

    from compress.formats import trellis as trellis_format
    from compress.quant import trellis, viterbi

    params = trellis_format.Params(bits, state_bits, 32 if device == "cpu" else 128, code)
    table = trellis_format.states_table(params, trellis._hyb_table() if code == "hyb" else None)
    values = 2 * torch.randn(
        40 if device == "cuda" else 2, params.tile_rows, generator=torch.Generator().manual_seed(1)
    )
    plain = viterbi.Search(table, state_bits, params.symbol_bits)
    plain.compiled = None
    wanted = plain.encode(values)
    fast = viterbi.Search(table.to(device), state_bits, params.symbol_bits)
    began = time.perf_counter()
    found = fast.encode(values.to(device)).cpu()
    assert torch.equal(found, wanted), f"{(found != wanted).sum()} of {found.numel()} states differ"
    return {"by": type(fast.on_gpu or fast.compiled).__name__, "device_s": time.perf_counter() - began}


def step_through(device: str) -> Row:
    """Compare GPTQ whose columns are stepped through by kernels with that of a CPU: nearly all codes are the same."""
    import torch

    from compress.quant import gptq
    from compress.types import Stats

    columns = 1024 if device == "cuda" else 160
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(192, columns, generator=generator), torch.randn(3 * columns, columns, generator=generator)
    hessian, seconds, made = x.T @ x / len(x), 0.0, []
    for where in ("cpu", device, device):  # the second time nothing is compiled
        began = time.perf_counter()
        stats = Stats(hessian.to(where), len(x))
        packed = gptq.quantize(weight.to(where), stats, gptq.Config(bits=4, group_size=128)).weight
        made.append({name: tensor.cpu() for name, tensor in packed.tensors.items()})
        seconds = time.perf_counter() - began
    same = min((made[-1][name] == wanted).float().mean().item() for name, wanted in made[0].items())
    assert same > 0.95, f"{same} are the same"
    return {"same": same, "device_s": seconds}


def attend(device: str, method: str, bits: int) -> Row:
    """Compare fused attention over a coded cache with attention over what it decodes to."""
    import kv_attention
    import torch

    generator = torch.Generator(device).manual_seed(1)
    heads = kv_attention.HEADS, kv_attention.KV_HEADS, kv_attention.KV_HEADS
    q, *new = (
        torch.randn(1, count, 1, kv_attention.WIDTH, generator=generator, device=device).bfloat16() for count in heads
    )
    layer, tokens = kv_attention.layer(method, bits, 700 if device == "cuda" else 300, device, 0)
    error, exact = kv_attention.errors(layer, tokens, q, new)
    return {"worst": error, "exact": exact}


def timed_shapes(entry: str) -> Row:
    """Compare products at the shapes that are timed, which also compiles their kernels."""
    import kernels as table

    shapes = [(min(shape[0], 4096), shape[1]) for shape in TIMED["cuda"]]
    errors = [table.check(entry, shape, rows, "cuda") for shape in shapes for rows in TIMED_ROWS["cuda"]]
    return {"worst": max(errors)}


def experts(device: str, bits: int) -> Row:
    """Compare the product of all experts with decoded weights in float64, and a CUDA graph with the product itself."""
    import torch

    from compress.formats import decode_stored
    from compress.formats import int as int_format
    from compress.kernels.triton import grouped
    from compress.types import PackedWeight
    from helpers import stored

    shape, count, top = ((768, 2048), 16, 4) if device == "cuda" else ((32, 128), 4, 2)
    params = int_format.params_for(bits, 64, bits % 2 == 0, shape[1])
    weights = [[stored.random_weight("int", params, shape) for _ in range(2)] for _ in range(count)]
    exact = [torch.cat([decode_stored(each, torch.float64) for each in expert]).to(device) for expert in weights]
    moved = [
        [PackedWeight(w.stored, {name: t.to(device) for name, t in w.tensors.items()}, w.shape) for w in expert]
        for expert in weights
    ]
    kernel = grouped.prepare(moved, torch.bfloat16)
    assert kernel is not None
    worst = 0.0
    for tokens in (1, 3, 16, 64, 300) if device == "cuda" else (1, 5):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, shape[1], generator=generator).to(device, torch.bfloat16)
        ids = torch.rand(tokens, count, generator=generator).argsort(-1)[:, :top].flatten()
        ids[1::7] = -1
        wanted = [exact[e] @ x[i // top].double() if e >= 0 else 0 * exact[0][:, 0] for i, e in enumerate(ids.tolist())]
        ids = ids.to(device)

        def run(x: Any, ids: Any = ids) -> Any:
            return kernel.product(x, ids, kernel.route(ids))

        worst = max(worst, apart(poisoned(run, x), torch.stack(wanted)))
        if device == "cuda":
            held, graph = torch.full_like(ids, -1), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = run(x, held)
            held.copy_(ids)
            graph.replay()
            assert torch.equal(y, run(x)), f"a graph of {tokens} tokens gives other numbers"
    assert worst < TOLERANCE[device], f"wrong: {worst}"
    return {"worst": worst}


def attend_pages(device: str, name: str) -> Row:
    """Compare what a device writes to pages and reads of them with a CPU's: one query, drafts, a chunk, a window."""
    import torch

    from compress.kernels import paged
    from compress.kv.pages import Pages
    from helpers import paged_cases

    codes, *rest = name.split()
    width = int(rest[-1]) if rest and rest[-1].isdigit() else 64
    make = paged_cases.levels if "levels" in rest else paged_cases.uniform
    keys, values = make(int(codes[1]), width), make(int(codes[3]), width)
    long = 3000 if device == "cuda" else 150
    worst: dict[str, float] = {}
    for requests, window in [(((long, 1), (37, 1)), None), (((long, 3), (600, 200 if long > 600 else 9)), 100)]:
        case = paged_cases.Case(keys, values, 16, (6, 2), requests, window, torch.bfloat16)
        given = paged_cases.made(case)
        exact = paged_cases.expected(case, given).to(device)
        moved: dict[str, Any] = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in given.items()}
        worst[f"read {len(worst)}"] = apart(paged.attend(**moved), exact)
    layout, generator = Pages(keys, values, 16), torch.Generator().manual_seed(1)
    states = torch.randn(40, 2, width, generator=generator), torch.randn(40, 2, width, generator=generator)
    slots = torch.arange(40) * 3 - 1
    tables = paged_cases.table(keys), paged_cases.table(values)
    pages = torch.zeros(8, 2, 16, layout.token_bytes, dtype=torch.uint8)
    on_device = pages.to(device)
    layout.encode_into(pages, slots, states, tables)
    levels = [None if x is None else x.to(device) for x in tables]
    paged.write(states[0].to(device), states[1].to(device), on_device, slots.to(device), layout, *levels)
    differing = (on_device.cpu() != pages).double().mean().item()
    assert max(worst.values()) < TOLERANCE[device] and differing < (2e-3 if layout.keys.levels else 1e-9), (
        worst,
        differing,
    )
    return {"worst": max(worst.values()), "differing": differing}
