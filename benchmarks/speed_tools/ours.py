"""A checkpoint of compress, or any of transformers in a type of torch: `ours.py DIR [--dtype bfloat16]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import protocol

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", type=Path)
parser.add_argument("--dtype", default="auto")
parser.add_argument("--avx2", action="store_true", help="as on a processor with AVX2 and without AVX-512")
arguments = parser.parse_args()
if arguments.avx2:
    import sys

    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
    import avx2_only  # noqa: F401

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

import compress  # noqa: E402, F401  # registers the format


class Transformers:
    """The model's own forward pass with its own cache, one call a token."""

    def __init__(self) -> None:
        dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        self.caches: dict[tuple[int, int], DynamicCache] = {}
        self.cache = DynamicCache(config=self.model.config)
        self.last = torch.zeros(1, 1, dtype=torch.long)

    def fill(self, rows: int, context: int) -> None:
        key = (rows, context)
        if key not in self.caches:
            self.caches.clear()
            self.caches[key] = self.cache = DynamicCache(config=self.model.config)
            for part in self._prompt(rows, context).split(512, 1):
                self.last = self._next(part)
        self.cache = self.caches[key]
        if (surplus := self.cache.get_seq_length() - context) > 0:
            self.cache.crop(-surplus)

    def step(self, rows: int) -> None:
        self.last = self._next(self.last)

    def prefill(self, rows: int, tokens: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self._next(self._prompt(rows, tokens))

    def _prompt(self, rows: int, tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(10, self.model.config.vocab_size - 10, (rows, tokens), generator=generator)

    @torch.inference_mode()
    def _next(self, ids: Tensor) -> Tensor:
        output = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1)


torch.set_num_threads(1)
protocol.serve(Transformers())
