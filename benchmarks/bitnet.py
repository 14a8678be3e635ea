"""Train small language models from scratch, in float and with ternary weights, on one text for as many steps.

    python benchmarks/bitnet.py tests/models/books-8m --calib tests/data/books_calib.txt \
        --text tests/data/books_heldout.txt --hidden 128 --layers 4 --steps 200 --out bitnet.json

Models have the architecture, tokenizer and vocabulary of the checkpoint, in the size that is asked for. The same
training (compress/papers/tune/bitnet.py) takes all of them: `float` rounds nothing, `mean` and `median` have ternary
weights and inputs of 8 bits, and `wide` is `median` with twice the hidden size, which arXiv 2407.09527 needs to reach
float. Perplexity is that of windows of 512 tokens of the other text, in float32, with the ternary weights.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.calib import data
from compress.formats import ternary
from compress.model import load
from compress.papers.quant.bitnet import FORMAT
from compress.papers.tune.bitnet import Config, TernaryLinear, Training
from compress.storage.checkpoint import open_checkpoint
from compress.tune.trained import TuningWork
from compress.types import Activations, Stored

SEQ_LEN = 512
STORED = Stored(FORMAT, ternary.Params(ternary.BASE3, -1, "float32", True), activations=Activations(8, "token"))


def build(directory: Path, hidden: int, layers: int) -> Any:
    """Return a random model of a checkpoint's architecture in another size, float32."""
    config = load.plain_config(directory)
    config.update({"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers})
    config.update({"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 128)})
    return load.empty_model(config, torch.float32)


def train(model: Any, kind: str, tokens: Tensor, arguments: argparse.Namespace) -> tuple[nn.Module, float]:
    """Train one model; return it and the seconds that it took."""
    scale = "mean" if kind == "mean" else "median"
    config = Config(arguments.steps, arguments.rate, arguments.batch_tokens, scale, "random", arguments.ramp)
    blocks = model.base_model.layers
    if kind != "float":
        for path, module in list(blocks.named_modules()):
            if isinstance(module, nn.Linear):
                blocks.set_submodule(path, TernaryLinear(module, config, STORED))
    checkpoint = open_checkpoint(Path(arguments.model))
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        work = TuningWork(where, checkpoint, tokens, torch.device("cpu"), 1, where, False, lambda _: None)
        started = time.process_time()
        Training(config, work, model, [name for name, _ in model.named_parameters()]).run()
    return model, time.process_time() - started


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor) -> float:
    """Return the perplexity of windows [samples, tokens]."""
    losses = [nn.functional.cross_entropy(model(row[None]).logits[0, :-1].float(), row[1:]).item() for row in windows]
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    """Train and score, and write what came of it after each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("--calib", "--text", "--out"):
        parser.add_argument(name, required=True)
    numbers: dict[str, float] = {"hidden": 128, "layers": 4, "steps": 200, "batch-tokens": 2048, "rate": 0.002}
    numbers |= {"ramp": 0.0, "windows": 64}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--kinds", default="float,mean,median,wide")
    arguments = parser.parse_args()
    tokenizer = load.load_tokenizer(Path(arguments.model))
    vocabulary = load.load_config(Path(arguments.model)).vocab_size
    tokens, held = (
        data.calibration(text, tokenizer, count, SEQ_LEN, 0, vocabulary).tokens
        for text, count in ((arguments.calib, 100_000), (arguments.text, arguments.windows))
    )
    rows: list[dict[str, Any]] = []
    for kind in arguments.kinds.split(","):
        hidden = arguments.hidden * (2 if kind == "wide" else 1)
        torch.manual_seed(0)
        model, seconds = train(build(Path(arguments.model), hidden, arguments.layers), kind, tokens, arguments)
        seen = arguments.steps * max(1, arguments.batch_tokens // SEQ_LEN) * SEQ_LEN
        rows.append({
            "kind": kind, "hidden": hidden, "parameters": sum(p.numel() for p in model.parameters()),
            "tokens trained": seen, "tokens scored": held.numel() - len(held),
            "perplexity": round(perplexity(model, held), 2), "cpu s": round(seconds),
        })  # fmt: skip
        print(rows[-1], flush=True)
        Path(arguments.out).write_text(json.dumps(vars(arguments) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
