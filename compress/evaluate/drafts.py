"""Choose a checkpoint's default draft: a level of its weights, sublayers that are passed over, or both.

The acceptance alpha of a draft is the mean over a text's tokens of sum_x min(p(x), q(x)), target p and draft q, at
temperature 1. On the first windows sublayers are chosen; the rows of the table are measured on the others, where
nothing was chosen. The cost of a drafted token is the share of bytes that it reads, and what that brings is predicted
by compress/speculate/cost.py.

Sublayers are chosen greedily, each step by the least rise of KL for the bytes that it saves. A rise that was measured
at an earlier, smaller set is looked at again only if it would be the least (lazy greedy): rises of KL seldom shrink
when more is passed over, while losses of acceptance do, since there is less and less to lose. Another plugin of drafts
that has `search(known, count, score, seed)` may choose instead, by acceptance.

A draft's passes read no cache here, so it never sees what the target knows of earlier tokens: on the target's cache it
is accepted somewhat more often. All experts of a mixture count as read.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import plugins
from compress.errors import CalibrationError, RecipeError
from compress.evaluate import scores
from compress.evaluate.reader import Execution, Reader
from compress.formats import levels as stored_levels
from compress.model import load
from compress.progress import Progress, silent
from compress.runtime import bypass, levels
from compress.runtime.bypass import Sublayer
from compress.runtime.linear import PackedModule
from compress.speculate import cost
from compress.speculate.skipping import inner_sublayers, write_set

GREEDY = "greedy"
PLUGIN_KIND = "speculate"
MAX_KEPT_NBYTES = 512 << 20  # the target's probabilities are kept while sublayers are chosen
UNREAD_TIME_SHARE = 0.05  # a token takes this much time that is no reading of weights


@dataclass(frozen=True)
class DraftRequest:
    """What to measure."""

    text: str | Path
    shares: Sequence[float] = (0.1, 0.2, 0.3, 0.4)  # of the inner sublayers that are passed over
    by: str = GREEDY  # or a plugin of drafts that searches
    seq_len: int = 256
    choice_tokens: int = 1024  # on which sublayers are chosen
    max_tokens: int = 4096  # on which drafts are measured
    seed: int = 0


@dataclass(frozen=True)
class DraftRow:
    """A draft, and what is measured and predicted of it."""

    level: int | None  # bits; None: the whole weights
    sublayers: str  # that are passed over
    count: int
    kl: float  # nats a token, of the target's law to the draft's
    acceptance: float
    fitted: float  # the acceptance that follows from KL by the rule of compress/speculate/cost.py
    same_top1: float
    bytes_share: float  # of what a step of the target reads
    length: int  # drafted tokens with the largest gain; 0: none pays
    speedup: float

    @property
    def specification(self) -> str:
        """Return the draft as text (compress/speculate/specification.py)."""
        parts = [] if self.level is None else [f"level={self.level}"]
        return ",".join([*parts, f"sublayers={self.sublayers}"] if self.sublayers else parts)


@dataclass(frozen=True)
class DraftChoice:
    """All drafts, and the one with the largest predicted speed-up."""

    rows: list[DraftRow]
    best: str  # a specification; "" where none pays
    tokens: int
    chosen_on: int  # tokens

    def plain(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def choose(directory: Path, asked: DraftRequest, execution: Execution, progress: Progress = silent) -> DraftChoice:
    """Measure the drafts of a checkpoint; CalibrationError for too little text, RecipeError for an unknown search."""
    wanted = asked.choice_tokens + asked.max_tokens
    windows = scores.text_windows([directory], asked.text, asked.seq_len, wanted, execution.bos).tokens
    reader = Reader(load.load_model(directory, execution.dtype, execution.device), name=directory.name)
    first = max(1, _choice_tokens(reader.model, asked) // asked.seq_len)
    if len(windows) <= first:
        raise CalibrationError(
            f"{asked.text} has {windows.numel():,} tokens; sublayers are chosen on {first * asked.seq_len:,}, and "
            "drafts measured on others: give a longer text"
        )
    drafts = _candidates(reader, windows[:first], asked, progress)
    rows = measure(reader, windows[first:], drafts, progress)
    best = max(rows, key=lambda row: row.speedup, default=None)
    pays = best is not None and best.speedup > 1
    tokens = (len(windows) - first) * (asked.seq_len - 1)
    return DraftChoice(rows, best.specification if best and pays else "", tokens, first * (asked.seq_len - 1))


def measure(
    reader: Reader,
    windows: Tensor,
    drafts: Sequence[tuple[int | None, frozenset[Sublayer]]],
    progress: Progress = silent,
) -> list[DraftRow]:
    """Return a row for each draft, level and sublayers; windows: int64 [windows, tokens]."""
    sums = torch.zeros(len(drafts), 3, dtype=torch.float64)
    for done, window in enumerate(windows.split(1)):
        progress("measuring drafts", done, len(windows))
        target = reader.predictions(window).float().log_softmax(-1)
        for place, (level, sublayers) in enumerate(drafts):
            sums[place] += torch.tensor(
                compare(target, _predictions(reader, window, level, sublayers)), dtype=torch.float64
            )
    means = (sums / len(windows)).tolist()
    return [_row(reader.model, draft, *figures) for draft, figures in zip(drafts, means, strict=True)]


def compare(target: Tensor, logits: Tensor) -> tuple[float, float, float]:
    """Return KL, acceptance and the share of equal likeliest tokens.

    target: log-probabilities [tokens, vocab]; logits: of the draft, likewise.
    """
    draft = logits.float().log_softmax(-1)
    probabilities = target.exp()
    kl = (probabilities * (target - draft)).nan_to_num(0.0).sum(-1).double().mean()
    alpha = torch.minimum(probabilities, draft.exp()).sum(-1).double().mean()
    return float(kl), float(alpha), float((target.argmax(-1) == draft.argmax(-1)).double().mean())


def read_nbytes(model: nn.Module, level: int | None, sublayers: frozenset[Sublayer]) -> int:
    """Return the bytes of weights that a step of a draft reads: what runs of the blocks, and the head."""
    modules = bypass.modules_of(model)
    passed = {id(module) for each in sublayers for module in modules[each]}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    blocks = bypass.blocks_in(model)
    return stored_nbytes(blocks, level, passed) + (0 if head is None else stored_nbytes(head, level, passed))


def greedy(
    known: Sequence[Sublayer],
    counts: Sequence[int],
    score: Callable[[frozenset[Sublayer]], float],
    sizes: dict[Sublayer, int],
) -> list[frozenset[Sublayer]]:
    """Return sets of these counts, rising; each contains the one before. score: the larger, the better."""
    chosen, now, sets = frozenset[Sublayer](), score(frozenset()), list[frozenset[Sublayer]]()
    # Loss for a byte, size of the set that it was measured at, sublayer.
    waiting = [((now - score(frozenset([each]))) / sizes[each], 0, each) for each in known]
    heapq.heapify(waiting)
    for size in range(1, max(counts, default=0) + 1):
        while True:
            loss, measured, each = heapq.heappop(waiting)
            if measured == size - 1:
                break
            value = score(chosen | {each})
            heapq.heappush(waiting, ((now - value) / sizes[each], size - 1, each))
        chosen |= {each}
        now -= loss * sizes[each]
        if size in counts:
            sets.append(chosen)
    return sets


def _candidates(
    reader: Reader, windows: Tensor, asked: DraftRequest, progress: Progress
) -> list[tuple[int | None, frozenset[Sublayer]]]:
    """Return the drafts to measure: levels, sets of sublayers, and both together."""
    model = reader.model
    known_levels: tuple[int, ...] = getattr(model, "levels", ())[:-1]
    known = inner_sublayers(model)
    counts = sorted({round(share * len(known)) for share in asked.shares} - {0})
    sets = _sets(reader, windows, known, counts, asked, progress) if counts else []
    alone: list[tuple[int | None, frozenset[Sublayer]]] = [(level, frozenset()) for level in known_levels]
    return [*alone, *((level, each) for level in (None, *known_levels) for each in sets)]


def _sets(
    reader: Reader,
    windows: Tensor,
    known: tuple[Sublayer, ...],
    counts: list[int],
    asked: DraftRequest,
    progress: Progress,
) -> list[frozenset[Sublayer]]:
    targets = [reader.predictions(window).float().log_softmax(-1) for window in windows.split(1)]
    tried = 0

    def try_without(sublayers: frozenset[Sublayer]) -> tuple[float, float]:
        """Return KL and acceptance of the model without sublayers."""
        nonlocal tried
        tried += 1
        progress(f"choosing sublayers, set {tried}", 0, 0)
        pairs = zip(windows.split(1), targets, strict=True)
        figures = [compare(target, _predictions(reader, window, None, sublayers)) for window, target in pairs]
        return sum(kl for kl, _, _ in figures) / len(figures), sum(alpha for _, alpha, _ in figures) / len(figures)

    if asked.by == GREEDY:
        modules = bypass.modules_of(reader.model)
        sizes = {each: max(1, sum(stored_nbytes(module) for module in modules[each])) for each in known}
        return greedy(known, counts, lambda sublayers: -try_without(sublayers)[0], sizes)
    search: Any = getattr(plugins.load(PLUGIN_KIND, asked.by), "search", None)
    if search is None:
        searching = [
            GREEDY,
            *(name for name in plugins.names(PLUGIN_KIND) if hasattr(plugins.load(PLUGIN_KIND, name), "search")),
        ]
        raise RecipeError(plugins.unknown("search of sublayers", asked.by, searching))
    return [search(known, count, lambda sublayers: try_without(sublayers)[1], asked.seed) for count in counts]


def _predictions(reader: Reader, window: Tensor, level: int | None, sublayers: frozenset[Sublayer]) -> Tensor:
    with ExitStack() as stack:
        if level is not None:
            stack.enter_context(levels.at_level(reader.model, level))
        stack.enter_context(bypass.bypassed(reader.model, sublayers))
        return reader.predictions(window)


def _row(
    model: nn.Module, draft: tuple[int | None, frozenset[Sublayer]], kl: float, alpha: float, same: float
) -> DraftRow:
    level, sublayers = draft
    share = read_nbytes(model, level, sublayers) / read_nbytes(model, None, frozenset())
    length, speedup = cost.best_length(alpha, cost.draft_cost(share, 1.0, UNREAD_TIME_SHARE))
    fitted = cost.acceptance_from_kl(kl)
    return DraftRow(level, write_set(sublayers), len(sublayers), kl, alpha, fitted, same, share, length, speedup)


def _choice_tokens(model: Any, asked: DraftRequest) -> int:
    vocab_size = model.config.get_text_config().vocab_size
    return min(asked.choice_tokens, MAX_KEPT_NBYTES // (4 * vocab_size))


def stored_nbytes(module: nn.Module, level: int | None = None, passed: Collection[int] = ()) -> int:
    """Return the bytes of a module's weights at a level, without modules of these identities."""
    if id(module) in passed:
        return 0
    if isinstance(module, PackedModule):
        own = sum(each.nbytes for each in stored_levels.view(module.packed(), level).tensors.values())
        bias = getattr(module, "bias", None)
        return own + (0 if bias is None else bias.nbytes)
    own = sum(each.nbytes for each in module._parameters.values() if each is not None)
    return own + sum(stored_nbytes(child, level, passed) for child in module.children())
