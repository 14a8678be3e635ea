"""SpinQuant: learn R1 and every R2 by gradient descent on the orthogonal matrices (arXiv 2405.16406).

A rotation changes only the rounding: a reader of a rotated vector x sees Q^T round(Q x) in place of x. So weights,
embeddings and norms stay as they are (the norms' weights moved into their readers), only what is rounded is rotated,
and the learned matrices are merged afterwards like random ones. Weights are rounded, W -> P^T round(P W Q^T) Q, only
where the recipe's method rounds them without data: a rotation fitted to rounding to nearest is not the best for a
method that corrects its errors. Gradients pass straight through all rounding.

A step is Cayley SGD (arXiv 2002.01113): G the gradient at X, A = U - U^T the tangent with U = V X - X^T (X V X) / 2 and
V = -G^T, then Y = X^T + a A (X^T + Y) / 2 by fixed-point iteration, a = min(rate, 1 / |A|_1), and X <- Y^T.

Differences from the paper and its code, and why:
- The loss is KL(original || rounded) of the predicted tokens, not the cross-entropy of the text: it needs no labels,
  its least value is that of the original model, and every token says something of the whole vocabulary, which calms the
  gradients of small batches.
- No momentum (it is off there, too). The iteration starts at X^T, so that a tangent that leaves the vector of ones
  alone (for LayerNorm) stays one. Every step ends with one of Newton's towards the nearest orthogonal matrix, in place
  of a rare QR; the result is made orthogonal in float64.

Cost: the whole model in its own type, the hidden states between blocks of one sample, the inside of one block (the rest
is computed again), and about twelve float32 matrices [hidden, hidden]. A step takes about ten times a forward pass of
its TOKENS_PER_STEP tokens; the samples that are learned from go through the model once more before. On 8M parameters,
with one core: 40 steps in 180 s, 680 MiB at most where a run without takes 640. There, without outliers, it gains
nothing that can be measured: KL 0.0163 for 0.0162 in w4a4kv4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compress import plugins, process_memory
from compress.errors import BudgetError, RecipeError
from compress.formats import transforms
from compress.model import blockwise, lm_head
from compress.model.blockwise import BlockArgs
from compress.model.edits import EditContext
from compress.numerics import kl
from compress.papers.transform import rotation_search
from compress.papers.transform.rotation_search import LinearRounding, SearchedRotation
from compress.transform.bases import value_rows
from compress.transform.search import fake_weight

FIRST_RATE = 1.5  # unit: the gradient; it falls to 0 along a cosine
TOKENS_PER_STEP = 2048  # a sample is taken whole
FIXED_POINT_STEPS = 6  # the error falls by a |A| / 2 <= 1/2 with each
ERRORS = 2.0  # standard errors that a gain must have to count
MATRICES = 12  # float32 copies of a learned matrix that a step holds at a time, an upper bound
NBYTES_PER_ACTIVATION = 24  # what the gradient of a linear keeps of each input and output, an upper bound


def learn(rotation: SearchedRotation, bench: EditContext) -> tuple[dict[str, Tensor], str]:
    """Learn matrices by name ("residual", a block's number for its values), float64; return them and the report's note.

    They are {} where nothing clearly better than the rotation's present bases was found. Raises RecipeError if no
    input is rounded, BudgetError if the model does not fit into the memory.
    """
    assert bench.tokens is not None, "the caller asks"
    layers = rotation_search.roundings(bench.plan, rotation.seed, bench.device, _rounds_without_data)
    if not layers:
        raise RecipeError(
            "spin: the recipe rounds no inputs, and no weights without data: there is nothing to learn a rotation "
            "from; set `learn: 0`"
        )
    _check_memory(rotation, bench)
    started, steps = time.monotonic(), rotation.config.learn
    held_out, used = _divide(bench.tokens, rotation.config.search_samples, steps)
    parameters = _parameters(rotation, bench.device)
    with (
        _load(rotation, torch.cat((held_out, used)), bench) as model,
        _round_in_learned_bases(rotation, parameters, layers, model),
    ):
        held, rest = range(held_out.shape[0]), range(held_out.shape[0], held_out.shape[0] + used.shape[0])
        before = model.divergence(held)
        per_step = min(samples_per_step(used.shape[1]), len(rest))
        for step in range(steps):
            bench.say(f"learning rotations, step {step + 1} of {steps}")
            for number in range(step * per_step, (step + 1) * per_step):
                model.descend(rest[number % len(rest)], 1 / per_step)
            rate = FIRST_RATE * (1 + math.cos(math.pi * step / steps)) / 2
            for name, matrix in parameters.items():
                cayley_step(matrix, rate, rotation.keep_mean and name == "residual")
        after = model.divergence(held)
    seconds, used_nbytes = time.monotonic() - started, process_memory.measured_peak()
    most = "" if used_nbytes is None else f" with {process_memory.show(used_nbytes)} at most"
    process_memory.trim()
    note = (
        f"rotations learned in {steps} steps: KL {before.mean():.5g} -> {after.mean():.5g} on {len(held)} samples, in "
        f"{seconds:.0f} s{most}"
    )
    if not is_better(before, after):
        return {}, f"{note}; they are not clearly better, and not used"
    return {name: orthogonal(matrix.detach()) for name, matrix in parameters.items()}, note


def is_better(before: Tensor, after: Tensor) -> bool:
    """Return whether the samples' KL has fallen by more than chance: any change of basis moves it by some percent."""
    gain = before - after
    error = gain.std() / len(gain) ** 0.5 if len(gain) > 1 else 0.0
    return bool(gain.mean() > ERRORS * error)


def _rounds_without_data(scheme: Any) -> bool:
    return "hessian" not in plugins.load("quant", scheme.method).NEEDS


def samples_per_step(seq_len: int) -> int:
    return max(1, TOKENS_PER_STEP // seq_len)


def _divide(tokens: Tensor, held_out: int, steps: int) -> tuple[Tensor, Tensor]:
    """Split samples into those the result is judged by and those learned from: the same where there are too few."""
    held, rest = tokens[:held_out], tokens[held_out:]
    return held, (rest if rest.shape[0] else held)[: steps * samples_per_step(tokens.shape[1])]


def _check_memory(rotation: SearchedRotation, bench: EditContext) -> None:
    """Raise BudgetError if learning needs more memory than there is."""
    assert bench.tokens is not None
    need = need_nbytes(rotation, bench.tokens.shape[1])
    free = int(0.8 * process_memory.available())
    if bench.device.type == "cuda":
        free = torch.cuda.mem_get_info(bench.device)[0]
    elif bench.max_memory is not None:
        free = max(0, bench.max_memory - process_memory.resident())
    if need > free:
        raise BudgetError(
            f"learning rotations takes the whole model and its gradients, {process_memory.show(need)} of memory, and "
            f"{process_memory.show(free)} are free; set `learn: 0` (and `seeds: 8`) for spin, or raise the limit"
        )


def need_nbytes(rotation: SearchedRotation, tokens: int) -> int:
    """Return about the bytes that learning takes with samples of so many tokens."""
    skeleton, blocks = rotation.skeleton, rotation.graph.blocks
    item = skeleton.dtype.itemsize
    heads = max((b.attention.heads for b in blocks if b.attention is not None), default=0)
    inside = max(
        sum(p.shape[-1] + p.shape[-2] for p in block.parameters() if p.dim() >= 2) for block in skeleton.blocks
    )
    weights = {id(p): p.numel() for p in skeleton.model.parameters()}
    return (
        sum(weights.values()) * item
        + tokens * (len(blocks) * rotation.width * item + inside * NBYTES_PER_ACTIVATION + heads * tokens * 4)
        + 6 * kl.LOGITS_NBYTES
        + MATRICES * 4 * rotation.width**2
    )


def _parameters(rotation: SearchedRotation, device: torch.device) -> dict[str, nn.Parameter]:
    """Return the matrices to be learned, float32, from the present bases."""
    matrices = {}
    if rotation.basis is not None:
        matrices["residual"] = rotation.basis.dense(rotation.width)
    for index, basis in rotation.values.items():
        attention = rotation.graph.blocks[index].attention
        assert attention is not None
        matrices[str(index)] = basis.dense(attention.head_dim)
    return {name: nn.Parameter(matrix.to(device, torch.float32).contiguous()) for name, matrix in matrices.items()}


class _Model:
    """The whole model, loaded; the samples' hidden states in front of it and, of the original, behind it."""

    def __init__(
        self,
        rotation: SearchedRotation,
        stream: blockwise.HiddenStates,
        calls: blockwise.ModelArgs,
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        self.skeleton, self.stream, self.calls, self.logits = rotation.skeleton, stream, calls, logits
        self.device = next(self.skeleton.blocks[0].parameters()).device
        self.shared: dict[Any, tuple[Tensor, Tensor]] = {}  # rounded inputs that several linears read

    @torch.no_grad()
    def remember(self) -> None:
        """Keep what the blocks as they are make of every sample."""
        for sample in range(self.stream.samples):
            self.stream.write(sample, self._through(sample), blockwise.FULL)

    def _through(self, sample: int) -> Tensor:
        hidden = self.stream.read(sample, 1).to(self.device)
        for block, calls in zip(self.skeleton.blocks, self.calls, strict=True):
            if torch.is_grad_enabled():
                hidden = checkpoint(self._block, block, calls[1], hidden, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = self._block(block, calls[1], hidden)
        return hidden

    def _block(self, block: nn.Module, call: BlockArgs, hidden: Tensor) -> Tensor:
        try:
            return blockwise.call_block(block, call, hidden)[0]
        finally:
            self.shared.clear()

    def descend(self, sample: int, share: float) -> float:
        """Add `share` of the gradient of one sample's loss to the parameters'; returns the loss."""
        hidden = self._through(sample)
        behind = hidden.detach().requires_grad_()
        loss = self._loss(sample, behind, share)
        if hidden.requires_grad:  # else no rounding depends on what is learned
            hidden.backward(behind.grad)
        return loss

    def _loss(self, sample: int, hidden: Tensor, share: float | None) -> float:
        """Return the sample's mean divergence; `share` of its gradient goes to `hidden`, None: no gradient."""
        original, count, total = self.stream.read(sample, 1, blockwise.FULL).to(self.device), hidden.shape[1], 0.0
        for tokens in kl.slices(count, self.skeleton.vocab_size):
            with torch.no_grad():
                exact = self.logits(original[:, tokens])
            loss = kl.from_logits(exact, self.logits(hidden[:, tokens])).sum() / count
            if share is not None:
                (loss * share).backward()
            total += loss.item()
        return total

    @torch.no_grad()
    def divergence(self, samples: range) -> Tensor:
        """Return the KL of each of these samples, in nats a token, float64."""
        losses = [self._loss(sample, self._through(sample), None) for sample in samples]
        return torch.tensor(losses, dtype=torch.float64)


@contextmanager
def _load(rotation: SearchedRotation, tokens: Tensor, bench: EditContext) -> Iterator[_Model]:
    """Load the model, every norm's weight moved into its readers, with all samples on both sides of it."""
    skeleton, drawn = rotation.skeleton, (rotation.basis, rotation.values)
    stream = blockwise.HiddenStates(tokens.shape[0], bench.folder / "stream", 2)
    bench.say("loading the model to learn rotations")
    try:
        with lm_head.edited_by(skeleton, None):
            calls = blockwise.record_inputs(skeleton, tokens, 1, stream, bench.device)
        with lm_head.logits_of(skeleton, bench.device) as logits:
            rotation.use_identity()
            with lm_head.edited_by(skeleton, rotation):
                for index in range(len(skeleton.blocks)):
                    skeleton.load_block(index, bench.device)
            model = _Model(rotation, stream, calls, logits)
            model.remember()
            yield model
    finally:
        rotation.use(*drawn)
        stream.close()


class _Turn(NamedTuple):
    """One linear in the learned bases: what it reads is turned by `into`, what it makes (`rows` of it) by `out`."""

    linear: nn.Linear
    rounding: LinearRounding
    into: Tensor | None  # [n, n], for each n of the inputs
    out: Tensor | None
    rows: Tensor | None
    shared: dict[Any, tuple[Tensor, Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight if self.rounding.config is None else self._weight()
        return nn.functional.linear(self._inputs(x), weight, self.linear.bias)

    def _inputs(self, x: Tensor) -> Tensor:
        """Return Q^T round(Q x), computed once for all that read x."""
        settings, around = self.rounding.activations, self.rounding.ops.input
        if settings is None:
            return x
        key = (id(x), id(self.into), settings, around)
        if key not in self.shared:
            turned = rotation_search.rounded_input(self._across(x.float()), settings)
            self.shared[key] = (x, self._back(turned).to(x.dtype))  # with x, so that its id stays its own
        return self.shared[key][1]

    def _weight(self) -> Tensor:
        """Return P^T round(P W Q^T) Q."""
        weight = self.linear.weight
        turned = self._columns(self._across(weight.float()), False)
        assert self.rounding.config is not None
        rounded = fake_weight(turned.detach(), self.rounding.config)
        return self._back(self._columns(turned + (rounded - turned.detach()), True)).to(weight.dtype)

    def _across(self, rows: Tensor) -> Tensor:
        """Return Q rows for rows [..., in], with the operations of run time behind the learned matrix."""
        return self._operations(rows if self.into is None else _each(rows, self.into.T), "in", False)

    def _back(self, rows: Tensor) -> Tensor:
        """Undo `_across`."""
        rows = self._operations(rows, "in", True)
        return rows if self.into is None else _each(rows, self.into)

    def _columns(self, matrix: Tensor, back: bool) -> Tensor:
        """Return P matrix or P^T matrix for matrix [out, in]; P: the learned one, then the operations undone."""
        columns = self._operations(matrix.T, "out", False) if back else matrix.T
        if self.out is not None:
            turned = columns if self.rows is None else columns[:, self.rows]
            turned = _each(turned, self.out if back else self.out.T)
            columns = turned if self.rows is None else columns.index_copy(1, self.rows, turned)
        return (columns if back else self._operations(columns, "out", True)).T

    def _operations(self, rows: Tensor, side: str, transposed: bool) -> Tensor:
        """Apply the operations of run time to rows [..., n] on the side "in" or "out" of the weight, or undo them."""
        names = self.rounding.ops.input if side == "in" else self.rounding.ops.output
        for name in reversed(names) if transposed else names:
            rows = transforms.multiply(rows, self.rounding.tensors.get(f"{side}_{name}"), name, transposed)
        return rows


def _each(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply every n of x [..., m n] by matrix [n, n]."""
    return (x.unflatten(-1, (-1, matrix.shape[0])) @ matrix).flatten(-2)


@contextmanager
def _round_in_learned_bases(
    rotation: SearchedRotation, parameters: dict[str, nn.Parameter], layers: dict[str, LinearRounding], model: _Model
) -> Iterator[None]:
    """Let these linears of the loaded model round in the bases of the parameters while active."""
    skeleton = rotation.skeleton
    residual = parameters.get("residual")
    changed: list[nn.Linear] = []
    try:
        for index, (block, graph) in enumerate(zip(skeleton.blocks, rotation.graph.blocks, strict=True)):
            prefix, attention = skeleton.block_prefix(index), graph.attention
            into = {prefix + name: residual for names in graph.norms.values() for name in names}
            out = dict.fromkeys((prefix + name for name in graph.writers), residual)
            rows: dict[str, Tensor] = {}
            if attention is not None and (matrix := parameters.get(str(index))) is not None:
                into[prefix + attention.output] = out[prefix + attention.values] = matrix
                rows[prefix + attention.values] = value_rows(attention).flatten().to(matrix.device)
            for name in [name for name in layers if name.startswith(prefix)]:
                linear = skeleton.linear(block, name)
                turn = _Turn(linear, layers[name], into.get(name), out.get(name), rows.get(name), model.shared)
                linear.__dict__["forward"] = turn.forward
                changed.append(linear)
        yield
    finally:
        for linear in changed:
            del linear.__dict__["forward"]


@torch.no_grad()
def cayley_step(matrix: nn.Parameter, rate: float, keep_mean: bool = False) -> None:
    """Move an orthogonal matrix [n, n] float32 against its gradient, which is cleared; keep_mean: Q 1 stays 1."""
    if matrix.grad is None:
        return
    x, v = matrix.data, -matrix.grad.T
    u = v @ x - x.T @ (x @ v @ x) / 2
    tangent = u - u.T
    if keep_mean:
        tangent = tangent - tangent.mean(0, keepdim=True)
        tangent = tangent - tangent.mean(1, keepdim=True)
    length = min(rate, 1 / (float(tangent.abs().sum(0).max()) + 1e-8))
    start = y = x.T
    for _ in range(FIXED_POINT_STEPS):
        y = start + (length / 2) * (tangent @ (start + y))
    matrix.data = _nearer(y.T).contiguous()
    matrix.grad = None


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the orthogonal matrix [n, n] nearest to one that nearly is, float64, on the CPU."""
    wide = matrix.double().cpu()
    for _ in range(4):  # the error is squared each time
        wide = _nearer(wide)
    return wide


def _nearer(matrix: Tensor) -> Tensor:
    """Take one step of Newton and Schulz towards the nearest orthogonal matrix."""
    return 1.5 * matrix - 0.5 * matrix @ (matrix.T @ matrix)
