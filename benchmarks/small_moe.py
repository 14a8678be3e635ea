"""Train a small mixture-of-experts model on the CPU, for measuring what compression does to experts.

    python benchmarks/small_moe.py models_out/small-moe [--steps 900 --threads 1 --seed 0]

Four blocks of hidden size 128, eight experts of which a token gets two, 4.4 million parameters; the tokenizer of
tests/models/books-8m, trained on tests/data/books_calib.txt with a load-balancing loss, judged on books_heldout.txt.
Random weights route at random and all experts count the same; trained ones have something to lose. The number of steps
is fixed by --steps, not by the clock, so that a seed gives the same model whatever else the machine does (for one
number of threads); --minutes only stops a run that is too slow, and then says so.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from compress.model.load import load_tokenizer

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "tests/models/books-8m"
TEXT = ROOT / "tests/data/books_calib.txt"
HELDOUT = ROOT / "tests/data/books_heldout.txt"
SEQ_LEN = 128  # tokens
BATCH = 16  # sequences a step
WARMUP = 0.05  # of the steps
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.1
BALANCE = 0.02  # weight of the load-balancing loss, the mean over blocks
JUDGED = 96  # held-out windows
JUDGED_LEN = 512  # tokens of each
KEPT = 0.1  # of the learning rate at the end


def build(vocab_size: int, end: int) -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        sliding_window=None,
        tie_word_embeddings=False,
        initializer_range=0.04,
    )
    return MixtralForCausalLM(config)


def tokenized(path: Path) -> Tensor:
    """The whole text as one row of token ids."""
    tokenizer = load_tokenizer(TOKENIZER)
    text = path.read_text(encoding="utf-8")
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def batches(tokens: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """[BATCH, SEQ_LEN + 1]: every epoch the windows begin elsewhere and come in another order."""
    generator = torch.Generator().manual_seed(seed)
    rows: Tensor = tokens.new_empty(0, SEQ_LEN + 1)
    for _ in range(steps):
        if rows.shape[0] < BATCH:
            offset = int(torch.randint(SEQ_LEN, (1,), generator=generator))
            whole = tokens[offset:].unfold(0, SEQ_LEN + 1, SEQ_LEN)
            rows = whole[torch.randperm(whole.shape[0], generator=generator)]
        part, rows = rows[:BATCH], rows[BATCH:]
        yield part


def rate(step: int, steps: int) -> float:
    """Of the learning rate: up in a straight line, down along a cosine."""
    rise = max(1, int(WARMUP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return KEPT + (1 - KEPT) * 0.5 * (1 + math.cos(math.pi * done))


def imbalance(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Of the Switch Transformer, each block by itself: experts * sum of share * mean probability, at best 1.

    transformers' own takes all blocks together, and is content where each block prefers other experts.
    """
    losses = []
    for logits in router_logits:  # [tokens, experts]
        experts = logits.shape[-1]
        share = logits.topk(top_k).indices.flatten().bincount(minlength=experts) / (logits.shape[0] * top_k)
        losses.append(experts * (share * logits.softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


def train(model: MixtralForCausalLM, tokens: Tensor, steps: int, seconds: float, seed: int) -> int:
    """Steps made; fewer than asked for only if the time ran out."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    started = time.monotonic()
    model.train()
    for step, part in enumerate(batches(tokens, steps, seed)):
        if time.monotonic() - started > seconds:
            return step
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate(step, steps)
        out = model(input_ids=part[:, :-1], output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), part[:, 1:].flatten())
        (loss + BALANCE * imbalance(out.router_logits, model.config.num_experts_per_tok)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)
    return steps


@torch.no_grad()
def judge(model: MixtralForCausalLM, tokens: Tensor) -> tuple[float, list[list[float]]]:
    """Held-out perplexity, and of each block the share of (token, expert) pairs that each expert gets."""
    model.eval()
    total, counted = 0.0, 0
    experts, top_k = model.config.num_local_experts, model.config.num_experts_per_tok
    counts = torch.zeros(model.config.num_hidden_layers, experts)
    for part in tokens.unfold(0, JUDGED_LEN, JUDGED_LEN)[:JUDGED].split(8):
        out = model(input_ids=part, output_router_logits=True)
        losses = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), part[:, 1:].flatten())
        total, counted = total + losses.item() * part[:, 1:].numel(), counted + part[:, 1:].numel()
        for row, logits in zip(counts, out.router_logits, strict=True):
            row += logits.topk(top_k).indices.flatten().bincount(minlength=experts)
    shares = counts / counts.sum(1, keepdim=True)
    return math.exp(total / counted), [[round(share, 4) for share in row] for row in shares.tolist()]


def make(out: Path, steps: int, minutes: float, threads: int, seed: int) -> dict[str, Any]:
    """Train, judge and save; what is written to training.json."""
    if (out / "config.json").exists():
        raise SystemExit(f"{out} has a checkpoint already; choose another directory or remove it")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(TOKENIZER)
    model = build(len(tokenizer), tokenizer.eos_token_id or 0)
    started = time.monotonic()
    made = train(model, tokenized(TEXT), steps, 60 * minutes, seed)
    if made < steps:
        print(f"stopped after {made} of {steps} steps, at {minutes:g} minutes: not the model that the seed stands for")
    perplexity, shares = judge(model, tokenized(HELDOUT))
    facts = {
        "architecture": model.config.model_type,
        "params": sum(p.numel() for p in model.parameters()),
        "steps": made,
        "tokens_seen": made * BATCH * SEQ_LEN,
        "seq_len": SEQ_LEN,
        "seed": seed,
        "threads": threads,
        "seconds": round(time.monotonic() - started),
        "heldout_perplexity": round(perplexity, 2),
        "shares": shares,
    }
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--minutes", type=float, default=10, help="stop after so long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    facts = make(args.out, args.steps, args.minutes, args.threads, args.seed)
    print(f"{args.out}: {facts['params']:,} parameters, held-out perplexity {facts['heldout_perplexity']}")
    for index, row in enumerate(facts["shares"]):
        print(f"block {index}: " + " ".join(f"{share:.3f}" for share in row))


if __name__ == "__main__":
    main()
