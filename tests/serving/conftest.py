"""Packed checkpoints for tests of serving."""

from __future__ import annotations

import dataclasses
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
    """packed(model, recipe, *overrides) -> a checkpoint, written once; model: of pico, or any type of transformers."""

    @functools.cache
    def directory(name: str, recipe: str, *overrides: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        lists = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
        built = pico.build if name in pico.PICO else pico.of_type
        model = pico.save(built(name, {**HEADS, **lists}), folder / "model")
        job = runs.job(model, runs.Setup(recipe, overrides), folder / "packed")
        api.quantize(dataclasses.replace(job, pack=job.recipe.packs))  # a recipe of the cache packs no weights
        return job.out

    return directory
