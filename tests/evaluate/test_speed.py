"""Timing a checkpoint: what is measured is there and consistent; how fast it is, no test can say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from compress import api
from compress.cli.app import app
from compress.errors import BudgetError
from compress.evaluate import speed
from compress.model.load import load_model
from helpers.pico import save_pico
from helpers.runs import RTN, job


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speed")
    api.quantize(job(save_pico("llama", directory / "source"), RTN, directory / "out"))
    return directory / "out"


def test_measure(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MIN_SECONDS_PER_KIND", 0.0)
    monkeypatch.setitem(speed.COPY_NBYTES, "cpu", 1 << 20)
    monkeypatch.setitem(speed.ROTATED_NBYTES, "cpu", 1 << 16)
    found = speed.measure(packed, "cpu", 2, 5, 3, packed)
    assert found.base == packed.name
    assert min(found.base_prefill_tokens_per_s or 0, found.base_decode_tokens_per_s or 0) > 0
    assert min(found.prefill_tokens_per_s, found.decode_tokens_per_s, found.copy_bytes_per_s) > 0
    assert (found.batch, found.prompt_tokens, found.new_tokens) == (2, 5, 3)
    report = json.loads((packed / "report.json").read_text())
    assert sum(row.count for row in found.layers) == len(report["layers"])
    for row in found.layers:
        assert row.rows == 2 and row.ratio == row.bfloat16_s / row.seconds > 0
        nbytes = row.bpw * row.shape[0] * row.shape[1] / 8
        assert row.bytes_per_s == pytest.approx(nbytes / row.seconds)
        assert row.copy_share == pytest.approx(row.bytes_per_s / found.copy_bytes_per_s)


def test_the_original_takes_turns(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model makes the same calls, one after the other; the better of two turns counts."""
    clock, made = [0.0], list[tuple[str, int]]()

    class Model:
        device = torch.device("cpu")
        config = load_model(packed, "bfloat16", "cpu").config

        def __init__(self, name: str, words: int, pace: float) -> None:
            self.name, self.words, self.pace = name, words, pace

        def get_input_embeddings(self) -> nn.Embedding:
            return nn.Embedding(self.words, 1)

        def generate(self, tokens: torch.Tensor, *, max_new_tokens: int, **more: object) -> None:
            made.append((self.name, max_new_tokens))
            assert tokens.shape == (2, 6) and int(tokens.max()) < 9
            clock[0] += self.pace * max_new_tokens * (2 if len(made) <= 6 else 1)  # a busy machine at first

    monkeypatch.setattr(speed, "now", lambda device: clock[0])
    found = speed._generation([Model("model", 9, 0.5), Model("base", 30, 1.0)], 2, 6, 4)
    assert made == [(name, count) for count in (2, 1, 5, 1, 5) for name in ("model", "base")]
    assert found == [(2 * 6 / 0.5, 2 * 4 / 2), (2 * 6 / 1.0, 2 * 4 / 4)]


def test_calls_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of every kind is made, kinds in turn."""
    monkeypatch.setattr(speed, "MIN_SECONDS_PER_KIND", 0.0)
    made: list[str] = []
    kinds = [[lambda name=name: made.append(name) for name in names] for names in ("ab", "cde")]
    seconds = speed.in_turns(kinds, "cpu")
    assert len(seconds) == 2 and all(s > 0 for s in seconds)
    assert "".join(made[:10]) == "abcdeabcde" and len(made) % 5 == 0


def test_copies_exceed_the_caches() -> None:
    weights = speed.bfloat16_weights((256, 256), "cpu")
    assert sum(w.nbytes for w in weights) >= speed.ROTATED_NBYTES["cpu"]
    assert weights[0].dtype == torch.bfloat16 and not torch.equal(weights[0], weights[1])


@pytest.mark.slow
def test_the_command(packed: Path) -> None:
    shown = CliRunner().invoke(app, ["bench", str(packed), "--prompt-tokens", "4", "--new-tokens", "2"])
    assert shown.exit_code == 0 and "decode" in shown.output and "of copy rate" in shown.output
    told = CliRunner().invoke(app, ["bench", str(packed), "--prompt-tokens", "4", "--new-tokens", "2", "--json"])
    values = json.loads(told.stdout)
    assert values["device"] in ("cpu", "cuda") and values["layers"][0]["format"] == "int"


@pytest.mark.parametrize(("batch", "prompt", "new"), [(10**30, 8, 2), (1 << 40, 8, 2), (1, 10**30, 2), (1, 8, 10**12)])
def test_more_than_memory_holds(batch: int, prompt: int, new: int, packed: Path) -> None:
    with pytest.raises(BudgetError, match="which is not free; ask for fewer"):
        speed.measure(packed, batch=batch, prompt_tokens=prompt, new_tokens=new)
