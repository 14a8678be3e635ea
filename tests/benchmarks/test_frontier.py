"""benchmarks/frontier.py: which entries are measured, the page that is made from rows, paired differences."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import frontier  # noqa: E402
import frontier_page  # noqa: E402

BOOKS = Path(__file__).parents[1] / "models" / "books-8m"
HELD_OUT = Path(__file__).parents[1] / "data" / "books_heldout.txt"


def row(entry: str, tool: str, bits: float, blocks: list[float]) -> dict[str, Any]:
    """A row as `frontier.py` writes it, with the figures that the page shows."""
    figures = {"kl_mean": sum(blocks) / len(blocks), "kl_se": 0.01, "kl_blocks": blocks, "perplexity": 20.0}
    figures |= {
        "same_top1": 0.8,
        "cpu_s": 12.3,
        "quantize_cpu_s": None,
        "tokens": 64 * len(blocks),
        "base_perplexity": 19.0,
        "begins_with": "",
    }
    facts = {"entry": entry, "tool": tool, "version": "1.2", "bpw": bits, "whole_bpw": bits + 2, "model": "some-model"}
    facts |= {"text": "some_text.txt", "calib": "other.txt", "samples": 64, "seq_len": 1024, "windows": 8}
    return {**facts, **figures, "processor_features": ["avx2"], "machine": {"cpu": "a processor"}}


def test_entries_are_patterns_and_tools_without_a_python_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--calib", "c", "--text", "t", "--peer", "hqq=python"]
    entries = frontier.wanted(frontier.parse(["model", "HQQ*", "llama.cpp Q2_K", "vq2bit", "some.yaml", *options]))
    assert entries == ["HQQ 4, groups of 64", "HQQ 3, groups of 64", "HQQ 2, groups of 64", "vq2bit", "some.yaml"]
    assert "llama-cpp: left out, no --peer llama-cpp=PYTHON" in capsys.readouterr().err
    everything = frontier.wanted(frontier.parse(["model", *options]))
    assert everything == [*entries[:3], *frontier.OURS]


def test_rows_of_peers_name_tools_that_are_there() -> None:
    import peers

    assert {tool for tool, _ in frontier.PEERS.values()} <= peers.load_tools().keys()


def test_a_paired_difference_is_that_of_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    other = torch.rand(50, generator=generator) + 1
    ours = 0.8 * other + 0.01 * torch.randn(50, generator=generator)
    change, error = frontier_page.paired_change(
        row("a", "compress", 2, ours.tolist()), row("b", "tool", 2, other.tolist())
    )
    assert change == pytest.approx(((ours - other).mean() / other.mean()).item())
    assert error == pytest.approx(((ours - other).std() / math.sqrt(50) / other.mean()).item())
    assert error < 0.1 * ((ours.std() ** 2 + other.std() ** 2) / 50).sqrt() / other.mean() * 10


def test_the_page_has_every_row_and_is_the_same_when_written_again(tmp_path: Path) -> None:
    rows = [
        row("ours2", "compress", 2.0, [0.2, 0.3, 0.25]),
        row("theirs2", "tool", 2.1, [0.4, 0.5, 0.4]),
        row("theirs4", "tool", 4.25, [0.1, 0.2, 0.1]),
        row("worse4", "tool", 4.5, [0.3, 0.3, 0.3]),
    ]
    frontier_page.write(rows, tmp_path)
    text = (tmp_path / "frontier.md").read_text()
    lines = {
        line.split("|")[2].strip(): line
        for line in text.splitlines()
        if line.startswith(("| • |", "|  | ")) and "| row |" not in line
    }
    assert list(lines) == ["**`ours2`**", "theirs2", "theirs4", "worse4"]
    assert [name for name, line in lines.items() if "•" in line] == ["**`ours2`**", "theirs4"]
    assert "| `ours2` | theirs2 | -0.100 | -42.3% |" in text
    for axis in ("linears", "whole"):
        name = f"frontier-some-model-some_text-{axis}.svg"
        assert f"({name})" in text
        assert all(entry["entry"] in (tmp_path / name).read_text() for entry in rows)
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}
    frontier_page.write(json.loads(json.dumps(rows)), tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_a_model_has_no_divergence_from_itself_and_blocks_add_up(tmp_path: Path) -> None:
    args = frontier.parse(["model", "--calib", "c", "--text", "t", "--seq-len", "160", "--windows", "2"])
    kept = tmp_path / "logits.safetensors"
    figures = frontier.score(BOOKS, BOOKS, HELD_OUT, args, kept)
    assert figures["kl_mean"] == 0
    assert figures["tokens"] == 2 * 159
    assert len(figures["kl_blocks"]) == 2 * 3  # 64, 64 and 31 positions
    again = frontier.score(BOOKS, BOOKS, HELD_OUT, args, kept)  # from the logits that were kept
    assert again == figures
