"""Take the packed weights of a model for nodes of ONNX Runtime, and every tensor for one zero, so that it is traced.

    model, makers = stand_ins(export)     # makers: name of a parameter -> how its tensor is made, when it is written

A packed linear is a MatMulNBits node, packed embeddings are a GatherBlockQuantized node. Both read the same codes where
the table is tied to the output head. Experts are computed one after the other, each for the tokens that are routed to
it.

Plain integers are laid out as ONNX Runtime multiplies with them (MatMulNBits) and looks them up (GatherBlockQuantized):

    codes       uint8 [rows, blocks, block * bits / 8]   2, 4 or 8 bits each, one after the other, the lowest bits first
    scales      float32 or float16 [rows, blocks]        w = scale * (code - zero)
    zeros       uint8 [rows, ceil(blocks * bits / 8)]    packed like codes; left out where all are 2 ** (bits - 1)
    row_zeros   uint8 [rows, blocks, 1]                  the same, one a byte, as lookups read them

Codes of 3, 5, 6 and 7 bits take the next wider form. Scales of groups that are larger than a block are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.errors import ExportError
from compress.export.convert import Export, dense_tensor
from compress.export.convert import cast as checked
from compress.export.weights import EMBEDDINGS, HEAD, ExportWeight, IntWeight, StoredWeight
from compress.model import stored_weights
from compress.model.skeleton import Skeleton
from compress.runtime.embedding import PackedEmbedding
from compress.runtime.experts import Experts
from compress.runtime.linear import PackedLinear

WIDTHS = (2, 4, 8)  # bits of a stored code
BLOCKS = (256, 128, 64, 32, 16)  # columns that share a scale
SCALE = 4  # bytes that a scale is taken to cost, whatever its type: blocks do not depend on it
INT8_INPUTS = 4  # accuracy_level of a product whose inputs ONNX Runtime rounds to 8 bits, in blocks, on a CPU
Maker = Callable[[], Tensor]
Makers = dict[str, Maker]
Tensors = Mapping[str, nn.Parameter]  # by the names that this file's docstring lists


class Form(NamedTuple):
    """How the integers of a weight are stored."""

    bits: int  # of a code: one of WIDTHS
    block: int  # columns that share a scale: one of BLOCKS
    blocks: int  # of a row; the last one may be padded
    has_zeros: bool

    @property
    def row(self) -> int:
        """Bytes of the codes and scales of a row."""
        return self.blocks * (self.block * self.bits // 8 + SCALE)


def form_of(weight: ExportWeight) -> Form | None:
    """Return the form of the fewest bytes that holds a weight of plain integers; None if its groups fit no block."""
    params, columns = weight.stored.params, weight.shape[1]
    group = params.group(columns)
    bits = next(width for width in WIDTHS if width >= params.bits)
    blocks = [block for block in BLOCKS if group % block == 0 or group >= columns]
    forms = [Form(bits, block, -(-columns // block), not params.symmetric) for block in blocks]
    return min(forms, key=lambda form: form.row, default=None)


def specs(form: Form, weight: ExportWeight, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> shape and type of what is stored for a weight: zero points as its products and lookups read them.

    dtype: of the scales.
    """
    rows = weight.shape[0]
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((rows, form.blocks, form.block * form.bits // 8), torch.uint8),
        "scales": ((rows, form.blocks), dtype),
    }
    if form.has_zeros and weight.roles != (EMBEDDINGS,):
        stored["zeros"] = (rows, -(-form.blocks * form.bits // 8)), torch.uint8
    if form.has_zeros and EMBEDDINGS in weight.roles:
        stored["row_zeros"] = (rows, form.blocks, 1), torch.uint8
    return stored


def tensor(weight: IntWeight, form: Form, name: str, dtype: torch.dtype) -> Tensor:
    """Return one of the tensors of `specs`; ExportError for scales that `dtype` does not hold."""
    group = torch.arange(form.blocks) * form.block // weight.group_size  # of each block
    if name == "codes":
        middle = 0 if form.has_zeros else (1 << (form.bits - 1)) - (1 << (weight.bits - 1))
        padding = form.blocks * form.block - weight.shape[1]
        codes = torch.nn.functional.pad(weight.codes + middle, (0, padding))
        return _pack_blocks(codes, form.bits).view(weight.shape[0], form.blocks, -1)
    if name == "scales":
        return weight.scales_in(dtype)[:, group]
    zeros = weight.full_zeros()[:, group]
    return _pack_blocks(zeros, form.bits) if name == "zeros" else zeros[:, :, None]


def _pack_blocks(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [rows, n] as bytes [rows, ceil(n * bits / 8)], the lowest bits first."""
    each = 8 // bits
    split = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    packed = split[:, :, 0].clone()
    for index in range(1, each):
        packed |= split[:, :, index] << (bits * index)
    return packed


class MatMulNBits(nn.Module):
    """Multiply x [..., in] with a packed weight [out, in]; int8: with x rounded to 8 bits, in any case."""

    zeros: nn.Parameter | None

    def __init__(
        self, form: Form, weight: StoredWeight, tensors: Tensors, bias: nn.Parameter | None, int8: bool
    ) -> None:
        super().__init__()
        self.codes, self.scales, self.zeros = tensors["codes"], tensors["scales"], tensors.get("zeros")
        self.bias = bias
        rows, columns = weight.shape
        self.attributes: Any = {"K": columns, "N": rows, "bits": form.bits, "block_size": form.block}
        if int8 or weight.stored.activations is not None:
            self.attributes["accuracy_level"] = INT8_INPUTS

    def forward(self, x: Tensor) -> Tensor:
        """Return the products [..., out], in the type of x."""
        return torch.onnx.ops.symbolic(
            "com.microsoft::MatMulNBits",
            [x, self.codes, self.scales, self.zeros, None, self.bias],
            self.attributes,
            dtype=x.dtype,
            shape=(*x.shape[:-1], len(self.codes)),
            version=1,
        )


class GatherBlockQuantized(nn.Module):
    """Look rows up in a packed table [tokens, columns]."""

    zeros: nn.Parameter | None

    def __init__(self, form: Form, weight: StoredWeight, tensors: Tensors) -> None:
        super().__init__()
        self.codes, self.scales, self.zeros = tensors["codes"], tensors["scales"], tensors.get("row_zeros")
        self.form, self.columns = form, weight.shape[1]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the rows [..., columns], in the type of the scales."""
        inputs = [self.codes, input_ids, self.scales[:, :, None], self.zeros]
        rows = torch.onnx.ops.symbolic(
            "com.microsoft::GatherBlockQuantized",
            inputs,
            {"bits": self.form.bits, "block_size": self.form.block, "gather_axis": 0, "quantize_axis": 2},
            dtype=self.scales.dtype,
            shape=(*input_ids.shape, self.form.blocks, self.form.block),
            version=1,
        )
        return rows.flatten(-2)[..., : self.columns]


class Scaled(nn.Module):
    """Multiply the rows of an embedding by a number and add another one, as the model's own class does."""

    def __init__(self, rows: nn.Module, factor: float, offset: float) -> None:
        super().__init__()
        self.rows, self.factor, self.offset = rows, factor, offset

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = cast(Tensor, self.rows(input_ids)) * self.factor
        return rows if self.offset == 0 else rows + self.offset


class Routed(nn.Module):
    """Compute all experts of a block, in the place of `Experts`, which looks at the data to leave some out."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums over the experts, in the shape of hidden_states."""
        shape, hidden_states = hidden_states.shape, hidden_states.flatten(0, -2)
        out = torch.zeros_like(hidden_states)
        for index in range(len(self.experts) + self.experts.layout.identities):
            token, position = torch.where(top_k_index == index)
            x = hidden_states[token]
            x = self.experts.compute(index, x) if index < len(self.experts) else x
            out = out.index_add(0, token, (x * top_k_weights[token, position, None]).to(out.dtype))
        return out.view(shape)


def stand_ins(export: Export) -> tuple[PreTrainedModel, Makers]:
    """Return the model in the type of the export, without data, and how its tensors are made.

    Raises ExportError for tensors that the checkpoint holds in other shapes than the model.
    """
    skeleton = Skeleton(export.source.skeleton.checkpoint)
    model = skeleton.model
    replaced = _Replaced(export)
    for path, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(path, replaced.linear(path, module))
        elif isinstance(module, PackedEmbedding):
            model.set_submodule(path, replaced.embedding(path, module))
    for path, module in list(model.named_modules()):
        if type(module) is Experts:
            model.set_submodule(path, Routed(module))
    _fill_buffers(skeleton, model)
    return model, replaced.makers(skeleton, model)


class _Replaced:
    """What takes the place of packed modules, and the parameters in them."""

    def __init__(self, export: Export) -> None:
        self.dtype, self.int8_inputs = export.dtype, export.wishes.int8_inputs
        self.held = {path: weight for weight in export.held for path in (weight.module, weight.tied) if path}
        self.tables = {path: table for table in export.tables for path in (table.module, table.tied) if path}
        self._shared: dict[tuple[str, str], nn.Parameter] = {}  # (module of a weight, tensor) -> stand-in
        self._makers: dict[int, Maker] = {}

    def linear(self, path: str, module: PackedLinear) -> nn.Module:
        if path in self.held:
            return MatMulNBits(*self._codes(path), module.bias, self.int8_inputs)
        linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        linear.weight = self._dense(path, HEAD)
        linear.register_parameter("bias", module.bias)
        return linear

    def embedding(self, path: str, module: PackedEmbedding) -> nn.Module:
        if path in self.held:
            rows: nn.Module = GatherBlockQuantized(*self._codes(path))
        else:
            rows = nn.Embedding(*module.shape, device="meta")
            rows.weight = self._dense(path, EMBEDDINGS)
        factor, offset = module.constants.by_type[self.dtype]
        return rows if (factor, offset) == (1, 0) else Scaled(rows, factor, offset)

    def makers(self, skeleton: Skeleton, model: PreTrainedModel) -> Makers:
        """Return name of a parameter -> how it is made, after a zero has been put in the place of all that are left."""
        names: dict[int, list[str]] = {}
        converted = stored_weights.names_of_converted(skeleton.model, skeleton.checkpoint)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for same in list(names.values()):
            parameter = model.get_parameter(same[0])
            if id(parameter) not in self._makers:
                maker = _plain(skeleton, converted, same, parameter.shape, self.dtype)
                stood_in = self._stand_in(parameter.shape, self.dtype, maker)
                for name in same:
                    owner, _, key = name.rpartition(".")
                    model.get_submodule(owner).register_parameter(key, stood_in)
        every = model.named_parameters(remove_duplicate=False)
        return {name: self._makers[id(parameter)] for name, parameter in every}

    def _codes(self, path: str) -> tuple[Form, StoredWeight, Tensors]:
        weight = self.held[path]
        form = form_of(weight)
        assert form is not None, "the target has refused it"
        tensors: dict[str, nn.Parameter] = {}
        for name, (shape, dtype) in specs(form, weight, self.dtype).items():
            make = partial(_part, weight, form, name, self.dtype)
            key = weight.module, name
            if key not in self._shared:
                self._shared[key] = self._stand_in(shape, dtype, make)
            tensors[name] = self._shared[key]
        return form, weight, tensors

    def _dense(self, path: str, role: str) -> nn.Parameter:
        """Return the stand-in of a packed table that becomes plain."""
        table = self.tables[path]
        key = table.module, "" if table.is_one_table else role
        if key not in self._shared:
            stored = dense_tensor(table, f"{table.name}.weight", self.dtype, role)
            self._shared[key] = self._stand_in(table.shape, self.dtype, stored.read)
        return self._shared[key]

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype, make: Maker) -> nn.Parameter:
        """Return a parameter of this shape and type that takes no memory."""
        parameter = nn.Parameter(torch.zeros((), dtype=dtype).expand(shape), requires_grad=False)
        self._makers[id(parameter)] = make
        return parameter


def _part(weight: StoredWeight, form: Form, name: str, dtype: torch.dtype) -> Tensor:
    return tensor(weight.integers(), form, name, dtype)


def _plain(skeleton: Skeleton, converted: set[str], names: list[str], shape: torch.Size, dtype: torch.dtype) -> Maker:
    """Return how a parameter with these names is made from the one stored tensor that it is.

    converted: the stored tensors that are no parameters as they are. ExportError for a parameter made of these.
    """
    stored = next((skeleton.sources[name] for name in names if name in skeleton.sources), [])
    if len(stored) != 1 or stored[0].shape != shape or stored[0].name in converted:
        raise ExportError(
            f"{names[0]} is made of other tensors when the model is loaded, which the ONNX target does not do; export "
            "to dense"
        )
    return lambda: checked(names[0], stored[0].read(), dtype)


def _fill_buffers(skeleton: Skeleton, model: PreTrainedModel) -> None:
    """Read the buffers that are stored; the others have been made with the model."""
    for name, buffer in list(model.named_buffers()):
        for stored in skeleton.sources.get(name, []):
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, stored.read().to(buffer.dtype))
