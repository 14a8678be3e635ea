"""Judge a finished checkpoint by the section `accept` of its recipe: divergence, tasks, and what looks broken.

The checkpoint is kept whatever comes of it. What was measured stands in report.json under "acceptance", and as a suite
in scores.json. Scores are those of `compress eval`, in float32; the model, its original and the text are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from compress.errors import CompressError, RecipeError, first_line
from compress.evaluate import page, record, suite, task_runs
from compress.evaluate.reader import Execution
from compress.evaluate.suite import SuiteRequest, SuiteResult
from compress.model import architectures, load
from compress.progress import Progress, note
from compress.recipe.schema import Acceptance
from compress.run import source
from compress.run.job import Job
from compress.storage import manifest, paths

WINDOW_TOKENS, TEXT_TOKENS = 512, 16_384


def check(job: Job) -> None:
    """Raise the error for what could not be judged once the run is over; nothing without a section `accept`."""
    wanted = job.recipe.accept
    if wanted is None:
        return
    architectures.check_task(load.whole_config(source.of(job)), architectures.LANGUAGE)
    task_runs.check_tasks(None, tuple(wanted.task))
    text = _text(job, wanted)
    if text is None and wanted.kl is not None:
        raise RecipeError("accept: kl needs a text that the run is not calibrated on; give --accept text=FILE")
    if text is not None:
        paths.check_corpus(text)


def judge(job: Job, report: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Return the report of a finished run with its verdict, which is kept; the report itself without `accept`.

    "acceptance" holds whether it is "accepted", the "reasons" why it is not, a sentence each, figures, and all of that
    in a line, "text".
    """
    wanted = job.recipe.accept
    if wanted is None:
        return report
    text, base = _text(job, wanted), source.of(job)
    asked = SuiteRequest(
        texts=() if text is None else (text,),
        tasks=tuple(wanted.task),
        seq_len=min(WINDOW_TOKENS, architectures.max_positions(load.load_config(base)) or WINDOW_TOKENS),
        max_tokens=TEXT_TOKENS,
        kv=None if job.recipe.kv_cache is None else {},
        are_texts_scored=True,
    )
    result = suite.run(job.out, base, asked, Execution("float32", job.device), progress)
    reasons = [*_shortfalls(wanted, result), *(f"looks broken: {each}" for each in result.findings)]
    verdict = {
        "accepted": not reasons,
        "reasons": reasons,
        "kl": None if wanted.kl is None else {"most": wanted.kl, "text": text, **_divergence(result)},
        "task": {score.task: {"least": wanted.task[name], **_loss(score)} for name, score in _scores(wanted, result)},
        "seconds": round(result.seconds, 2),
    }
    report = {**report, "acceptance": {**verdict, "text": _sentence(verdict)}}
    _keep(job.out, report, result)
    return report


def _sentence(verdict: dict[str, Any]) -> str:
    """Return a verdict in one line."""
    kl, figures = verdict["kl"], []
    if kl is not None:
        error = "" if kl["se"] is None else f" ± {kl['se']:.2g}"
        figures.append(f"KL {kl['mean']:.4g}{error} of at most {kl['most']:g} on {kl['tokens']:,} tokens")
    for name, score in verdict["task"].items():
        figures.append(f"{name} {score['difference']:+.3f} of at least {score['least']:+g} on {score['items']} items")
    broken = [reason for reason in verdict["reasons"] if reason.startswith("looks broken")]
    return f"{'accepted' if verdict['accepted'] else 'falls short'}: {'; '.join([*figures, *broken])}"


def _text(job: Job, wanted: Acceptance) -> str | None:
    """Return the text that is scored; None where there is none that the run was not calibrated on."""
    default = str(paths.default_text())
    return wanted.text if wanted.text is not None else default if job.calib != default else None


def _shortfalls(wanted: Acceptance, result: SuiteResult) -> Iterator[str]:
    """Yield a sentence for each bound that is not kept; a figure that is no number keeps none."""
    if wanted.kl is not None and not (kl := result.texts[0].kl_mean) <= wanted.kl:
        yield f"KL {kl:.4g} is above {wanted.kl:g}"
    for name, score in _scores(wanted, result):
        if not score.paired.difference >= wanted.task[name]:
            yield f"{score.task} changes by {score.paired.difference:+.3f}, at least {wanted.task[name]:+g} is wanted"


def _scores(wanted: Acceptance, result: SuiteResult) -> Iterator[tuple[str, Any]]:
    """Yield each task as it was named, and its score."""
    yield from zip(wanted.task, result.tasks, strict=True)


def _divergence(result: SuiteResult) -> dict[str, Any]:
    scored = result.texts[0]
    return {"mean": scored.kl_mean, "se": scored.kl_se, "tokens": scored.tokens}


def _loss(score: Any) -> dict[str, Any]:
    paired = score.paired
    low, high = paired.difference_low, paired.difference_high
    return {"difference": paired.difference, "low": low, "high": high, "items": score.items}


def _keep(directory: Path, report: dict[str, Any], result: SuiteResult) -> None:
    """Write the report anew, with its hash in the manifest, and the scores beside it."""
    manifest.replace(directory, manifest.REPORT, json.dumps(report, indent=1) + "\n")
    try:
        record.add(directory, suites=[result.plain()])
    except (CompressError, OSError) as error:
        note(f"what was measured is not kept beside {directory}: {first_line(error)}")
    with suppress(CompressError, OSError):
        page.refresh(directory)
