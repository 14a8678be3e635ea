"""Look at checkpoints that compress wrote, and pass them on: `compress inspect`, `verify` and `push`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from compress.cli.options import (
    AsJson,
    Bos,
    Device,
    Directory,
    Dtype,
    check_base,
    check_paths,
    device_named,
    errors,
    note_prefix,
)
from compress.errors import RecipeError
from compress.storage import paths

if TYPE_CHECKING:
    from compress.evaluate.page import Wanted
    from compress.evaluate.reader import Execution

ON_PAGE = "With --page"  # the heading of the options that a page alone has a use for
PAGE_OPTIONS = ("base", "text", "prompt", "study", "seq_len", "max_tokens", "max_new_tokens", "bos", "dtype", "device")

PageBase = Annotated[
    str | None, Option(metavar="MODEL", help="Uncompressed model to compare with.", rich_help_panel=ON_PAGE)
]
PageTexts = Annotated[
    list[str] | None,
    Option("--text", metavar="SRC", help="Text to score; repeatable, with --base.", rich_help_panel=ON_PAGE),
]
PagePrompts = Annotated[
    list[str] | None, Option(help="Text that both models continue; repeatable, with --base.", rich_help_panel=ON_PAGE)
]
PageStudy = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="study.json of the same model: its recipes beside this checkpoint.",
        rich_help_panel=ON_PAGE,
    ),
]
PageWindow = Annotated[int, Option(min=2, help="Tokens of a window.", rich_help_panel=ON_PAGE)]
PageTokens = Annotated[int, Option(min=2, help="Tokens of each text to score.", rich_help_panel=ON_PAGE)]
PageNewTokens = Annotated[int, Option(min=1, help="Tokens that follow a prompt.", rich_help_panel=ON_PAGE)]


def inspect(
    context: typer.Context,
    directory: Directory,
    all_layers: Annotated[bool, Option("--all", help="Every layer, not only the worst.")] = False,
    page: Annotated[bool, Option("--page", help="Write report.html into the checkpoint, and print its path.")] = False,
    base: PageBase = None,
    text: PageTexts = None,
    prompt: PagePrompts = None,
    study: PageStudy = None,
    seq_len: PageWindow = 512,
    max_tokens: PageTokens = 32768,
    max_new_tokens: PageNewTokens = 48,
    bos: Bos = "auto",
    dtype: Dtype = "float32",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint stores: bits per weight by group of layers and in all, the largest errors, fallbacks.

    Of one that was saved again by other software, which writes no report: the bits.

    With --page, report.html is written instead: bits, losses and errors by layer, sizes, time and memory, in one file.
    With --base, texts are scored and prompts continued by both models; that is kept in scores.json for later pages, as
    are the recipes of --study.
    """
    _check_page_options(context, page)
    with errors():
        paths.check_checkpoint(directory)
        if not page:
            return _show_report(directory, all_layers, as_json)
        check_paths(str(directory), *(text or ()))
        if base is None and (text or prompt):
            raise RecipeError("--text and --prompt compare with the uncompressed model; name it with --base")
        check_base(str(directory), base)
        from compress.evaluate import page as pages
        from compress.evaluate.reader import Execution
        from compress.study import losses

        points = [] if study is None else losses.points(study)
        execution = Execution(dtype=dtype, device=device_named(device), bos=bos)
        pages.write(directory)  # damaged facts, and a folder that nothing is written into, are refused before measuring
        pages.add_studies(directory, points)
        if base is not None:
            wanted = pages.Wanted(tuple(text or ()), tuple(prompt or ()), seq_len, max_tokens, max_new_tokens)
            _measure_for_page(directory, base, wanted, execution)
        path = pages.write(directory)
        print(json.dumps({"page": str(path)}) if as_json else path)


def _measure_for_page(directory: Path, base: str, wanted: Wanted, execution: Execution) -> None:
    """Score texts and continue prompts with a checkpoint and its original."""
    from compress.cli import tables
    from compress.evaluate import page as pages
    from compress.run.source import resolve

    if wanted.texts:
        note_prefix(directory, execution.bos)
    with tables.progress_bar() as progress:
        pages.measure(directory, resolve(base), wanted, execution, progress)


def _check_page_options(context: typer.Context, page: bool) -> None:
    """Refuse options that would have no effect; wrong usage."""
    for name in ("all_layers",) if page else PAGE_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--all" if page else f"--{name.replace('_', '-')}"
            clause = "has no effect with --page" if page else "has no effect without --page"
            raise typer.BadParameter(f"{clause}; leave it out", param_hint=option)


def _show_report(directory: Path, all_layers: bool, as_json: bool) -> None:
    """Print the report of a checkpoint."""
    from compress.cli import tables
    from compress.run.plan_summary import level_sizes
    from compress.run.report import PACKED, load, worst

    report = load(directory)
    sizes_of_levels = level_sizes(report["layers"], report["nbytes"]["total"])
    if as_json:
        print(json.dumps({**report, "levels": [each._asdict() for each in sizes_of_levels]}))
        return
    sizes = dict(report["nbytes"])
    total = sizes.pop("total")
    kept = {name: nbytes for name, nbytes in sizes.items() if name not in PACKED}
    tables.out.print(tables.plan_table(report["plan"], kept, total, report["source_nbytes"], report["bpw"]))
    print(tables.bits(report["bpw"], report.get("whole")))
    for each in sizes_of_levels:
        print(f"level {each.level}: {tables.size(each.nbytes)}, {each.bpw:.3f} bits per packed weight")
    if "incomplete" in report:
        print(f"{directory}: {report['incomplete']}")
        return
    rows = report["layers"] if all_layers else worst(report["layers"])
    tables.out.print(tables.layers_table(rows, "all layers" if all_layers else "largest errors"))


def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Check a checkpoint: file hashes, names, shapes and types, and that every block loads and gives finite outputs.

    One that was saved again by other software has no hashes; the rest is checked.
    """
    with errors():
        paths.check_checkpoint(directory)
        from compress.cli import tables
        from compress.run import verify as checks

        with tables.progress_bar() as progress:
            counts = checks.verify(directory, progress)
        print(json.dumps(counts) if as_json else tables.verify_line(counts, str(directory)))


def push(
    directory: Directory,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the hub: owner/name.")],
    dry_run: Annotated[bool, Option("--dry-run", help="List what would be uploaded and stop.")] = False,
    private: Annotated[
        bool | None, Option("--private/--public", help="Of a repository that is made. Default: the account's.")
    ] = None,
    revision: Annotated[str | None, Option(metavar="BRANCH", help="Branch to write to. Default: main.")] = None,
    include: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Also this file, which has no name of a model's. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a checkpoint to the Hugging Face hub, once all of its files have the hashes of its manifest.

    Every file is named first. Files that the manifest does not list stay here. A listed one whose name is none of a
    model's is an error, unless it is given with --include. Weights in the repository (*.safetensors and their index)
    that are not among the uploaded files are deleted by the same commit; its other files stay. The token is that of
    `hf auth login`, or HF_TOKEN.
    """
    with errors():
        if not paths.HUB_ID.fullmatch(repo):
            raise typer.BadParameter("give owner/name", param_hint="REPO")
        paths.check_checkpoint(directory)
        from compress.cli.tables import size
        from compress.export import push as pushing

        upload = pushing.check(directory, include or ())
        if not as_json:
            for name, nbytes in upload.files.items():
                print(f"{nbytes:>14,}  {name}")
            for name in upload.left:
                print(f"{'stays here':>14}  {name}")
            print(f"deleted from {repo}: {', '.join(pushing.STALE_PATTERNS)} at its top that are not listed above")
        address = None if dry_run else pushing.push(directory, pushing.PushTarget(repo, revision, private), upload)
        if as_json:
            print(json.dumps({"repo": repo, "files": upload.files, "left": upload.left, "commit": address}))
            return
        outcome = f"would upload to {repo}" if address is None else f"uploaded to {address}"
        print(f"{len(upload.files)} files, {size(upload.nbytes)}, {outcome}")
