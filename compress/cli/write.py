"""Let models write: `compress generate`, `chat` and `serve`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from typer import Argument, Option

from compress.cli.options import (
    AsJson,
    Cache,
    CacheCalib,
    CacheSet,
    Device,
    Level,
    Model,
    Seed,
    at_level,
    cache_recipes,
    check_model,
    check_paths,
    device_named,
    errors,
    note,
)
from compress.errors import CompressError
from compress.storage import paths

if TYPE_CHECKING:
    from compress.evaluate.generation import Continuation, Style, TextWriter
    from compress.speculate.generation import Speculation

NewTokens = Annotated[int, Option("--max-new-tokens", min=1, help="Tokens to write, at most.")]
Temperature = Annotated[float, Option(min=0, help="Of sampling; 0: the most likely token each time.")]
TopK = Annotated[int, Option(min=0, help="Draw from so many of the likeliest tokens; 0: from all.")]
TopP = Annotated[float, Option(min=0, max=1, help="Draw from the fewest tokens with this share of the probability.")]
MinP = Annotated[float, Option(min=0, max=1, help="Draw from tokens this likely, next to the likeliest one.")]
System = Annotated[str | None, Option(metavar="TEXT", help="What a chat begins with, as its template puts it.")]
Draft = Annotated[
    str | None, Option(metavar="MODEL", help="A smaller model with the same tokens that writes ahead; checked.")
]
Speculate = Annotated[
    bool,
    Option("--speculate", help="Write faster by drafts of the model itself, which it checks; same law."),
]
Drafts = Annotated[
    str | None,
    Option(metavar="DRAFTS", help="What --speculate drafts, such as ngram+level=4. Default: what the checkpoint has."),
]
ENGINES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("engines.yaml").read_text("utf-8"))
HELP = "/stats tokens, rate and memory of the cache; /reset a new conversation; /quit"


def generate(
    model: Model,
    prompt: Annotated[str | None, Option(help="Text to continue.")] = None,
    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help='A prompt a line: text, or JSON of a text, {"prompt": ...} or {"messages": [...]}. Writes JSON lines.',
        ),
    ] = None,
    chat: Annotated[bool, Option("--chat", help="Through the chat template: the prompt is a user's message.")] = False,
    system: System = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    draft: Draft = None,
    speculate: Speculate = False,
    drafts: Drafts = None,
    level: Level = None,
    seed: Seed = 0,
    device: Device = "auto",
    kv: Cache = None,
    overrides: CacheSet = None,
    calib: CacheCalib = None,
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, with the cache that the checkpoint stores, if any, or with that of --kv.

    The text is shown as it is written. With --prompts the model continues each by itself, one after the other.
    """
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give --prompt or --prompts, one of them", param_hint="--prompt")
    if system is not None and not (chat or prompts):
        raise typer.BadParameter("goes with --chat; leave it out", param_hint="--system")
    if draft is not None and (speculate or drafts):
        raise typer.BadParameter("goes without --draft: one model writes ahead", param_hint="--speculate")
    with errors():
        model = at_level(model, level)
        check_paths(model, calib)
        if draft is not None:
            check_model(draft)
        caches = _caches(kv, overrides)
        from compress.evaluate import generation
        from compress.run.source import resolve

        directory, style = resolve(model), _style(max_new_tokens, temperature, seed, (top_k, top_p, min_p))
        asked = [prompt] if prompts is None else generation.read_prompts(prompts)
        ids = [_prompt_ids(directory, each, chat, system) for each in asked]
        helper = None if draft is None else resolve(draft)
        writer = generation.open_writer(directory, style, device_named(device), "auto", caches, calib, helper)
        writer.speculation = _speculation(speculate, drafts)
        _write_all(writer, asked, ids, as_json or prompts is not None)


def _caches(kv: str | None, overrides: list[str] | None) -> Any:
    """Return the cache that is asked for, as a list of recipes; None: that of the checkpoint, if any."""
    return cache_recipes([kv] if kv else [], overrides) if kv or overrides else None


def _write_all(writer: TextWriter, asked: list[Any], ids: list[list[int]], as_json: bool) -> None:
    """Continue prompts and print what comes, as it comes or as lines of JSON."""
    written: Continuation | None = None
    for prompt, tokens in zip(asked, ids, strict=True):
        written = writer.write(tokens, None if as_json else _tell)
        if as_json:
            key = "prompt" if isinstance(prompt, str) else "messages"
            cache = {} if written.cache is None else {"cache": dataclasses.asdict(written.cache)}
            drafts = {} if written.drafts is None else {"drafts": written.drafts.plain()}
            print(json.dumps({key: prompt, "text": written.text, **cache, **drafts}), flush=True)
    if not as_json:
        print()
    if written is not None and written.cache is not None and not as_json:
        note(f"cache: {written.cache.text}")
    if written is not None and written.drafts is not None and not as_json:
        note(f"drafts: {written.drafts.text()}")


def _speculation(is_asked: bool, drafts: str | None) -> Speculation | None:
    """Return how a model drafts for itself, None if it is not to."""
    from compress.speculate.generation import Speculation

    return Speculation(drafts) if is_asked or drafts else None


def chat(
    model: Model,
    system: System = None,
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.05,
    speculate: Speculate = False,
    drafts: Drafts = None,
    level: Level = None,
    seed: Seed = 0,
    device: Device = "auto",
    kv: Cache = None,
    overrides: CacheSet = None,
    calib: CacheCalib = None,
) -> None:
    """Chat with a model: a message a line, also from a pipe. The cache goes on from turn to turn.

    It is the one that the checkpoint stores, if any, or that of --kv.
    /stats: tokens, rate and memory of the cache; /reset: a new conversation; /quit.
    """
    with errors():
        model = at_level(model, level)
        check_paths(model, calib)
        caches = _caches(kv, overrides)
        from compress.evaluate import generation
        from compress.run.source import resolve

        directory, style = resolve(model), _style(max_new_tokens, temperature, seed, (top_k, top_p, min_p))
        writer = generation.open_writer(directory, style, device_named(device), "auto", caches, calib)
        writer.speculation = _speculation(speculate, drafts)
        begun = [{"role": "system", "content": system}] if system else []
        trial = [*begun, {"role": "user", "content": "?"}]
        generation.chat_ids(writer.tokenizer, trial, "this conversation")  # a template that takes it is there
        talk = generation.Conversation(writer, system)
        if sys.stdin.isatty():
            note(HELP)
        commands: dict[str, Callable[[], None]] = {"/reset": talk.reset, "/help": lambda: note(HELP)}
        commands["/stats"] = lambda: print(json.dumps(talk.stats()), flush=True)
        for line in _lines():
            if line == "/quit":
                break
            if line in commands:
                commands[line]()
            elif line.startswith("/") and line[1:].isalpha():
                note(f"there is no {line}; {HELP}")
            else:
                _answer(talk, line)


def _answer(talk: Any, message: str) -> None:
    """Print the answer to a message; an error that leaves the conversation usable is a note."""
    try:
        talk.say(message, _tell)
    except CompressError as error:
        note(str(error))
        return
    print(flush=True)


def _lines() -> Any:
    """Yield lines of the standard input that are not empty; a terminal gets a sign that one is waited for."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("> ", end="", flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def _tell(text: str) -> None:
    print(text, end="", flush=True)


def _style(new_tokens: int, temperature: float, seed: int, tokens: tuple[int, float, float]) -> Style:
    """Return how a model writes; tokens: top k, top p and min p."""
    from compress.evaluate.generation import Style
    from compress.model.writing import Filter

    return Style(new_tokens, temperature, seed, Filter(*tokens))


def _prompt_ids(directory: Path, prompt: Any, is_chat: bool, system: str | None) -> list[int]:
    """Return the token ids of a prompt: as text, or as messages through the chat template."""
    from compress.evaluate import generation
    from compress.model.load import load_tokenizer

    if isinstance(prompt, str) and not is_chat and system is None:
        return generation.prompt_ids(directory, prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    begun = [{"role": "system", "content": system}] if system is not None else []
    return generation.chat_ids(load_tokenizer(directory), [*begun, *messages], "the prompt")


def serve(
    directory: Annotated[str, Argument(metavar="DIR", help="A checkpoint that compress wrote, or a GGUF file.")],
    more: Annotated[list[str] | None, Argument(metavar="-- ARGS", help="Passed on to the engine as they are.")] = None,
    engine: Annotated[
        str | None,
        Option(metavar="NAME", help=f"One of {', '.join(ENGINES)}. Default: the first of these that is installed."),
    ] = None,
    only_print: Annotated[bool, Option("--print", help="Print the command line and stop.")] = False,
) -> None:
    """Start the best engine that is installed on a checkpoint, an HTTP server with the API of OpenAI.

    vLLM, SGLang, transformers, or llama-server of llama.cpp, which reads a GGUF export: that is written beside the
    checkpoint where it is missing or older. The command line is printed first.
    """
    with errors():
        check_model(directory)
        path = Path(directory)
        is_file = paths.gguf_file(path) is not None if path.exists() else False
        chosen = _engine(engine, is_file)
        export = path if is_file else Path(f"{str(path).rstrip('/')}.gguf")
        words = [*_engine_words(chosen, path, export), *(more or [])]
        if "file" in ENGINES[chosen] and not is_file and _is_older(export, path):
            writing = ["export", str(path), "--to", "gguf", "--out", str(export), "--overwrite"]
            print(shlex.join(["compress", *writing]), flush=True)
            if not only_print:
                from compress.export import convert

                convert.export(path, "gguf", export, overwrite=True)
        print(shlex.join(words), flush=True)
        if not only_print:
            os.execvp(words[0], words)


def _is_older(export: Path, checkpoint: Path) -> bool:
    """Return whether an export is missing, or from before the checkpoint was written."""
    from compress.storage.checkpoint import MANIFEST

    manifest = checkpoint / MANIFEST
    return not export.exists() or (manifest.exists() and manifest.stat().st_mtime > export.stat().st_mtime)


def _engine(asked: str | None, is_file: bool) -> str:
    """Return the engine to start; CompressError where it, or any, is not installed; wrong usage for another."""
    if asked is not None and asked not in ENGINES:
        raise typer.BadParameter(f"{asked!r} is none of {', '.join(ENGINES)}", param_hint="--engine")
    installed = (name for name in ENGINES if _is_installed(ENGINES[name]) and ("file" in ENGINES[name] or not is_file))
    best = next((name for name in installed if asked in (None, name)), None)
    if best is not None:
        return best
    readers = " or ".join(f"{each['program']} of {name}" for name, each in ENGINES.items() if "file" in each)
    if is_file:
        raise CompressError(f"{readers}, which serves GGUF files, is not installed")
    what = "no engine is" if asked is None else f"{asked} is not"
    advice = f"pip install vllm, or sglang, or 'transformers[serving]'; or put {readers} on the PATH"
    raise CompressError(f"{what} installed; {advice}")


def _is_installed(engine: dict[str, Any]) -> bool:
    if "program" in engine:
        return shutil.which(engine["program"]) is not None
    return all(find_spec(name) is not None for name in engine["packages"])


def _engine_words(name: str, path: Path, export: Path) -> list[str]:
    """Return the command line of an engine for a checkpoint (docs/serving.md)."""
    from compress.runtime import kv_config
    from compress.storage.checkpoint import read_config

    engine = ENGINES[name]
    config = {} if "file" in engine else read_config(path)
    if config and "applies_cache" not in engine and kv_config.stored_section(config) is not None:
        note(f"{name} does not apply the checkpoint's kv_cache; --engine vllm and transformers do")
    places = {"MODEL": str(export if "file" in engine else path), "PYTHON": sys.executable}
    packed = config.get("quantization_config")
    has_experts = isinstance(packed, dict) and "experts" in json.dumps(packed)
    return [
        *(places.get(word, word) for word in engine["command"]),
        *(engine.get("experts", []) if has_experts else []),
    ]
