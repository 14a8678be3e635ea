"""Declare the options of the commands that plan, measure or write a checkpoint: the fields of `RunOptions`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import typer
from typer import Option

from compress import plugins
from compress.cli.options import (
    Adapter,
    ComputeDtype,
    Device,
    Model,
    Seed,
    check_adapter,
    check_device,
    check_paths,
    device_named,
    note,
    parse_memory,
    parse_time,
)
from compress.errors import RecipeError
from compress.storage import paths

if TYPE_CHECKING:
    from compress.run.job import Job

DEFAULT_RECIPE = "trellis4bit"
CALIBRATION_RECIPE = "int8"  # only its calibration settings count
ALLOCATING_RECIPE = "mixed3bit"  # the default of the commands that need something to allocate
GOAL = ("target", "context", "max_kl")
DATA_FREE = ("out", "adapter", "overrides", "device", "overwrite", "allow_partial", "export")  # those without text
OUTPUT = ("out", "overwrite", "restart", "base_model", "work")
REQUIRED = inspect.Parameter.empty

Writes = Literal["checkpoint", "measurements"] | None

QUICK = (
    "calibration.tokens=auto",
    "calibration.num_samples=8",
    "calibration.seq_len=512",
    "calibration.gradient_tokens=2048",
)
WITHOUT_TEXT = ("calibration.importance=none", "quantize.two_sided=false")  # what an importance matrix cannot say
# --quick takes no gradients either.
ONE_SIDED_ROUNDING = "quantize.two_sided=false"


@dataclass(frozen=True)
class RunOptions:
    """The options shared by the commands that plan, measure or write a checkpoint. One field is one option."""

    model: Model
    recipe: Annotated[
        str, Option("--recipe", "-r", help="Built-in recipe (`compress recipes`), a YAML file, or two as vq2bit+kv2.")
    ] = DEFAULT_RECIPE
    out: Annotated[
        Path | None,
        Option(
            "--out", "-o", metavar="DIR", help="The checkpoint to be written. Default: models_out/<model>-<recipe>."
        ),
    ] = None
    calib: Annotated[
        str | None,
        Option(
            metavar="SRC",
            help="Text or chats: a .txt, .jsonl or .parquet file, or a data set; self: the model writes its own. "
            "Default: the text that compress comes with.",
        ),
    ] = None
    imatrix: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Importance matrix in a GGUF file (`compress imatrix` makes one): errors of weights count "
            "by it, and no text is read.",
        ),
    ] = None
    adapter: Adapter = None
    base_model: Annotated[
        str | None, Option(metavar="ID", help="Hub id of the original (owner/name), for the model card.")
    ] = None
    overrides: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Override a recipe value: bits=3; or FILE.yaml over it. Repeatable."),
    ] = None
    accept: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=BOUND",
            help="Score the result: kl=0.1 at most, TASK=-0.02 of the original's answers, text=FILE. Exit code 3 where "
            "it falls short. Repeatable.",
        ),
    ] = None
    max_memory: Annotated[
        str | None, Option(metavar="SIZE", help="Limit for this process: 8GiB. Default: what is free.")
    ] = None
    device: Device = "auto"
    dtype: ComputeDtype = None
    seed: Seed = 0
    target: Annotated[
        str | None,
        Option(
            metavar="SIZE", help="Allocate bits for 3.25bpw (linears), 2.1GiB (whole model), 75% units or 70% time."
        ),
    ] = None
    context: Annotated[
        int | None, Option(min=1, metavar="TOKENS", help="Count the cache of so many tokens in --target, too.")
    ] = None
    max_kl: Annotated[
        float | None, Option(metavar="NATS", help="Allocate the smallest model within this KL on the calibration text.")
    ] = None
    export: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Write the result in this format, too (`compress export --list`): OUT.gguf or OUT-NAME. The plan is "
            "checked for it, and a --target in bytes is that of a GGUF file.",
        ),
    ] = None
    measurements: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="Measured by `compress allocate --measure`, and gradients of the loss; made or reused. Default: "
            "beside the output, by model and recipe.",
        ),
    ] = None
    budget: Annotated[
        str | None, Option(metavar="TIME", help="To measure damages and quantize: 90s, 20min, 2h. Picks the estimator.")
    ] = None
    processes: Annotated[int, Option(min=1, help="Processes that measure choices side by side.")] = 1
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace an existing output once the new one is complete.")
    ] = False
    restart: Annotated[bool, Option("--restart", help="Forget an unfinished run and start over.")] = False
    allow_partial: Annotated[
        bool, Option("--allow-partial", help="Go on with less than half of the weights packed, or packed ones lost.")
    ] = False
    work: Annotated[
        Path | None,
        Option(metavar="DIR", help="For unfinished work; then --out may be an object store. Default: beside --out."),
    ] = None

    quick: Annotated[
        bool,
        Option(
            "--quick", help="4,096 calibration tokens, one-sided rounding: sooner, at some loss. The report says so."
        ),
    ] = False

    @property
    def recipe_overrides(self) -> list[str]:
        """The values of --set, and those that --quick, --target, --max-kl and --context stand for."""
        goal = {"allocate.target": self._goal(), "allocate.context": self.context, "export": self.export}
        quick = QUICK if self.quick else ()
        return [
            *quick,
            *(WITHOUT_TEXT if self.imatrix is not None else ()),
            *(self.overrides or []),
            *(f"{key}={value}" for key, value in goal.items() if value is not None),
            *map(_override_of_bound, self.accept or []),
        ]

    def _goal(self) -> str | None:
        """The target of an allocation that --target or --max-kl stands for."""
        from compress.recipe import Target

        if self.max_kl is None:
            try:
                return None if self.target is None else Target(self.target.strip()).text
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--target") from error
        if self.target is not None:
            raise typer.BadParameter("give --target or --max-kl, not both", param_hint="--max-kl")
        if self.context is not None:
            raise typer.BadParameter("give --target, a size that the cache is counted in", param_hint="--context")
        bound = f"{self.max_kl:.12f}".rstrip("0").rstrip(".")
        if not math.isfinite(self.max_kl) or self.max_kl <= 0 or not bound.strip("0."):
            raise typer.BadParameter("give a positive number of nats a token, such as 0.05", param_hint="--max-kl")
        return f"{bound}kl"

    def _check_folders(self, writes: Writes, out: Path | None) -> None:
        """Raise the error for a folder that the run could not write; `out`: that of the checkpoint, None: unknown."""
        read = [each for each in (Path(self.model), self.adapter) if each is not None and each.exists()]
        if writes is not None and self.measurements is not None:
            paths.check_outside(self.measurements, "--measurements", *read)
            paths.check_writable(self.measurements, "--measurements")
        elif writes == "measurements" and out is not None:
            paths.check_writable(out.parent, "--measurements")
        if writes == "checkpoint" and out is not None:
            paths.check_name(out)
            paths.check_apart(out, *read)
            if self.work is not None:
                paths.check_outside(self.work, "--work", *read)
                paths.check_writable(self.work, "--work")
            paths.check_out(out, self.overwrite)
            paths.check_writable(out.parent, "--out")

    @property
    def named_recipe(self) -> str:
        """The recipe: where none was named, that of the format to export."""
        return getattr(self._exported_by(), "RECIPE", self.recipe) if self.recipe == DEFAULT_RECIPE else self.recipe

    def _exported_by(self) -> ModuleType | None:
        """The target that --export names; unknown ones stop here."""
        return None if self.export is None else plugins.load("export", self.export.lower().replace("-", "_"))

    def export_path(self, out: Path) -> Path | None:
        """Return where the export of a checkpoint at `out` is written, None without one."""
        target = self._exported_by()
        return None if target is None else out.with_name(f"{out.name}{target.SUFFIX or f'-{self.export}'}")

    def data_free(self, scheme: str) -> RunOptions:
        """Return the options of a run that rounds by a scheme, without calibration; wrong usage for options of one."""
        from compress import recipe as recipes

        fields = [each for each in dataclasses.fields(self) if each.name not in ("model", *DATA_FREE)]
        if given := [each.name for each in fields if getattr(self, each.name) != each.default]:
            option = f"--{given[0].replace('_', '-')}"
            raise typer.BadParameter("has no effect with --model-free; leave it out", param_hint=option)
        name, own = recipes.data_free(scheme)
        return dataclasses.replace(self, recipe=name, overrides=[*own, *(self.overrides or [])])

    def job(self, pack: bool = True, writes: Writes = "checkpoint") -> Job:
        """Return the job of a run; wrong usage, paths and recipes stop here, before anything heavy is imported.

        `pack` False: the job applies only the transforms of the recipe. `writes`: None for a plan.
        """
        from compress import recipe as recipes

        target = self._exported_by()
        overrides, limit = self.recipe_overrides, parse_memory(self.max_memory)
        check_device(self.device)
        check_paths(self.model, *([] if self.calib == paths.SELF else [self.calib]))
        check_adapter(self.adapter)
        if self.imatrix is not None and not self.imatrix.is_file():
            raise typer.BadParameter(f"{self.imatrix} is no file", param_hint="--imatrix")
        if self.base_model is not None and not paths.HUB_ID.fullmatch(self.base_model):
            raise typer.BadParameter("give the id of a model on the hub, owner/name", param_hint="--base-model")
        given = self.out
        if target is not None and target.SUFFIX and given is not None and given.suffix == target.SUFFIX:
            given = given.with_suffix("")
        self._check_folders(writes, given)
        named = self.named_recipe
        if named != self.recipe:
            note(f"recipe: {named}, that of --export {self.export} in the place of {self.recipe}, the default")
        note(recipes.ambiguous(named))
        recipe = recipes.load(named, overrides)
        if self.quick and recipe.quantize.two_sided and not any("two_sided" in each for each in self.overrides or ()):
            recipe = recipes.load(named, [*overrides, ONE_SIDED_ROUNDING])
        if not pack and not recipe.transform:
            raise RecipeError(f"recipe {recipe.name!r} has no transform to apply; give one that has, or use quantize")
        if self.budget is not None and not hasattr(getattr(recipe.allocate, "config", None), "estimator"):
            reason = f"recipe {recipe.name!r} has no estimator of damages to choose; leave it out"
            raise typer.BadParameter(reason, param_hint="--budget")
        from compress.run.job import Job

        model = Path(self.model.rstrip("/")).name.removesuffix(paths.GGUF)
        name = re.sub(r"[^\w.-]+", "-", f"{model or 'model'}-{recipe.name}")
        out = given or Path("models_out") / (name if pack else f"{name}-transformed")
        self._check_folders(writes, out)
        return Job(
            model=self.model,
            recipe=recipe,
            out=out,
            adapter=self.adapter,
            base_model=self.base_model,
            calib=None if self.calib == paths.SELF else self.calib or str(paths.default_text()),
            imatrix=self.imatrix,
            max_memory=limit,
            device=device_named(self.device),
            dtype=self.dtype,
            seed=self.seed,
            overwrite=self.overwrite,
            restart=self.restart,
            work=self.work,
            allow_partial=self.allow_partial,
            pack=pack and recipe.packs,
            measurements=self.measurements,
            budget=parse_time(self.budget, "--budget"),
            processes=self.processes,
            quick=self.quick,
        )


def _override_of_bound(word: str) -> str:
    """Return the override that a value of --accept stands for; wrong usage for one that is none."""
    key, equals, bound = (part.strip() for part in word.partition("="))
    if not (key and equals and bound):
        raise typer.BadParameter(f"{word!r} is none of kl=0.1, text=FILE and TASK=-0.02", param_hint="--accept")
    return f"accept.{key}={bound}" if key in ("kl", "text") else f"accept.task.{key.removeprefix('task.')}={bound}"


def takes_run_options(
    *, without: tuple[str, ...] = (), helps: Mapping[str, str] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose first parameter is a `RunOptions` the fields of it as options.

    typer reads the options of a command from the parameters of its function. The command therefore gets a signature in
    which the fields of the dataclass, with their types and defaults, stand in place of the first parameter; when it is
    called, it puts them together again. A field that is added to the dataclass is an option of every command.
    `without`: fields that this command does not offer. `helps`: of fields that mean another thing here. `defaults`:
    values that differ here, or REQUIRED.
    """
    hints = get_type_hints(RunOptions, include_extras=True)
    hints |= {name: _with_help(hints[name], text) for name, text in (helps or {}).items()}
    shared = [
        _parameter(field.name, hints[field.name], defaults.get(field.name, field.default))
        for field in dataclasses.fields(RunOptions)
        if field.name not in without
    ]

    def add_options(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        parameters = [*shared, *(_parameter(each.name, each.annotation, each.default) for each in own)]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            options = RunOptions(**{each.name: values.pop(each.name) for each in shared})
            function(options, **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return add_options


def _with_help(annotation: Any, text: str) -> Any:
    """Return the type of an option, with another help."""
    value_type, option = get_args(annotation)
    option = copy.copy(option)
    option.help = text
    return Annotated[value_type, option]


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a parameter that is given by name, without a default where the dataclass field has none."""
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
