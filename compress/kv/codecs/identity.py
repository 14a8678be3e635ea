"""Identity: keys and values as they are, through the same store as every codec.

The yardstick of the cache itself (generation equals that of transformers' own cache bit for bit), and what layers that
`skip_layers` names keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from compress.kv.codec import Block, Codec, Field, Spec

NEEDS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Config:
    """There is nothing to set."""


class Identity(Codec):
    fields = {"exact": Field("codes")}

    def encode(self, x: Tensor, state: Block) -> dict[str, Tensor]:
        return {"exact": x.to(self.spec.dtype)}

    def decode(self, block: Block) -> Tensor:
        return block["exact"]


def build(config: Config, spec: Spec, static: Mapping[str, Tensor]) -> Codec:
    return Identity(spec)
