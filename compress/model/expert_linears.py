"""Cut the fused experts of a block into linears: their specifications, and the modules, once their layout is checked.

What a layout says of a module (compress/runtime/expert_layouts.py) is read from names, shapes and attributes. It is
checked against what the module computes before the first module of a class is taken apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from compress.errors import UnsupportedModelError
from compress.runtime import expert_layouts
from compress.runtime.expert_layouts import SHARED, SORTED, ExpertLayout
from compress.runtime.experts import Experts
from compress.types import LinearSpec

CHECKED_TOKENS = 3
MAX_RELATIVE_DIFFERENCE = 0.05  # a ratio of norms; a wrong layout is off by about 1, bfloat16 by 0.01


def specs(name: str, module: nn.Module, dtype: torch.dtype, block: int) -> Iterable[LinearSpec] | str:
    """Return the linears of all experts of the module of this full name, none for another module; a reason if refused.

    All linears but the last of an expert share an input. dtype: of the weights.
    """
    layout = expert_layouts.describe(module)
    if isinstance(layout, ExpertLayout):
        return _specs(name, module, layout, dtype, block)
    has_stack = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return layout or ("a parameter of three dimensions that is no experts'" if has_stack else ())


def _specs(name: str, module: nn.Module, layout: ExpertLayout, dtype: torch.dtype, block: int) -> Iterator[LinearSpec]:
    shapes = [layout.shape(module, part) for part in layout.parts]
    for number in range(layout.experts):
        names = [f"{name}.{number}.{projection}" for projection in layout.projections]
        for linear, part, shape in zip(names, layout.parts, shapes, strict=True):
            fused = tuple(f"{name}.{parameter}" for parameter in (part.parameter, part.bias) if parameter)
            key = linear if linear == names[-1] else names[0]
            yield LinearSpec(linear, shape, dtype, block, key, is_expert=True, parameters=fused)


class Unfusing:
    """Take loaded modules of fused experts apart, the first of each class after a check."""

    def __init__(self) -> None:
        self._checked: set[type[nn.Module]] = set()

    def experts(self, fused: nn.Module, where: str) -> Experts:
        """Return the experts of a loaded module; where: its full name.

        Raises UnsupportedModelError if they compute something else than the module.
        """
        experts = Experts.from_fused(fused)
        if type(fused) not in self._checked:
            if not _agree(fused, experts):
                raise UnsupportedModelError(
                    f"{where}: {type(fused).__name__} computes something else than its parameters' names and shapes "
                    f'say; add "{where}.*" to ignore in the recipe'
                )
            self._checked.add(type(fused))
        _own_rows(fused, experts)
        return experts


def _own_rows(fused: nn.Module, experts: Experts) -> None:
    """Give linears that are no rows of a fused parameter, but turned or every other row of it, weights of their own.

    A matrix product depends to the last bit on how the weight lies in memory, and packed weights have rows. What is
    not needed any more of the fused module is freed.
    """
    if all(parameter.is_contiguous() for parameter in experts.parameters()):
        return
    for part in {part.parameter for part in experts.layout.parts}:
        owner, _, key = part.rpartition(".")
        empty = torch.empty_like(fused.get_parameter(part), device="meta")
        fused.get_submodule(owner).register_parameter(key, nn.Parameter(empty, requires_grad=False))
    for linear in experts.modules():
        for key, parameter in list(linear.named_parameters(recurse=False)):
            linear.register_parameter(key, nn.Parameter(parameter.detach().contiguous(), requires_grad=False))


@torch.no_grad()
def _agree(fused: nn.Module, experts: Experts) -> bool:
    """Return whether both modules give the same for a few random tokens."""
    inputs = _inputs(fused, experts)
    expected = inspect.unwrap(type(fused).forward)(fused, *inputs)  # without the kernels that transformers chooses
    outputs = experts(*inputs)
    if not torch.isfinite(expected).all():  # named elsewhere
        return True
    difference = outputs.reshape(expected.shape).float() - expected.float()
    return bool(difference.norm() <= MAX_RELATIVE_DIFFERENCE * expected.float().norm())


def _inputs(fused: nn.Module, experts: Experts) -> tuple[object, ...]:
    """Return what the forward pass of a module of experts takes, for a few random tokens."""
    layout, count = experts.layout, len(experts)
    weight = fused.get_parameter(layout.parts[0].parameter)
    columns = layout.shape(fused, layout.parts[0])[1]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(weight.device, weight.dtype)

    if layout.call == SORTED:
        sizes = inspect.signature(type(fused).forward).parameters
        rows = random(count * CHECKED_TOKENS, columns) - 0.5
        return (rows, [CHECKED_TOKENS] * count) if len(sizes) > 2 else (rows,)
    x = random(CHECKED_TOKENS, columns) - 0.5
    if layout.call == SHARED:
        return x, random(CHECKED_TOKENS, count)
    first = torch.arange(CHECKED_TOKENS) % count
    index = torch.stack([first, count + layout.identities - 1 - first], 1)
    return x, index.to(weight.device), random(CHECKED_TOKENS, 2)
