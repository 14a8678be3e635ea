"""Score a model with tasks of lm-evaluation-harness, beside its original.

Its Python API (lm_eval.simple_evaluate) runs the tasks on a model that is loaded here, in the same way as everywhere
else, so that packed checkpoints need nothing of lm_eval. What comes back for each document is joined on its id: flips,
McNemar's test and intervals are those of our own tasks (compress/evaluate/task_scores.py), not the harness's standard
errors, which know nothing of pairs.

A task needs a figure that is 0 or 1 for a document: acc, exact_match, or another one. One without (perplexity, BLEU)
is refused; KL and perplexity are measured by `compress eval` itself. lm_eval is an optional package, imported when it
is asked for. It fetches data sets from the hub unless a task names local files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.calib import prefix
from compress.errors import CalibrationError, RecipeError, first_line, needs, shown
from compress.evaluate import task_scores
from compress.evaluate.items import Outcome
from compress.evaluate.reader import Execution
from compress.evaluate.task_scores import TaskScore
from compress.model import load
from compress.model.architectures import max_positions
from compress.progress import Progress
from compress.recipe.schema import Bos
from compress.storage.files import read_text

WAY = "lm-eval"
FIGURES = ("acc", "exact_match", "em", "pass@1")  # the first that a task has is used
BY_LENGTH = "acc_norm"


def evaluate(
    directories: Sequence[Path],
    tasks: Sequence[str],
    execution: Execution,
    limit: int | None = None,
    progress: Progress | None = None,
) -> list[TaskScore]:
    """Return the figures of each task for a checkpoint, directories[0], paired with those of directories[1] if given.

    tasks: names of lm_eval's, or .yaml files of one. limit: documents of each. Raises MissingPackageError without
    lm_eval, RecipeError for a task that there is not, or that has no figure of 0 and 1.
    """
    manager, names = task_manager(tasks)
    samples_of = []
    for number, directory in enumerate(directories):
        if progress is not None:
            progress(f"lm-eval on {directory.name}", number, len(directories))
        samples_of.append(_samples(directory, names, manager, execution, limit))
    own = [(name, outcomes(name, samples)) for name, samples in samples_of[0].items()]
    others = [{name: outcomes(name, samples) for name, samples in each.items()} for each in samples_of[1:]]
    return [task_scores.summary(name, WAY, each, others[0][name] if others else None) for name, each in own]


def task_manager(tasks: Sequence[str]) -> tuple[Any, list[str]]:
    """Return lm_eval's manager of tasks, and the names of those that are asked for."""
    with needs("lm_eval", "a task of lm-evaluation-harness"):
        from lm_eval.tasks import TaskManager
    folders, names = [], []
    for task in tasks:
        path = Path(task)
        if path.suffix in (".yaml", ".yml"):
            folders.append(str(path.parent))
            names.append(_name(path))
        else:
            names.append(task)
    manager = TaskManager(include_path=folders or None)
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(f"lm-eval has no task {shown(unknown[0])}; `lm_eval ls tasks` lists them")
    return manager, names


def _name(path: Path) -> str:
    """Return the name of the task in a file."""
    import yaml

    class Plain(yaml.SafeLoader):
        """Reads the tag !function, which lm_eval's files may have, as text."""

    Plain.add_constructor("!function", lambda loader, node: str(node.value))
    try:
        values = yaml.load(read_text(path), Plain)  # noqa: S506  (a safe loader)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise CalibrationError(f"cannot read the task {path} ({first_line(error)})") from error
    if not isinstance(values, dict) or not isinstance(values.get("task"), str):
        raise CalibrationError(f'{path} names no task; it needs a line "task: NAME"')
    return str(values["task"])


def adds_bos(tokenizer: Any, bos: Bos) -> bool:
    """Return whether lm-eval lets the tokenizer begin a text; CalibrationError for tokens that it does not put."""
    begun = prefix.of_tokenizer(tokenizer, bos).tokens
    if begun and not prefix.of_tokenizer(tokenizer).tokens:
        raise CalibrationError("lm-eval puts before a text only what its tokenizer does by itself; leave --bos at auto")
    return bool(begun)


def _samples(
    directory: Path, names: Sequence[str], manager: Any, execution: Execution, limit: int | None
) -> dict[str, list[Mapping[str, Any]]]:
    """Return what lm_eval keeps of each document, by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = load.load_model(directory, execution.dtype, execution.device)
    positions = max_positions(model.config.get_text_config())
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tokenizer = load.load_tokenizer(directory)
    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        add_bos_token=adds_bos(tokenizer, execution.bos),
        backend="causal",
        batch_size=execution.batch or 1,
        max_length=positions,
        softmax_dtype="float32",
        device=execution.device,
    )
    try:
        results = simple_evaluate(
            model=lm,
            tasks=list(names),
            task_manager=manager,
            limit=limit,
            log_samples=True,
            bootstrap_iters=0,
        )
    except load.FAILURES as error:
        raise CalibrationError(f"lm-eval cannot run {', '.join(names)}: {first_line(error)}") from error
    return dict((results or {}).get("samples", {}))


def outcomes(task: str, samples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Return the outcome of each document from lm_eval's samples; of several filters of answers the first counts."""
    if not samples:
        raise CalibrationError(f"lm-eval task {task} gave no documents")
    first = samples[0].get("filter")
    return [_outcome(task, sample) for sample in samples if sample.get("filter") == first]


def _outcome(task: str, sample: Mapping[str, Any]) -> Outcome:
    names = [*FIGURES, *sample.get("metrics", ())]
    figure = next((name for name in names if sample.get(name) in (0, 1)), None)
    if figure is None:
        raise RecipeError(
            f"lm-eval task {task} has no figure of 0 or 1 for a document (it has {', '.join(sample.get('metrics', ()))}"
            "); tasks without cannot be compared item by item"
        )
    answers = sample.get("filtered_resps", ())
    by_length = sample.get(BY_LENGTH)
    return Outcome(
        str(sample["doc_id"]),
        bool(sample[figure]),
        _choice(answers),
        right_by_bytes=bool(by_length) if by_length in (0, 1) else None,
    )


def _choice(answers: Sequence[Any]) -> str:
    """Return what the model chose: the place of the likeliest continuation, or what it wrote."""
    if answers and all(isinstance(each, list | tuple) and len(each) == 2 for each in answers):
        likelihoods = [float(each[0]) for each in answers]
        if len(likelihoods) == 1:
            return str(answers[0][1])  # whether the continuation is the greedy one
        return str(likelihoods.index(max(likelihoods)))
    return " ".join(map(str, answers))
