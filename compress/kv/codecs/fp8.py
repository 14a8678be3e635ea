"""FP8: float8_e4m3fn with a float16 scale for each token of each head.

scale = max|x| / 448 over the channels of the token, so that nothing saturates; bits per element 8 + 16 / width. Unlike
transformers' own fp8 layer, whose one scale is frozen by the first chunk, later tokens have their own range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kv.codec import Block, Codec, Field, Spec

NEEDS: frozenset[str] = frozenset()
MAX_FLOAT8 = 448.0  # float8_e4m3fn
MIN_NORMAL_FLOAT16 = 2.0**-14  # smallest normal float16


@dataclass(frozen=True)
class Config:
    """There is nothing to set."""


class Fp8(Codec):
    fields = {"floats": Field("codes"), "scales": Field("scales")}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        scales = (x.abs().amax(-1, keepdim=True) / MAX_FLOAT8).clamp(min=MIN_NORMAL_FLOAT16).half()
        floats = (x / scales.float()).clamp(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn)
        return {"floats": floats, "scales": scales}

    def decode(self, block: Block) -> Tensor:
        return block["floats"].float() * block["scales"].float()

    def scores(self, query: Tensor, block: Block) -> Tensor:
        return (query @ block["floats"].float().transpose(-1, -2)) * block["scales"].float().transpose(-1, -2)

    def mix(self, p: Tensor, block: Block) -> Tensor:
        return (p * block["scales"].float().transpose(-1, -2)) @ block["floats"].float()


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Fp8(spec)
