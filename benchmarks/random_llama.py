"""Write a Llama checkpoint of a given shape with random weights, one shard in memory at a time.

    python benchmarks/random_llama.py OUT [--layers 22 --hidden 2048 ...]
The defaults have the shape of a 1.1B-parameter model (2.2 GB in bfloat16). Weights are normal(0, 0.02), each tensor
seeded by its name, so that neither the shard size nor the number of layers changes a tensor's values. The tokenizer is
byte-level (256 bytes and an end-of-text token) and built here, so that any text can be tokenized. Random weights show
memory and time, nothing of quality.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

INIT_STD = 0.02
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Shape:
    """Model dimensions under the names of the Hugging Face config."""

    num_hidden_layers: int = 22
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    vocab_size: int = 32000


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, in the order of the forward pass."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden // shape.num_attention_heads * shape.num_key_value_heads
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """bfloat16; norms are ones, matrices normal(0, INIT_STD)."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, INIT_STD, generator=generator)


def write_weights(shape: Shape, out: Path, shard_bytes: int, seed: int) -> int:
    """Write the shards, each at most `shard_bytes` unless one tensor is larger, and their index; returns all bytes."""
    plan: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = total = 0
    for name, dims in tensor_shapes(shape):
        size = 2 * torch.Size(dims).numel()
        if plan[-1] and filled + size > shard_bytes:
            plan.append([])
            filled = 0
        plan[-1].append((name, dims))
        filled += size
        total += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(plan, start=1):
        file = f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        save_file(
            {name: random_tensor(name, dims, seed) for name, dims in names}, out / file, metadata={"format": "pt"}
        )
        weight_map |= {name: file for name, _ in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def write_config(shape: Shape, out: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vars(shape),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))


def write_tokenizer(out: Path) -> None:
    """One token a byte, by the byte-level alphabet that GPT-2's tokenizers use; no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=2048
    ).save_pretrained(out)


def write(out: Path, shape: Shape, shard_bytes: int = 500_000_000, seed: int = 0) -> int:
    """The whole checkpoint; refuses a directory that has one. Bytes of the weights."""
    if (out / "config.json").exists():
        raise SystemExit(f"{out} has a checkpoint already; choose another directory or remove it")
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out)
    total = write_weights(shape, out, shard_bytes, seed)
    write_config(shape, out)  # last: its presence says that the checkpoint is complete
    return total


def main() -> None:
    default = Shape()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=default.num_hidden_layers)
    parser.add_argument("--hidden", type=int, default=default.hidden_size)
    parser.add_argument("--intermediate", type=int, default=default.intermediate_size)
    parser.add_argument("--heads", type=int, default=default.num_attention_heads)
    parser.add_argument("--kv-heads", type=int, default=default.num_key_value_heads)
    parser.add_argument("--vocab", type=int, default=default.vocab_size)
    parser.add_argument("--shard-bytes", type=int, default=500_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = Shape(args.layers, args.hidden, args.intermediate, args.heads, args.kv_heads, args.vocab)
    total = write(args.out, shape, args.shard_bytes, args.seed)
    print(f"{args.out}: {total / 2:,.0f} parameters, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
