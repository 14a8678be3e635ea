"""Time products that skip small inputs beside the same kernel with all inputs, and beside the kernels of rows.

    python benchmarks/sparse_inputs.py [--shape 4096x4096] [--rows 1] [--threads 1] [--turns 11]
    python benchmarks/sparse_inputs.py --layers 22 [--bits 4]      # tokens of a model instead

Weights are stored column by column as bfloat16, 8 and 4 bits (groups of 128), and row by row as `dense` and `int`.
Inputs have long tails and channels of different sizes, as those of a trained model. Calls take turns, in processor
time, each on the next of several copies of its weight, so that none is in a cache. Ratios are those of the least times,
and of the medians in brackets: how many times as fast as all columns, and as the kernel that reads row by row. What is
said of 256 rows compares the least times of both storages for a prompt.

The model has the shape of 1.1B parameters and so many blocks, all of which have the same random weights. Thresholds of
its linears are medians over a prompt; what is read of the next tokens is printed. Tokens are generated one by one, as
`compress.load` has it: programs of both storages run the blocks, the head is read by rows, in 8 bits beside codes.
"""

from __future__ import annotations

import argparse
import dataclasses
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


def linears(outputs: int, columns: int, bits: int, seed: int) -> tuple[Any, Any]:
    """One weight by rows, and by columns with a threshold for each input."""
    from compress.formats import columns as by_columns
    from compress.formats import dense
    from compress.quant import rtn
    from compress.types import IN_THRESHOLD, InputSparsity, PackedWeight, Stored

    shape = (outputs, columns)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.02)
    if bits == 16:
        plain = dense.Params()
        packed = PackedWeight(Stored("dense", plain), dense.pack(weight, plain), shape)
        params, tensors = by_columns.from_dense(packed.tensors, plain, shape)
    else:
        packed = rtn.quantize(weight, None, rtn.Config(bits=bits, group_size=128)).weight
        params, tensors = by_columns.from_int(packed.tensors, packed.params, shape)
    stored = Stored("columns", params, sparsity=InputSparsity(0.5))
    return packed, PackedWeight(stored, {**tensors, IN_THRESHOLD: torch.zeros(columns)}, shape)


def models(bits: int, layers: int) -> tuple[Any, Any]:
    """Two models of a 1.1B shape with the same weights, by rows and by columns. All blocks have those of the first."""
    from random_llama import Shape
    from transformers import LlamaConfig, LlamaForCausalLM

    from compress.runtime.linear import PackedLinear

    torch.set_default_dtype(torch.bfloat16)
    torch.nn.Linear.reset_parameters = lambda self: None  # type: ignore[method-assign]
    LlamaForCausalLM._init_weights = lambda self, module: None  # type: ignore[method-assign]
    config = LlamaConfig(**vars(Shape(num_hidden_layers=layers)), max_position_embeddings=2048)
    pair = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    for table in (pair[0].model.embed_tokens, pair[0].lm_head):
        table.weight.data.normal_(0, 0.02)
    pair[1].model.embed_tokens, pair[1].lm_head = pair[0].model.embed_tokens, pair[0].lm_head
    if bits < 16:  # as recipes of few bits have it
        head, _ = linears(config.vocab_size, config.hidden_size, 8, len(pair[0].model.layers))
        for model in pair:
            model.lm_head = PackedLinear.from_packed(head)
    names = [name for name, each in pair[0].model.layers[0].named_modules() if isinstance(each, torch.nn.Linear)]
    for seed, name in enumerate(names):
        plain = pair[0].model.layers[0].get_submodule(name)
        weights = linears(plain.out_features, plain.in_features, bits, seed)
        for model, weight in zip(pair, weights, strict=True):
            for block in model.model.layers:
                tensors = {key: tensor.clone() for key, tensor in weight.tensors.items()}
                block.set_submodule(name, PackedLinear.from_packed(dataclasses.replace(weight, tensors=tensors)))
    return pair


def calibrate(model: Any) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Return each threshold with its values, medians of inputs of a prompt, and the share kept of the next tokens."""
    from compress.runtime.linear import PackedLinear
    from compress.types import IN_THRESHOLD

    sparse = [each for each in model.modules() if isinstance(each, PackedLinear) and each.sparsity is not None]
    inputs: dict[Any, list[Tensor]] = {each: [] for each in sparse}
    handles = [each.register_forward_pre_hook(lambda own, x: inputs[own].append(x[0].float().abs())) for each in sparse]
    cache = model(torch.arange(64)[None] * 7).past_key_values
    thresholds = [each.get_parameter(IN_THRESHOLD) for each in sparse]
    values = [inputs[each].pop()[:, 4:].median().expand(each.in_features).clone() for each in sparse]
    for each, value in zip(thresholds, values, strict=True):
        each.copy_(value)
    for token in range(4):
        model(torch.tensor([[token]]), past_key_values=cache)
    for handle in handles:
        handle.remove()
    kept = [float((torch.cat(inputs[each], 1) >= values[i]).float().mean()) for i, each in enumerate(sparse)]
    sizes = [each.in_features * each.out_features for each in sparse]
    return list(zip(thresholds, values, strict=True)), sum(map(float.__mul__, kept, map(float, sizes))) / sum(sizes)


def generate(bits: int, layers: int, turns: int) -> None:
    """Print the times of a token of a model of 1.1B shape."""
    from compress.runtime.step import decode, speed_up

    times = dict[str, list[float]]()
    with torch.no_grad():
        rows, columns = models(bits, layers)
        thresholds, kept = calibrate(columns)
        print(f"{bits} bits, {layers} layers: {kept:.1%} of inputs are read", flush=True)
        for model in (rows, columns):
            speed_up(model)
        for turn in range(-1, turns):
            for mode, model in {"rows": rows, "columns": columns, "half": columns}.items():
                for each, value in thresholds:
                    each.copy_(value * (mode == "half"))
                cache = model(torch.arange(16)[None]).past_key_values
                start = time.thread_time()
                for token in range(4):
                    model(torch.tensor([[token]]), past_key_values=cache)
                if turn >= 0:
                    times.setdefault(mode, []).append((time.thread_time() - start) / 4)
    for model in (rows, columns):
        state = vars(model.model)[decode.MARK]
        assert state.running, f"no program: {state.refused}"
    for mode, taken in times.items():
        ratios = [
            f"{min(times[base]) / min(taken):.2f} ({statistics.median(times[base]) / statistics.median(taken):.2f})"
            for base in ("columns", "rows")
        ]
        least, median = 1e3 * min(taken), 1e3 * statistics.median(taken)
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
