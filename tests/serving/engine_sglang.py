"""An SGLang engine on the CPU for tests, in a process of its own.

    python engine_sglang.py '{"model": DIR, "out": FILE, "prompts": [[ids], ...], "tokens": 12, "options": {...}}'

PyPI has builds for GPUs only of two packages that SGLang imports, and uses none of their kernels here: stand-ins take
their place. The processes that SGLang starts import this file, and with it the stand-ins, too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

ABSENT = ("torchvision", "sgl_kernel")


class _Any(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a stand-in of a package whose build does not work here; say that it is not there to those who only ask."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        asked = sys._getframe(2).f_code.co_name == "find_spec"
        if name.partition(".")[0] not in ABSENT or asked:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


sys.meta_path.append(Absent())
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 2048,
    "log_level": "info",
}


def main() -> None:
    import sglang

    asked = json.loads(sys.argv[1])
    engine = sglang.Engine(model_path=asked["model"], **{**OPTIONS, **asked["options"]})
    sampling = {"temperature": 0, "max_new_tokens": asked["tokens"], "ignore_eos": True}
    answers = engine.generate(
        input_ids=asked["prompts"], sampling_params=sampling, return_logprob=True, top_logprobs_num=5
    )
    told = [
        {
            "prompt": prompt,
            "ids": answer["output_ids"],
            "logprobs": [
                {token: value for value, token, _ in top} for top in answer["meta_info"]["output_top_logprobs"]
            ],
        }
        for prompt, answer in zip(asked["prompts"], answers, strict=True)
    ]
    Path(asked["out"]).write_text(json.dumps(told))
    engine.shutdown()


if __name__ == "__main__":
    main()
