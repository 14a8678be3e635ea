"""Measure an engine: tokens a second and the time to the first token, with several requests at a time.

Each model runs in a process of its own, this file: `python -m compress.evaluate.serving ENGINE MODEL SETTINGS`. It
writes "ready", then for each line of JSON that it reads, a number of requests, a line with the seconds after which the
first and the last token of each request came. The requests of a turn come at once, with prompts of the same length and
nothing in common, and go on to the same number of new tokens, the likeliest ones. The better of two turns counts.

On a CPU models run side by side and take turns, so that a busy machine slows all alike; on a GPU one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from compress.errors import CompressError, first_line
from compress.ranks import children

Times = list[tuple[float, float]]  # seconds to the first and to the last token, for each request
Turn = Callable[[list[list[int]], int], Times]  # of prompts and a number of new tokens

IDS = 256  # token ids that prompts are made of: all models have so many
TURNS = 2  # times that each case is measured


class Load(NamedTuple):
    """What an engine is asked."""

    prompt_tokens: int
    new_tokens: int
    concurrency: tuple[int, ...]  # requests at a time
    device: str = "cpu"
    cache_nbytes: int | None = None  # for keys and values; None: what the engine takes

    @property
    def length(self) -> int:
        """Tokens of a whole sequence."""
        return self.prompt_tokens + self.new_tokens


class ServingSpeed(NamedTuple):
    """What came of a number of requests at a time."""

    requests: int
    tokens_per_s: float  # new ones of all requests together, from the start to the last
    first_token_s: float  # median over requests
    last_first_token_s: float  # of the request that waits longest

    @classmethod
    def of_times(cls, times: Times, new_tokens: int) -> ServingSpeed:
        """Return the rates of a turn."""
        first, last = [each for each, _ in times], max(each for _, each in times)
        return cls(len(times), len(times) * new_tokens / last, statistics.median(first), max(first))


def choose_engine(asked: str | None) -> str:
    """Return the engine to measure, by default the first that is installed; CompressError where it is not."""
    if asked is not None and asked not in ENGINES:
        raise CompressError(f"--engine {asked}: it is none of {', '.join(ENGINES)}")
    engine = next((name for name in ENGINES if asked in (None, name) and find_spec(name) is not None), None)
    if engine is None:
        raise CompressError(f"--engine {asked}: it is not installed; pip install {asked}, or leave --engine out")
    return engine


def measure(models: Sequence[Path], engine: str, load: Load) -> list[list[ServingSpeed]]:
    """Return for each model what came of each number of requests. Raises CompressError where an engine ends early."""
    groups = [models] if load.device == "cpu" else [[model] for model in models]
    speeds: list[list[ServingSpeed]] = []
    for group in groups:
        with ExitStack() as stack:
            processes = [stack.enter_context(_run_engine(engine, model, load)) for model in group]
            for ask in processes:
                ask(1)  # compiles, and fills caches
            best: list[list[ServingSpeed]] = [[] for _ in processes]
            for requests in load.concurrency:
                turns = [[ask(requests) for ask in processes] for _ in range(TURNS)]
                for rates, of_model in zip(best, zip(*turns, strict=True), strict=True):
                    each = (ServingSpeed.of_times(times, load.new_tokens) for times in of_model)
                    rates.append(max(each, key=lambda speed: speed.tokens_per_s))
            speeds += best
    return speeds


@contextmanager
def _run_engine(engine: str, model: Path, load: Load) -> Iterator[Callable[[int], Times]]:
    """Start a process with a model, and yield what asks it; the process ends with the context."""
    words = (*children.module_command("compress.evaluate.serving"), engine, str(model), json.dumps(load))
    with tempfile.TemporaryFile("w+") as log:
        process = children.start_answering(words, log)
        assert process.stdin is not None and process.stdout is not None
        answers, asked = process.stdout, process.stdin

        def next_answer() -> Any:
            for line in answers:  # an engine may write lines of its own
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
            log.seek(0)
            last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "without a word")
            raise CompressError(f"{engine} has ended while it served {model}: {last.strip()[:300]}")

        def ask(requests: int) -> Times:
            with suppress(BrokenPipeError):  # no answer comes, and what the process wrote says why
                print(requests, file=asked, flush=True)
            return [(first, last) for first, last in next_answer()]

        try:
            next_answer()
            yield ask
        finally:
            with suppress(BrokenPipeError):
                asked.close()
            children.wait(process, 30)
            answers.close()


ANSWER = "compress-serving "  # what a line begins with that is an answer


def _vllm(model: str, load: Load) -> Turn:
    """Return what gives requests to vLLM, one step of the engine at a time."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    room = {} if load.cache_nbytes is None else {"kv_cache_memory_bytes": load.cache_nbytes}
    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=load.device == "cpu",
        max_model_len=load.length,
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        **room,
    )
    count = 0

    def turn(prompts: list[list[int]], new_tokens: int) -> Times:
        nonlocal count
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        first, last = dict[str, float](), dict[str, float]()
        begun = time.perf_counter()
        for prompt in prompts:
            count += 1
            llm.llm_engine.add_request(str(count), {"prompt_token_ids": prompt}, sampling)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                passed = time.perf_counter() - begun
                if output.outputs and output.outputs[0].token_ids:
                    first.setdefault(output.request_id, passed)
                    last[output.request_id] = passed
        return [(first[name], last[name]) for name in first]

    return turn


def _sglang(model: str, load: Load) -> Turn:
    """Return what gives requests to SGLang as streams."""
    from sglang import Engine

    engine = Engine(
        model_path=model,
        dtype="bfloat16",
        context_length=load.length + 8,
        device=load.device,
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        log_level="error",
    )

    async def one(prompt: list[int], new_tokens: int, begun: float) -> tuple[float, float]:
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        came = []
        async for _ in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            came.append(time.perf_counter() - begun)
        return came[0], came[-1]

    async def all_of(prompts: list[list[int]], new_tokens: int) -> Times:
        begun = time.perf_counter()
        return list(await asyncio.gather(*(one(prompt, new_tokens, begun) for prompt in prompts)))

    return lambda prompts, new_tokens: asyncio.get_event_loop().run_until_complete(all_of(prompts, new_tokens))


def _transformers(model: str, load: Load) -> Turn:
    """Return what gives requests to `generate` of transformers as one batch, with the checkpoint's own cache."""
    import torch

    from compress.model.load import load_model

    loaded: Any = load_model(Path(model), "bfloat16", load.device)

    def turn(prompts: list[list[int]], new_tokens: int) -> Times:
        came: list[float] = []

        def note_time(ids: Any, scores: Any) -> Any:
            came.append(time.perf_counter() - begun)
            return scores

        tokens = torch.tensor(prompts, device=loaded.device)
        length = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        begun = time.perf_counter()
        with torch.inference_mode():
            mask = torch.ones_like(tokens)
            loaded.generate(tokens, attention_mask=mask, do_sample=False, logits_processor=[note_time], **length)
        return [(came[0], time.perf_counter() - begun)] * len(prompts)

    return turn


ENGINES: dict[str, Callable[[str, Load], Turn]] = {"vllm": _vllm, "sglang": _sglang, "transformers": _transformers}


def _serve(engine: str, model: str, settings: str) -> None:
    """Answer what comes, until nothing does."""
    load = Load(*json.loads(settings))
    turn, asked = ENGINES[engine](model, load), 0
    print(ANSWER + "null", flush=True)
    for line in sys.stdin:
        prompts = []
        for _ in range(int(line)):
            asked += 1
            prompts.append([(asked * 31 + place * (1 + 2 * (asked % 64))) % IDS for place in range(load.prompt_tokens)])
        print(ANSWER + json.dumps(turn(prompts, load.new_tokens)), flush=True)


if __name__ == "__main__":
    try:
        _serve(*sys.argv[1:])
    except (CompressError, ImportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {first_line(error)}")
