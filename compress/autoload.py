"""Lets plain transformers load packed checkpoints, with or without `import compress`.

`register` runs on `import compress`: it registers with transformers at once if that is loaded, else as soon as it is.
The same goes for PEFT, which is to put adapters beside packed linears.
`install` is the entry point that torch calls at the end of `import torch` (group `torch.backends`, meant for devices,
and the only hook that every user of transformers passes). Loading it imports this package, and with that registers, so
that `AutoModelForCausalLM.from_pretrained(directory)` works in a program that has never heard of compress.

Switched off by COMPRESS_AUTOLOAD=0, or for all of torch's extensions by TORCH_DEVICE_BACKEND_AUTOLOAD=0; an explicit
`import compress` registers all the same. Nothing here imports torch or transformers before the program does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

# The first holds the table of quantization methods; the second serves where the first was half loaded when we came.
TARGETS = ("transformers.quantizers.auto", "transformers.modeling_utils")

PEFT = "peft.tuners.lora.model"  # when it is loaded, all is there that its hooks need, and nothing has copied it yet

_TORCH_CAME_FIRST = "torch" in sys.modules


def register() -> None:
    """Register with transformers and PEFT now, or when they load."""
    _register_now()
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def install() -> None:
    """Entry point for torch; all but the opt-out is done by then, because loading it imports the package."""
    if os.environ.get("COMPRESS_AUTOLOAD") != "0" or not _TORCH_CAME_FIRST:
        return
    # torch, not the program, imported the package: leave no trace, so that an explicit import starts afresh
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "compress"]:
        del sys.modules[name]


class _Finder:
    """Finds nothing itself: lets us register right after each of TARGETS and PEFT has run."""

    def __init__(self) -> None:
        self.pending = {*TARGETS, PEFT}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.pending:
            return None
        self.pending.remove(fullname)  # first, because the search below asks this finder too
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register_now()

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_now() -> None:
    """Register with what is loaded: of each module, something that it defines last is there."""
    if hasattr(sys.modules.get(TARGETS[0]), "get_hf_quantizer"):
        _load("compress.runtime.hf", "transformers")
    if hasattr(sys.modules.get(PEFT), "LoraModel"):
        _load("compress.runtime.peft_hooks", "peft")


def _load(module: str, what: str) -> None:
    """Import what registers itself. Inside an import of the program's, which must not break whatever is wrong here."""
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        warnings.warn(f"compress cannot register with this version of {what}: {error}", stacklevel=2)
