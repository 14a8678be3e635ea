"""Measure what evicting tokens from the cache costs, beside kvpress on the same windows.

    python benchmarks/kv_eviction.py MODEL TEXT [--windows 12] [--context 2048] [--only NAME ...] [--json FILE]
    python benchmarks/kv_eviction.py MODEL TEXT --kvpress       # in an environment that has kvpress and not compress

A window is a prompt of --context tokens and the 64 that follow. A passage of 32 tokens from elsewhere in the text is
put into the prompt, at a depth that goes from 10% to 80% over the windows. The prompt goes through the model once,
with an exact cache; each entry evicts from what that cache holds. Then, teacher forced in one step each and from the
same state: the passage again, of which 24 tokens are scored after a cue of 8 (recall: nll above the exact cache's), and
the 64 tokens (KL to the exact cache). Everything is float32. Bytes are a token's, of those of the prompt, as stored in
bfloat16. AdaKV of kvpress is left out: it keeps all bytes, and hides tokens by a key that no query of the step attends
to, which it does not find for steps of many tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

SCORED, NEEDLE, CUE = 64, 32, 8
DEPTHS = (0.1, 0.45, 0.8)
EXACT: dict[str, Any] = {"method": "identity", "sink": 4, "residual_length": 128}
KIVI: dict[str, Any] = {"method": "kivi", "bits": 4, "group_size": 32, "sink": 4, "residual_length": 128}
SNAP, EXPECTED = {"method": "snapkv", "keep": 0.5}, {"method": "expected_attention", "keep": 0.5}
ENTRIES: dict[str, dict[str, Any]] = {
    "knorm": {**EXACT, "evict": {"method": "knorm", "keep": 0.5}},
    "snapkv": {**EXACT, "evict": SNAP},
    "snapkv ada": {**EXACT, "evict": {**SNAP, "heads": "ada"}},
    "snapkv critical": {**EXACT, "evict": {**SNAP, "critical": True}},
    "snapkv ada critical": {**EXACT, "evict": {**SNAP, "heads": "ada", "critical": True}},
    "snapkv shared": {**EXACT, "evict": {**SNAP, "heads": "shared"}},
    "snapkv pyramid": {**EXACT, "evict": {**SNAP, "layers": "pyramid"}},
    "expected": {**EXACT, "evict": EXPECTED},
    "expected ada": {**EXACT, "evict": {**EXPECTED, "heads": "ada"}},
    "expected critical": {**EXACT, "evict": {**EXPECTED, "critical": True}},
    "expected without norms critical": {**EXACT, "evict": {**EXPECTED, "critical": True, "norms": False}},
    "expected ada critical": {**EXACT, "evict": {**EXPECTED, "heads": "ada", "critical": True}},
    "expected shared": {**EXACT, "evict": {**EXPECTED, "heads": "shared"}},
    "expected merge": {**EXACT, "evict": {**EXPECTED, "merge": True}},
    "expected pyramid": {**EXACT, "evict": {**EXPECTED, "layers": "pyramid"}},
    "d2o": {**EXACT, "evict": {"method": "d2o", "keep": 0.5}},
    "d2o without merging": {**EXACT, "evict": {"method": "d2o", "keep": 0.5, "merge": False}},
    "kivi4": KIVI,
    "kivi4 expected ada": {**KIVI, "evict": {**EXPECTED, "heads": "ada"}},
    "kivi4 expected ada critical": {**KIVI, "evict": {**EXPECTED, "heads": "ada", "critical": True}},
}


def samples(
    model: Any, tokenizer: Any, text: str, windows: int, context: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield prompts [1, context], what follows [1, SCORED], and the passage that was planted [1, NEEDLE]."""
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    length = context + SCORED
    rows = tokens[: (len(tokens) // length) * length].view(-1, length)
    stride = len(rows) // (2 * windows)
    for index in range(windows):
        row, other = rows[2 * index * stride], rows[(2 * index + 1) * stride]
        needle, prompt = other[:NEEDLE], row[:context].clone()
        at = int(DEPTHS[index % len(DEPTHS)] * context)
        prompt[at : at + NEEDLE] = needle
        yield prompt[None], row[context:][None], needle[None]


def scores(
    model: Any, cache: Any, crop: Callable[[int], None], following: Tensor, needle: Tensor
) -> tuple[Tensor, float]:
    """Return the log-probabilities of the tokens that follow [SCORED, vocab], and the nll of the passage."""
    found = model(needle, past_key_values=cache, use_cache=True).logits[0].float().log_softmax(-1)
    target = needle[0, CUE:]
    nll = -float(found[CUE - 1 : -1].gather(-1, target[:, None]).mean())
    crop(NEEDLE)
    return model(following, past_key_values=cache, use_cache=True).logits[0].float().log_softmax(-1), nll


def measured(model: Any, args: argparse.Namespace, engine: Any) -> dict[str, dict[str, Any]]:
    """Return KL, recall, bytes and seconds of every entry, means over windows."""
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    needed = 16 * args.windows * (args.context + SCORED)  # characters
    text = Path(args.text).read_text(encoding="utf-8")[:needed]
    for prompt, following, needle in samples(model, engine.tokenizer, text, args.windows, args.context):
        exact = engine.prefilled(prompt)
        base, base_nll = scores(model, exact, lambda n: exact.crop(-n), following, needle)  # noqa: B023
        for name in engine.names(args.only):
            started = time.process_time()
            cache, nbytes = engine.evicted(name)
            took = time.process_time() - started
            other, nll = scores(model, cache, lambda n: cache.crop(-n), following, needle)  # noqa: B023
            kl = float((base.exp() * (base - other)).sum(-1).mean())
            rows.setdefault(name, []).append((kl, nll - base_nll, nbytes / args.context, took))
        done = len(rows[next(iter(rows))])
        found = {name: _summary(own) for name, own in rows.items()}
        print(f"{done} windows", json.dumps({k: v["kl"] for k, v in found.items()}), file=sys.stderr, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return found


def _summary(rows: list[tuple[float, float, float, float]]) -> dict[str, Any]:
    columns = torch.tensor(rows, dtype=torch.float64)
    mean = columns.mean(0).tolist()
    error = float(columns[:, 0].std() / math.sqrt(len(rows))) if len(rows) > 1 else math.nan
    keys = ("kl", "needle_nll", "bytes_per_token", "seconds")
    by_window = {"kl_by_window": columns[:, 0].tolist(), "needle_nll_by_window": columns[:, 1].tolist()}
    scored = {"kl_standard_error": error, "tokens": SCORED * len(rows)}
    return {**dict(zip(keys, mean, strict=True)), **scored, **by_window}


class Ours:
    """Feeds caches of compress with the queries, keys and values of one prompt."""

    def __init__(self, model: Any, tokenizer: Any, keep: float) -> None:
        self.model, self.tokenizer, self.keep = model, tokenizer, keep

    def names(self, only: list[str]) -> list[str]:
        return only or list(ENTRIES)

    def prefilled(self, prompt: Tensor) -> Any:
        from kv_prompt import Prompt

        self.prompt = Prompt(self.model, prompt)
        return self.prompt.exact

    def evicted(self, name: str) -> tuple[Any, float]:
        from kv_prompt import nbytes_in_16_bits

        from compress.kv.cache import make_cache

        settings = copy.deepcopy(ENTRIES[name])
        if "evict" in settings:
            settings["evict"]["keep"] = self.keep
        cache = self.prompt.fill(make_cache(self.model.config, settings))
        return cache, nbytes_in_16_bits(cache)


class KVPress:
    """Compresses the cache of one prompt with presses of kvpress."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        import kvpress

        self.model, self.tokenizer = model, tokenizer
        half = {"compression_ratio": 0.5}
        base, snap = kvpress.ExpectedAttentionPress, kvpress.SnapKVPress
        self.presses = {
            "knorm": kvpress.KnormPress(**half),
            "snapkv": snap(**half),
            "snapkv critical": kvpress.CriticalKVPress(snap(**half)),
            "expected": base(**half),
            "expected critical": kvpress.CriticalKVPress(base(**half)),
        }
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb

    def names(self, only: list[str]) -> list[str]:
        return only or list(self.presses)

    def prefilled(self, prompt: Tensor) -> Any:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

        def note(module: Any, given: Any, kwargs: dict[str, Any]) -> None:
            self.calls.append((module, dict(kwargs)))

        handles = [x.self_attn.register_forward_pre_hook(note, with_kwargs=True) for x in self.model.model.layers]
        cache = DynamicCache()
        self.model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for handle in handles:
            handle.remove()
        self.cache = copy.deepcopy(cache)
        return cache

    def evicted(self, name: str) -> tuple[Any, float]:
        press, made, tokens = self.presses[name], copy.deepcopy(self.cache), self.cache.get_seq_length()
        shift = 0
        for (module, kwargs), layer in zip(self.calls, made.layers, strict=True):
            found = press.compress(module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs)
            layer.keys, layer.values = found
            shift = tokens - found[0].shape[2]
        kept = sum(x.keys.numel() + x.values.numel() for x in made.layers) * 2
        return _shifted(made, shift), kept


def _shifted(cache: Any, shift: int) -> Any:
    """Let a cache count tokens that were evicted, so that positions and masks are right in steps of many tokens."""
    for layer in cache.layers:
        own = type(layer)

        class Layer(own):  # type: ignore[misc, valid-type]
            def get_seq_length(self, *args: Any) -> int:
                return super().get_seq_length() + shift

            def get_mask_sizes(self, position: Any, *args: Any) -> tuple[int, int]:
                count = position if isinstance(position, int) else position.shape[0]
                return self.keys.shape[-2] + count, shift

            def crop(self, count: int) -> None:
                self.keys, self.values = self.keys[:, :, :count], self.values[:, :, :count]

        layer.__class__ = Layer
    return cache


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json")
    parser.add_argument("--keep", type=float, default=0.5, help="fraction of the tokens that stays")
    parser.add_argument("--kvpress", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine: Any
    if args.kvpress:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
        engine = KVPress(model, AutoTokenizer.from_pretrained(args.model))
    else:
        from compress.evaluate.reader import Execution, load_model
        from compress.model.load import load_tokenizer

        model = load_model(Path(args.model).resolve(), Execution("float32", "cpu"))
        engine = Ours(model, load_tokenizer(Path(args.model).resolve()), args.keep)
    known = engine.names([])
    if unknown := [name for name in args.only if name not in known]:
        raise SystemExit(f"--only {unknown[0]!r} is no entry; there are {', '.join(known)}")
    for name, row in measured(model, args, engine).items():
        print(f"| {name} | {row['bytes_per_token']:.0f} | {row['kl']:.4f} | {row['needle_nll']:+.3f} |")


if __name__ == "__main__":
    main()
