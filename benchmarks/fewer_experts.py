"""Compare ways to go without experts on one mixture: removed by several scores, or replaced by a constant (MoNE).

    python benchmarks/fewer_experts.py models_out/small-moe [--remove 2 4 --seeds 4 --windows 32]

In MoNE (arXiv 2507.00390) the router stays as it is, and an expert that goes gives the constant mu_j = sum g^2 f /
sum g^2 over its tokens of the calibration text, with the weight that the router gives it. The experts that go are those
of the least sum g^2 ||f - mu_j||^2, the error that this makes in the layer: the paper's own formula is not known to us.
Everything is computed in memory on transformers' own model, apart from the package's transforms: for the experts of a
Mixtral, which benchmarks/small_moe.py trains.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as nn_functional
from small_moe import HELDOUT, TEXT, tokenized
from torch import Tensor

from compress.model.load import load_model

SEQ_LEN = 512  # tokens of a window
CALIBRATION = 128  # windows
Sums = dict[str, Tensor]  # of one layer, a first dimension for the experts


def output(experts: Any, number: int, x: Tensor) -> Tensor:
    gate, up = nn_functional.linear(x, experts.gate_up_proj[number]).chunk(2, -1)
    return nn_functional.linear(experts.act_fn(gate) * up, experts.down_proj[number])


def measure(model: Any, windows: Tensor) -> list[Sums]:
    """The sums of each layer over the pairs of a token and an expert that the router chooses."""
    layers = [layer.mlp.experts for layer in model.model.layers]
    sums: list[Sums] = [{} for _ in layers]

    def hook(own: Sums) -> Callable[..., None]:
        def watch(experts: Any, args: tuple[Tensor, Tensor, Tensor], _: Any) -> None:
            hidden, index, weights = args
            for number in range(experts.num_experts):
                token, position = torch.where(index == number)
                f, g = output(experts, number, hidden[token]).double(), weights[token, position].double()
                square = g.square()
                each = {"tokens": torch.tensor(float(len(g))), "gates": g.sum(), "norms": (g * f.norm(dim=1)).sum()}
                each |= {"squares": square.sum(), "energy": square @ f.square().sum(1), "outputs": square @ f}
                for key, value in each.items():
                    total = own.setdefault(key, torch.zeros(experts.num_experts, *value.shape, dtype=torch.float64))
                    total[number] += value

        return watch

    hooks = [experts.register_forward_hook(hook(own)) for experts, own in zip(layers, sums, strict=True)]
    for part in windows.split(4):
        model(input_ids=part)
    for each in hooks:
        each.remove()
    return sums


SCORES: dict[str, Callable[[Sums], Tensor]] = {
    "reap": lambda s: s["norms"] / s["tokens"],
    "frequency": lambda s: s["tokens"],
    "router mean": lambda s: s["gates"] / s["tokens"],
    "error of a constant": lambda s: s["energy"] - s["outputs"].square().sum(1) / s["squares"],
}


def pruned(model: Any, gone: list[list[int]]) -> Any:
    changed = copy.deepcopy(model)
    for layer, numbers in zip(changed.model.layers, gone, strict=True):
        kept = [n for n in range(layer.mlp.experts.num_experts) if n not in numbers]
        for owner, key in (
            (layer.mlp.experts, "gate_up_proj"),
            (layer.mlp.experts, "down_proj"),
            (layer.mlp.gate, "weight"),
        ):
            setattr(owner, key, torch.nn.Parameter(getattr(owner, key)[kept]))
            owner.num_experts = len(kept)
    return changed


def with_constants(model: Any, gone: list[list[int]], sums: list[Sums]) -> Any:
    changed = copy.deepcopy(model)
    for layer, numbers, own in zip(changed.model.layers, gone, sums, strict=True):
        constants = (own["outputs"] / own["squares"][:, None]).float()

        def forward(
            x: Tensor, index: Tensor, weights: Tensor, experts: Any = layer.mlp.experts, numbers: Any = numbers,
            constants: Tensor = constants,
        ) -> Tensor:  # fmt: skip
            out = torch.zeros_like(x)
            for number in index.unique().tolist():
                token, position = torch.where(index == number)
                y = constants[number].expand(len(token), -1) if number in numbers else output(experts, number, x[token])
                out.index_add_(0, token, y * weights[token, position, None])
            return out

        layer.mlp.experts.forward = forward
    return changed


def log_probabilities(model: Any, windows: Tensor) -> Iterator[Tensor]:
    for part in windows.split(4):
        yield model(input_ids=part).logits[:, :-1].float().log_softmax(-1)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--remove", type=int, nargs="+", default=[2, 4], help="experts of each layer")
    parser.add_argument("--seeds", type=int, default=4, help="draws of experts that go by chance")
    parser.add_argument("--windows", type=int, default=32, help="of the held-out text")
    args = parser.parse_args()
    model = load_model(args.model, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    text, held_out = (tokenized(path).unfold(0, SEQ_LEN, SEQ_LEN) for path in (TEXT, HELDOUT))
    windows, sums = held_out[: args.windows], measure(model, text[:CALIBRATION])
    expected = list(log_probabilities(model, windows))

    def report(name: str, changed: Any) -> None:
        parts = zip(log_probabilities(changed, windows), expected, strict=True)
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for q, p in parts])
        print(
            f"{name:40} KL {kl.mean():.4f} (s.e. {kl.std() / kl.numel() ** 0.5:.4f}, {kl.numel()} tokens)", flush=True
        )

    for count in args.remove:
        for by, score in SCORES.items():
            gone = [score(own).argsort()[:count].tolist() for own in sums]
            report(f"{count} removed by {by}", pruned(model, gone))
            report(f"{count} constant by {by}", with_constants(model, gone, sums))
        for seed in range(args.seeds):
            generator = torch.Generator().manual_seed(seed)
            experts = len(sums[0]["tokens"])
            gone = [torch.randperm(experts, generator=generator)[:count].tolist() for _ in sums]
            report(f"{count} removed by chance, seed {seed}", pruned(model, gone))


if __name__ == "__main__":
    main()
