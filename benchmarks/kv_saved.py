"""Measure saved caches of a prompt: bytes, divergence of what follows, and CPU seconds to save and load.

    python benchmarks/kv_saved.py MODEL --text FILE [--tokens 4096] [--scored 256] [--windows 2]
                                  [--quality standard lossless high small zstd] [--again]
    python benchmarks/kv_saved.py show

A window is `tokens` tokens of prompt and `scored` that follow; windows do not overlap. The model runs in float32 and
computes the prompt; its cache is rounded to bfloat16, which is the raw cache that sizes are relative to, and saved. The
loaded cache goes through the next tokens by teacher forcing; KL is to the float32 cache that the model computed, so
that `lossless` is the raw bfloat16 cache. `zstd` codes the raw bytes with the program of that name, level 3, if it is
there. Times are CPU seconds of the process (or of its child), one thread, which other load on the machine changes
little; loading starts from a file in the page cache. Rows go to benchmarks/results/kv_saved.json.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT

sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks/results/kv_saved.json"
CHUNK = 1024  # tokens of the prompt at a time
QUALITIES = ["standard", "lossless", "high", "small", "zstd"]


@dataclass
class Prompt:
    """A window that the model has read: its keys and values of the prompt, and what it says of the rest."""

    model: Any
    prompt: Any  # int64 [1, tokens]
    following: Any  # int64 [1, scored]
    states: list[tuple[Any, Any]]  # of each layer, bfloat16
    reference: Any  # log-probabilities float32 [scored, vocab]
    seconds: float  # to compute the prompt

    @property
    def raw(self) -> int:
        return sum(x.numel() * x.element_size() for pair in self.states for x in pair)


def cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def cache_of(model: Any, states: list[tuple[Any, Any]], dtype: Any) -> Any:
    """Return transformers' cache with these keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(states):
        cache.update(keys.to(dtype), values.to(dtype), index)
    return cache


def read(model: Any, tokens: Any, count: int) -> Prompt:
    """Compute the prompt, the first `count` tokens [1, n], and score the rest."""
    import torch
    from transformers import DynamicCache

    prompt, following, cache = tokens[:, :count], tokens[:, count:], DynamicCache(config=model.config)
    start = cpu()
    with torch.no_grad():
        for chunk in prompt.split(CHUNK, 1):
            model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds = cpu() - start
    states = [(layer.keys.bfloat16(), layer.values.bfloat16()) for layer in cache.layers]
    return Prompt(model, prompt, following, states, logprobs(model, following, cache), seconds)


def logprobs(model: Any, tokens: Any, cache: Any) -> Any:
    """Return log-probabilities float32 [tokens, vocab] after each of the tokens [1, n]."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


def saved(read: Prompt, quality: str) -> dict[str, Any]:
    """Save, load and score."""
    import torch

    from compress.kv.saved import load_cache, save_cache

    model, cache = read.model, cache_of(read.model, read.states, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "cache.kv", cpu()
        save_cache(cache, path, model, read.prompt, quality)
        saving, start = cpu() - start, cpu()
        loaded = load_cache(model, path, read.prompt)
        loading, nbytes = cpu() - start, path.stat().st_size
    states = [(layer.keys, layer.values) for layer in loaded.layers]
    own = logprobs(model, read.following, cache_of(model, states, torch.float32))
    kl = (read.reference.exp() * (read.reference - own)).sum(-1).double()
    same = (own.argmax(-1) == read.reference.argmax(-1)).float().mean()
    figures = {"kl": kl.mean().item(), "kl_max": kl.max().item(), "same_top1": same.item()}
    return {"bytes": nbytes, "save_cpu_s": saving, "load_cpu_s": loading, **figures}


def zstd(read: Prompt) -> dict[str, Any]:
    """Code the raw bytes by the program zstd."""
    import torch

    program = shutil.which("zstd")
    if program is None:
        raise SystemExit("there is no program zstd here")
    with tempfile.TemporaryDirectory() as folder:
        raw, packed = Path(folder) / "raw", Path(folder) / "raw.zst"
        with raw.open("wb") as stream:
            for pair in read.states:
                for x in pair:
                    stream.write(x.contiguous().view(torch.uint8).numpy().tobytes())
        start = cpu()
        subprocess.run([program, "-q", "-3", "--single-thread", str(raw), "-o", str(packed)], check=True)
        saving, start = cpu() - start, cpu()
        subprocess.run([program, "-q", "-d", str(packed), "-o", str(Path(folder) / "again")], check=True)
        return {"bytes": packed.stat().st_size, "save_cpu_s": saving, "load_cpu_s": cpu() - start}


def run(asked: argparse.Namespace) -> None:
    """Measure what the file does not have."""
    import torch

    from compress.model import load

    torch.set_num_threads(1)
    directory = Path(asked.model)
    text = Path(asked.text).read_text(encoding="utf-8")
    need = asked.windows * (asked.tokens + asked.scored)
    tokenizer = load.load_tokenizer(directory)
    tokens = torch.tensor([tokenizer(text[: 8 * need], verbose=False)["input_ids"][:need]])
    model, windows = load.load_model(directory, "float32"), tokens.split(asked.tokens + asked.scored, 1)
    for number, window in enumerate(windows):
        done: list[Prompt] = []
        for quality in asked.quality:
            identity = {"model": directory.name, "text": Path(asked.text).name, "window": number}
            identity |= {"tokens": asked.tokens, "scored": asked.scored, "quality": quality}

            def work(quality: str = quality, window: Any = window, done: list[Prompt] = done) -> dict[str, Any]:
                done += [] if done else [read(model, window, asked.tokens)]
                figures = zstd(done[0]) if quality == "zstd" else saved(done[0], quality)
                return {"raw_bytes": done[0].raw, "prompt_cpu_s": done[0].seconds, **figures}

            if row := result_file.add(RESULTS, identity, asked.again, quality, work):
                print(row, flush=True)


def show() -> None:
    """Print the mean of each quality over windows."""
    rows, cells, times = result_file.read(RESULTS), [], ("save_cpu_s", "load_cpu_s", "prompt_cpu_s")
    names = ["quality", "windows", "of raw", "bits", "KL", "save s", "load s", "prompt s"]
    for quality in QUALITIES:
        own = [row for row in rows if row["quality"] == quality]
        if own:
            share = sum(row["bytes"] / row["raw_bytes"] for row in own) / len(own)
            means = [f"{sum(row[key] for row in own) / len(own):.1f}" for key in times]
            kl = ", ".join(f"{row['kl']:.5f}" for row in own if "kl" in row)
            cells.append([quality, str(len(own)), f"{share:.1%}", f"{16 * share:.2f}", kl, *means])
    result_file.present("saved caches", names, cells, ["quality"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory, or show")
    parser.add_argument("--text", help="text to read")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--quality", nargs="+", choices=QUALITIES, default=QUALITIES)
    parser.add_argument("--again", action="store_true", help="measure anew what the file has")
    asked = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    show() if asked.model == "show" else run(asked)


if __name__ == "__main__":
    main()
