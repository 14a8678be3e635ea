"""Measure EAD on a nested checkpoint: how often the low level writes, and what that costs.

    python benchmarks/ead.py MODEL --text TEXT [--thresholds 0 0.5 1 2 3 99] [--prompts 4] [--tokens 96]

Texts are sampled at temperature 1 behind prompts of 128 tokens. "low" is the share of tokens by the low level; "KL"
that of the law which each token was drawn from to the whole weights' law of the same place, mean over tokens; "nll"
what the whole weights lose on the text, in nats a token: texts of threshold 0 are theirs alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from measure import ROOT

sys.path.insert(0, str(ROOT))
PROMPT = 128


@torch.no_grad()
def main() -> None:
    """Print a row for each threshold."""
    from compress import speculate
    from compress.model.load import load_model, load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0, 0.5, 1, 2, 3, 99])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    model = load_model(args.model, dtype=torch.float32).eval()
    text = load_tokenizer(args.model)(args.text.read_text(), return_tensors="pt").input_ids
    how = {"max_new_tokens": args.tokens, "do_sample": True, "top_k": 0, "eos_token_id": None}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    print("| threshold | low | KL | nll | tokens |\n|---|---|---|---|---|")
    for threshold in args.thresholds:
        shares, losses, divergences = list[float](), list[float](), list[float]()
        for number in range(args.prompts):
            start = number * (text.shape[1] // args.prompts)
            made = speculate.with_settings(f"ead={threshold:g}", generator=torch.Generator().manual_seed(number))
            out = model.generate(text[:, start : start + PROMPT], custom_generate=made, **how)
            low, _, whole = made.statistics.notes[0].partition(" of ")
            shares.append(int(low) / int(whole.split()[0]))
            laws = torch.cat(out.logits).double().log_softmax(-1)
            target = model(out.sequences).logits[0, PROMPT - 1 : -1].double().log_softmax(-1)
            divergences += (laws.exp() * (laws - target)).sum(-1).tolist()
            losses += (-target.gather(1, out.sequences[0, PROMPT:, None])[:, 0]).tolist()
        figures = f"{statistics.mean(shares):.2f} | {statistics.mean(divergences):.5f} | {statistics.mean(losses):.3f}"
        print(f"| {threshold:g} | {figures} | {len(losses)} |", flush=True)


if __name__ == "__main__":
    main()
