"""Triton kernels on the CPU. Import this before anything that imports triton.

Triton 3.6 turns the bounds of loops into integers in a way that NumPy 2.4 refuses: mended here, for tests only.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

triton = pytest.importorskip("triton", reason="triton is not installed")
from triton.runtime import interpreter  # noqa: E402

_patch_tensor = interpreter._patch_lang_tensor


def _mended(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _mended
assert triton.knobs.runtime.interpret, "triton was imported before TRITON_INTERPRET was set"
