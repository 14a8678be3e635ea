"""Triton kernels on the CPU. Import this before anything that imports triton.

Triton 3.6 turns the bounds of loops into integers in a way that NumPy 2.4 refuses: mended here, for tests only.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

try:
    import triton
    from triton.runtime import interpreter
except ModuleNotFoundError:
    import pytest

    pytest.skip("triton is not installed", allow_module_level=True)

_patch_tensor = interpreter._patch_lang_tensor


def _mended(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _mended
assert triton.knobs.runtime.interpret, "triton was imported before TRITON_INTERPRET was set"
