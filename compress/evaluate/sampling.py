"""Compare what a compressed model and its base write: temperature, filters, repetition penalty, and beams.

Compressed models react to generation settings in their own way (Roy 2023, arXiv 2309.05210): with an error d of the
logits KL at temperature T is about Var(d) / (2 T^2), so it grows as T falls, until one token has all probability.

One pass over a text gives both models' logits, position by position, and with them everything that needs no sampling:
how far apart the filtered distributions are in each setting (compress/evaluate/sampling_distributions.py), and the
temperature at which the compressed model is closest to its base (compress/evaluate/sampling_temperature.py). Then both
models continue prompts from the text, with equal random numbers and by beam search (sampling_runs.py beside it).

Memory: the logits of one window and float64 copies of some positions. What is kept are sums over windows, so the text
may be as long as one likes. Windows are the unit of standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.calib.documents import source_name
from compress.errors import CalibrationError
from compress.evaluate import sampling_distributions as distributions
from compress.evaluate import sampling_temperature as best
from compress.evaluate.reader import Execution, Reader
from compress.evaluate.sampling_distributions import SamplingSetting, grid, order, penalize
from compress.evaluate.sampling_runs import COPIES, BeamSearch, Sampled, continue_prompts, search_beams
from compress.evaluate.sampling_temperature import TemperatureAdvice
from compress.evaluate.scores import text_windows
from compress.model import load, writing
from compress.numerics import kl
from compress.progress import Progress, silent

TEMPERATURES = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2)
TOP_K, TOP_P, MIN_P = (0, 50), (1.0, 0.9), (0.0, 0.05)
ERRORS = ("acceptance", "kl_kept", "jaccard", "same_cdf", "same_gumbel", "entropy_gap")  # have a standard error


@dataclass(frozen=True)
class SamplingRequest:
    """What to compare, on which text."""

    text: str | Path
    settings: Sequence[SamplingSetting]  # of `grid`
    seq_len: int = 256  # tokens of a window
    max_tokens: int = 8192  # of the text
    prompts: int = 8  # that both models continue in some of the settings; 0: none
    prompt_tokens: int = 32
    new_tokens: int = 64
    seed: int = 0  # of everything random
    beams: Sequence[int] = ()  # numbers of beams with which both models also continue the prompts


@dataclass(frozen=True)
class SamplingComparison:
    """What two models sample in each setting, and which temperatures to recommend."""

    text: str  # file or data set name
    base: str  # name of the base model
    tokens: int  # positions compared
    windows: int
    seq_len: int
    same_top1: float  # share of positions at which both models find the same token likeliest; no setting changes it
    settings: list[dict[str, Any]]  # a row for each setting: the setting, and means over positions
    temperatures: list[TemperatureAdvice]
    sampled: list[Sampled]
    begins_with: str = ""  # what each window begins with, by the tokenizer's name of it
    beams: Sequence[BeamSearch] = ()

    def plain(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def default_settings(
    temperatures: Sequence[float] = (),
    top_k: Sequence[int] = (),
    top_p: Sequence[float] = (),
    min_p: Sequence[float] = (),
    others: Sequence[Sequence[float]] = (),
) -> list[SamplingSetting]:
    """Return the grid of these values, those above where none are given; ValueError for an impossible one.

    others: values of typical_p, eta and repetition_penalty; off where none are given. Where there are
    any, filters that are not given are off, too.
    """
    filters: tuple[Sequence[float], ...] = (top_k or TOP_K, top_p or TOP_P, min_p or MIN_P)
    if any(others):
        filters = (top_k or (0,), top_p or (1.0,), min_p or (0.0,))
    rest = [given or (off,) for given, off in zip(others, (1.0, 0.0, 1.0), strict=False)]
    return grid(temperatures or TEMPERATURES, *filters, *rest)


@torch.no_grad()
def measure(
    directory: Path,
    base: Path,
    request: SamplingRequest,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> SamplingComparison:
    """Compare a checkpoint with its base in all settings of a request.

    Raises CheckpointError, CalibrationError, or NumericalError for logits that are not finite.
    """
    execution, say = execution or Execution(), progress or silent
    cut = text_windows([directory, base], request.text, request.seq_len, request.max_tokens, execution.bos)
    windows, unscored = cut.tokens, cut.prefix.unscored
    prompts = _prompts(windows, request)
    readers = [
        Reader(load.load_model(each, execution.dtype, execution.device), name=each.name) for each in (directory, base)
    ]
    stop = writing.end_tokens(readers[1].model)
    temperatures = sorted({setting.temperature for setting in request.settings})
    betas = best.nodes(temperatures)
    parts: list[list[Tensor]] = [[], []]
    for index, window in enumerate(windows):
        tokens = window[None].to(execution.device)
        logits = [reader.predictions(tokens)[unscored:] for reader in readers]
        sums_of = window_sums(logits, request.settings, temperatures, betas, tokens[0, unscored:])
        for kept, sums in zip(parts, sums_of, strict=True):
            kept.append(sums)
        say("comparing distributions", index + 1, len(windows))
    positions = request.seq_len - 1 - unscored
    means, curves = (torch.stack(part, -1) / positions for part in parts)
    runs, searches = list[Sampled](), list[BeamSearch]()
    if len(prompts):
        some = sampled_settings(request.settings)
        runs = continue_prompts(readers, prompts, request.new_tokens, stop, some, request.seed, say)
        searches = search_beams(readers, prompts, request.new_tokens, stop, request.beams)
    return SamplingComparison(
        text=source_name(request.text),
        base=base.name,
        tokens=len(windows) * positions,
        windows=len(windows),
        seq_len=request.seq_len,
        same_top1=float(means[-1].mean()),
        settings=rows(request.settings, means[:-1]),
        temperatures=best.recommend(curves, temperatures, betas, request.seed),
        sampled=runs,
        begins_with=cut.prefix.text,
        beams=searches,
    )


def window_sums(
    logits: Sequence[Tensor],
    settings: Sequence[SamplingSetting],
    temperatures: Sequence[float],
    betas: Tensor,
    text: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sums over positions: [settings * figures + 1] and those of `sampling_temperature.sums`, float64, CPU.

    logits: those of the model and of its base [positions, vocabulary]. The last of the first is the count of positions
    with the same likeliest token. text int64 [at least positions]: token i is the last in front of position i; what a
    repetition penalty asks for.
    """
    figures = torch.zeros(len(settings) * len(distributions.NAMES) + 1, dtype=torch.float64)
    curves = torch.zeros(2 * len(temperatures) + 3 * len(betas), dtype=torch.float64)
    for part in kl.slices(len(logits[0]), COPIES * logits[0].shape[1]):
        plain = [each[part].double() for each in logits]
        by_setting: dict[SamplingSetting, Tensor] = {}
        for penalty in {setting.repetition_penalty for setting in settings}:
            model, base = (order(_penalize_part(each, text, part, penalty)) for each in plain)
            ratios = distributions.by_ratio(base, model)
            for setting in settings:
                if setting.repetition_penalty == penalty:
                    by_setting[setting] = distributions.compare(base, model, setting, ratios).sum(-1)
        same = (plain[0].argmax(-1) == plain[1].argmax(-1)).sum().double()
        figures += torch.cat([*(by_setting[setting] for setting in settings), same[None]]).cpu()
        curves += best.sums(plain[1], plain[0], temperatures, betas).sum(-1).cpu()
    return figures, curves


def _penalize_part(logits: Tensor, text: Tensor | None, part: slice, penalty: float) -> Tensor:
    """Return the logits of some positions of a text with a repetition penalty."""
    if penalty == 1:
        return logits
    assert text is not None
    places = torch.arange(part.start, part.start + len(logits), device=text.device)
    front = text[: int(places[-1]) + 1].expand(len(logits), -1)
    return penalize(logits, front, penalty, torch.arange(front.shape[1], device=text.device) <= places[:, None])


def rows(settings: Sequence[SamplingSetting], means: Tensor) -> list[dict[str, Any]]:
    """Return a row of JSON values for each setting; means float64 [settings * figures, windows] over positions."""
    rows = []
    windows = means.shape[1]
    for setting, values in zip(settings, means.view(len(settings), len(distributions.NAMES), windows), strict=True):
        by_name = dict(zip(distributions.NAMES, values, strict=True))
        by_name["entropy_gap"] = by_name["entropy"] - by_name["base_entropy"]
        row: dict[str, Any] = {**setting._asdict(), "filters": setting.filters}
        row |= {name: float(value.mean()) for name, value in by_name.items()}
        row["kl"] = row["kl"] / row["kl_defined"] if row["kl_defined"] else None
        for name in ERRORS:
            row[f"{name}_se"] = float(by_name[name].std()) / math.sqrt(windows) if windows > 1 else None
        rows.append(row)
    return rows


def sampled_settings(settings: Sequence[SamplingSetting]) -> list[SamplingSetting]:
    """Return the settings that are sampled: every temperature with the first filters of the grid, and with the last."""
    filters = list(dict.fromkeys(setting[1:] for setting in settings))
    return [setting for setting in settings if setting[1:] in (filters[0], filters[-1])]


def _prompts(windows: Tensor, request: SamplingRequest) -> Tensor:
    """Return the beginnings of windows that lie evenly in the text, int64 [at most prompts, prompt_tokens]."""
    if request.prompt_tokens >= request.seq_len:
        raise CalibrationError(
            f"prompts of {request.prompt_tokens} tokens do not fit windows of {request.seq_len}; raise seq_len"
        )
    count = min(request.prompts, len(windows))
    places = torch.arange(count) * len(windows) // max(1, count)
    return windows[places, : request.prompt_tokens]
