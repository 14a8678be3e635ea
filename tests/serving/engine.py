"""vLLM engines for tests, each in a process of its own: a second one in the same process fails.

    python engine.py        reads a line of JSON for each engine from its input, writes its exit code as a line

    {"model": DIR, "out": FILE, "prompts": [[ids], ...], "images": [FILE, ...], "tokens": 16, "options": {...},
     "lora": DIR or null}
    {..., "rounds": [{"prompts": [[ids], ...], "tokens": 16}, ...]}      batch after batch, and facts of the cache
    {"serve": ["--model", DIR, ...]}        an HTTP server, until it is killed; its process id comes first

Every engine is forked from one process that has imported vLLM, which takes longer than all else. What engines print
goes to the file "log".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

ALONE = {  # the fastest start: everything in this process, on one thread
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
SECONDS = 600


def answer(asked: dict[str, Any]) -> Any:
    """For each prompt the tokens that are generated, greedily, and the log probabilities of the likeliest."""
    from vllm import LLM

    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, **asked["options"]}
    if options.get("tensor_parallel_size", 1) == 1:
        options["distributed_executor_backend"] = "uni"
    llm = LLM(asked["model"], **options)
    if "rounds" in asked:
        rounds = [generate(llm, each) for each in asked["rounds"]]
        facts = {"cache": facts_of_cache(llm), "drafts": counts_of_drafts(llm), "weights": facts_of_draft_weights(llm)}
        return {"rounds": rounds, **facts}
    return generate(llm, asked)


def generate(llm: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """scored: so many log probabilities at each place of the prompts come, too; -1: those of all tokens."""
    from vllm import SamplingParams

    adapter = None
    if asked.get("lora"):
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest("adapter", 1, asked["lora"])
    if asked.get("fresh"):
        assert llm.reset_prefix_cache()
    scores = {"prompt_logprobs": asked["scored"]} if "scored" in asked else {}
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], logprobs=5, ignore_eos=True, **scores)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    for prompt, file in zip(prompts, asked.get("images", []), strict=False):
        from PIL import Image

        prompt["multi_modal_data"] = {"image": Image.open(file)}
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    return [
        {
            "prompt": list(output.prompt_token_ids),  # as the engine has it, with the tokens of images
            "ids": list(output.outputs[0].token_ids),
            "logprobs": [{int(k): v.logprob for k, v in each.items()} for each in output.outputs[0].logprobs],
            "hits": output.num_cached_tokens,
            "scores": [[each[token].logprob for token in sorted(each)] for each in (output.prompt_logprobs or [])[1:]],
        }
        for output in outputs
    ]


def facts_of_cache(llm: Any) -> dict[str, Any]:
    """Blocks, and of each layer in this process its attention and its pages [blocks, KV heads, tokens, bytes]."""
    blocks = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.num_blocks
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    layers = [layer for layer in layers if hasattr(layer, "kv_cache")]  # experts are among them, too
    shapes = [[*layer.kv_cache.shape] for layer in layers]
    return {"blocks": blocks, "shapes": shapes, "kinds": [type(layer.impl).__name__ for layer in layers]}


def counts_of_drafts(llm: Any) -> dict[str, int]:
    """What vLLM counts of drafts where it counts at all (`disable_log_stats=False`)."""
    if not llm.llm_engine.log_stats:
        return {}
    sums = [each for each in llm.get_metrics() if each.name.startswith("vllm:spec_decode_num_")]
    return {each.name.removeprefix("vllm:spec_decode_num_"): each.value for each in sums if hasattr(each, "value")}


def facts_of_draft_weights(llm: Any) -> dict[str, int]:
    """Bytes of the draft model's linears and tables in this process, and those of them that are the target's."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    draft = getattr(getattr(runner, "drafter", None), "model", None)
    if draft is None:
        return {}
    target = {each.untyped_storage().data_ptr() for each in runner.model.parameters() if each.numel()}
    matrices = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in draft.parameters() if t.dim() > 1}
    return {"all": sum(matrices.values()), "shared": sum(n for place, n in matrices.items() if place in target)}


def serve(words: list[str]) -> None:
    """Run vLLM's HTTP server, as `python -m vllm.entrypoints.openai.api_server` does."""
    import runpy

    sys.argv = ["api_server", *words]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def child(asked: dict[str, Any]) -> None:
    """Do what is asked and end the process."""
    os.setsid()  # a server ends with all processes that it has started
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    signal.alarm(SECONDS)
    code = 1
    try:
        exec(asked.get("patch", ""), {})
        if "serve" in asked:
            serve(asked["serve"])
        else:
            Path(asked["out"]).write_text(json.dumps(answer(asked)))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    os.environ.update(ALONE)
    import torch
    import vllm.entrypoints.openai.api_server
    import vllm.plugins
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        number = os.fork()
        if number == 0:
            os.environ.update(asked.get("environment", {}))
            child(asked)
        if "serve" in asked:
            print(number, flush=True)
            continue
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
