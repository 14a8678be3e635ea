"""AutoRound with its defaults, 200 iterations a block; or plain rounding."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from .common import Clock
from .gptq_layout import restore

__all__ = ["DISTRIBUTION", "METHOD", "add_options", "quantize", "restore"]
DISTRIBUTION = "auto-round"
METHOD = "auto-round"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--iterations", type=int, default=200, help="of AutoRound, for each block")
    parser.add_argument("--tokens-a-window", type=int, help="AutoRound: cut the windows into shorter ones")
    parser.add_argument("--plain-blocks", type=int, nargs="*", default=[], help="that AutoRound leaves as they are")
    parser.add_argument("--extended", action="store_true", help="AutoRound with its algorithm extensions")


def quantize(args: argparse.Namespace, windows: Tensor, out: Path) -> Clock:
    """Run AutoRound on the windows, cut to --tokens-a-window where that is given.

    The clock covers what it does in one go: calibration, tuning and the writing of the packed checkpoint.
    """
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    windows = windows.reshape(-1, args.tokens_a_window or windows.shape[1])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    plain = {f"model.layers.{block}." for block in args.plain_blocks}
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    kept = {name: {"bits": 16} for name in linears if any(map(name.startswith, plain))}
    tuner = AutoRound(
        model,
        AutoTokenizer.from_pretrained(args.model),
        scheme={"bits": args.bits, "group_size": args.group_size, "sym": not args.asymmetric, "data_type": "int"},
        iters=0 if args.method == "rtn" else args.iterations,
        dataset=[row[None] for row in windows],
        nsamples=len(windows),
        seqlen=windows.shape[1],
        batch_size=min(args.batch_size, len(windows)),
        device_map="cpu",
        enable_alg_ext=args.extended,
        layer_config=kept,
    )
    with Clock() as clock:
        _, folder = tuner.quantize_and_save(str(out), format="auto_round")  # below `out`, under a name of its own
    for file in Path(folder).iterdir():
        file.rename(out / file.name)
    return clock
