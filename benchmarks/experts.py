"""Time the packed experts of a block against a dense layer of the size that a token uses, on one thread.

    python benchmarks/experts.py [--hidden 128 --inner 256 --experts 8 --top 2 --bits 4 --turns 15]

The defaults are the experts of benchmarks/small_moe.py with the weights of the recipe int4. Both layers are compiled by
torch.compile, in bfloat16. The layers take turns in one process; medians and minima of CPU time, for 1 token and for 16
that go to random experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from compress.formats import int as int_format
from compress.runtime.experts import Experts
from compress.runtime.linear import FusedLinears, PackedLinear
from compress.types import PackedWeight, Stored

GROUP = 128  # columns that share a scale
CALLS = 100  # of a turn


class Dense(nn.Module):
    """A gated layer whose first two products are one call, as engines fuse them."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self._first = FusedLinears([gate, up])

    def forward(self, x: Tensor) -> Tensor:
        both = self._first.product(x)
        gate, up = (self.gate(x), self.up(x)) if both is None else both.chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def packed(outputs: int, inputs: int, bits: int, seed: int) -> PackedLinear:
    """A linear of random codes."""
    generator = torch.Generator().manual_seed(seed)
    params = int_format.params_for(bits, GROUP, True, inputs)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(outputs, -(-inputs // GROUP), generator=generator) / inputs**0.5 / 2 ** (bits - 2)).half()
    tensors = int_format.pack(codes, scales, None, params)
    return PackedLinear.from_packed(PackedWeight(Stored("int", params), tensors, (outputs, inputs)))


def experts(hidden: int, inner: int, count: int, top: int, bits: int) -> Experts:
    """The experts of a block, packed."""
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=count, num_experts_per_tok=top
    )
    with torch.device("meta"):
        made = Experts.from_fused(MixtralExperts(config))
    for number in range(count):
        for i, (name, shape) in enumerate(
            {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}.items()
        ):
            made.set_submodule(f"{number}.{name}", packed(*shape, bits, 3 * number + i))
    return made.eval()


def timed(call: Any) -> float:
    started = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - started) / CALLS * 1e6


@torch.inference_mode()
def measure(tokens: int, asked: argparse.Namespace) -> None:
    """Print microseconds of both layers, eager and compiled, and their ratios."""
    hidden, active = asked.hidden, asked.inner * asked.top
    shapes = [(active, hidden), (active, hidden), (hidden, active)]
    dense = Dense(*(packed(*shape, asked.bits, 1000 + i) for i, shape in enumerate(shapes)))
    sparse = experts(hidden, asked.inner, asked.experts, asked.top, asked.bits)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights, ids = torch.rand(tokens, asked.experts, generator=torch.Generator().manual_seed(2)).topk(asked.top)
    weights = weights.bfloat16()
    sparse(x, ids, weights)  # what is compiled uses what this call has made
    compiled = [torch.compile(each, fullgraph=True) for each in (dense, sparse)]
    calls = {
        "dense": lambda: dense(x),
        "experts": lambda: sparse(x, ids, weights),
        "dense, compiled": lambda: compiled[0](x),
        "experts, compiled": lambda: compiled[1](x, ids, weights),
    }
    for call in calls.values():
        for _ in range(10):
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(asked.turns):
        for name, call in calls.items():
            taken[name].append(timed(call))
    for way in ("", ", compiled"):
        one, many = taken["dense" + way], taken["experts" + way]
        ratio = statistics.median(many) / statistics.median(one)
        print(
            f"{tokens:3} tokens{way or ', eager':10}: dense {statistics.median(one):7.1f} us (least {min(one):.1f}), "
            f"experts {statistics.median(many):7.1f} us (least {min(many):.1f}): {ratio:.2f} x, "
            f"of the least {min(many) / min(one):.2f} x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 128, "inner": 256, "experts": 8, "top": 2, "bits": 4, "turns": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in (1, 16):
        measure(tokens, asked)


if __name__ == "__main__":
    main()
