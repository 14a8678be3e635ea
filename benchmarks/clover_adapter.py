"""Fine-tune a small model by CLOVER's singular-value matrices alone, and by LoRA with as many trained numbers.

    python benchmarks/clover_adapter.py tests/models/books-8m --calib texts/code_calib.txt --text texts/code_heldout.txt

CLOVER (arXiv 2411.17426) as initialization of an adapter: between the orthogonal factors of a head's values and output
lies S [head_dim, head_dim], at first diagonal; behind the orthogonalized rows of each head of queries and keys R, at
first triangular (rotary positions lie between both sides). Only S and R are trained, and then multiplied into the
weights. LoRA has a product of rank r beside the same four linears, the r with which it trains as many numbers. Loss is
that of the next token; the better of the learning rates is that with the lower loss on the other text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compress.calib import data
from compress.model import load
from compress.papers.transform.clover import decompose_product
from compress.tune.descend import descend

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
Weights = Callable[[], dict[str, Tensor]]


def start_clover(model: Any) -> tuple[list[nn.Parameter], Weights]:
    """Return the matrices S and R of all heads, and what makes weights of them."""
    trained: list[nn.Parameter] = []
    made: list[tuple[str, nn.Parameter, Tensor]] = []  # weight, its matrices [heads, hd, hd], its rows [heads, hd, in]
    fixed: dict[str, Tensor] = {}
    for index, block in enumerate(model.base_model.layers):
        attention, path = block.self_attn, f"model.layers.{index}.self_attn."
        size = attention.head_dim
        if attention.v_proj.bias is not None:
            raise SystemExit(f"{path}v_proj has a bias, which would have to be turned, too; take a model without one")
        values = attention.v_proj.weight.detach().double().unflatten(0, (-1, size))
        outputs = attention.o_proj.weight.detach().double().unflatten(1, (len(values), -1, size)).permute(1, 2, 0, 3)
        pairs = [decompose_product(value, output) for value, output in zip(values, outputs, strict=True)]
        roots = torch.stack([pair.sizes.clamp(min=1e-12).sqrt() for pair in pairs])
        rows = torch.stack([pair.values for pair in pairs]) / roots[:, :, None]
        columns = torch.stack([pair.outputs for pair in pairs]) / roots[:, None, None]  # head, group, out, channel
        fixed[f"{path}o_proj.weight"] = columns.permute(2, 0, 1, 3).flatten(1).float()
        parts: dict[str, tuple[Tensor, Tensor]] = {"v_proj": (torch.diag_embed(roots.square()), rows)}
        for name in ("q_proj", "k_proj"):
            parts[name] = _orthogonal_rows(getattr(attention, name).weight.detach().double(), size)
        for name, (matrices, orthogonal) in parts.items():
            trained.append(nn.Parameter(matrices.float()))
            made.append((f"{path}{name}.weight", trained[-1], orthogonal.float()))
    return trained, lambda: fixed | {name: (matrices @ rows).flatten(0, 1) for name, matrices, rows in made}


def _orthogonal_rows(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return R [heads, hd, hd] and rows [heads, hd, in] that are orthonormal, R rows = weight."""
    basis, upper = torch.linalg.qr(weight.unflatten(0, (-1, size)).transpose(1, 2))
    return upper.transpose(1, 2), basis.transpose(1, 2)


def start_lora(model: Any, count: int) -> tuple[list[nn.Parameter], Weights]:
    """Return factors A and B with about `count` numbers in all, and what makes weights of them."""
    names = [name for name, _ in model.named_parameters() if name.split(".")[-2] in LINEARS]
    weights = {name: model.get_parameter(name).detach() for name in names}
    rank = max(1, round(count / sum(sum(weight.shape) for weight in weights.values())))
    generator = torch.Generator().manual_seed(0)
    pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, weight in weights.items():
        start = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        pairs[name] = nn.Parameter(start), nn.Parameter(torch.zeros(weight.shape[0], rank))
    trained = [factor for pair in pairs.values() for factor in pair]
    return trained, lambda: {name: weights[name] + b @ a for name, (a, b) in pairs.items()}


def measure_loss(model: nn.Module, weights: dict[str, Tensor], rows: Tensor) -> Tensor:
    """Return the loss of the next token, nats [1], of windows [samples, tokens]."""
    logits = functional_call(model, weights, (), {"input_ids": rows, "use_cache": False}).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def fine_tune(model: Any, kind: str, rate: float, texts: tuple[Tensor, Tensor], options: Any) -> dict[str, Any]:
    """Train one adapter; return its row."""
    clover, made = start_clover(model)
    count = sum(parameter.numel() for parameter in clover)
    trained, weights = (clover, made) if kind == "clover" else start_lora(model, count)
    batch, started = options.batch_tokens // texts[0].shape[1], time.process_time()
    with torch.no_grad():
        before = torch.stack([measure_loss(model, weights(), row[None]) for row in texts[1]]).mean().item()

    def loss(step: int) -> float:
        rows = texts[0][(torch.arange(batch) + step * batch) % len(texts[0])]
        value = measure_loss(model, weights(), rows)
        value.backward()
        return value.item()

    descend(trained, options.steps, rate, loss)
    with torch.no_grad():
        after = torch.stack([measure_loss(model, weights(), row[None]) for row in texts[1]])
    return {
        "kind": kind, "rate": rate, "trained": sum(p.numel() for p in trained), "loss before": round(before, 4),
        "loss after": round(after.mean().item(), 4), "se": round((after.std() / len(after) ** 0.5).item(), 4),
        "tokens scored": texts[1][:, 1:].numel(), "cpu s": round(time.process_time() - started),
    }  # fmt: skip


def main() -> None:
    """Train both adapters at every learning rate, and print and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    for name in ("--calib", "--text"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--rates", default="0.001,0.004")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer, vocabulary = load.load_tokenizer(options.model), load.load_config(options.model).vocab_size
    counts = options.steps * options.batch_tokens // 256, options.windows
    texts = [
        data.calibration(text, tokenizer, count, 256, 0, vocabulary).tokens
        for text, count in zip((options.calib, options.text), counts, strict=True)
    ]
    model, rows = load.load_model(options.model, "float32", "cpu").requires_grad_(False), []
    for kind in ("clover", "lora"):
        for rate in map(float, options.rates.split(",")):
            rows.append(fine_tune(model, kind, rate, (texts[0], texts[1]), options))
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
