"""Packed checkpoints for tests of serving."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared import HEADS

from compress import api
from helpers import pico, runs


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """packed(model, recipe, *overrides) -> a checkpoint, written once."""

    @functools.cache
    def directory(name: str, recipe: str, *overrides: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        model = pico.save_pico(name, folder / "model", changes={**HEADS, **changes})
        out = folder / "packed"
        api.quantize(runs.job(model, runs.Setup(recipe, overrides), out))
        return out

    return directory
