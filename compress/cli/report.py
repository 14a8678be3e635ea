"""Write the page of a checkpoint: `compress report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.cli.evaluation_options import Base, Bos, note_prefix
from compress.cli.options import Device, Directory, Dtype, app, check_base, check_paths, device_named, errors
from compress.errors import RecipeError
from compress.storage import paths

if TYPE_CHECKING:
    from compress.evaluate import Comparison, Execution
    from compress.progress import Progress


@app.command(epilog="Example: compress report models_out/my-model-int4 --base ./my-model --text held_out.txt")
def report(
    directory: Directory,
    base: Base = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="SRC", help="Text to score; repeatable, with --base.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text that both models continue; repeatable, with --base.")
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="study.json of the same model: its recipes beside this checkpoint."),
    ] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text to score.")] = 32768,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that follow a prompt.")] = 48,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
) -> None:
    """Write report.html into a checkpoint: bits, losses and errors by layer, sizes, time and memory, in one file.

    With --base, texts are scored and prompts continued by both models; that is kept in scores.json for later pages, as
    are the recipes of --study.
    """
    with errors():
        paths.check_checkpoint(directory)
        check_paths(str(directory), *(text or ()))
        if base is None and (text or prompt):
            raise RecipeError("--text and --prompt compare with the uncompressed model; name it with --base")
        check_base(str(directory), base)
        from compress import evaluate as evaluation
        from compress.cli import tables
        from compress.evaluate import page, record
        from compress.study import losses

        points = [] if study is None else losses.points(study)
        execution = evaluation.Execution(dtype=dtype, device=device_named(device), bos=bos)
        page.write(directory)  # damaged facts, and a folder that nothing is written into, are refused before measuring
        if points:
            record.add_studies(directory, points)
        if base is not None:
            texts, generations = [], []
            if text:
                note_prefix(directory, bos)
            with tables.progress_bar() as progress:
                for source in text or ():
                    texts.append(_compared(directory, base, source, seq_len, max_tokens, execution, progress))
                for begun in prompt or ():
                    progress("writing", 0, 1)
                    generations.append(_continued(directory, base, begun, max_new_tokens, execution))
            record.add(directory, texts, generations)
        print(page.write(directory))


def _compared(
    directory: Path,
    base: str,
    text: str,
    seq_len: int,
    max_tokens: int,
    execution: Execution,
    progress: Progress,
) -> Comparison:
    """Score a checkpoint on a text against its original."""
    from compress import evaluate as evaluation
    from compress.run.source import resolve

    def say(done: int, total: int) -> None:
        progress(f"scoring {Path(text).name}", done, total)

    scores = evaluation.evaluate(directory, text, resolve(base), seq_len, max_tokens, execution, say)
    assert isinstance(scores, evaluation.Comparison)
    return scores


def _continued(directory: Path, base: str, prompt: str, tokens: int, execution: Execution) -> dict[str, str]:
    """Return what the original and a checkpoint write behind a prompt."""
    from compress import evaluate as evaluation
    from compress.run.source import resolve

    found = [
        evaluation.generate(model, prompt, tokens, dtype=execution.dtype, device=execution.device)
        for model in (resolve(base), directory)
    ]
    return {"prompt": prompt, "base": found[0], "model": found[1]}
