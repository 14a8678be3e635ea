"""Tune the stored numbers of a whole packed model, so that it predicts what the original does (end-to-end tuning).

EfficientQAT (Chen et al. 2024, arXiv 2407.11062) ends by training the scales of all layers together, with the codes
fixed; the continuous step of PV-Tuning (arXiv 2405.14852) and the fine-tuning of QuIP# (arXiv 2402.04396) do so with
codebooks, norms and other numbers beside the codes. Here all floating-point numbers that a packed weight stores are
trained (scales, codebooks, lattices, gains, low-rank factors), norms and biases, whatever the format. The loss is
KL(original || packed) on the calibration text. It needs neither model in memory (compress/tune/streamed.py): the
original's largest log-probabilities are taken once, block by block, and kept in a file.

A number moves in units of the root mean square of its tensor. Each step computes with all numbers as they would be
stored, and its gradient goes past that rounding: norms in bfloat16 move in steps of 0.4%. One sample in `held_out` is
not trained on. What is kept is the state with the lowest divergence on these, of those at the start, at the end and
between; so no model is left worse than it was found.

With `trains: low_rank` only the factors of low-rank parts are trained, beside frozen integers: the recovery of INT2.1
(arXiv 2306.08162), and the reason of RILQ (arXiv 2412.01129): at two bits the errors of all layers add up to one of
high rank, which no layer can make up for by itself. Neither gradients nor moments of anything else are made.

Differences: EfficientQAT takes the loss of the next token, and trains scales alone. Not done: codes that move,
embeddings and output head, norms in front of the blocks, inputs that are quantized at run time, blocks that hand each
other more than hidden states (the model then stays as it is, and the report says so).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from compress.calib import reference_logprobs
from compress.model import blockwise
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.tune.adamw8bit import States, saved_nbytes
from compress.tune.descend import check_held_out, descend, is_checked
from compress.tune.streamed import StreamedModel, TrainingText
from compress.tune.trained import DiskSizes, Trained, TuningResult, TuningWork, WholeModelSizes

SCOPE = "model"
CHECKS = 5  # times that the held-out divergence is measured behind the start
MASTERS = 32  # bytes of a trained number: where it began, how far it is, its gradient, two moments, best, as stored
STATES = 12  # bytes of a number that linears read or write: as it is, as codes give it, and turned
LOGITS = 6  # times the float32 logits that are made at a time: themselves, logarithms, gradients
DECODING = 4  # float32 numbers of the largest linear that decoding it with gradients takes


@dataclass(frozen=True)
class Config:
    """Settings of end-to-end tuning."""

    steps: int = 100  # [steps] of training
    rate: float = 0.02  # of AdamW for what packed weights store, in units of the root mean square of each tensor
    norm_rate: float = 0.006  # the same for norms and biases
    batch_tokens: int = 2048  # [tokens] of a step
    top_k: int = 512  # log-probabilities of the original that are kept of each position
    held_out: int = 10  # [samples] of which one is not trained on
    patience: int = 0  # [checks] of 5 in a row without a lower held-out divergence that end training; 0: none does
    optimizer_states: States = "32bit"  # of AdamW; 8bit: a quarter of their memory, slower steps
    trains: Literal["all", "low_rank"] = "all"  # stored numbers, norms and biases, or the factors beside codes alone

    tokens_factor: ClassVar[float] = 4.0  # what is trained fits itself to few tokens (calib/enough.py)

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_tokens, self.top_k) < 1:
            raise ValueError(
                f"steps {self.steps}, batch_tokens {self.batch_tokens} and top_k {self.top_k} must be positive"
            )
        for key in ("rate", "norm_rate"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} {getattr(self, key)} is not at least 0 and below 1")
        if self.patience < 0:
            raise ValueError(f"patience {self.patience} is negative; 0 takes all steps")
        check_held_out(self.held_out)


def workspace(config: Config, sizes: WholeModelSizes, batch: int, is_spilled: bool) -> int:
    """Return the bytes that `train` takes on a CPU, with `batch` samples in a block at a time."""
    blocks = len(sizes.packed)
    step = max(1, config.batch_tokens // sizes.seq_len) * sizes.seq_len
    held = max(sizes.packed) if is_spilled else sum(sizes.packed)
    stream = 0 if is_spilled else 4 * sizes.tokens * sizes.hidden
    boundaries = 4 * max((blocks + 2) * step, 2 * -(-sizes.tokens // config.held_out)) * sizes.hidden
    in_block = 2 * 4 * sizes.block + 4 * DECODING * sizes.linear + STATES * batch * sizes.seq_len * sizes.states
    logits = min(kl.LOGITS_NBYTES, 4 * sizes.seq_len * sizes.vocabulary)
    outside = 4 * sizes.rest + sizes.tables
    numbers = sizes.low_rank if config.trains == "low_rank" else sizes.trained
    trained = MASTERS * numbers - saved_nbytes(numbers, config.optimizer_states)
    return outside + held + stream + boundaries + max(in_block, LOGITS * logits) + trained


def positions(config: Config, samples: int, seq_len: int) -> int:
    """Return the tokens that `train` takes through the model, at most: a step takes its own about four times.

    That is forward, again, and backward by states and by weights. Patience may end training before.
    """
    held, of_step = max(1, samples // config.held_out), max(config.batch_tokens, seq_len)
    return 4 * config.steps * of_step + _trained_tokens(config, samples, seq_len) + (CHECKS + 1) * held * seq_len


def _trained_tokens(config: Config, samples: int, seq_len: int) -> int:
    """Return the tokens that the original predicts, at most."""
    held, of_step = max(1, samples // config.held_out), max(config.batch_tokens, seq_len)
    return min(samples * seq_len, config.steps * of_step + held * seq_len)


def disk(config: Config, sizes: DiskSizes) -> int:
    """Return the bytes that `train` has in its folder at a time, at most.

    That is while the original's predictions are written, with its hidden states beside them; or behind that, with those
    of the packed model. What is trained is kept as it was and as it is.
    """
    tokens = _trained_tokens(config, sizes.samples, sizes.seq_len)
    making = reference_logprobs.making_nbytes(tokens, sizes.vocabulary, config.top_k)
    return making + 4 * tokens * sizes.hidden + 2 * 4 * sizes.trained


def train(config: Config, work: TuningWork) -> TuningResult:
    """Tune a packed checkpoint against the original; its files stay as they are."""
    started = time.monotonic()
    held = max(1, len(work.tokens) // config.held_out)
    most = max(1, len(work.tokens) - held)
    of_step = min(max(1, config.batch_tokens // work.tokens.shape[1]), most)
    batch = next(size for size in range(min(work.batch, of_step), 0, -1) if of_step % size == 0)
    used = work.tokens[: min(most // of_step, config.steps) * of_step]  # so that every step has as many
    unseen = work.tokens[-held:]
    is_low_rank = config.trains == "low_rank"
    model = StreamedModel(work.directory, work.device, not work.is_spilled, is_low_rank)
    if is_low_rank and not model.stored:
        return TuningResult("not tuned: there is no low-rank part in 16 bits, which `trains: low_rank` needs", {})
    files = [work.folder / f"tuned-{name}" if work.is_spilled else None for name in ("trained", "held")]
    original = Skeleton(work.original)
    blockwise.computing_in(original, torch.float32)
    both = torch.cat((used, unseen))
    reference = reference_logprobs.load(original, both, work.folder, config.top_k, work.device, work.say)
    del original
    text = model.text(used, batch, files[0], reference)
    checked = model.text(unseen, work.batch, files[1], reference, len(used))
    try:
        if not text.is_separable:
            return TuningResult(
                "not tuned end to end: blocks of this model hand each other more than hidden states", {}
            )
        training = _Training(config, work, model, (text, checked), of_step // batch)
        tensors = training.run()
        return TuningResult(training.note(bool(tensors), time.monotonic() - started), tensors)
    finally:
        text.stream.close()
        checked.stream.close()


class _Training:
    """The numbers of a model in training, and the best that they have been."""

    def __init__(
        self,
        config: Config,
        work: TuningWork,
        model: StreamedModel,
        texts: tuple[TrainingText, TrainingText],
        batches: int,
    ) -> None:
        """texts: what is trained on, and what is not; batches: of a step."""
        self.config, self.work, self.model, self.batches = config, work, model, batches
        self.text, self.checked = texts
        self.rate = max(config.rate, config.norm_rate)
        rates = {name: config.norm_rate if name in model.vectors else config.rate for name in model.stored}
        self.masters = {
            name: Trained(tensor, rates[name] / self.rate) for name, tensor in model.stored.items() if rates[name]
        }
        self.fixed = {name: tensor.float() for name, tensor in model.stored.items() if not rates[name]}
        self.first = self.best = self._held_out_loss()
        self.taken = self.since = 0  # steps; checks since the best one

    def run(self) -> dict[str, Tensor]:
        """Take all steps; return the tensors that have changed for the better, as they are stored."""
        parameters = [master.moved for master in self.masters.values()]
        if parameters:
            descend(parameters, self.config.steps, self.rate, self._loss, self._check, self.config.optimizer_states)
        for master in self.masters.values():
            master.restore()
        made = {name: self._as_stored(name) for name in self.masters}
        return {name: tensor.cpu() for name, tensor in made.items() if not torch.equal(tensor, self.model.stored[name])}

    def _numbers(self) -> dict[str, Tensor]:
        return {**self.fixed, **{name: self._as_stored(name).float() for name in self.masters}}

    @torch.no_grad()
    def _as_stored(self, name: str) -> Tensor:
        """Return a trained tensor as it would be stored now."""
        return self.masters[name].value().to(self.model.stored[name].dtype).contiguous()

    def _loss(self, step: int) -> float:
        """Leave the gradients of the mean divergence over the batches of a step behind, and return it."""
        self.work.say(f"tuning end to end, step {step + 1} of {self.config.steps}")
        first = step * self.batches % len(self.text.batches)
        chosen = self.text.batches[first : first + self.batches]
        total, gradients = self.model.gradients(self.text, chosen, self._numbers())
        positions = sum(samples.stop - samples.start for samples in chosen) * self.text.seq_len
        for name, gradient in gradients.items():
            if (master := self.masters.get(name)) is not None:
                master.moved.grad = gradient * (master.unit / positions)
        return total / positions

    def _check(self, step: int) -> bool:
        """Keep the present state if it is the best on what is not trained on; return whether patience is at an end."""
        self.taken = step + 1
        if not is_checked(step, self.config.steps, CHECKS):
            return False
        if (loss := self._held_out_loss()) < self.best:
            self.best, self.since = loss, 0
            for master in self.masters.values():
                master.keep()
        else:
            self.since += 1
        return self.since == self.config.patience > 0

    def _held_out_loss(self) -> float:
        """Return the mean divergence on the samples that are not trained on, in nats a token."""
        positions = self.checked.batches[-1].stop * self.checked.seq_len
        return self.model.divergence(self.checked, self.checked.batches, self._numbers()) / positions

    def note(self, is_better: bool, seconds: float) -> str:
        """Return what the report should say."""
        count, kept = (
            sum(master.moved.numel() for master in self.masters.values()),
            "" if is_better else "; no better, so they stay as they were",
        )
        stopped = f" of {self.config.steps}, then stopped" if self.taken < self.config.steps else ""
        return (
            f"{count} stored numbers tuned end to end for {self.taken} steps{stopped} in {seconds:.0f} s: KL on "
            f"held-out calibration text {self.first:.4f} -> {self.best:.4f}{kept}; errors of linears are from before it"
        )
