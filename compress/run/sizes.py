"""Tell what linears need before they are quantized, and how many bytes each phase of a run takes, from shapes.

First come needs (statistics of inputs, gradients, scales, text, tiles), then the bytes of quantizing linears, of
activations and weights around the blocks, and of the chunks of rows in which a table is quantized.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from compress import formats, plugins, ranks
from compress.calib import stats
from compress.kernels.loops import columns as column_loops
from compress.lowrank import correct
from compress.model.skeleton import Skeleton
from compress.quant import feedback, incoherence, parts, target_correction, two_sided
from compress.recipe.schema import Recipe
from compress.storage.checkpoint import CHUNK, StoredTensor
from compress.types import NO_TRANSFORMS, LayerPlan, LinearSpec


def readers(layers: Sequence[LayerPlan], every: bool = False) -> dict[str, list[LayerPlan]]:
    """Return input key -> the layers whose method needs statistics of it, or all."""
    by_input: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        if every or needs_statistics(layer):
            by_input.setdefault(layer.spec.input_key, []).append(layer)
    return by_input


def needs_statistics(layer: LayerPlan) -> bool:
    """Return whether statistics of its input are part of how a linear is quantized."""
    if layer.scheme.config is None:
        return False
    method = plugins.load("quant", layer.scheme.method)
    return "hessian" in method.NEEDS or correct.needs_statistics(layer.scheme.lowrank)


def needs_largest_weight(layer: LayerPlan) -> bool:
    """Return whether a method is told the largest of all weights that read the same input: no text is needed."""
    return layer.scheme.config is not None and "largest_weight" in plugins.load("quant", layer.scheme.method).NEEDS


def needs_gradients(layer: LayerPlan) -> bool:
    """Return whether the errors of a linear are weighed by the gradients of the model's loss."""
    return layer.scheme.lowrank is not None and layer.scheme.lowrank.metric == "fisher"


def needs_output_gradients(layer: LayerPlan) -> bool:
    """Return whether the loss's gradients at the outputs of a linear are part of how it is quantized."""
    scheme = layer.scheme
    return scheme.config is not None and (scheme.two_sided or scheme.out_scales == "sensitivity")


def tuning_needs_gradients(recipe: Recipe) -> bool:
    """Return whether the tuning of blocks weighs all linears by the gradients of the model's loss."""
    tune = recipe.tuning("block")
    return tune is not None and getattr(tune.config, "needs_gradients", False)


def needs_in_scale(layer: LayerPlan) -> bool:
    """Return whether a layer's inputs are quantized with one calibrated scale."""
    return layer.stored.activations is not None and layer.stored.activations.scale == "tensor"


def needs_thresholds(layer: LayerPlan) -> bool:
    """Return whether a layer leaves inputs unread by calibrated thresholds."""
    return layer.stored.sparsity is not None


def needs_text(layer: LayerPlan) -> bool:
    """Return whether calibration text is needed to quantize a linear, or to train its low-rank part."""
    lowrank = layer.scheme.lowrank
    trains = lowrank is not None and bool(lowrank.train or lowrank.train_blocks)
    gradients = needs_gradients(layer) or needs_output_gradients(layer)
    of_inputs = needs_in_scale(layer) or needs_thresholds(layer)
    return needs_statistics(layer) or of_inputs or gradients or trains


def row_tiles(layer: LayerPlan) -> list[slice]:
    """Return the rows of each tile that a linear is quantized by, all in one if its method takes whole weights."""
    method, shape = plugins.load("quant", layer.scheme.method), layer.spec.shape
    if not hasattr(method, "quantize_rows"):
        return [slice(0, shape[0])]
    return feedback.row_tiles(shape, method.row_unit(layer.scheme.config, shape))


def spans(layer: LayerPlan) -> list[slice]:
    """Return the rows of each tile by which processes can share a linear, all in one if they cannot.

    Experts are many, a low-rank part is of the whole weight, and so are further parts of a nested one.
    """
    scheme = layer.scheme
    if scheme.config is None or scheme.lowrank is not None or scheme.levels or layer.spec.is_expert:
        return [slice(0, layer.spec.shape[0])]
    return row_tiles(layer)


TOWER_SHARD_NBYTES = 256 << 20  # packed weights of towers are written when they are so many
MEASURING_NBYTES_PER_WEIGHT = (
    14  # bytes a weight that the errors in the report take: what is decoded, and while it is; measured: 6 to 13
)


def split_passes(keys: dict[str, int], allowed: int) -> list[list[str]]:
    """Split input keys (with their statistics' bytes) into passes of at most `allowed` bytes, one key at least."""
    passes: list[list[str]] = []
    used = 0
    for key, nbytes in keys.items():
        if not passes or used + nbytes > allowed:
            passes.append([])
            used = 0
        passes[-1].append(key)
        used += nbytes
    return passes


def hessian_nbytes(layers: Sequence[LayerPlan], paired: bool = False, every: bool = False) -> dict[str, int]:
    """Return input key -> bytes of its Hessian, and of its drift if `paired`, where needed (or all: `every`).

    Processes share out those of experts.
    """
    inputs = {key: users[0].spec for key, users in readers(layers, every).items()}
    return {
        key: -(-stats.nbytes(spec.shape[1]) // ranks.current().size)
        if spec.is_expert
        else stats.nbytes(spec.shape[1], paired)
        for key, spec in inputs.items()
    }


def lowrank_parameters(layers: Sequence[LayerPlan], steps: str) -> int:
    """Return the parameters of low-rank parts for which the recipe asks for such steps of training."""
    parts = [layer for layer in layers if layer.scheme.lowrank is not None and getattr(layer.scheme.lowrank, steps)]
    return sum(layer.stored.lowrank.rank * sum(layer.spec.shape) for layer in parts if layer.stored.lowrank is not None)


def gradient_nbytes(layers: Sequence[LayerPlan], item: int, every: bool) -> int:
    """Return the bytes of the gradients of a block's linears, their sums and squares; 0 if none needs them.

    every: of a recipe whose tuning needs them for all linears.
    """
    is_needed = every or any(map(needs_gradients, layers))
    return sum((8 + item) * layer.spec.numel for layer in layers) if is_needed else 0


class GradientSizes(NamedTuple):
    """Bytes of a pass that takes the gradients at the outputs of all linears, and of using them."""

    tokens: int  # that the pass takes: not bytes
    logits: int  # float32 logits of a sample
    states: int  # hidden states in front of all blocks, in memory or in a file
    work: int  # memory that the pass takes beside them
    stored: int  # files in the folder of the gradients
    reading: int  # those of a linear while it is quantized, changed to the basis that it is stored in

    @property
    def sentence(self) -> str:
        """What is to be known of the pass before anything is done."""
        return (
            f"output gradients are taken on {self.tokens} tokens first, unless an earlier run has kept them: "
            f"{-(-self.stored // (1 << 20))} MiB beside the output, or in the folder of --work or --measurements"
        )


def output_gradient_sizes(skeleton: Skeleton, samples: int, seq_len: int, item: int) -> GradientSizes:
    """Return the bytes for so many samples, computed in a type of `item` bytes; none for 0 samples.

    Every token is taken to reach each linear, but those of experts: they get as many rows as there are tokens for all
    experts that a token goes to, the widest ones.
    """
    config, tokens, specs = skeleton.config.get_text_config(), samples * seq_len, skeleton.linears(is_needed=False)[0]
    if not tokens:
        return GradientSizes(0, 0, 0, 0, 0, 0)
    work = stored = reading = 0
    for index, block in enumerate(skeleton.blocks):
        own = [spec for spec in specs if spec.block == index]
        experts = {spec.name.rpartition(".")[2]: spec.shape[0] for spec in own if spec.is_expert}
        rows = {spec.name: (tokens, spec.shape[0]) for spec in own if not spec.is_expert}
        routed = tokens * getattr(config, "num_experts_per_tok", DEFAULT_EXPERTS_PER_TOKEN)
        rows |= {name: (routed, width) for name, width in experts.items()}
        kept = sum((2 * width + 4) * count for count, width in rows.values())
        file = sum(min((2 * width + 4) * count, 4 * width**2) for count, width in rows.values())
        largest = max(((2 * width + 4) * count + 8 * width**2 for count, width in rows.values()), default=0)
        states = BACKWARD_STATES * seq_len * token_nbytes(own, item)
        weights = sum(p.numel() for p in block.parameters()) * item
        work = max(work, weights + kept + max(states, file + largest))
        stored += file
        changed = [BASIS_CHANGE_COPIES * 4 * width * min(count, width) for count, width in rows.values()]
        reading = max(reading, *changed, 0)
    states = tokens * config.hidden_size * (len(skeleton.blocks) + 1) * item
    logits = 4 * seq_len * skeleton.vocab_size
    return GradientSizes(tokens, logits, states, work, stored + tokens * config.hidden_size * item, reading)


def paired_columns(layers: Sequence[LayerPlan]) -> int:
    """Return the columns of all shared inputs of a block whose drift is summed."""
    return sum(users[0].spec.shape[1] for users in readers(layers).values() if not users[0].spec.is_expert)


def linears_workspace(layers: Sequence[LayerPlan], paired: bool) -> int:
    """Return the bytes that the most demanding linear needs beside its weight and statistics."""
    distinct = {(x.scheme, x.spec.shape, x.spec.is_expert): x for x in layers}
    needs = []
    for layer in distinct.values():
        needs.append(layer_workspace(layer))
        if paired and not layer.spec.is_expert:
            needs[-1] += target_correction.target_workspace(layer.spec)
            needs.append(target_correction.solve_workspace(layer.spec.shape[1]))
    return max(needs, default=0)


def sharing_nbytes(layers: Sequence[LayerPlan]) -> int:
    """Return the bytes of sharing: a linear that waits until others have made the rest, one expert more than others.

    Of the linear that is a Hessian, and tiles.
    """
    large = [layer.spec for layer in layers if len(spans(layer)) > 1]
    waiting = max((4 * spec.shape[1] ** 2 + 5 * spec.numel for spec in large), default=0)
    return waiting + max((stats.nbytes(x.spec.shape[1]) for x in layers if x.spec.is_expert), default=0)


def layer_workspace(layer: LayerPlan) -> int:
    """Return the bytes that quantizing or measuring one linear needs."""
    if (need := MEASURING_NBYTES_PER_WEIGHT * layer.spec.numel) and layer.scheme.config is None:
        return need
    taken = parts.workspace(layer.scheme, layer.spec.shape)
    need = max(need, taken + (two_sided.workspace(layer.spec.shape) if layer.scheme.two_sided else 0))
    if layer.scheme.lowrank is not None:
        need = correct.workspace(layer.spec.shape, need)
    rotated = layer, needs_statistics(layer)
    return max(need, incoherence.turning(*rotated)) + incoherence.workspace(*rotated)


def stored_floats(layer: LayerPlan) -> int:
    """Return the floating-point numbers that a packed linear stores."""
    specs = formats.specs(layer.stored, layer.spec.shape).values()
    return sum(math.prod(size) for size, dtype in specs if dtype.is_floating_point)


BACKWARD_STATES = 4  # times what linears read and write of a token that a block takes on its way back
BASIS_CHANGE_COPIES = 3  # float32 arrays of a linear's gradients that are there while their basis is changed
DECODING_COPIES = 5  # float32 copies of a piece of a weight while it is decoded: codes, scales, both
ROUTED_COPIES = 3  # copies of the inputs of experts: as kept, as sent, as received
DEFAULT_EXPERTS_PER_TOKEN = 8  # the configuration may name no number


def token_nbytes(specs: list[LinearSpec], item: int) -> int:
    """Return the most bytes of activations that one token keeps alive in a block: inputs and outputs of linears."""
    dense = sum(sum(spec.shape) for spec in specs if not spec.is_expert)
    expert = max((sum(spec.shape) for spec in specs if spec.is_expert), default=0)
    return (dense + 3 * expert) * item


def alive_nbytes(specs: list[LinearSpec], item: int) -> int:
    """Return the most bytes of activations that one token takes at a time: what linears of one module read and write.

    What a module's linears share is there once, and nothing is left of one module when the next one runs.
    """
    modules: dict[str, dict[str, int]] = {}
    for spec in specs:
        if not spec.is_expert:
            numbers = modules.setdefault(spec.name.rpartition(".")[0], {})
            numbers[spec.input_key] = spec.shape[1]
            numbers[f"{spec.name} out"] = spec.shape[0]
    expert = max((sum(spec.shape) for spec in specs if spec.is_expert), default=0)
    return (max((sum(numbers.values()) for numbers in modules.values()), default=0) + 3 * expert) * item


def routed_nbytes(specs: list[LinearSpec], config: Any, item: int) -> int:
    """Return the bytes of what a token's experts read, while it goes to the processes that sum it up."""
    columns = {spec.shape[1] for spec in specs if spec.is_expert}
    return ROUTED_COPIES * getattr(config, "num_experts_per_tok", DEFAULT_EXPERTS_PER_TOKEN) * sum(columns) * item


def compiler_nbytes(layers: Iterable[LayerPlan]) -> int:
    """Return the bytes that come to stay when a weight is large enough to compile functions; loads what does that."""
    largest = max((layer.spec.numel for layer in layers), default=0)
    return column_loops.compiler_nbytes() if column_loops.is_worthwhile(largest) else 0


def head_nbytes(model: PreTrainedModel) -> int:
    """Return the bytes of an output head that is not the embeddings too."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    shared = {id(p) for p in embeddings.parameters()}
    return sum(p.numel() * p.itemsize for p in head.parameters() if id(p) not in shared) if head is not None else 0


def converted_nbytes(skeleton: Skeleton) -> int:
    """Return the bytes of the largest group of weights that is loaded in another type than it is stored in."""
    groups: dict[str, int] = {}
    for name, sources in skeleton.sources.items():
        prefix = next((each for each in skeleton.in_blocks if name.startswith(each)), "")
        group = prefix + name.removeprefix(prefix).partition(".")[0] if prefix else ""
        groups[group] = groups.get(group, 0) + sum(x.nbytes for x in sources if x.dtype != skeleton.dtype)
    return max(groups.values(), default=0)


def decoding_nbytes(skeleton: Skeleton) -> int:
    """Return the bytes that decoding one weight of another tool takes beside the weight: what is stored, and pieces."""
    decoded = [tensor for tensor in skeleton.checkpoint.tensors.values() if not isinstance(tensor, StoredTensor)]
    if not decoded:
        return 0
    stored = max(sum(source.nbytes for source in tensor.sources) for tensor in decoded)
    piece = max(CHUNK, *(4 * math.prod(tensor.shape[1:]) for tensor in decoded))
    return stored + DECODING_COPIES * piece


CHUNK_WEIGHTS = 1 << 24  # weights of a table that are quantized at a time, at least
CHUNK_ROW_MULTIPLE = 16  # every chunk but the last has a multiple of so many rows


def chunk_rows(layer: LayerPlan) -> int:
    """Return the rows of a table that are quantized at a time: all of them where its format cannot join such rows.

    A chunk has at least twice as many rows as columns, so that factoring the Hessian anew costs little beside it.
    """
    rows, columns = layer.spec.shape
    if not formats.has_rows(layer.stored) or formats.is_estimated(layer.stored):
        return rows
    return min(rows, max(CHUNK_WEIGHTS // columns, 2 * columns) // CHUNK_ROW_MULTIPLE * CHUNK_ROW_MULTIPLE)


def is_turned(layer: LayerPlan) -> bool:
    """Return whether a table is stored in another basis than the rest of the model, which a transform has turned.

    The operations around it are then the transform's; others are part of how it is quantized.
    """
    return bool(layer.stored.ops) and not layer.scheme.incoherence


def plan_rows(layer: LayerPlan, rows: int) -> LayerPlan:
    """Return the plan of so many rows of a table.

    It is that of the matrix alone: what a transform leaves to run time lies around all rows.
    """
    shape = (rows, layer.spec.shape[1])
    spec = dataclasses.replace(layer.spec, shape=shape)
    stored = dataclasses.replace(layer.stored, ops=NO_TRANSFORMS) if is_turned(layer) else layer.stored
    return dataclasses.replace(layer, spec=spec, stored=stored, nbytes=formats.nbytes(stored, shape))
