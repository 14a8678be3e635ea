"""Fine-tune adapters beside quantized weights from where each method lets them begin: perplexity before and after.

    compress quantize MODEL --recipe apiq2bit --calib TEXT --out PACKED
    python benchmarks/adapter_starts.py PACKED OTHER... --base MODEL --train TEXT --test TEXT --steps 40

Each checkpoint's low-rank parts are its adapter; one without them gets a new one, random A and B = 0, of --rank
(QLoRA). The base is frozen. Steps are the same for all: AdamW, a rate that falls along a cosine, cross entropy of the
next token of the same windows in the same order. Prints for each checkpoint the perplexity on the test text in windows
of 512 tokens as it stands and behind training, the divergence from the original, and standard errors over windows.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compress import formats
from compress.calib.data import token_windows
from compress.export import peft as adapter
from compress.model import load
from compress.runtime.linear import PackedLinear

SEQ_LEN = 512


def with_adapter(checkpoint: Path, rank: int) -> tuple[Any, list[torch.nn.Parameter]]:
    """Return the model with dense, frozen base weights, and the factors of its adapters."""
    model: Any = load.load_model(checkpoint, "float32", "cpu")
    if not adapter.separate(model):
        adapter.attach(model, rank)
    factors = adapter.parameters(model)
    for module in adapter.adapted_linears(model).values():
        packed: Any = module.base_layer
        assert isinstance(packed, PackedLinear)
        dense = torch.nn.Linear(packed.in_features, packed.out_features, packed.bias is not None)
        dense.weight.data = formats.decode(packed.packed(), torch.float32)
        if packed.bias is not None:
            dense.bias.data = packed.bias.float()
        module.base_layer = dense.requires_grad_(False)  # type: ignore[assignment]
    return model, factors


def losses(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss in nats of each predicted token of a batch of windows, flat."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")


class Score(NamedTuple):
    """What windows of text say of a model, and standard errors over windows."""

    loss: float  # nats a token
    loss_se: float
    kl: float  # of the original's predictions to the model's, nats a token
    kl_se: float

    def __str__(self) -> str:
        divergence = f"KL {self.kl:.4f}, se {self.kl_se:.4f}"
        return f"{math.exp(self.loss):.2f} (loss {self.loss:.4f}, se {self.loss_se:.4f}; {divergence})"


@torch.no_grad()
def score(model: Any, original: Any, windows: Tensor) -> Score:
    """Return how a model predicts windows [n, seq_len]."""
    rows = []
    for window in windows:
        expected, found = (
            torch.log_softmax(each(input_ids=window[None], use_cache=False).logits[0, :-1].float(), -1)
            for each in (original, model)
        )
        divergence = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        rows.append([-found.gather(1, window[1:, None]).mean().item(), divergence.mean().item()])
    values = torch.tensor(rows, dtype=torch.float64)
    means, errors = values.mean(0).tolist(), (values.std(0) / len(values) ** 0.5).tolist()
    return Score(means[0], errors[0], means[1], errors[1])


def fine_tune(model: Any, factors: list[torch.nn.Parameter], windows: Tensor, asked: argparse.Namespace) -> list[float]:
    """Train the factors; return the loss of each step."""
    optimizer = torch.optim.AdamW(factors, lr=asked.rate, weight_decay=0.0)
    found = []
    for step in range(asked.steps):
        warmth = min(1.0, (step + 1) / 5)
        optimizer.param_groups[0]["lr"] = asked.rate * warmth * (1 + math.cos(math.pi * step / asked.steps)) / 2
        tokens = windows[torch.arange(asked.batch * step, asked.batch * (step + 1)) % len(windows)]
        with torch.autocast("cpu", torch.bfloat16, enabled=asked.bf16):
            loss = losses(model, tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(factors, 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> None:
    """Fine-tune every checkpoint and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--base", type=Path, required=True, help="the original model")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where matrices are multiplied")
    asked = parser.parse_args()
    original = load.load_model(asked.base, "float32", "cpu")
    for checkpoint in asked.checkpoints:
        started = time.process_time()
        torch.manual_seed(0)
        model, factors = with_adapter(checkpoint, asked.rank)
        size = model.config.get_text_config().vocab_size
        train, test = (
            token_windows(text, load.load_tokenizer(checkpoint), SEQ_LEN, size)[0] for text in (asked.train, asked.test)
        )
        before = score(model, original, test[: asked.windows])
        steps = fine_tune(model, factors, train, asked)
        after = score(model, original, test[: asked.windows])
        part = max(1, len(steps) // 5)
        print(
            f"{checkpoint.name}: perplexity {before} -> {after}; training loss {sum(steps[:part]) / part:.3f} -> "
            f"{sum(steps[-part:]) / part:.3f}; {time.process_time() - started:.0f} CPU s",
            flush=True,
        )


if __name__ == "__main__":
    main()
