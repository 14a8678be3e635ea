"""Decode without some blocks between refreshes (LoRA-Drop): divergence, perplexity, time and cache by share and period.

    python benchmarks/lora_drop.py MODEL --calib TEXT --text TEXT

Each text window is read as decoding would read it behind a prompt (`TeacherForced`), and the tokens behind the prompt
are scored. Rows: blocks left out; period; what is used again (the block's `state`, as published, or its `update`); with
corrections that are fitted on the calibration text, and without. `skipped` passes over the same blocks in
the same steps, with nothing in their place. Then tokens per CPU second and bytes of the cache of a greedy
decoding.

`--train-steps N` trains copies of the model instead, by the paper's loss and with its reuse of states: one without
leaving out any block, and one for each set and period; each is compared with the model as it was.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from compress.calib.data import token_windows
from compress.model import load
from compress.papers.decoding import lora_drop
from compress.papers.decoding.lora_drop import BlockCorrection, Corrections, FitSettings, Reuse, TeacherForced
from compress.papers.decoding.lora_drop_training import TrainSettings, train

REUSES: tuple[Reuse, ...] = ("state", "update")


def block_sets(count: int) -> dict[str, tuple[int, ...]]:
    """Return sets of blocks by name, of a model of `count` blocks: the published one, each second, each fourth."""
    return {
        "3 of 4": lora_drop.published_blocks(count),
        "1 of 2": tuple(range(2, count - 1, 2)),
        "1 of 4": tuple(range(4, count - 1, 4)),
    }


@torch.no_grad()
def log_probabilities(model: Any, windows: Tensor, prompt: int, chosen: Corrections | None) -> Tensor:
    """Return log-probabilities [tokens behind the prompt, vocabulary] of all windows, float32."""
    rows = []
    for window in windows:
        ids = window[None]
        if chosen is None:
            logits = model(input_ids=ids, use_cache=False).logits
        else:
            logits = TeacherForced(model, chosen, prompt).logits(ids)
        rows.append(torch.log_softmax(logits[0, prompt - 1 : -1].float(), -1))
    return torch.cat(rows)


def scores(found: Tensor, expected: Tensor, targets: Tensor) -> tuple[float, float, float]:
    """Return KL in nats a token, its standard error, and perplexity."""
    divergence = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1).double()
    loss = -found.gather(1, targets[:, None]).mean().item()
    return divergence.mean().item(), (divergence.std() / len(divergence) ** 0.5).item(), math.exp(loss)


@torch.no_grad()
def decode(model: Any, prompt: Tensor, tokens: int) -> tuple[float, int]:
    """Return CPU seconds and bytes of the cache of a greedy decoding of so many tokens."""
    cache = DynamicCache(config=model.config)
    ids = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    started = time.process_time()
    for _ in range(tokens):
        ids = model(input_ids=ids, past_key_values=cache, use_cache=True).logits.argmax(-1)
    seconds = time.process_time() - started
    layers: list[Any] = list(cache.layers)
    return seconds, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def measure_quality(model: Any, asked: argparse.Namespace, fits: Tensor, windows: Tensor) -> None:
    """Print a row for each set, period and way."""
    targets = windows[:, asked.prompt :].flatten()
    expected = log_probabilities(model, windows, asked.prompt, None)
    print(f"whole model: perplexity {scores(expected, expected, targets)[2]:.2f}, {len(targets)} tokens", flush=True)
    for name, blocks in block_sets(len(lora_drop.blocks_in(model))).items():
        for period in asked.periods if name in asked.sets else ():
            ways: dict[str, Corrections] = {}
            for reuse in REUSES:
                settings = FitSettings(period, asked.rank, reuse, asked.prompt)
                ways[f"{reuse}, corrected"] = lora_drop.fit(model, fits, blocks, settings)
                ways[f"{reuse}, as it is"] = lora_drop.without_correction(model, blocks, period, reuse)
            ways["skipped"] = lora_drop.without_correction(model, blocks, period, "nothing")
            for way, chosen in ways.items():
                found = scores(log_probabilities(model, windows, asked.prompt, chosen), expected, targets)
                row = "KL {:.4f} (se {:.4f}), perplexity {:.2f}".format(*found)
                print(f"{name} ({len(blocks)} blocks), period {period}, {way}: {row}", flush=True)


def measure_speed(model: Any, asked: argparse.Namespace, prompt: Tensor) -> None:
    """Print CPU seconds and bytes of the cache of whole and of shortened decoding, in turns."""
    hidden = model.config.get_text_config().hidden_size
    correction = BlockCorrection(torch.zeros(asked.rank, hidden), torch.zeros(hidden, asked.rank))
    kinds: dict[str, Corrections] = {"whole": Corrections({}, 1)}
    for name, blocks in block_sets(len(lora_drop.blocks_in(model))).items():
        for period in asked.periods:
            kinds[f"{name}, period {period}"] = Corrections(dict.fromkeys(blocks, correction), period)
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    nbytes = {}
    for _ in range(asked.turns):
        for name, chosen in kinds.items():
            with lora_drop.decoding(model, chosen):
                taken, nbytes[name] = decode(model, prompt, asked.decode)
            seconds[name].append(taken)
    whole = statistics.median(seconds["whole"])
    for name, taken_each in seconds.items():
        middle = statistics.median(taken_each)
        speed = f"{1000 * middle / asked.decode:.1f} ms of CPU a token, {whole / middle:.2f} times as fast"
        print(f"{name}: {speed}, cache {nbytes[name]} bytes, {nbytes[name] / nbytes['whole']:.2f}", flush=True)


def measure_training(asked: argparse.Namespace, fits: Tensor, windows: Tensor) -> None:
    """Train a copy of the model for each set and period and print what it loses, whole and without these blocks."""
    targets = windows[:, asked.prompt :].flatten()
    model: Any = load.load_model(asked.model, "float32", "cpu").requires_grad_(False)
    expected = log_probabilities(model, windows, asked.prompt, None)
    print(f"as it was: perplexity {scores(expected, expected, targets)[2]:.2f}, {len(targets)} tokens", flush=True)
    sets = {name: blocks for name, blocks in block_sets(len(lora_drop.blocks_in(model))).items() if name in asked.sets}
    kinds = [("none", (), 1), *((name, blocks, period) for name, blocks in sets.items() for period in asked.periods)]
    for name, blocks, period in kinds:
        trained: Any = load.load_model(asked.model, "float32", "cpu")
        training = TrainSettings(asked.train_steps, learning_rate=asked.rate, model_rate=asked.rate)
        chosen, losses = train(trained, fits, blocks, FitSettings(period, asked.rank, "state", asked.prompt), training)
        ways = {"whole": None, **({"left out": chosen} if blocks else {})}
        for way, corrections in ways.items():
            found = scores(log_probabilities(trained, windows, asked.prompt, corrections), expected, targets)
            row = "KL {:.4f} (se {:.4f}), perplexity {:.2f}".format(*found)
            print(f"{name} ({len(blocks)} blocks), period {period}, trained, {way}: {row}", flush=True)
        first, last = statistics.mean(losses[:10]), statistics.mean(losses[-10:])
        print(f"  loss of the first and last ten of {len(losses)} steps: {first:.3f}, {last:.3f} nats", flush=True)


def main() -> None:
    """Measure a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--periods", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sets", nargs="+", default=["3 of 4", "1 of 2", "1 of 4"], help="of blocks that are scored")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=384)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16, help="of the calibration text")
    parser.add_argument("--windows", type=int, default=8, help="that are scored")
    parser.add_argument("--decode", type=int, default=64, help="tokens of the timed decoding")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--train-steps", type=int, default=0, help="train copies of the model by so many steps")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning")
    asked = parser.parse_args()
    model: Any = load.load_model(asked.model, "bfloat16", "cpu").requires_grad_(False)
    tokenizer, size = load.load_tokenizer(asked.model), model.config.get_text_config().vocab_size
    fits, windows = (token_windows(text, tokenizer, asked.seq_len, size)[0] for text in (asked.calib, asked.text))
    if asked.train_steps:
        measure_training(asked, fits[: asked.samples], windows[: asked.windows])
        return
    if asked.turns:
        measure_speed(model, asked, windows[:1, : asked.prompt])
    measure_quality(model, asked, fits[: asked.samples], windows[: asked.windows])


if __name__ == "__main__":
    main()
