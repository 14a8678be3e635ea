"""Train the low-rank parts of a packed model in three ways, and a whole dense model in a fourth: peak memory, seconds.

    compress quantize MODEL --recipe int2-lrec --set tune=[] --calib calib.txt --out packed
    python benchmarks/low_rank_memory.py MODEL packed --calib calib.txt --steps 2 --json memory.json

Each way runs in a process of its own, on the same windows, with steps of as many tokens:
- `streamed`: compress/tune/end_to_end.py with `trains: low_rank`; the packed model lies in memory;
- `spilled`: the same, blocks read from disk whenever they are needed;
- `both`: `lowrank: {train: N}` (compress/tune/low_rank.py), original and packed model in memory in float32;
- `full`: AdamW on all weights of the float32 model, against the same log-probabilities, which lie in a file; blocks
  keep their inputs alone (gradient checkpointing of transformers).
Peak memory is that of the process less what it held before the model was opened (`imports`). `--out` keeps the packed
model with what `streamed` trained.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import in_fresh_process, machine
from torch import Tensor

from compress import process_memory
from compress.calib import data, reference_logprobs
from compress.model import load
from compress.model.skeleton import Skeleton
from compress.run.trained_tensors import write_into
from compress.storage.checkpoint import MANIFEST, open_checkpoint
from compress.tune import end_to_end, low_rank
from compress.tune.descend import descend
from compress.tune.end_to_end import Config
from compress.tune.trained import TuningWork

Row = dict[str, Any]


def train_streamed(options: argparse.Namespace, tokens: Tensor, folder: Path, is_spilled: bool = False) -> str:
    """Train the factors end to end; return the note of it."""
    config = Config(options.steps, options.rate, batch_tokens=options.batch_tokens, trains="low_rank")
    work = TuningWork(
        options.packed, open_checkpoint(options.model), tokens, torch.device("cpu"), 1, folder, is_spilled, _ignore
    )
    result = end_to_end.train(config, work)
    if options.out and result.tensors and not is_spilled:
        shutil.copytree(options.packed, options.out)
        (options.out / MANIFEST).unlink(missing_ok=True)  # it has the hashes of the shards before
        for shard in options.out.glob("*.safetensors"):
            write_into(shard, result.tensors)
    return result.note


def train_spilled(options: argparse.Namespace, tokens: Tensor, folder: Path) -> str:
    """Train the factors with blocks and hidden states on disk; return the note of it."""
    return train_streamed(options, tokens, folder, is_spilled=True)


def train_both(options: argparse.Namespace, tokens: Tensor, folder: Path) -> str:
    """Train the factors with both models in memory; return the note of it."""
    report = json.loads((options.packed / "report.json").read_text())
    names = frozenset(row["name"] for row in report["layers"])
    request = low_rank.LowRankRequest(options.steps, 1e-3, names)
    return low_rank.train_model(options.packed, options.model, tokens, request, "cpu", _ignore)[0].note


def train_full(options: argparse.Namespace, tokens: Tensor, folder: Path) -> str:
    """Train all weights of the dense model by AdamW, its blocks without kept activations; return what was trained."""
    reference = reference_logprobs.load(Skeleton(open_checkpoint(options.model)), tokens, folder)
    model = load.load_model(options.model, "float32", "cpu").train()
    model.gradient_checkpointing_enable()
    model.requires_grad_(True)
    parameters = list(model.parameters())
    batch = max(1, options.batch_tokens // tokens.shape[1])

    def loss(step: int) -> float:
        total = 0.0
        for sample in range(step * batch, (step + 1) * batch):
            row = sample % len(tokens)
            logits = model(input_ids=tokens[row : row + 1], use_cache=False).logits[0].float()
            every = slice(0, tokens.shape[1])
            mean = reference_logprobs.loss(reference.row(row, logits.device), every, logits) / tokens.shape[1]
            mean.backward()
            total += mean.item()
        return total / batch

    descend(parameters, options.steps, 1e-5, loss)
    return f"{sum(parameter.numel() for parameter in parameters)} weights trained for {options.steps} steps"


WAYS: dict[str, Callable[[argparse.Namespace, Tensor, Path], str]] = {
    "streamed": train_streamed,
    "spilled": train_spilled,
    "both": train_both,
    "full": train_full,
}


def measure_way(options: argparse.Namespace, way: str, tokens: Tensor) -> Row:
    """Return the row of one way, measured in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        before, started = process_memory.resident(), time.process_time()
        process_memory.reset_peak()
        note = WAYS[way](options, tokens, Path(folder))
        peak = process_memory.peak()
        seconds = time.process_time() - started
    return {
        "way": way, "peak_mib": round((peak - before) / 2**20), "imports_mib": round(before / 2**20),
        "cpu_seconds": round(seconds, 1), "note": note,
    }  # fmt: skip


def _ignore(text: str) -> None:
    """Report no progress."""


def main() -> None:
    """Measure all ways that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.02, help="of end-to-end tuning")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--num-samples", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tokenizer, vocabulary = load.load_tokenizer(options.model), load.load_config(options.model).vocab_size
    tokens = data.calibration(options.calib, tokenizer, options.num_samples, options.seq_len, 0, vocabulary).tokens
    rows = []
    for way in options.ways.split(","):
        rows.append(in_fresh_process(measure_way, options, way, tokens))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"machine": machine(), "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
