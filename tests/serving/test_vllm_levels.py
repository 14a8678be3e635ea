"""A level of a checkpoint as the draft model of the whole in vLLM. Runs where vLLM is: `make vllm`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared import PROMPTS, SMALL, check
from in_vllm import in_rounds, needed, served

from compress.export import linked_level
from helpers import runs

pytestmark = needed

NESTED = (*SMALL, "bits=8", "nested=true")
CASES = {
    "nested": ("llama", "int4", *NESTED),
    "tied": ("llama_tied", "int4", *NESTED),
    "experts": ("mixtral", "int4", *NESTED),
    "kept tables": ("llama", "int4", *NESTED, *runs.KEEP_TABLES),
    "lattice": ("llama", "e8p2bit", *runs.SMALL, "bits=4"),
}
LEVEL = {"lattice": 2}  # else 4


def view_of(case: str, directory: Path, folder: Path) -> Path:
    linked_level.link(directory, LEVEL.get(case, 4), folder / "view")
    return folder / "view"


@pytest.mark.parametrize("case", CASES)
def test_a_level_drafts_for_the_whole(case: str, packed: Callable[..., Path], tmp_path: Path) -> None:
    """The answers are those of transformers, most drafts are right, and no matrix of the draft is a second one."""
    directory = packed(*CASES[case])
    drafts = {"method": "draft_model", "model": str(view_of(case, directory, tmp_path)), "num_speculative_tokens": 3}
    asked = [{"prompts": PROMPTS, "tokens": 24}]
    got = in_rounds(directory, tmp_path, asked, speculative_config=drafts, disable_log_stats=False)
    check(directory, got["rounds"][0])
    assert got["drafts"]["accepted_tokens"] > 0
    assert got["weights"]["all"] == got["weights"]["shared"] > 0
    assert "are tensors of the model that was loaded before" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("case", ["nested", "lattice"])
def test_a_level_is_served_alone(case: str, packed: Callable[..., Path], tmp_path: Path) -> None:
    view = view_of(case, packed(*CASES[case]), tmp_path)
    check(view, served(view, tmp_path))


def test_two_ranks_share_a_level(packed: Callable[..., Path], tmp_path: Path) -> None:
    directory = packed(*CASES["nested"])
    drafts = {
        "method": "draft_model",
        "model": str(view_of("nested", directory, tmp_path)),
        "num_speculative_tokens": 3,
    }
    drafts["draft_tensor_parallel_size"] = 2
    options: dict[str, Any] = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    check(directory, served(directory, tmp_path, speculative_config=drafts, **options))
    assert "are tensors of the model that was loaded before" in (tmp_path / "log").read_text()
