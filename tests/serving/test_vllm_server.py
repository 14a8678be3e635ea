"""vLLM's HTTP server on packed checkpoints, with and without drafts. Runs where vLLM is: `make vllm`."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compared import SMALL
from in_vllm import Server, needed, server

pytestmark = needed

PROMPTS = [[start, start + 1, start + 2] for start in range(40, 48)]
INT4 = ("llama", "int4", *SMALL)


@pytest.fixture(scope="module")
def texts(packed: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the server answers to each prompt alone; eight at once get the same."""
    with server(packed(*INT4), tmp_path_factory.mktemp("server")) as running:
        alone = [running.complete(ids) for ids in PROMPTS]
        assert answers(running) == alone
    return alone


def answers(running: Server) -> list[str]:
    """What it answers to all prompts at once."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(running.complete, PROMPTS))


def test_a_server_answers_eight_at_once(texts: list[str]) -> None:
    assert len(set(texts)) == len(texts) and all(texts)


@pytest.mark.parametrize("draft", ["ngram", "int4", "int2"])
def test_drafted_answers(draft: str, texts: list[str], packed: Callable[..., Path], tmp_path: Path) -> None:
    """The same as without drafts: of the text before, of the packed model itself, and of it in 2 bits.

    The model itself is right nearly always: its drafts show that what is accepted is right, too.
    """
    target = packed(*INT4)
    drafts = {"int4": target, "int2": packed(*INT4, "bits=2")}
    settings: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    if draft != "ngram":
        settings = {"method": "draft_model", "model": str(drafts[draft])}
    words = ("--speculative-config", json.dumps({**settings, "num_speculative_tokens": 3}))
    with server(target, tmp_path, *words) as running:
        assert answers(running) == texts
        drafted, accepted = (
            running.metric(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")
        )
    assert 0 < accepted <= drafted
    if draft == "int4":
        assert accepted > 0.9 * drafted
