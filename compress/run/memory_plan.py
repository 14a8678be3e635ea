"""Plan the memory of a run: predict its peak and arrange it to stay within a limit.

A run's peak is predicted from shapes before it starts, as the process's memory at that point plus the largest of its
phases. If the prediction passes the limit the run is rearranged: the stream of hidden states goes to disk, batches
shrink, the statistics of a block are collected in several passes. If no arrangement fits, the run is refused with
what it would need. While it runs, the peak that the operating system recorded is checked against the limit, and before
each block whether what is held leaves room for it: else the run stops, resumable. The arrangement changes no result
beyond the order of floating-point sums: in the model's own batched products, and in the statistics of experts. Where
blocks are tuned it does: steps and what is held out are counted in batches, so that other batches are other steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from compress import process_memory, ranks
from compress.calib import stats
from compress.errors import BudgetError
from compress.model.skeleton import Skeleton
from compress.numerics import kl, products
from compress.run import sizes
from compress.tune import held_block, low_rank
from compress.tune.trained import WholeModelSizes
from compress.types import LayerPlan, LinearSpec, Plan

BATCH_TOKENS = 2048  # tokens of a batch when memory allows: products are efficient, activations small
SLACK_NBYTES = 32 << 20  # bytes of the program's own objects and buffers that grow during a run
TOKENIZING_NBYTES = (
    208 << 20
)  # bytes that tokenizing one piece of the calibration text takes, before any weight is loaded
TOKENIZER_LOADING_FACTOR = 18  # times its file that a tokenizer takes while it is loaded
TOKENIZER_KEPT_FACTOR = 6  # times its file that stay
READ_TOKEN_NBYTES = 12  # bytes of each token that is read while it is cut into samples
SEARCHED_TOKENS = 4096  # tokens whose inputs a transform of blocks keeps, an upper bound of its defaults
EDITING_NBYTES = 64 << 20  # bytes that a transform of the whole model takes for some rows of a weight, widened
SCORING_NBYTES = 8 << 20  # bytes that a chunk of attention scores takes, with the mask of those that are not seen
KEPT_NBYTES = 16 << 20  # bytes that come to stay in a run with a text: pages of libraries, gaps between small objects
TRAINING_NBYTES = 64 << 20  # bytes that come to stay when gradients are first taken: pages and buffers of libraries
COMPILING_NBYTES = 64 << 20  # bytes that come to stay when kernels for packed weights are compiled
BACKWARD_FACTOR = 2  # times what linears read and write that a block takes with its gradients, where no weight has any
LOGITS_FACTOR = 6  # times the float32 logits that are made at a time: themselves, as stored, logarithms, gradients
DRAWING_FACTOR = 10  # the same where labels are drawn of them: also their softmax, and its sums in float64
MARGIN_FACTOR = 1.05  # all but the stream of hidden states is multiplied by this: allocator slack, library buffers


@dataclass(frozen=True)
class Arrangement:
    """A way to fit a run into memory."""

    batch: int  # samples in a forward pass
    spill: bool  # hidden states in a file instead of in memory
    passes: int  # most calibration passes over one block
    statistics_nbytes: int  # what the statistics of one pass may take
    peak_nbytes: int  # predicted peak of the process
    block_nbytes: int = 0  # most that a block takes beside what is held between blocks
    program_nbytes: int = 0  # of the peak, what the program itself comes to hold

    def as_stored(self) -> dict[str, Any]:
        """Return what a run stores of its arrangement for those that resume it: as JSON values, with the threads."""
        return {**dataclasses.asdict(self), "threads": torch.get_num_threads()}


class CacheSizes(NamedTuple):
    """Bytes that calibrating a cache holds."""

    sampled: int  # samples of one layer
    learning: int  # what is made of them
    states: int  # hidden states that enter blocks
    logits: int  # made at a time, with all that their gradients take; 0 where no gradient is needed
    batch: int  # samples in a forward pass, at most: not bytes


@dataclass(frozen=True, kw_only=True)
class MemoryDemands:
    """Demands of a recipe that take memory of their own."""

    is_paired: bool = False  # the stream of the full-precision model goes beside the quantized one
    searches: bool = False  # transforms of blocks try changes on copies of weights and inputs
    weighs_tokens: bool = False  # token importance
    other_plans: tuple[Plan, ...] = ()  # whose weights are made and kept for each block beside those of the plan itself
    all_statistics: bool = False  # of all inputs, whether a method needs them or not
    cache: CacheSizes | None = None  # of the calibration of a cache
    read_tokens: int = 0  # tokens of the calibration text that are read, at most
    reader_nbytes: int = 0  # of a library that reads it, which stays in memory
    document_nbytes: int = 0  # of its largest document while that is read
    block_tuning: Callable[[held_block.BlockSizes], int] | None = (
        None  # `workspace` of what tunes a block, with its settings
    )
    tables: tuple[LayerPlan, ...] = ()  # outside of the blocks, made and kept beside those of the plan itself
    # bytes of tuning a model of these sizes with so many samples at a time, hidden states on disk or not
    model_tuning: Callable[[WholeModelSizes, int, bool], int] | None = None
    tuning_gradients: bool = False  # tuning takes the gradients of the loss by all linears
    output_gradients: sizes.GradientSizes | None = None  # where those at outputs of linears are needed


NO_DEMANDS = MemoryDemands()


def arrange(
    plan: Plan, skeleton: Skeleton, samples: int, seq_len: int, limit: int | None, demands: MemoryDemands = NO_DEMANDS
) -> Arrangement:
    """Return the fastest arrangement whose predicted peak is within the limit (without one: 80% of what is free).

    samples is 0 for a recipe that needs no calibration. Raises BudgetError naming the least that would do.
    """
    model = _MemoryModel(plan, skeleton, samples, seq_len, demands)
    free = int(0.8 * process_memory.available() / ranks.current().local)
    allowed = limit if limit is not None else process_memory.resident() + free
    best: Arrangement | None = None
    for candidate in _arrangements(model):
        if candidate.peak_nbytes <= allowed:
            return candidate
        if best is None or candidate.peak_nbytes < best.peak_nbytes:
            best = candidate
    assert best is not None
    one_sided = "set two_sided: false, " if demands.output_gradients is not None else ""
    raise BudgetError(
        f"this run needs at least {-(-best.peak_nbytes // (1 << 20))} MiB ({process_memory.show(model.base)} of it for "
        f"the program itself), more than {'--max-memory' if limit is not None else f'{process_memory.room().what},'} "
        f"{process_memory.show(allowed)}; raise it, {one_sided}or use fewer or shorter calibration samples"
    )


@contextmanager
def keep_arrangement(
    planned: Arrangement, first: Callable[[dict[str, Any]], dict[str, Any]], limit: int | None
) -> Iterator[Arrangement]:
    """Give the arrangement of the run that this one goes on with, and its number of threads while this is active.

    Sums are then taken in the same order. first: stores an arrangement and returns the one that was stored first.
    Raises BudgetError if that was made for more than the limit.
    """
    before = torch.get_num_threads()
    stored = first(planned.as_stored())
    threads = stored.pop("threads")
    arrangement = Arrangement(**stored)
    if limit is not None and arrangement.peak_nbytes > limit:
        raise BudgetError(
            f"the unfinished run was arranged for {process_memory.show(arrangement.peak_nbytes)}, more than "
            f"--max-memory {process_memory.show(limit)}; give at least that to resume it, or --restart to start over"
        )
    torch.set_num_threads(threads)
    try:
        yield arrangement
    finally:
        torch.set_num_threads(before)


class _MemoryModel:
    """Predict the bytes that the phases of a run hold, from shapes."""

    def __init__(self, plan: Plan, skeleton: Skeleton, samples: int, seq_len: int, demands: MemoryDemands) -> None:
        paired = demands.is_paired
        self.compiler = sizes.compiler_nbytes(plan.packed)
        self.base = process_memory.resident()  # behind what the line above loads
        self.samples, self.seq_len = samples, seq_len
        self.by_block: list[list[LayerPlan]] = [[] for _ in skeleton.blocks]
        for layer in plan.layers:
            self.by_block[layer.spec.block].append(layer)
        self.demands = demands
        self.editing = EDITING_NBYTES if skeleton.edits is not None else 0
        self.item = item = skeleton.dtype.itemsize
        self.widening = products.WORKSPACE if samples and products.is_slow(skeleton.dtype) else 0
        self.weights = [sum(p.numel() for p in block.parameters()) * item for block in skeleton.blocks]
        self.expert_weights = [
            sum(layer.spec.numel for layer in layers if layer.spec.is_expert) * item for layers in self.by_block
        ]
        is_copied = skeleton.edits is not None and item < 4  # but for experts, to be compared in float32
        self.widened = [4 * (w - e) // item * is_copied for w, e in zip(self.weights, self.expert_weights, strict=True)]
        blocks = {id(p) for block in skeleton.blocks for p in block.parameters()}
        named = skeleton.model.named_parameters()
        rest = {id(p): p.numel() * item for n, p in named if id(p) not in blocks and not skeleton.is_off_text_path(n)}
        self.rest = sum(rest.values())
        self.embedding = self.rest - sizes.head_nbytes(skeleton.model)  # what is loaded to embed a text
        self.converted = sizes.converted_nbytes(skeleton) + sizes.decoding_nbytes(skeleton)
        self.edited_rest = 2 * self.embedding + self.converted if skeleton.edits is not None else 0  # and as it was
        self.reading, self.kept = self._text(skeleton) if samples else (0, 0)
        self.hidden = skeleton.config.get_text_config().hidden_size * item  # of one token's state
        stacks = 1 if skeleton.second is None else 2
        self.stream = samples * seq_len * self.hidden * (2 if paired else 1) * stacks
        self.work = [sizes.linears_workspace(layers, paired) for layers in self.by_block]
        self.token = [sizes.token_nbytes([x.spec for x in layers], item) + 12 * self.hidden for layers in self.by_block]
        self.alive = [self._alive([x.spec for x in layers]) for layers in self.by_block]
        self.packed = [sum(layer.nbytes for layer in layers) for layers in self.by_block]
        self.hessians = [sizes.hessian_nbytes(layers, paired, demands.all_statistics) for layers in self.by_block]
        for other in demands.other_plans:
            for layer in other.layers:
                self.packed[layer.spec.block] += layer.nbytes
                self.work[layer.spec.block] = max(self.work[layer.spec.block], sizes.linears_workspace([layer], paired))
        is_shared, config = ranks.current().size > 1, skeleton.config.get_text_config()
        self.divided = [sizes.sharing_nbytes(layers) if is_shared else 0 for layers in self.by_block]
        self.routed = [
            sizes.routed_nbytes([x.spec for x in layers], config, item) if is_shared else 0 for layers in self.by_block
        ]
        self.tables = self._tables(plan)
        self.towers = self._towers(plan)
        self.trained = [sizes.lowrank_parameters(layers, "train_blocks") for layers in self.by_block]
        self.training = self._training(plan, skeleton)
        self.tuned = self._tuning_sizes(plan, skeleton, samples * seq_len)
        self.gradients = [sizes.gradient_nbytes(layers, item, demands.tuning_gradients) for layers in self.by_block]
        self.widest = [max((layer.spec.shape[1] for layer in layers), default=0) for layers in self.by_block]
        if paired:  # inputs of the full-precision stream wait for the other's; both and their difference are float32
            waiting = map(sizes.paired_columns, self.by_block)
            self.alive = [t + item * columns for t, columns in zip(self.alive, waiting, strict=True)]
            self.widest = [3 * columns for columns in self.widest]

    def _text(self, skeleton: Skeleton) -> tuple[int, int]:
        """Return the bytes of reading the calibration text, and those that stay of it."""
        demands, files = self.demands, skeleton.checkpoint.directory.glob("tokenizer*")
        tokenizer = sum(path.stat().st_size for path in files)
        kept = TOKENIZER_KEPT_FACTOR * tokenizer
        text = kept + max(TOKENIZING_NBYTES + 4 * demands.read_tokens, READ_TOKEN_NBYTES * demands.read_tokens)
        reading = demands.reader_nbytes + demands.document_nbytes + max(TOKENIZER_LOADING_FACTOR * tokenizer, text)
        return reading, demands.reader_nbytes + KEPT_NBYTES + kept + 8 * self.samples * self.seq_len

    def _alive(self, specs: list[LinearSpec]) -> int:
        """Return the bytes of a token on its way through a block: a module with its states, or norms and rotations."""
        return max(sizes.alive_nbytes(specs, self.item) + 2 * self.hidden, 12 * self.hidden)

    def _training(self, plan: Plan, skeleton: Skeleton) -> int:
        """Return the bytes of training low-rank parts against the whole model, 0 if none are."""
        if not (trained := sizes.lowrank_parameters(plan.layers, "train")):
            return 0
        linears, parameters = sum(x.spec.numel for x in plan.layers), (self.rest + sum(self.weights)) // self.item
        vocabulary = skeleton.config.get_text_config().vocab_size
        training_sizes = low_rank.TrainingSizes(
            parameters, linears, plan.quantized_nbytes, trained, vocabulary, sum(self.token) // self.item
        )
        return TRAINING_NBYTES + low_rank.whole_workspace(training_sizes, self.seq_len)

    def _tuning_sizes(self, plan: Plan, skeleton: Skeleton, tokens: int) -> WholeModelSizes:
        """Return the sizes of the packed model that tuning depends on; tokens: of the text."""
        packed = [
            sum(layer.nbytes for layer in layers) + weights - self.item * sum(layer.spec.numel for layer in layers)
            for layers, weights in zip(self.by_block, self.weights, strict=True)
        ]
        return WholeModelSizes(
            rest=self.rest // self.item,
            tables=sum(table.nbytes for table in plan.tables),
            block=max(self.weights) // self.item,
            linear=max((layer.spec.numel for layer in plan.layers), default=0),
            packed=tuple(packed),
            trained=sum(sizes.stored_floats(layer) for layer in plan.layers),
            hidden=self.hidden // self.item,
            vocabulary=skeleton.vocab_size,
            states=max(self.token) // self.item,
            tokens=tokens,
            seq_len=max(1, self.seq_len),
            low_rank=sizes.lowrank_parameters(plan.layers, "rank"),
        )

    def _tables(self, plan: Plan) -> int:
        """Return the bytes of quantizing what is outside of the blocks, 0 if it stays as it is."""
        if not (tables := (*plan.tables, *self.demands.tables)):
            return 0
        chunks = [sizes.plan_rows(table, sizes.chunk_rows(table)) for table in tables]
        packed = 2 * sum(table.nbytes for table in tables)  # in parts, and joined
        rest = self.embedding if any(map(sizes.is_turned, tables)) else self.rest
        return (
            rest
            + self.editing
            + sum(sizes.hessian_nbytes(chunks).values())
            + sizes.linears_workspace(chunks, False)
            + packed
        )

    def _towers(self, plan: Plan) -> int:
        """Return the bytes of quantizing towers and draft heads: a linear, and what waits; or of running the heads."""
        if not (layers := (*plan.tower_layers, *plan.draft_layers)):
            return 0
        weights = max(layer.spec.numel for layer in layers) * self.item
        packed = max(layer.nbytes for layer in layers)
        waiting = min(sum(layer.nbytes for layer in layers), sizes.TOWER_SHARD_NBYTES + packed)
        hessians = max(sizes.hessian_nbytes(layers).values(), default=0)
        inputs = [layer for layer in plan.draft_layers if not layer.spec.is_expert]
        if self.samples and (measured := sum(sizes.hessian_nbytes(inputs).values())):
            hessians = max(hessians, measured)
            weights += self.embedding + self.item * sum(layer.spec.numel for layer in plan.draft_layers)
            weights += self.seq_len * sizes.token_nbytes([layer.spec for layer in inputs], self.item)
        return weights + self.converted + hessians + sizes.linears_workspace(layers, False) + waiting

    def block_peak(self, index: int, batch: int, statistics_nbytes: int) -> int:
        """Return the peak of one block beside the program and the stream."""
        hessians = self.hessians[index]
        held = min(sum(hessians.values()), max(statistics_nbytes, *hessians.values(), 0)) if hessians else 0
        inputs = 4 * min(batch * self.seq_len, stats.chunk_tokens(self.seq_len)) * self.widest[index]
        adding = stats.adding_nbytes(self.widest[index])
        token = self.alive[index] + self.routed[index]
        forward = batch * self.seq_len * token + 2 * inputs + adding  # inputs as they are, and scaled
        forward += self.widening + min(process_memory.HELD, forward)  # what was freed is kept for what follows
        weighing = 0
        searching = self._searching(index) if self.demands.searches else 0
        if self.demands.weighs_tokens:  # while statistics are collected; what attention reads waits for the weights
            waiting = 2 * batch * self.seq_len * self.hidden
            weighing = inputs + waiting + SCORING_NBYTES + 16 * self.seq_len * self.hidden // self.item
        loading = self.expert_weights[index] + self.converted + self.editing + self.widened[index]
        quantizing = held + self.work[index] + self.packed[index]
        if self.demands.output_gradients is not None:
            quantizing += self.demands.output_gradients.reading
        training = differentiating = 0
        if trained := self.trained[index]:
            states = batch * self.seq_len * self.token[index]
            training = TRAINING_NBYTES + low_rank.block_workspace(
                self.weights[index], self.packed[index], trained, states
            )
        if gradients := self.gradients[index]:
            differentiating = gradients + low_rank.STATES * self.seq_len * self.token[index]
        if self.demands.block_tuning is not None:  # and all along, a copy of the block
            numel, tokens = self.weights[index] // self.item, batch * self.seq_len
            states, hidden = 4 * tokens * self.token[index] // self.item, tokens * self.hidden
            sizes_of_tuning = held_block.BlockSizes(numel, states, hidden, batch, self.seq_len)
            tuning = TRAINING_NBYTES + held + self.packed[index] + self.demands.block_tuning(sizes_of_tuning)
            training = max(training, tuning)
            held, quantizing = held + 4 * numel, quantizing + 4 * numel
        collecting = held + forward + weighing
        most = max(loading, searching, collecting, quantizing, training, differentiating)
        return self.weights[index] + self.divided[index] + most

    def _searching(self, index: int) -> int:
        """Return the bytes of a search for a transform of a block.

        That is kept inputs, outputs in float32 twice while a module runs on them, and four copies in float32 of the
        weights that read one input.
        """
        readers, columns = dict[str, int](), dict[str, int]()
        for spec in (layer.spec for layer in self.by_block[index]):
            readers[spec.input_key] = readers.get(spec.input_key, 0) + spec.numel
            columns["an expert" if spec.is_expert else spec.input_key] = spec.shape[1]
        token = self.item * sum(columns.values()) + self.alive[index] + 2 * 4 * self.hidden // self.item
        return min(SEARCHED_TOKENS, self.samples * self.seq_len) * token + 4 * 4 * max(readers.values(), default=0)

    def _caching(self, batch: int, spill: bool) -> int:
        """Return the bytes of calibrating the cache, 0 if there is nothing to."""
        if (cache := self.demands.cache) is None:
            return 0
        tokens = min(batch, cache.batch) * self.seq_len
        forward = tokens * (BACKWARD_FACTOR * max(self.token) if cache.logits else max(self.alive))
        block = cache.sampled + max(max(self.weights) + forward, cache.learning)
        libraries = (TRAINING_NBYTES if cache.logits else 0) + (COMPILING_NBYTES if any(self.packed) else 0)
        return libraries + (0 if spill else cache.states) + max(block, self.rest + cache.logits)

    def _output_gradients(self, spill: bool) -> int:
        """Return the bytes of taking the gradients at outputs of linears, 0 if none are needed."""
        if (gradients := self.demands.output_gradients) is None:
            return 0
        rest = 4 * self.rest // self.item + DRAWING_FACTOR * min(kl.LOGITS_NBYTES, gradients.logits)
        return TRAINING_NBYTES + (0 if spill else gradients.states) + max(gradients.work, rest) + self.converted

    def arrangement(self, batch: int, spill: bool, passes: int) -> Arrangement:
        """Return this arrangement with its predicted peak."""
        totals = [sum(hessians.values()) for hessians in self.hessians]
        allowed = math.ceil(max(totals, default=0) / passes)
        stream = 0 if spill else self.stream
        blocks = max(self.block_peak(i, batch, allowed) for i in range(len(self.by_block)))
        first = self.embedding + self.converted + max(self.editing, batch * self.seq_len * 4 * self.hidden)
        later = max(self.edited_rest, self.training, self._caching(batch, spill), self.tables, self.towers)
        later = max(later, self._output_gradients(spill))
        if self.demands.model_tuning is not None:
            later = max(later, TRAINING_NBYTES + self.demands.model_tuning(self.tuned, batch, spill))
        work = max(stream + int(MARGIN_FACTOR * max(blocks, first)), int(MARGIN_FACTOR * later))
        program = self.base + self.compiler + SLACK_NBYTES + self.kept  # nothing is compiled while the text is read
        total = max(self.base + self.reading, program + work)
        most = max(len(sizes.split_passes(hessians, allowed)) for hessians in self.hessians)
        return Arrangement(batch, spill, most, allowed, total, blocks, program)


def _arrangements(model: _MemoryModel) -> Iterator[Arrangement]:
    """Yield the fastest first: all in memory, then the stream on disk, then smaller batches, then more passes."""
    largest = max(1, min(model.samples, BATCH_TOKENS // max(1, model.seq_len)))
    batches = [max(1, largest >> k) for k in range(largest.bit_length())]
    for passes in (
        (1, 2, 4, 8, 16, 64, 256) if model.demands.block_tuning is None else (1,)
    ):  # it needs what a pass leaves
        for spill in (False, True) if model.samples else (False,):
            for batch in batches:
                yield model.arrangement(batch, spill, passes)
