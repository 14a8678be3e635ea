"""Time products that skip small inputs beside the same kernel with all inputs, and beside the kernels of rows.

    python benchmarks/sparse_inputs.py [--shape 4096x4096] [--rows 1] [--threads 1] [--turns 11]
    python benchmarks/sparse_inputs.py --layers 22 [--bits 4]      # tokens of a model instead

Weights are stored column by column as bfloat16, 8 and 4 bits (groups of 128), and row by row as `dense` and `int`.
Inputs have long tails and channels of different sizes, as those of a trained model. Calls take turns, in processor
time, each on the next of several copies of its weight, so that none is in a cache. Ratios are those of the least times,
and of the medians in brackets: how many times as fast as all columns, and as the kernel that reads row by row. What is
said of 256 rows compares the least times of both storages for a prompt.

The model has the shape of 1.1B parameters, random weights in its blocks and so many of these. Each linear of a block
leaves out the half of its inputs that is smallest in a first token; tokens are generated one by one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import ROOT
from torch import Tensor

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SHARES = (0.25, 0.5, 0.65, 0.75)  # of the inputs that are left out
COLD = 1 << 27  # bytes of copies that calls go round


def inputs(rows: int, columns: int) -> Tensor:
    """Inputs with long tails [rows, columns], bfloat16."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(columns, generator=generator).mul_(0.4).exp_()
    draw = torch.rand(rows, columns, generator=generator).clamp_(1e-4, 1 - 1e-4)
    return ((draw - 0.5).sign() * -(1 - 2 * (draw - 0.5).abs()).log() * sizes).bfloat16()


def timed(ways: dict[str, Callable[[int], object]], turns: int) -> dict[str, tuple[float, float]]:
    """Least and median time of each way, which take turns; a way is given the number of the turn."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-2, turns):
        for name, way in ways.items():
            start = clock()
            for again in range(4):
                way(4 * (turn + 2) + again)
            if turn >= 0:
                seconds[name].append((clock() - start) / 4)
    return {name: (min(each), statistics.median(each)) for name, each in seconds.items()}


def measure(shape: tuple[int, int], bits: int, rows: int, turns: int) -> None:
    """Print the times of one storage."""
    from compress.formats import columns, dense
    from compress.kernels import dispatch
    from compress.quant import rtn

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).mul_(0.02)
    if bits == 16:
        plain = dense.Params()
        by_row: tuple[str, Any, Any] = ("dense", plain, dense.pack(weight, plain))
        by_column = ("columns", *columns.from_dense(by_row[2], plain, shape))
    else:
        packed = rtn.quantize(weight, None, rtn.Config(bits=bits, group_size=128)).weight
        by_row = ("int", packed.params, packed.tensors)
        by_column = ("columns", *columns.from_int(packed.tensors, packed.params, shape))
    x = inputs(rows, shape[1])
    kernels: dict[str, list[Any]] = {}
    for name, (format, params, tensors) in (("rows", by_row), ("columns", by_column)):
        size = sum(tensor.nbytes for tensor in tensors.values())
        copies = [{key: tensor.clone() for key, tensor in tensors.items()} for _ in range(max(2, COLD // size))]
        kernels[name] = [dispatch.prepare(x, copy, format, params, shape) for copy in copies]
    ways: dict[str, Callable[[int], object]] = {
        "rows": lambda i: kernels["rows"][i % len(kernels["rows"])](x),
        "columns": lambda i: kernels["columns"][i % len(kernels["columns"])].sparse(x, None),
    }
    for share in SHARES:
        threshold = x.float().abs().flatten().quantile(share)[None]

        def sparse(i: int, threshold: Tensor = threshold) -> object:
            return kernels["columns"][i % len(kernels["columns"])].sparse(x, threshold)

        ways[f"{share:.0%} left out"] = sparse
    times = timed(ways, turns)
    for name, (least, median) in times.items():
        ratios = [f"{times[base][0] / least:.2f} ({times[base][1] / median:.2f})" for base in ("columns", "rows")]
        print(f"| {bits} | {name} | {1e6 * least:.0f} ({1e6 * median:.0f}) | {' | '.join(ratios)} |", flush=True)

    many = inputs(256, shape[1])

    def product(name: str) -> Callable[[int], object]:
        kernel = kernels[name][0]
        if dispatch.suits(kernel, many):
            return lambda _: kernel(many)
        return lambda _: dispatch.decoded_product(kernel, many)

    times = timed({name: product(name) for name in ("rows", "columns")}, 3)
    ratio = times["rows"][0] / times["columns"][0]
    print(f"| {bits} | 256 rows | {1e6 * times['columns'][0]:.0f} | | {ratio:.2f} |", flush=True)


class _Linear(torch.nn.Module):
    """A linear of the model: `mode` says what is multiplied."""

    mode = "rows"

    def __init__(self, outputs: int, columns: int, bits: int, seed: int) -> None:
        from compress.formats import dense
        from compress.formats.columns import Params
        from compress.formats.int import params_for
        from compress.kernels import dispatch
        from helpers.stored import random_weight

        super().__init__()
        self.weight = None  # asked for by the model
        shape = (outputs, columns)
        if bits == 16:
            stored = torch.randn(outputs, columns, dtype=torch.bfloat16).mul_(0.02)
            by_row: tuple[str, Any, dict[str, Tensor]] = ("dense", dense.Params(), {"values": stored})
            by_column: tuple[Any, dict[str, Tensor]] = (Params(), {"values": stored.T.contiguous()})
        else:
            chosen = params_for(bits, 128, True, columns)
            by_row = ("int", chosen, random_weight("int", chosen, shape, seed).tensors)
            params = Params(bits, 128, dtype="float16")
            by_column = (params, random_weight("columns", params, shape, seed).tensors)
        x = torch.empty(0)
        self.kernels = (
            dispatch.prepare(x, by_row[2], by_row[0], by_row[1], shape),
            dispatch.prepare(x, by_column[1], "columns", by_column[0], shape),
        )
        self.kept = by_row, by_column  # kernels hold addresses
        self.threshold: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        by_row, by_column = self.kernels
        assert by_row is not None and by_column is not None
        if x.shape[-2] > 1 or self.mode == "rows":
            return by_row(x.contiguous())
        if self.mode == "half" and self.threshold is None:
            self.threshold = x.float().abs().flatten().median()[None]
        threshold = self.threshold if self.mode == "half" else None
        return by_column.sparse(x.reshape(1, -1), threshold).view(*x.shape[:-1], -1)  # type: ignore[attr-defined]


def generate(bits: int, layers: int, turns: int) -> None:
    """Print the times of a token of a model of 1.1B shape."""
    from random_llama import Shape
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = Shape(num_hidden_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    torch.nn.Linear.reset_parameters = lambda self: None  # type: ignore[method-assign]
    LlamaForCausalLM._init_weights = lambda self, module: None  # type: ignore[method-assign,assignment]
    model = LlamaForCausalLM(LlamaConfig(**vars(shape), max_position_embeddings=2048)).eval()
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            parent = model.model.layers.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], _Linear(module.out_features, module.in_features, bits, len(name)))
    model.lm_head.weight.data.normal_(0, 0.02)
    prompt, times = torch.arange(16)[None], dict[str, list[float]]()
    with torch.inference_mode():
        for turn in range(-1, turns):
            for _Linear.mode in ("rows", "columns", "half"):
                cache = model(prompt).past_key_values
                start = time.thread_time()
                for token in range(4):
                    model(torch.tensor([[token]]), past_key_values=cache)
                if turn >= 0:
                    times.setdefault(_Linear.mode, []).append((time.thread_time() - start) / 4)
    for mode, each in times.items():
        ratios = [
            f"{min(times[base]) / min(each):.2f} ({statistics.median(times[base]) / statistics.median(each):.2f})"
            for base in ("columns", "rows")
        ]
        least, median = 1e3 * min(each), 1e3 * statistics.median(each)
        print(f"| {bits} | {mode} | {least:.1f} ms ({median:.1f}) | {' | '.join(ratios)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4096x4096")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--bits", type=int, nargs="*", default=[16, 8, 4])
    parser.add_argument("--layers", type=int, default=0, help="blocks of a model; 0: time products")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    outputs, columns = map(int, args.shape.split("x"))
    print("| bits | columns | us | x all columns | x by rows |")
    print("|---|---|---|---|---|")
    for bits in args.bits:
        if args.layers:
            generate(bits, args.layers, args.turns)
            continue
        measure((outputs, columns), bits, args.rows, args.turns)


if __name__ == "__main__":
    main()
