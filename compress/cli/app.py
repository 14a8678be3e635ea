"""The command line: parse, call one function, print. Heavy imports stay inside the commands, so that --help is instant.

PANELS has every command under what people want; FORMER_WORDS has what earlier versions called some of them.

Exit codes: 0 done, 1 the user's input cannot be used, 2 wrong usage, 3 the result falls short of what `accept` says,
128 + n ended by signal n (130 by SIGINT, 143 by SIGTERM), 141 nobody reads the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from compress import ranks
from compress.cli import checkpoints, compare, draft, evaluate, export, lists, make, study, use, write
from compress.cli.options import note
from compress.version import __version__


class Command(NamedTuple):
    """A command, or a group of them, and what follows `compress NAME` in an example of it."""

    run: Callable[..., None] | typer.Typer
    example: str


PANELS: dict[str, dict[str, Command]] = {
    "Make a checkpoint": {
        "quantize": Command(make.quantize, "./my-model --recipe int4 --calib text.txt --max-memory 8GiB"),
        "plan": Command(make.plan, "./my-model --recipe int4 --max-memory 8GiB"),
        "allocate": Command(make.allocate, "./my-model --target 3.25bpw --text held_out.txt"),
        "transform": Command(make.transform, "./my-model --recipe rotated.yaml --out rotated"),
        "merge": Command(
            make.merge, "models_out/my-model-int4 --adapter ./lora --out models_out/merged --calib text.txt"
        ),
    },
    "Look": {
        "inspect": Command(checkpoints.inspect, "models_out/my-model-int4"),
        "verify": Command(checkpoints.verify, "models_out/my-model-int4"),
        "recipes": Command(lists.recipes, "int4 > mine.yaml"),
        "methods": Command(lists.methods, "recipe/calibration"),
    },
    "Use a model": {
        "generate": Command(write.generate, 'models_out/my-model-int4 --prompt "Once upon a time"'),
        "chat": Command(write.chat, "models_out/my-model-int4"),
        "draft": Command(draft.draft, "models_out/my-model-nested8 --text calib.txt"),
        "serve": Command(write.serve, "models_out/my-model-int4 -- --port 8000"),
        "kv": Command(use.kv, "bench ./my-model --kv kv4 --kv kv2 --text held_out.txt"),
    },
    "Compare": {
        "eval": Command(evaluate.evaluate, "models_out/my-model-int4 --base ./my-model --text held_out.txt"),
        "bench": Command(compare.bench, "models_out/my-model-int4 --base ./my-model --device cpu"),
        "sampling": Command(compare.sampling, "models_out/my-model-int4 --base ./my-model --text held_out.txt"),
        "study": Command(
            study.study,
            "./my-model --recipes 'int*,vq2bit' --text held_out.txt --calib text.txt --out studies/mine",
        ),
        "recommend": Command(compare.recommend, "./my-model --fits 8GiB --context 32768"),
    },
    "Exchange": {
        "export": Command(export.export, "models_out/my-model-int4 --to gguf --out my-model.gguf"),
        "imatrix": Command(make.imatrix, "./my-model --calib text.txt --out my-model.imatrix.gguf"),
        "push": Command(checkpoints.push, "models_out/my-model-int4 me/my-model-int4 --dry-run"),
    },
}
FORMER_WORDS = {  # the first word of a command line -> those that it stands for
    "measure": ("allocate", "--measure"),
    "report": ("inspect", "--page"),
    "kv-bench": ("kv", "bench"),
    "exports": ("export", "--list"),
}
SHARED_COMMANDS = {"quantize", "transform", "allocate", "eval", "study"}  # those that several processes may share


class _Commands(TyperGroup):
    """The commands, also under the words of earlier versions."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that a command line names; a former word is replaced, with a note."""
        if args[0] in FORMER_WORDS:
            note(f"{args[0]} is now called {' '.join(FORMER_WORDS[args[0]])}")
            args = [*FORMER_WORDS[args[0]], *args[1:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="compress",
    cls=_Commands,
    help="Compress language models: quantize a Hugging Face checkpoint by a recipe, check it, score it, use it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"compress {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compress language models: quantize a Hugging Face checkpoint by a recipe, check it, score it, use it."""
    if ranks.given()[1] > 1 and context.invoked_subcommand not in SHARED_COMMANDS:
        note(f"{context.invoked_subcommand} runs in one process; start it without torchrun")
        raise typer.Exit(2)


def _add_commands() -> None:
    for panel, commands in PANELS.items():
        for name, (run, example) in commands.items():
            epilog = f"Example: compress {name} {example}"
            if isinstance(run, typer.Typer):
                app.add_typer(run, name=name, epilog=epilog, rich_help_panel=panel)
            else:
                app.command(name, epilog=epilog, rich_help_panel=panel)(run)


_add_commands()
