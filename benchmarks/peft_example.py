"""Train adapters on a packed, frozen base, from the command line to a saved adapter.

    compress quantize MODEL --recipe int3-eora --calib TEXT --out PACKED
    python benchmarks/peft_example.py PACKED TEXT OUT [--steps 50]

OUT/base is the packed model without its low-rank parts, OUT/adapter these parts as a LoRA adapter in PEFT's format,
OUT/trained what became of them. With PEFT installed, PEFT trains; otherwise a loop of a few lines does.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import compress
from compress.calib.data import token_windows
from compress.export import peft as adapter
from compress.model import load
from compress.runtime.linear import PackedLinear


def with_adapter(base: Path, directory: Path) -> tuple[Any, list[torch.nn.Parameter]]:
    """The packed model with the adapter beside its linears, and what is to be trained."""
    model: Any = compress.load(base)
    if importlib.util.find_spec("peft") is None:
        adapter.load(model, directory)
        return model, adapter.parameters(model)
    peft = importlib.import_module("peft")
    config = peft.PeftConfig.from_pretrained(directory)
    config._register_custom_module({PackedLinear: peft.tuners.lora.Linear})
    model = peft.PeftModel.from_pretrained(model, directory, config=config, is_trainable=True)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def train(model: Any, parameters: list[torch.nn.Parameter], windows: Tensor, steps: int, rate: float) -> list[float]:
    """Next-token loss in nats, of each step on 4 of the windows [n, seq_len]; the model is changed in place."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    model.train()
    losses = []
    for step in range(steps):
        tokens = windows[torch.arange(4 * step, 4 * step + 4) % len(windows)]
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1e-4)
    asked = parser.parse_args()
    base, directory, trained = (asked.out / name for name in ("base", "adapter", "trained"))
    count = adapter.export(asked.packed, base, directory)
    model, parameters = with_adapter(base, directory)
    size = sum(parameter.numel() for parameter in parameters)
    print(f"{count} adapters, {size} trained parameters; the base stays packed")
    windows, _ = token_windows(asked.text, load.load_tokenizer(base), 128, model.config.get_text_config().vocab_size)
    losses = train(model, parameters, windows, asked.steps, asked.rate)
    part = max(1, len(losses) // 5)
    print(f"loss {sum(losses[:part]) / part:.4f} -> {sum(losses[-part:]) / part:.4f} nats a token")
    if adapter.adapted_linears(model):
        adapter.save(model, trained, str(base))
    else:
        model.save_pretrained(trained)
    again = compress.load(base)
    print(f"{adapter.load(again, trained)} adapters in {trained} load again")


if __name__ == "__main__":
    main()
