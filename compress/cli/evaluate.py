"""Score a model: `compress eval`, on texts, with suites and tasks of ours, or with tasks of lm-evaluation-harness."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from compress.cli.options import (
    Adapter,
    AsJson,
    Base,
    Bos,
    Cache,
    CacheCalib,
    CacheSet,
    Device,
    Dtype,
    Level,
    Model,
    at_level,
    cache_recipes,
    check_adapter,
    check_base,
    check_model,
    check_paths,
    device_named,
    errors,
    keep,
    note,
    note_prefix,
    required_text,
)
from compress.errors import CalibrationError

if TYPE_CHECKING:
    from compress.evaluate.reader import Execution, Readings
    from compress.evaluate.task_scores import TaskScore
    from compress.kv.settings import CacheSettings

GROUPS = ("items", "right", "original", "NLL", "original's")
SCORES = ("text", "tokens", "KL, nats a token", "perplexity", "original", "other top-1")
PAIRED = ("difference, 95%", "lost, gained", "p", "changed")
TASKS = ("task", "items", "right", "original", *PAIRED, "NLL", "less the original's, 95%")
HARNESS_TASKS = ("task", "items", "right", "95%", "original", *PAIRED)

Texts = Annotated[
    list[str] | None,
    Option("--text", metavar="FILE", help="Text to score; never the calibration text. With --suite repeatable."),
]
Suite = Annotated[
    str | None, Option(metavar="NAME", help="quick or full: texts, tasks, noise floor, defects; with --base.")
]
Tasks = Annotated[
    list[str] | None,
    Option("--task", metavar="NAME", help="Run a task; NAME=FILE for one that reads a file. Repeatable, with --base."),
]
Choices = Annotated[
    Path | None, Option(metavar="FILE", help="Multiple-choice questions, JSON lines: question, choices, answer.")
]
HarnessTasks = Annotated[
    str | None,
    Option(
        "--tasks",
        metavar="NAMES",
        help="Tasks of lm-evaluation-harness (package lm_eval), separated by commas: hellaswag,arc_easy or a .yaml.",
    ),
]
HarnessLimit = Annotated[int | None, Option("--limit", min=1, help="Documents of each of --tasks. Default: all.")]
WindowTokens = Annotated[int | None, Option(min=2, help="Tokens of a window. Default: 512; quick: 256.")]
Neurons = Annotated[
    float | None,
    Option(
        "--activation-sparsity",
        min=0,
        metavar="PERCENT",
        help="Also find the share of MLP neurons that tokens can go without while perplexity rises by this at most.",
    ),
]
MaxTokens = Annotated[
    int | None, Option(min=2, help="Tokens of a text to score. Default: 131072; quick: 4096; full: 65536.")
]


@dataclass(frozen=True)
class SuiteOptions:
    """The options of a suite as they were given."""

    suite: str | None
    tasks: Sequence[str]
    choices: Path | None
    texts: Sequence[str]
    seq_len: int | None
    max_tokens: int | None
    kv: Mapping[str, CacheSettings] | None = None  # one cache by name; empty: the checkpoint's own; None: without one
    calib: str | None = None  # text for it
    percent: float | None = None  # by which perplexity may rise while activations become sparse

    @property
    def is_any(self) -> bool:
        """Whether a suite or a task is asked for."""
        return bool(self.suite or self.tasks or self.choices)


def _one_text(texts: Sequence[str]) -> str | None:
    """Return the only text, None for none; wrong usage for several without a suite."""
    if len(texts) > 1:
        raise BadParameter("give one text, or --suite quick, which scores several", param_hint="--text")
    return texts[0] if texts else None


def evaluate(
    model: Model,
    texts: Texts = None,
    base: Base = None,
    suite: Suite = None,
    task: Tasks = None,
    choices: Choices = None,
    tasks: HarnessTasks = None,
    limit: HarnessLimit = None,
    seq_len: WindowTokens = None,
    max_tokens: MaxTokens = None,
    activation_sparsity: Neurons = None,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
    kv: Cache = None,
    overrides: CacheSet = None,
    calib: CacheCalib = None,
    adapter: Adapter = None,
    level: Level = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on text: perplexity over disjoint windows; against a base also KL divergence and top-1 agreement.

    With --adapter the LoRA is merged into the base that a model is compared with (without --base into MODEL).
    With --kv texts and tasks are read through that cache; without --base against the uncompressed one.

    With --suite, --task, --choices or --tasks both models answer tasks, too; a suite names what looks broken in MODEL.
    """
    with errors():
        model, percent = at_level(model, level), activation_sparsity
        options = SuiteOptions(suite, task or (), choices, texts or (), seq_len, max_tokens, percent=percent)
        if activation_sparsity is not None and (tasks is not None or options.is_any or kv or overrides):
            raise BadParameter("goes with --text alone", param_hint="--activation-sparsity")
        if tasks is not None:
            _check_alone(options, {"--kv": kv, "--set": overrides, "--calib": calib, "--adapter": adapter})
            return _run_harness(model, base, tasks, limit, (dtype, device_named(device), bos), as_json)
        caches = cache_recipes([kv] if kv else [], overrides) if kv or overrides else None
        if options.is_any:
            _check_suite(caches, calib, adapter)
            options = dataclasses.replace(options, kv=caches, calib=calib)
            return _run_suite(model, base, options, (dtype, device_named(device), bos), as_json)
        _run_text(model, base, options, caches, calib, adapter, (dtype, device, bos), as_json)


def _run_text(
    model: str,
    base: str | None,
    options: SuiteOptions,
    caches: Mapping[str, CacheSettings] | None,
    calib: str | None,
    adapter: Path | None,
    execution: tuple[str, str, Bos],
    as_json: bool,
) -> None:
    """Score a model on a text, alone or beside its original, and print that. execution: dtype, device and --bos."""
    text = required_text(_one_text(options.texts))
    check_paths(model, text, calib)
    check_base(model, base)
    check_adapter(adapter)
    from compress import evaluate as evaluation
    from compress.cli import tables
    from compress.evaluate import cache_scores, writers
    from compress.run.source import resolve

    dtype, device, bos = execution
    running = evaluation.Execution(dtype, device_named(device), bos=bos)
    seq_len, max_tokens = options.seq_len, options.max_tokens
    against = None if base is None else resolve(base, adapter)
    directory = resolve(model, adapter if base is None else None)
    if (scorer := writers.scorer(directory)) is not None:
        return _run_beside(scorer, directory, text, against, caches, (seq_len, max_tokens, running), as_json)
    lengths = seq_len or 512, max_tokens or 131_072
    note_prefix(directory, bos)
    with tables.progress_bar() as progress:
        if caches is None:
            report, read = partial(progress, "scoring"), None
            scores = evaluation.evaluate(directory, text, against, *lengths, running, report)
        else:
            directories = [directory, *([] if against is None else [against])]
            scores, read = cache_scores.evaluate(directories, text, caches, calib, lengths, running, progress)
    values = dataclasses.asdict(scores)
    if options.percent is not None:
        sparse = evaluation.measure_sparsity(directory, text, options.percent, lengths, running)
        values["activation_sparsity"] = dataclasses.asdict(sparse)
    _show_scores(values, read, as_json)


def _run_beside(
    scorer: Callable[..., Any],
    directory: Path,
    text: str,
    base: Path | None,
    caches: Any,
    how: tuple[int | None, int | None, Execution],
    as_json: bool,
) -> None:
    """Compare a model with its original, and print the scores. how: --seq-len, --max-tokens, type and device."""
    if base is None:
        raise BadParameter("a model with an encoder is compared with its original; name it", param_hint="--base")
    if caches is not None:
        raise BadParameter("has no effect on a model with an encoder; leave it out", param_hint="--kv")
    from compress.cli import tables

    with tables.progress_bar() as progress:
        scores = scorer(directory, text, base, how[:2], how[2], progress)
    figures = {name: value for name, value in dataclasses.asdict(scores).items() if value is not None}
    _show_scores(figures, None, as_json)


def _check_alone(options: SuiteOptions, others: dict[str, Any]) -> None:
    """Refuse options that would have no effect beside --tasks; wrong usage."""
    if options.is_any:
        raise BadParameter("runs alone; leave out --suite, --task and --choices", param_hint="--tasks")
    for option, value in others.items():
        if value:
            raise BadParameter("has no effect on --tasks; leave it out", param_hint=option)


def _check_suite(caches: Mapping[str, CacheSettings] | None, calib: str | None, adapter: Path | None) -> None:
    """Refuse options that would have no effect beside --suite and --task; wrong usage."""
    if adapter:
        raise BadParameter("goes with --text, not with tasks or a suite; leave it out", param_hint="--adapter")
    if calib and caches is None:
        raise BadParameter("goes with --kv; leave it out", param_hint="--calib")


def _show_scores(values: dict[str, Any], read: Readings | None, as_json: bool) -> None:
    """Print scores, and how a compressed cache was read."""
    from compress.cli import tables

    if as_json:
        print(json.dumps({**values, **({} if read is None else {"cache": read.plain()})}))
        return
    sparse = values.pop("activation_sparsity", None)
    tables.out.print(tables.evaluation_table(values))
    if sparse is not None:
        print(
            f"activation sparsity at {sparse['percent']:g}% more perplexity: {sparse['share']:.1%} of the neurons of "
            f"{sparse['layers']} MLPs ({sparse['dense_perplexity']:.3f} -> {sparse['perplexity']:.3f})"
        )
    if read is not None:
        print(f"cache {read.text}")


def _run_suite(
    model: str, base: str | None, options: SuiteOptions, execution: tuple[str, str, Bos], as_json: bool
) -> None:
    """Run suites and tasks, keep the result beside the checkpoint, and print it. execution: dtype, device and --bos."""
    if base is None and options.kv is not None:
        base = model
    if base is None:
        raise BadParameter("name the uncompressed model that the tasks compare with", param_hint="--base")
    check_paths(model, *options.texts, options.calib)
    check_base(model, base)
    if options.choices is not None and not options.choices.is_file():
        raise CalibrationError(f"{options.choices} is not a file; give questions as JSON lines")
    from compress.cli import tables
    from compress.evaluate import suite as suites
    from compress.evaluate.reader import Execution
    from compress.run.source import resolve

    tasks = [*options.tasks, *([f"choices={options.choices}"] if options.choices else [])]
    lengths = options.seq_len, options.max_tokens
    asked = suites.SuiteRequest(options.suite, tuple(options.texts), tuple(tasks), *lengths, options.kv, options.calib)
    suites.check(asked)
    directory, original = resolve(model), resolve(base)
    note_prefix(original, execution[2])
    running = Execution(dtype=execution[0], device=execution[1], bos=execution[2])
    with tables.progress_bar() as progress:
        result = suites.run(directory, original, asked, running, progress).plain()
    keep(directory, lambda record: record.add(directory, suites=[result]))
    if as_json:
        print(json.dumps(result))
        return
    _show_suite(result)


def _show_suite(result: dict[str, Any]) -> None:
    """Print the result of a suite."""
    from compress.cli import tables
    from compress.pages.suite import half_of_loss

    if result["texts"]:
        tables.out.print(tables.columns(SCORES, [_score_cells(row) for row in result["texts"]]))
    for each in result["lost"]:
        print(half_of_loss(each))
    if result["cache"]:
        print(f"read through the cache {result['cache']}, {result['cache_read']}")
    if result["floor"]:
        print(f"KL of {result['floor']['kl_mean']:.2g} is rounding: {result['floor']['path']}")
    _show_tasks(result["tasks"], result["remarks"])
    for each in result["findings"]:
        note(f"looks broken: {each}")
    if not result["findings"] and result["texts"]:
        print("no layer and no tokenizer looks broken")


def _show_tasks(tasks: Sequence[dict[str, Any]], remarks: Sequence[str]) -> None:
    """Print tasks beside the original, and what some of them have for each depth or the like."""
    from compress.cli import tables

    if tasks:
        print()
        tables.out.print(tables.columns(TASKS, [_task_cells(row) for row in tasks]))
        print("lost, gained: items that only the original, only the model has right; p: of McNemar's exact test")
    for each in remarks:
        print(each)
    for row in tasks:
        if row["groups"]:
            print(f"\n{row['task']} by {row['by']}")
            tables.out.print(tables.columns((row["by"], *GROUPS), [_group_cells(each) for each in row["groups"]]))


def _score_cells(row: dict[str, Any]) -> tuple[str, ...]:
    error = f" ± {row['kl_se']:.5f}" if row["kl_se"] is not None else ""
    perplexities = (f"{row[key]:.3f}" for key in ("perplexity", "base_perplexity"))
    cells = row["text"], f"{row['tokens']:,}", f"{row['kl_mean']:.5f}{error}"
    return (*cells, *perplexities, f"{1 - row['same_top1']:.1%}")


def _group_cells(row: dict[str, Any]) -> tuple[str, ...]:
    shares = (f"{row['accuracy']:.1%}", f"{row['base_accuracy']:.1%}")
    losses = ("" if each is None else f"{each:.3f}" for each in (row["nll"], row["base_nll"]))
    return (str(row["value"]), str(row["items"]), *shares, *losses)


def _task_cells(row: dict[str, Any]) -> tuple[str, ...]:
    from compress.pages.suite import nll_difference

    paired = row["paired"]
    loss = "" if row["nll"] is None else f"{row['nll']:.3f}"
    cells = row["task"], str(row["items"]), f"{row['accuracy']:.1%}"
    return (*cells, *_paired_cells(paired), loss, nll_difference(paired) or "")


def _paired_cells(paired: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the original's share of right items, and the cells of PAIRED."""
    from compress.pages.suite import difference

    counts = f"{paired['lost']}, {paired['gained']}", f"{paired['p_value']:.2g}"
    return (f"{paired['base_accuracy']:.1%}", difference(paired), *counts, f"{paired['all_flips']:.1%}")


def _run_harness(
    model: str, base: str | None, tasks: str, limit: int | None, execution: tuple[str, str, Bos], as_json: bool
) -> None:
    """Run tasks of lm-evaluation-harness, keep the result, and print it. execution: dtype, device and --bos."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise BadParameter("name at least one task", param_hint="--tasks")
    check_model(model)
    check_base(model, base)
    from compress.calib import prefix
    from compress.cli import tables
    from compress.evaluate import harness
    from compress.evaluate.reader import Execution
    from compress.evaluate.suite import SuiteResult
    from compress.run.source import resolve

    dtype, device, bos = execution
    directories = [resolve(each) for each in (model, base) if each is not None]
    note_prefix(directories[0], bos)
    start = time.perf_counter()
    with tables.progress_bar() as progress:
        scores = harness.evaluate(directories, names, Execution(dtype, device, bos=bos), limit, progress)
    if base is not None:
        seconds = time.perf_counter() - start
        result = SuiteResult(harness.WAY, directories[1].name, (), {}, tuple(scores), (), (), seconds)
        result = dataclasses.replace(result, begins_with=prefix.of_directory(directories[1], bos).text)
        keep(directories[0], lambda record: record.add(directories[0], suites=[result.plain()]))
    if as_json:
        print(json.dumps({"tasks": [dataclasses.asdict(each) for each in scores]}))
        return
    tables.out.print(tables.columns(HARNESS_TASKS, [_harness_cells(each) for each in scores]))


def _harness_cells(score: TaskScore) -> tuple[str, ...]:
    bounds = f"{score.accuracy_low:.1%} to {score.accuracy_high:.1%}"
    cells = (score.task, str(score.items), f"{score.accuracy:.1%}", bounds)
    return (*cells, *(_paired_cells(dataclasses.asdict(score.paired)) if score.paired is not None else [""] * 5))
