"""Train a small vision-language model on the CPU, for measuring what is lost where vision tokens leave the cache.

    python benchmarks/small_vlm.py models_out/small-vlm [--steps 2400 --threads 1 --seed 0]

A picture is a grid of 6 x 6 cells in eight colours, and one vision token sees one cell. Two questions are asked of it,
in tokens of their own: the colour of the cell in row r and column c (one token answers), and all colours of row r from
left to right (six tokens do). So an answer depends on one vision token of 36, or on six, and a random model's attention
would tell nothing. LLaVA of transformers: a tower of one block, a projector, a Llama of four blocks of hidden
size 128; 0.7 million parameters. Training sequences hold a picture and QUESTIONS questions; answers alone are trained.

The number of steps is fixed by --steps, not by the clock, so that a seed gives the same model whatever else the machine
does (for one number of threads); --minutes only stops a run that is too slow, and then says so.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from small_moe import rate
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

SIDE, PATCH = 6, 4  # cells of a side, pixels of a side of a cell
CELLS = SIDE * SIDE
COLOURS = torch.tensor([[r, g, b] for r in (-1.0, 1.0) for g in (-1.0, 1.0) for b in (-1.0, 1.0)])
NOISE = 0.2  # of a pixel, standard deviation
PAD, IMAGE, READ = 0, 1, 2  # token ids; READ asks for a whole row
ROW, COLUMN, COLOUR = 4, 4 + SIDE, 4 + 2 * SIDE  # first ids of rows, columns and colours
VOCABULARY = 32
QUESTIONS = 6  # in a training sequence, three of each kind
BATCH, LEARNING_RATE, WEIGHT_DECAY = 32, 3e-3, 0.01
JUDGED = 256  # pictures
IGNORED = -100  # a label that is not trained


def build() -> LlavaForConditionalGeneration:
    """Return the model with random weights."""
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=PAD,
        pad_token_id=PAD,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE * PATCH,
        patch_size=PATCH,
        projection_dim=64,
        initializer_factor=1.0,
    )
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE,
        image_seq_length=CELLS,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position_embedding" in name:
                parameter.normal_(0, 0.5)
    return model


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the colours of cells int64 [count, SIDE, SIDE] and the pixels [count, 3, SIDE PATCH, SIDE PATCH]."""
    cells = torch.randint(len(COLOURS), (count, SIDE, SIDE), generator=generator)
    return cells, pixels_of(cells, generator)


def pixels_of(cells: Tensor, generator: torch.Generator) -> Tensor:
    """Return the pixels [count, 3, SIDE PATCH, SIDE PATCH] of cells int64 [count, SIDE, SIDE]."""
    pixels = COLOURS[cells].permute(0, 3, 1, 2).repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
    return pixels + NOISE * torch.randn(pixels.shape, generator=generator)


def cell_questions(cells: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return one question [count, 2] for the colour of a cell of each picture, and its answer [count, 1]."""
    row, column = (torch.randint(SIDE, (len(cells),), generator=generator) for _ in range(2))
    answer = cells[torch.arange(len(cells)), row, column]
    return torch.stack((ROW + row, COLUMN + column), 1), COLOUR + answer[:, None]


def row_questions(cells: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return one question [count, 2] for the colours of a row of each picture, and its answer [count, SIDE]."""
    row = torch.randint(SIDE, (len(cells),), generator=generator)
    question = torch.stack((ROW + row, torch.full_like(row, READ)), 1)
    return question, COLOUR + cells[torch.arange(len(cells)), row]


def vision_tokens(count: int) -> Tensor:
    """Return the placeholders of a picture, int64 [count, CELLS]."""
    return torch.full((count, CELLS), IMAGE)


def training_batch(first: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids and labels int64 [BATCH, tokens], weights of the labels [tokens], and pixels.

    Both kinds of questions take turns; `first`, 0 or 1, is the kind of the first one. All answers weigh the same.
    """
    cells, pixels = pictures(BATCH, generator)
    ids, labels, weights = [vision_tokens(BATCH)], [torch.full((BATCH, CELLS), IGNORED)], [torch.zeros(CELLS)]
    for index in range(QUESTIONS):
        question, answer = (row_questions if (index + first) % 2 else cell_questions)(cells, generator)
        ids += [question, answer]
        labels += [torch.full_like(question, IGNORED), answer]
        share = 1 / (QUESTIONS * answer.shape[1])
        weights += [torch.zeros(question.shape[1]), torch.full((answer.shape[1],), share)]
    return torch.cat(ids, 1), torch.cat(labels, 1), torch.cat(weights), pixels


def train(model: Any, steps: int, seconds: float, seed: int) -> int:
    """Return the number of steps made; fewer than asked for only if the time ran out."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    started = time.monotonic()
    model.train()
    for step in range(steps):
        if time.monotonic() - started > seconds:
            return step
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate(step, steps)
        ids, labels, weights, pixels = training_batch(step % 2, generator)
        logits = model(input_ids=ids, pixel_values=pixels).logits
        nll = torch.nn.functional.cross_entropy(
            logits[:, CELLS - 1 : -1].flatten(0, 1), labels[:, CELLS:].flatten(), ignore_index=IGNORED, reduction="none"
        )
        loss = nll.view(BATCH, -1).mean(0) @ weights[CELLS:]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)
    return steps


@torch.no_grad()
def judge(model: Any, seed: int) -> dict[str, float]:
    """Return the share of right tokens in answers to both questions about pictures that were not trained on."""
    model.eval()
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    cells, pixels = pictures(JUDGED, generator)
    found = {}
    for name, asked in (("cell", cell_questions), ("row", row_questions)):
        question, answer = asked(cells, generator)
        ids = torch.cat((vision_tokens(JUDGED), question, answer), 1)
        logits = model(input_ids=ids, pixel_values=pixels).logits[:, -1 - answer.shape[1] : -1]
        found[name] = round(float((logits.argmax(-1) == answer).float().mean()), 4)
    return found


def make(out: Path, steps: int, minutes: float, threads: int, seed: int) -> dict[str, Any]:
    """Train, judge and save; return what is written to training.json."""
    if (out / "config.json").exists():
        raise SystemExit(f"{out} has a checkpoint already; choose another directory or remove it")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = build()
    started = time.monotonic()
    made = train(model, steps, 60 * minutes, seed)
    if made < steps:
        print(f"stopped after {made} of {steps} steps, at {minutes:g} minutes: not the model that the seed stands for")
    facts = {
        "params": sum(p.numel() for p in model.parameters()),
        "steps": made,
        "pictures_seen": made * BATCH,
        "seed": seed,
        "threads": threads,
        "seconds": round(time.monotonic() - started),
        "right": judge(model, seed),
    }
    model.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=20, help="stop after so long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(make(args.out, args.steps, args.minutes, args.threads, args.seed)))


if __name__ == "__main__":
    main()
