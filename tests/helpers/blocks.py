"""Decoder blocks of pico models with their calibration batches, the sites of their families by hand, and what the
rounding of a block costs, computed plainly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress import formats
from compress.model.blockwise import BlockArgs, BlockInputs
from compress.model.graph import Site
from compress.quant import rtn
from compress.runtime.experts import Experts, is_fused_experts
from compress.types import Activations, Scheme
from helpers.pico import VOCAB_SIZE, build

TOKENS = 24  # of a sequence
SAMPLES = 6

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _attention(norm: str, output: str, repeats: int, offset: bool = False) -> list[Site]:
    return [
        Site(norm, True, QKV, "self_attn", offset=offset),
        Site(QKV[2], False, (f"self_attn.{output}",), f"self_attn.{output}", repeats, 16),
    ]


def _llama(offset: bool = False) -> list[Site]:
    gated = ("mlp.gate_proj", "mlp.up_proj")
    return [
        *_attention("input_layernorm", "o_proj", 2, offset),
        Site("post_attention_layernorm", True, gated, "mlp", offset=offset),
        Site("mlp.up_proj", False, ("mlp.down_proj",), "mlp.down_proj"),
    ]


def _mixtral() -> list[Site]:
    experts = [f"mlp.experts.{i}" for i in range(4)]
    readers = ("mlp.gate", *(f"{e}.{p}" for e in experts for p in ("gate_proj", "up_proj")))
    return [
        *_attention("input_layernorm", "o_proj", 2),
        Site("post_attention_layernorm", True, readers, "mlp"),
        *(Site(f"{e}.up_proj", False, (f"{e}.down_proj",), f"{e}.down_proj") for e in experts),
    ]


SITES: dict[str, list[Site]] = {
    "llama": _llama(),
    "qwen2": _llama(),  # biases of q, k, v
    "gemma": _llama(offset=True),
    "mixtral": _mixtral(),
    "opt": [
        *_attention("self_attn_layer_norm", "out_proj", 1),
        Site("final_layer_norm", True, ("fc1",), "fc1"),
        Site("fc1", False, ("fc2",), "fc2"),  # a ReLU lets positive scales pass
    ],
}


class Case:
    """The first block of a pico model; `calls` are what it receives, one sample at a time."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = build(name).to(dtype)
        self.sites = SITES[name]
        layers = getattr(self.model.base_model, "layers", None)
        self.block: nn.Module = (self.model.base_model.decoder.layers if layers is None else layers)[0]
        for path, module in list(self.block.named_modules()):
            if is_fused_experts(module):
                self.block.set_submodule(path, Experts.from_fused(module))
        self.tokens = torch.randint(VOCAB_SIZE, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))

    def batches(self, size: int = 2) -> BlockInputs:
        """What the block receives, `size` samples at a time."""
        taken: list[tuple[Tensor, BlockArgs]] = []

        def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken.append((args[0].clone(), BlockArgs(args[1:], kwargs)))

        handle = self.block.register_forward_pre_hook(take, with_kwargs=True)
        with torch.no_grad():
            for part in self.tokens.split(size):
                self.model.base_model(input_ids=part, use_cache=False)
        handle.remove()
        return lambda: iter(taken)

    def linears(self) -> dict[str, nn.Linear]:
        return {name: module for name, module in self.block.named_modules() if isinstance(module, nn.Linear)}

    def schemes(
        self, bits: int, group_size: int = -1, activations: Activations | None = None, clip_search: bool = True
    ) -> dict[str, Scheme]:
        """Every linear rounded to nearest."""
        config = rtn.Config(bits, group_size, clip_search=clip_search)
        return dict.fromkeys(self.linears(), Scheme("rtn", config, activations=activations))

    def plant(self, site: Site, channels: Sequence[int], factor: float) -> None:
        """Outlier channels in what a norm makes, undone in its readers: the function stays."""
        with torch.no_grad():
            norm = self.block.get_submodule(site.producer)
            for name, parameter in norm.named_parameters():
                one = 1.0 if site.offset and name == "weight" else 0.0
                parameter[list(channels)] = (parameter[list(channels)] + one) * factor - one
            for reader in site.readers:
                self.block.get_submodule(reader).get_parameter("weight")[:, list(channels)] /= factor

    def copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.block.named_parameters()}


@torch.no_grad()
def outputs(block: nn.Module, batches: BlockInputs) -> Tensor:
    """What the block gives [samples, tokens, hidden]."""
    found = [block(hidden, *call.args, **call.kwargs) for hidden, call in batches()]
    return torch.cat([out[0] if isinstance(out, tuple) else out for out in found])


def difference(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted||^2 / ||wanted||^2."""
    found, wanted = found.double(), wanted.double()
    return ((found - wanted).square().sum() / wanted.square().sum()).item()


def per_token(x: Tensor, bits: int) -> Tensor:
    """Dynamic symmetric rounding of each token, in float64."""
    top = 2 ** (bits - 1) - 1
    step = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / top
    return ((x.double() / step).round() * step).to(x.dtype)


@torch.no_grad()
def rounded_outputs(block: nn.Module, batches: BlockInputs, schemes: Mapping[str, Scheme]) -> Tensor:
    """What the block gives with its linears rounded to nearest, their inputs too where a scheme says so."""
    linears = {path: block.get_submodule(path) for path in schemes}
    before = {path: linear.get_parameter("weight").detach().clone() for path, linear in linears.items()}
    handles = []
    for path, linear in linears.items():
        packed = rtn.quantize(before[path], None, schemes[path].config).weight
        linear.get_parameter("weight").copy_(formats.decode(packed, torch.float32))
        if (activations := schemes[path].activations) is not None:
            bits = activations.bits
            handles.append(linear.register_forward_pre_hook(lambda _, args, bits=bits: (per_token(args[0], bits),)))
    found = outputs(block, batches)
    for handle in handles:
        handle.remove()
    for path, linear in linears.items():
        linear.get_parameter("weight").copy_(before[path])
    return found


def vectors(case: Case, site: Site) -> Tensor:
    """The site's vector for every token [tokens, channels], float64."""
    seen: list[Tensor] = []
    batches = case.batches(1)
    if site.is_norm:
        handle = case.block.get_submodule(site.producer).register_forward_hook(lambda _, i, out: seen.append(out))
    else:
        handle = case.block.get_submodule(site.readers[0]).register_forward_pre_hook(lambda _, i: seen.append(i[0]))
    outputs(case.block, batches)
    handle.remove()
    return torch.cat([x.flatten(0, -2) for x in seen]).double()


def nearest(weight: Tensor, bits: int, group: int) -> Tensor:
    """weight [out, in] on the full-range symmetric grid of each group, float64 but for scales that are stored."""
    half = 2 ** (bits - 1)
    out = torch.empty_like(weight, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group):
            part = weight[row, start : start + group].double()
            largest = part[part.abs().argmax()]
            step = (largest.float() / -half).half().double()
            step = step if step != 0 else torch.tensor(1.0).double()
            out[row, start : start + group] = (part / step).round().clamp(-half, half - 1) * step
    return out
