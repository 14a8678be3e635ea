"""`compress draft`: acceptance and bytes against slow sums, greedy choice against all orders, what is stored."""

from __future__ import annotations

import hashlib
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from compress import api, speculate
from compress.cli.app import app
from compress.errors import CalibrationError, RecipeError
from compress.evaluate import drafts
from compress.evaluate.drafts import DraftRequest
from compress.evaluate.reader import Execution, Reader
from compress.papers.speculate import draft_verify
from compress.run import verify
from compress.runtime.bypass import bypassed
from compress.speculate import default, generation
from compress.speculate.skipping import read_set
from compress.storage import manifest
from helpers.pico import of_type, save_pico
from helpers.runs import KEEP_TABLES, TEXT, Setup, job

GQA = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 6}
KNOWN = tuple((block, kind) for block in range(1, 5) for kind in ("attention", "mlp"))
IDS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(2))


def test_figures_are_those_of_float64_sums() -> None:
    model = of_type("llama", GQA)
    chosen = read_set("2/3a")
    row = drafts.measure(Reader(model), IDS, [(None, chosen)])[0]
    with torch.no_grad():
        p = model(IDS).logits[:, :-1].double().softmax(-1).flatten(0, 1)
        with bypassed(model, chosen):
            q = model(IDS).logits[:, :-1].double().softmax(-1).flatten(0, 1)
    assert row.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert row.acceptance == pytest.approx(
        sum(float(torch.minimum(a, b).sum()) for a, b in zip(p, q, strict=True)) / len(p), rel=1e-5
    )
    assert row.same_top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert (row.sublayers, row.count, row.specification) == ("2/3a", 3, "sublayers=2/3a")


def test_bytes_are_those_of_what_runs() -> None:
    model = of_type("llama", GQA)
    attention, mlp = (
        sum(4 * each.numel() for each in part.parameters())
        for part in (model.model.layers[0].self_attn, model.model.layers[0].mlp)
    )
    norms = 2 * 64 * 4
    whole = 6 * (attention + mlp + norms) + 4 * model.lm_head.weight.numel()
    assert drafts.read_nbytes(model, None, frozenset()) == whole
    assert drafts.read_nbytes(model, None, read_set("2/3a")) == whole - 2 * attention - mlp


def test_greedy_sets_are_those_of_a_slow_search() -> None:
    """Losses that grow with the set, as they mostly do: the lazy order is the exact one, with fewer scores."""
    generator = torch.Generator().manual_seed(1)
    own = dict(zip(KNOWN, torch.rand(len(KNOWN), generator=generator).tolist(), strict=True))
    pairs = {pair: float(torch.rand((), generator=generator)) for pair in combinations(KNOWN, 2)}
    sizes = {each: 1 + (each[1] == "mlp") for each in KNOWN}
    asked = list[frozenset[Any]]()

    def score(chosen: frozenset[Any]) -> float:
        asked.append(chosen)
        return -sum(own[each] for each in chosen) - sum(
            pairs[pair] for pair in combinations(KNOWN, 2) if set(pair) <= chosen
        )

    found = drafts.greedy(KNOWN, [1, 3, 5], score, sizes)
    lazy, slow, now = len(asked), frozenset[Any](), score(frozenset())
    for size in range(1, 6):
        each = min(
            (each for each in KNOWN if each not in slow), key=lambda each: (now - score(slow | {each})) / sizes[each]
        )
        slow |= {each}
        now = score(slow)
        if size in (1, 3, 5):
            assert found.pop(0) == slow
    assert lazy < len(asked) - lazy


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nested checkpoint of six blocks, of which two do next to nothing."""
    folder = tmp_path_factory.mktemp("drafts")
    model = of_type("llama", GQA)
    with torch.no_grad():
        for number in (2, 3):
            for linear in (model.model.layers[number].self_attn.o_proj, model.model.layers[number].mlp.down_proj):
                linear.weight.mul_(1e-3)
    source = save_pico("llama", folder / "source")
    model.save_pretrained(source)
    out = folder / "out"
    api.quantize(job(source, Setup("int8", (*KEEP_TABLES, "quantize.nested=true")), out))
    return out


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["draft", *words])


ASKED = ("--text", str(TEXT), "--seq-len", "32", "--choice-tokens", "96", "--max-tokens", "96", "--json")


def test_the_best_draft_is_stored_and_read(packed: Path) -> None:
    before = {path.name: path.read_bytes() for path in packed.iterdir() if path.is_file()}
    result = run(str(packed), *ASKED, "--share", "0.5")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout.splitlines()[-1])
    found = {(row["level"], row["sublayers"]): row for row in values["rows"]}
    assert set(found) == {(4, ""), (4, "2/3"), (None, "2/3")}  # the blocks that do nothing
    assert found[None, "2/3"]["acceptance"] > 0.98 and found[None, "2/3"]["bytes_share"] < 0.8
    assert found[4, "2/3"]["bytes_share"] < min(found[4, ""]["bytes_share"], found[None, "2/3"]["bytes_share"])
    best = max(values["rows"], key=lambda row: row["speedup"])
    assert values["stored"] and best["sublayers"] == "2/3" and values["best"].endswith("sublayers=2/3")
    after = {path.name: path.read_bytes() for path in packed.iterdir() if path.is_file()}
    assert {name for name in after if after[name] != before[name]} == {"config.json", manifest.MANIFEST}
    config = json.loads(after["config.json"])
    assert config.pop("speculate") == f"ngram+{values['best']}" and config == json.loads(before["config.json"])
    listed = json.loads(after[manifest.MANIFEST])["files"]
    assert listed["config.json"] == hashlib.sha256(after["config.json"]).hexdigest()
    verify.verify(packed)
    model: Any = AutoModelForCausalLM.from_pretrained(packed).eval()
    assert generation.default_drafts(model) == f"ngram+{values['best']}"
    ids, own = IDS[:1], speculate.with_settings()
    plain = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert torch.equal(
        model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, custom_generate=own), plain
    )
    default.store(packed, "")
    assert json.loads((packed / "config.json").read_text()) == json.loads(before["config.json"])
    verify.verify(packed)


def test_searches_of_plugins_and_dry_runs(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_verify, "CALIBRATION_TRIALS", 20)
    before = (packed / "config.json").read_bytes()
    result = run(str(packed), *ASKED, "--share", "0.5", "--by", "draft_verify", "--dry-run")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert {row["sublayers"] for row in rows if row["level"] is None} == {"2/3"}
    assert (packed / "config.json").read_bytes() == before
    table = run(str(packed), *ASKED[:-1], "--share", "0.25", "--dry-run")
    assert table.exit_code == 0 and "speed-up" in table.stdout and "not stored" in table.stdout


def test_what_cannot_be_is_said(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="unknown search of sublayers 'even'; known: greedy, draft_verify, swift"):
        drafts.choose(packed, DraftRequest(TEXT, (0.5,), "even", 32, 64, 64), Execution())
    short = tmp_path / "short.txt"
    short.write_text("a few words of text, no more than that are here")
    with pytest.raises(CalibrationError, match="give"):
        drafts.choose(packed, DraftRequest(short, (0.5,), seq_len=32, choice_tokens=64, max_tokens=64), Execution())
    plain = save_pico("llama", tmp_path / "plain")
    assert "no checkpoint that compress wrote" in run(str(plain), *ASKED).output
