"""QuaRot: put the residual stream and the values of attention in a random rotated basis (arXiv 2404.00456).

Where every norm's output depends on its input x only through x / rms(x), an orthogonal Q can be put between all that
writes to the residual stream and all that reads it: writers W become Q W, readers W Q^T, embeddings e Q e, and the
model computes the same in another basis, in which no channel stands out. So each norm's weight is first moved into its
readers. Heads of values are rotated likewise (v by R2, o by its transpose); a Hadamard transform in front of the
projections back into the stream is left to run time (compress/formats/transforms.py), which packed weights alone can
have.

Differences from the released code, and why:
- What reads a norm and what writes to the stream is traced (compress/model/graph.py), and every block is checked while
  it is rotated, in float32: on probe states its output must be the rotated output of before. No family is listed by
  name.
- For models with LayerNorm Q leaves the vector of ones in its place (a reflection after the transform): taking the mean
  away then commutes with it, the norm stays the module it is, and nothing has to be centred. The released code centres
  embeddings and swaps norms; on models with RMSNorm its centring changes the function.
- A norm's bias b goes into its readers' biases where all have one, else it stays, as Q (b / weight).
- Routers are readers like others. The head mixes with H_K (x) H of any size, in the order of its heads.
- Embeddings that are the output head, too, become two tables, E Q^T and E diag(g) Q^T with the final norm's weight g.
  Where the recipe packs them, E is stored once, as it was: its rows are turned when they are looked up, and what the
  head reads is turned back and multiplied by g at run time (`table_ops`). compress/run/outside_plan.py decides, and
  says why where two are stored. The released code unties always.
- Sizes that are no power of two have Hadamard matrices of their own (compress/numerics/hadamard.py), never padding.

Refused: norms with weights between a block's output and the stream (their weight cannot be moved past Q), and all else
that changes the stream channel by channel. With `residual: auto` such a model keeps its stream as it is, which is said,
and what lies inside its blocks is rotated. Not done: R3 in front of the key cache, which is that cache's own.

The transform `spin` (compress/papers/transform/spin.py) tries several random rotations, and learns one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compress.errors import UnsupportedModelError
from compress.model import blockwise, edits
from compress.model.blockwise import BlockArgs
from compress.model.graph import Attention, Block, Graph, norm_kind, trace
from compress.model.lm_head import edited_by
from compress.model.skeleton import Skeleton
from compress.quant.incoherence import derived_seed
from compress.storage.checkpoint import Readable
from compress.transform import widened
from compress.transform.bases import Basis, Orthogonal, value_rows
from compress.types import WeightTransforms

SCOPE = "model"
ROTATES_INPUTS = True  # what linears read is about normal: no activation sparsity behind it
C = TypeVar("C", bound="Config")
PROBE_TOKENS = 16
TOLERANCE = {
    torch.float32: 1e-3,
    torch.float16: 0.01,
    torch.bfloat16: 0.03,
}  # relative error of weights that are rounded to a type
MIN_CHANGE_SHARE = 1e-3  # a block's change is taken to be at least this share of its states
CHUNK = 1 << 20  # numbers of a matrix that are widened at a time


@dataclass(frozen=True)
class Config:
    residual: bool | Literal["auto"] = True  # R1: rotate the residual stream; merged into weights; auto:
    # where the model allows it. Embeddings that are the head, too, become two tables unless the recipe packs them
    values: bool = True  # R2: rotate the values of each head; merged into weights
    online: bool = True  # R4 and head mixing: Hadamard transforms at run time of the inputs of quantized down and
    # output projections

    REMOVED_KEYS: ClassVar[dict[str, Any]] = {"seeds": 1, "search_samples": 8, "learn": 0}  # other values: see spin


def apply(skeleton: Skeleton, config: Config, seed: int) -> Rotation:
    """Return the rotation of this model; no weight is read. Raises UnsupportedModelError where there is none."""
    return Rotation(skeleton, *settle(skeleton, config), seed)


def settle(skeleton: Skeleton, config: C) -> tuple[C, Graph, tuple[str, ...]]:
    """Return settings whose `residual` is what this model allows, its graph, and lines for the report.

    The embeddings of a model whose stream is rotated are untied. Raises UnsupportedModelError.
    """
    graph = trace(skeleton)
    obstacle = _obstacle(graph, skeleton) if config.residual else ""
    if obstacle and config.residual != "auto":
        raise UnsupportedModelError(
            f"{obstacle}, so that the stream cannot be rotated; set `residual: auto` for rotate, which then rotates "
            "what lies inside the blocks, or remove it"
        )
    config = replace(config, residual=bool(config.residual and not obstacle))
    if config.residual:
        skeleton.untie()
    return config, graph, (f"the residual stream is not rotated, because {obstacle}",) if obstacle else ()


class Rotation:
    """Edits the parameters of a model as they are loaded. `online`: linear -> the operations left to run time."""

    samples = 0  # of calibration that `choose` reads

    def __init__(self, skeleton: Skeleton, config: Config, graph: Graph, says: tuple[str, ...], seed: int) -> None:
        self.skeleton, self.config, self.graph, self.says, self.seed = skeleton, config, graph, says, seed
        self.width = skeleton.config.get_text_config().hidden_size
        self.offset = self.keep_mean = False
        if config.residual:
            (norm,) = graph.outside.norms
            self.offset, self.keep_mean = norm_kind(skeleton.model.get_submodule(norm), self.width)
        self.basis: Orthogonal | None = None  # of the residual stream
        self.values: Mapping[int, Orthogonal] = {}  # block -> of each head's values
        self.calls: blockwise.ModelArgs  # set by begin
        self.online = dict(self._online()) if config.online else {}
        self.draw(0)

    def draw(self, number: int) -> None:
        """Take the random rotation of this number."""
        seed = derived_seed(self.seed, "rotation", f"number {number}") if number else self.seed
        residual, values = None, {}
        if self.config.residual:
            residual = Basis(self.width, derived_seed(seed, "rotation", "residual"), self.keep_mean)
        for index, block in enumerate(self.graph.blocks if self.config.values else ()):
            if block.attention is not None:
                name = self.skeleton.block_prefix(index).rstrip(".")
                values[index] = Basis(block.attention.head_dim, derived_seed(seed, "rotation", f"{name} values"))
        self.use(residual, values)

    def use(self, residual: Orthogonal | None, values: Mapping[int, Orthogonal]) -> None:
        """Take these bases: of the residual stream, and of the values of each block."""
        self.basis, self.values = residual, values

    def choose(self, bench: edits.EditContext) -> list[str]:
        """Decide nothing, the first rotation is used; return lines for the report."""
        return list(self.says)

    def _online(self) -> Iterator[tuple[str, WeightTransforms]]:
        for index, block in enumerate(self.graph.blocks):
            prefix = self.skeleton.block_prefix(index)
            attention = block.attention
            for name in block.writers:
                if attention is not None and name == attention.output:
                    mix = (f"head_mix/{attention.head_dim}",) if attention.heads > 1 else ()
                    yield prefix + name, WeightTransforms(input=mix if self.config.values else ("hadamard",))
                else:
                    yield prefix + name, WeightTransforms(input=("hadamard",))

    @torch.no_grad()
    def begin(self, device: torch.device) -> None:
        """Record what the blocks are called with, and check that the embeddings reach them rotated."""
        config = self.skeleton.config.get_text_config()
        tokens = (torch.arange(PROBE_TOKENS) * 11 + 3)[None] % config.vocab_size
        before, after = blockwise.HiddenStates(1, None), blockwise.HiddenStates(1, None)
        with edited_by(self.skeleton, None):
            self.calls = blockwise.record_inputs(self.skeleton, tokens, 1, before, device)
        calls = blockwise.record_inputs(self.skeleton, tokens, 1, after, device)
        self._compare(before.read(0, 1), after.read(0, 1), self.skeleton.dtype, "what reaches the first block")
        for index, (one, other) in enumerate(zip(self.calls, calls, strict=True)):
            if not _are_close(one[1], other[1]):
                raise UnsupportedModelError(
                    f"{self.skeleton.block_prefix(index).rstrip('.')} is given more than hidden states that is made "
                    "from the embeddings: this model cannot be rotated; remove `rotate` from the recipe's transform"
                )

    @torch.no_grad()
    def rest(self, model: nn.Module) -> None:
        """Edit what lies outside the blocks, where it is loaded."""
        if self.basis is None:
            return
        for name in self.graph.outside.writers:
            self._write(model.get_submodule(name), self.basis)
        for name in self.graph.outside.norms:
            self._clear(name, model.get_submodule(name), moved=False)

    def table_ops(self) -> WeightTransforms | str:
        """Return the operations of a table E that serves as embeddings, Q e, and as output head, E diag(g) Q^T."""
        embeddings = self.skeleton.model.get_input_embeddings()
        if embeddings not in [self.skeleton.model.get_submodule(name) for name in self.graph.outside.writers]:
            return "the embeddings go through a linear on their way to the stream"
        assert isinstance(self.basis, Basis), "it is drawn, not learned"
        scale = ("channel_scale",) if self._last_norm() is not None else ()
        return WeightTransforms(input=(*self.basis.undoing(), *scale))

    def table_tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors of these operations, the final norm's weight g read from the checkpoint."""
        assert isinstance(self.basis, Basis), "it is drawn, not learned"
        scale = {"in_channel_scale": self._last_weight().float()} if self._last_norm() is not None else {}
        return {**{f"in_{name}": x for name, x in self.basis.undoing().items() if x is not None}, **scale}

    def _last_norm(self) -> Readable | None:
        """Return the stored weight of the final norm, None if it has none."""
        (name,) = self.graph.outside.norms
        stored = self.skeleton.sources.get(f"{name}.weight")
        return stored[0] if stored else None

    def _last_weight(self) -> Tensor:
        """Return the factors of the final norm, float64 [hidden], or [1] of a norm without weights."""
        stored = self._last_norm()
        return torch.ones(1).double() if stored is None else stored.read().double() + (1 if self.offset else 0)

    def head(self) -> Callable[[Tensor], Tensor]:
        """Return the change of the output head's rows [rows, hidden]: the final norm's weight, and the new basis."""
        if self.basis is None:
            return lambda rows: rows
        basis, weight = self.basis, self._last_weight()
        return lambda rows: basis.forward(_wide(rows) * weight.to(_wide(rows))).to(rows.dtype)

    @torch.no_grad()
    def block(self, index: int, block: nn.Module) -> None:
        """Rotate a loaded block in place, once that is seen to change nothing but the basis of what it gives."""
        graph, device = self.graph.blocks[index], next(block.parameters()).device
        generator = torch.Generator().manual_seed(derived_seed(self.seed, "rotation probe", str(index)))
        states = torch.randn(1, PROBE_TOKENS, self.width, generator=generator)
        name = self.skeleton.block_prefix(index).rstrip(".")
        wide = widened.copy_of(block)
        call = widened.arguments(self.calls[index][1])

        def change(x: Tensor) -> Tensor:
            return blockwise.run_block(wide, call, x.to(device), name).float().cpu() - x

        before = change(states)
        if self.basis is not None:
            self._residual(f"{name}.", wide, graph, self.basis)
        if index in self.values and graph.attention is not None:
            _values(wide, graph.attention, self.values[index])
        moved = self.basis.forward(states) if self.basis is not None else states
        rounded = min((p.dtype for p in wide.parameters() if p.dtype in TOLERANCE), key=lambda x: -TOLERANCE[x])
        self._compare(before, change(moved), rounded, name, MIN_CHANGE_SHARE * states.norm())
        widened.take(block, wide)

    def _compare(
        self, before: Tensor, after: Tensor, dtype: torch.dtype, what: str, least: Tensor | float = 1e-30
    ) -> None:
        """Raise UnsupportedModelError unless `after` is `before` in the new basis, up to the rounding to a type."""
        expected = self.basis.forward(before.float()) if self.basis is not None else before.float()
        error = ((after.float() - expected).norm() / expected.norm().clamp_min(least)).item()
        if not error <= TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]):
            raise UnsupportedModelError(
                f"rotating {what} changes its result by {error:.2g} of itself: this model cannot be rotated; remove "
                "`rotate` from the recipe's transform"
            )

    def _residual(self, prefix: str, block: nn.Module, graph: Block, basis: Orthogonal) -> None:
        for norm, readers in graph.norms.items():
            module = block.get_submodule(norm)
            reading = [block.get_submodule(name) for name in readers]
            shift = _bias(module)
            moved = shift is not None and all(_bias(reader) is not None for reader in reading)
            weight = self._scale(module)

            def edit(rows: Tensor, weight: Tensor = weight) -> Tensor:
                return basis.forward(rows * weight.to(rows))

            for reader in reading:
                matrix, bias = reader.get_parameter("weight"), _bias(reader)
                if moved and bias is not None and shift is not None:
                    bias.copy_(bias.double() + matrix.double() @ shift.double())
                _edit(matrix, edit)
            self._clear(prefix + norm, module, moved)
        for name in graph.writers:
            self._write(block.get_submodule(name), basis)

    def _write(self, module: nn.Module, basis: Orthogonal) -> None:
        """Rotate what a module writes: rows of an embedding, outputs of a linear."""
        weight = module.get_parameter("weight")
        if isinstance(module, nn.Embedding):
            _edit(weight, basis.forward)
            return
        _edit(weight.T, basis.forward)
        if (bias := _bias(module)) is not None:
            bias.copy_(basis.forward(bias.double()))

    def _scale(self, norm: nn.Module) -> Tensor:
        """Return the factors of a norm, float64 [hidden], or [1] of a norm without weights."""
        if next(norm.parameters(), None) is None:
            return torch.ones(1, dtype=torch.float64)
        return norm.get_parameter("weight").double() + (1 if self.offset else 0)

    def _clear(self, name: str, norm: nn.Module, moved: bool) -> None:
        """Take away a norm's weight; its bias has been `moved` to the readers, or stays in the new basis."""
        if next(norm.parameters(), None) is None:
            return
        if (bias := _bias(norm)) is not None:
            if moved:
                bias.zero_()
            else:
                assert self.basis is not None
                shift = torch.where(bias == 0, 0.0, bias.double() / self._scale(norm))
                lost = shift.square().mean().sqrt() * torch.finfo(bias.dtype).eps  # of outputs that are about 1
                if not lost <= TOLERANCE.get(bias.dtype, 0.1):
                    raise UnsupportedModelError(
                        f"{name} has weights of zero, or nearly, and a bias that its readers cannot take over: this "
                        "model cannot be rotated; remove `rotate` from the recipe's transform"
                    )
                bias.copy_(self.basis.forward(shift))
        norm.get_parameter("weight").fill_(0 if self.offset else 1)


def _obstacle(graph: Graph, skeleton: Skeleton) -> str:
    """Return what stands in the way of rotating the residual stream, "" for nothing."""
    if beside := [*skeleton.text_path.towers, *(f"block {number}" for number in skeleton.text_path.skipped)]:
        return f"a pass over text does not show what {beside[0]} writes into the residual stream"
    for index, block in [*enumerate(graph.blocks), (None, graph.outside)]:
        prefix = "" if index is None else skeleton.block_prefix(index)
        if block.post_norms:
            return f"{prefix}{block.post_norms[0]} normalizes what goes to the residual stream"
        if block.unknown:
            return f"the residual stream has a part that is not the plain result of a linear: {block.unknown}"
        if index is not None and not (block.norms and block.writers):
            return f"nothing in {prefix.rstrip('.')} is known to {'write to' if block.norms else 'read'} the stream"
    if not graph.outside.writers:
        return "no embeddings are known that go to the residual stream"
    last = [skeleton.model.get_submodule(name) for readers in graph.outside.norms.values() for name in readers]
    if len(graph.outside.norms) != 1 or last != [skeleton.model.get_output_embeddings()]:
        return "the output head does not read the residual stream through one norm"
    return ""


def _are_close(one: BlockArgs, other: BlockArgs) -> bool:
    """Return whether a block's arguments are the same up to rounding."""
    pairs = zip(tree_leaves((one.args, one.kwargs)), tree_leaves((other.args, other.kwargs)), strict=True)
    return all(
        (a.float() - b.float()).norm() <= 0.1 * a.float().norm()
        for a, b in pairs
        if isinstance(a, Tensor) and a.is_floating_point()
    )


def _values(block: nn.Module, attention: Attention, basis: Orthogonal) -> None:
    """Rotate every head's values alike, and undo it where they are read (R2)."""
    made, read = block.get_submodule(attention.values), block.get_submodule(attention.output)
    rows = value_rows(attention).flatten()
    for parameter in (made.get_parameter("weight"), _bias(made)):
        if parameter is None:
            continue
        part = parameter.data[rows]
        wide = _wide(part).view(attention.key_value_heads, attention.head_dim, -1).transpose(1, 2)
        parameter.data[rows] = basis.forward(wide).transpose(1, 2).reshape(part.shape).to(part.dtype)

    def edit(part: Tensor) -> Tensor:
        return basis.forward(part.unflatten(1, (-1, attention.head_dim))).flatten(1)

    _edit(read.get_parameter("weight"), edit)


def _bias(module: nn.Module) -> nn.Parameter | None:
    return dict(module.named_parameters(recurse=False)).get("bias")


def _edit(matrix: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Change matrix [rows, n] in place, some rows at a time, in float32 (float64 for float32); rounded once."""
    for part in matrix.data.split(max(1, CHUNK // matrix.shape[1])):
        part.copy_(change(_wide(part)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
