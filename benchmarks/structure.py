"""Measure what fewer and narrower blocks cost: KL and perplexity of plain checkpoints beside their original.

    python benchmarks/structure.py MODEL --calib TEXT --text TEXT --work DIR --variants "drop_blocks by=angular" ...

A variant is a transform and its settings, as in a recipe. Each is written by `compress transform` into the folder,
where it is found again, and scored on the first windows of the text, in float32: KL(original || variant) over the whole
vocabulary in nats a token, its standard error over windows, and perplexity. Parameters are those of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from compress import api, recipe
from compress.model.load import load_model, load_tokenizer
from compress.numerics import kl
from compress.run.job import Job


def write(model: Path, words: Sequence[str], args: argparse.Namespace) -> tuple[Path, float]:
    """Write the checkpoint of a variant unless it is there; return its folder and the seconds of this process."""
    settings = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words[1:])}
    name = "-".join(words).replace("=", "_")
    out, path = args.work / name, args.work / f"{name}.yaml"
    text = {"num_samples": args.samples, "seq_len": args.calib_length}
    step = {"method": words[0], **settings}
    path.write_text(yaml.safe_dump({"description": name, "calibration": text, "transform": [step]}))
    begun = time.process_time()
    if not out.exists():
        api.quantize(Job(str(model), recipe.load(str(path)), out, calib=str(args.calib), pack=False))
    return out, time.process_time() - begun


@torch.no_grad()
def logits_of(model: nn.Module, windows: Tensor) -> list[Tensor]:
    """Return the logits [tokens, vocabulary] of each window."""
    return [model(window[None]).logits[0].float() for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variants", nargs="+", default=[])
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--samples", type=int, default=64, help="windows of the calibration text")
    parser.add_argument("--calib-length", type=int, default=512, help="tokens of each")
    parser.add_argument("--windows", type=int, default=8, help="windows that are scored")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tokens = load_tokenizer(args.model)(args.text.read_text()[: 12 * args.windows * args.length], return_tensors="pt")
    windows = tokens.input_ids[0][: args.windows * args.length].view(args.windows, args.length)
    original = logits_of(load_model(args.model, torch.float32), windows)
    for variant in ["", *args.variants]:
        path, seconds = write(args.model, variant.split(), args) if variant else (args.model, 0.0)
        model = load_model(path, torch.float32)
        kls, losses = [], []
        for window, before, after in zip(windows, original, logits_of(model, windows), strict=True):
            kls.append(kl.from_logits(before, after).mean())
            losses.append(nn.functional.cross_entropy(after[:-1], window[1:]))
        spread = torch.stack(kls).std().item() / math.sqrt(len(kls))
        said = json.loads((path / "report.json").read_text())["notes"]["transform"][1:] if variant else []
        print(
            f"{variant or 'original':60s} {model.num_parameters() / 1e6:8.2f}M  KL {torch.stack(kls).mean():.4f} +- "
            f"{spread:.4f}  perplexity {torch.stack(losses).mean().exp():.3f}  {seconds:.0f} s  {'; '.join(said)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
