"""A tiny GLM-4.5 with a draft head that was trained with it for seconds, and how many drafted tokens are accepted.

folder = save_drafting(tmp_path / "model")          # two blocks, hidden 64, one head, stored as publishers store it
accepted_length(model, heads, drafted=2)            # 1 + accepted drafts a step
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from helpers.pico import of_type, pico_tokenizer, save

STEPS, BATCH, LENGTH = 120, 16, 48
GLM: dict[str, Any] = {
    **{"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"num_nextn_predict_layers": 1, "n_shared_experts": 1},
}
WORDS = ("the", "a", "old", "grey", "cat", "ship", "king", "sees", "finds", "loves", "river", "stone", "and", "then")


def texts(count: int, seed: int, length: int = LENGTH) -> Tensor:
    """Tokens [count, length] of sentences in which each word says much about the next; letters are their own tokens."""
    ids = letters()
    return torch.tensor([[ids[letter] for letter in line[:length]] for line in lines(count, seed, length)])


@functools.cache
def letters() -> dict[str, int]:
    """Letter -> token of the tokenizer that is stored with the model."""
    tokenizer = pico_tokenizer()
    return {letter: tokenizer(letter)["input_ids"][0] for letter in sorted(set("".join(WORDS) + " "))}


def lines(count: int, seed: int, length: int) -> list[str]:
    """As many texts of at least so many letters."""
    generator = torch.Generator().manual_seed(seed)
    follow = torch.randperm(len(WORDS) * 3, generator=torch.Generator().manual_seed(0)) % len(WORDS)
    rows = []
    for _ in range(count):
        word, line = int(torch.randint(len(WORDS), (1,), generator=generator)), ""
        while len(line) < length:
            line += WORDS[word] + " "
            chance = torch.rand(1, generator=generator).item()
            word = int(follow[word * 3 + (0 if chance < 0.7 else 1 if chance < 0.9 else 2)])
        rows.append(line)
    return rows


@functools.cache
def trained() -> tuple[PreTrainedModel, Any]:
    """The model and its head, in float32."""
    torch.manual_seed(0)
    model = of_type("glm4_moe", GLM)
    heads: Any = MtpModel(model, 1)
    with torch.no_grad():
        for parameter in heads.layers.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    own = [*model.parameters(), *heads.layers.parameters()]
    optimizer = torch.optim.AdamW(own, lr=4e-3, betas=(0.9, 0.95))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 10) * (1 - step / STEPS) + 1e-5
        tokens = texts(BATCH, 1000 + step)
        hidden = model.model(tokens).last_hidden_state
        behind = next(run(heads, hidden, tokens))
        loss = _loss(model, hidden[:, :-1], tokens[:, 1:]) + _loss(model, behind[:, :-1], tokens[:, 2:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False), heads.eval().requires_grad_(False)


def _loss(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), targets.flatten())


def run(heads: Any, hidden: Tensor, tokens: Tensor, drafted: int = 1) -> Any:
    """Yield what the one head gives in each of so many steps, each on what it gave before; in any transformers."""
    for number in range(drafted):
        behind = tokens[:, 1 + number :]
        positions = torch.arange(1 + number, tokens.shape[1])[None].expand(len(tokens), -1)
        read = heads.embed_tokens(behind)
        options = heads.create_masks_for_mtp_layer(0, read, None, positions)
        options |= {"position_ids": positions, "past_key_values": None}
        turned = heads.rotary_emb(read, position_ids=positions)
        hidden = heads.layers[0](read, hidden[:, :-1], position_embeddings=turned, **options)
        yield hidden


def save_drafting(folder: Path) -> Path:
    """Store both as GLM-4.5 is published: the head is the layer behind the last, with copies of both tables."""
    model, heads = trained()
    save(model, folder)
    stored = load_file(folder / "model.safetensors")
    head = published(heads, "model.layers.2.")
    head["model.layers.2.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    head["model.layers.2.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    return added(folder, head)


def added(folder: Path, more: dict[str, Tensor]) -> Path:
    """Store further tensors in a checkpoint of one file."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
    return folder


def published(heads: Any, prefix: str) -> dict[str, Tensor]:
    """The tensors of one head as DeepSeek-V3 and GLM-4.5 name them, experts one by one."""
    head = {}
    for name, tensor in heads.layers[0].state_dict().items():
        inner = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        parts = {inner: tensor}
        if inner.endswith("experts.gate_up_proj"):
            halves = [matrix.chunk(2) for matrix in tensor]
            named = [
                (n, key, part) for n, pair in enumerate(halves) for key, part in zip(("gate", "up"), pair, strict=True)
            ]
            parts = {f"mlp.experts.{number}.{key}_proj.weight": part for number, key, part in named}
        if inner.endswith("experts.down_proj"):
            parts = {f"mlp.experts.{number}.down_proj.weight": part for number, part in enumerate(tensor)}
        head |= {prefix + key: part.clone() for key, part in parts.items()}
    return head


@torch.no_grad()
def accepted_length(model: Any, heads: Any, drafted: int = 2, count: int = 64) -> float:
    """Tokens a step of greedy speculative decoding: 1 + the drafts that the model would have chosen itself.

    On what the model writes greedily behind the beginnings of so many texts.
    """
    tokens = model.generate(texts(count, 7, 12), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    hidden = model.model(tokens).last_hidden_state
    right = torch.ones(1, dtype=torch.bool)
    total = 1.0
    for number, behind in enumerate(run(heads, hidden, tokens, drafted)):
        drafts = model.lm_head(behind).argmax(-1)[:, 12:-1]
        right = (drafts == tokens[:, 2 + number :][:, 12:]) & (right[:, : drafts.shape[1]] if number else True)
        total += right.float().mean().item()
    return total
