"""Measure what rounding the states of linear attention and Mamba costs, after every token: bfloat16, int8, 12 bits.

    python benchmarks/kv_states.py rules                       # random recurrences of 64 x 64
    python benchmarks/kv_states.py train delta DIRECTORY       # a small model of bytes, in minutes; or ssd
    python benchmarks/kv_states.py model DIRECTORY             # KL to states in float32, token by token

A rule is simulated in float64: the gated delta rule with random unit keys, and Mamba-2's with channels and directions
of the state of sizes that differ. The error is that of the output, of the second half of the steps; for the latter it
is relative to each channel's size. `12 columns` has its scales along the other axis.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import ROOT
from torch import Tensor
from torch.nn import functional as F

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from compress.kv.hooks import cache_argument  # noqa: E402
from compress.kv.states import StateCodes  # noqa: E402
from compress.model.load import load_model  # noqa: E402
from helpers.pico import EOS_ID, VOCAB_SIZE, pico_tokenizer  # noqa: E402

SIZE, HEADS, STEPS = 64, 4, 1500
TRAIN, HELD = ROOT / "tests/data/books_calib.txt", ROOT / "tests/data/books_heldout.txt"
SAMPLES, LENGTH = 8, 256  # of a step of training
COMMON = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048},
    **{"bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID, "tie_word_embeddings": True},
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            **{**MIXTURE, "shared_expert_intermediate_size": 128, "linear_num_key_heads": 8},
            **{"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 16},
        },
    ),
    "ssd": ("mamba2", {"state_size": 64, "num_heads": 8, "head_dim": 32, "n_groups": 1, "chunk_size": 64}),
}

Rounding = Callable[[Tensor], Tensor]
ROUNDINGS: dict[str, Rounding] = {
    "bf16": lambda x: x.bfloat16().to(x.dtype),
    "int8": lambda x: StateCodes(x, 8).decode(),
    "12": lambda x: StateCodes(x).decode(),
    "12 columns": lambda x: StateCodes(x.transpose(-1, -2).contiguous()).decode().transpose(-1, -2),
}


def delta_rule(decay: float, step: int, generator: torch.Generator) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return what a step does to a state [heads, keys, values], and the query that reads it."""
    key, query, value = torch.randn(3, HEADS, SIZE, 1, dtype=torch.float64, generator=generator)
    key, query = F.normalize(key, dim=1), F.normalize(query, dim=1)
    beta = torch.rand(HEADS, 1, 1, dtype=torch.float64, generator=generator)

    def update(state: Tensor) -> Tensor:
        state = decay * state
        return state + key * (beta * (value.mT - key.mT @ state))

    return update, query.mT


def spread(count: int) -> Tensor:
    """Sizes that differ as those of channels do: log-normal."""
    return torch.randn(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).exp()


def ssd_rule(decay: float, step: int, generator: torch.Generator) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return what a step does to a state [heads, channels, state], and what reads it, relative to channels' sizes."""
    x, inwards, outwards = torch.randn(3, HEADS, SIZE, 1, dtype=torch.float64, generator=generator)
    dt = 2 * torch.rand(HEADS, 1, 1, dtype=torch.float64, generator=generator)
    sizes = spread(SIZE)
    x, inwards, outwards = x * sizes.flip(0), inwards * sizes, outwards * sizes
    return lambda state: decay**dt * state + dt * x * inwards.mT, outwards


def rules() -> None:
    """Print the relative errors of outputs."""
    for name, rule in (("delta", delta_rule), ("ssd", ssd_rule)):
        for decay in (0.9, 0.99, 0.999):
            generator = torch.Generator().manual_seed(0)
            states = dict.fromkeys(("exact", *ROUNDINGS), torch.zeros(HEADS, SIZE, SIZE, dtype=torch.float64))
            errors, total = dict.fromkeys(ROUNDINGS, 0.0), 0.0
            for step in range(STEPS):
                update, reader = rule(decay, step, generator)
                states = {key: update(state) for key, state in states.items()}
                states |= {key: rounding(states[key]) for key, rounding in ROUNDINGS.items()}
                outputs = {
                    key: (reader @ state).mT if name == "delta" else state @ reader / spread(SIZE).flip(0)
                    for key, state in states.items()
                }
                if step >= STEPS // 2:
                    total += outputs["exact"].square().sum().item()
                    for key in ROUNDINGS:
                        errors[key] += (outputs[key] - outputs["exact"]).square().sum().item()
            figures = ", ".join(f"{key} {(error / total) ** 0.5:.5f}" for key, error in errors.items())
            print(f"{name}, decay {decay}: {figures}", flush=True)


def train(kind: str, directory: str, steps: int) -> None:
    """Train a small model on bytes and save it."""
    model_type, differences = MODELS[kind]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**COMMON, **differences})
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).train()
    tokenizer = pico_tokenizer()
    ids = torch.tensor(tokenizer(TRAIN.read_text())["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    began = time.process_time()
    for step in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (SAMPLES,))
        batch = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f} nats a byte, {time.process_time() - began:.0f} s", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@torch.no_grad()
def measure(directory: str, windows: int, tokens: int) -> None:
    """Print the KL of predictions where states are rounded after each token."""
    model = load_model(Path(directory), torch.float32)
    ids = torch.tensor(pico_tokenizer()(HELD.read_text())["input_ids"])[: windows * tokens].view(windows, tokens)
    caches = {name: DynamicCache(config=model.config) for name in ("exact", *ROUNDINGS)}
    sums, nll = dict.fromkeys(ROUNDINGS, 0.0), 0.0
    for at in range(tokens - 1):
        logits = {}
        for name, cache in caches.items():
            made = model(ids[:, at : at + 1], use_cache=True, **{cache_argument(model): cache}).logits[:, -1]
            logits[name] = made.double().log_softmax(-1)
            for layer in cache.layers if name in ROUNDINGS else ():
                for state in getattr(layer, "recurrent_states", {}).values():
                    state.copy_(ROUNDINGS[name](state))
        if at >= tokens // 2:
            exact = logits["exact"]
            nll -= exact.gather(1, ids[:, at + 1 : at + 2]).sum().item()
            for name in ROUNDINGS:
                sums[name] += (exact.exp() * (exact - logits[name])).sum().item()
    count = windows * (tokens - 1 - tokens // 2)
    figures = ", ".join(f"{name} {total / count:.2e}" for name, total in sums.items())
    print(f"{directory}: {nll / count:.3f} nats a byte; KL over {count} bytes: {figures}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rules")
    trained = commands.add_parser("train")
    trained.add_argument("kind", choices=MODELS)
    trained.add_argument("directory")
    trained.add_argument("--steps", type=int, default=300)
    measured = commands.add_parser("model")
    measured.add_argument("directory")
    measured.add_argument("--windows", type=int, default=4)
    measured.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.command == "rules":
        rules()
    elif arguments.command == "train":
        train(arguments.kind, arguments.directory, arguments.steps)
    else:
        measure(arguments.directory, arguments.windows, arguments.tokens)


if __name__ == "__main__":
    main()
