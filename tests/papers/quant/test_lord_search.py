"""LoRD with ranks by linear under a bound, in 8 bits beside an adapter, and healed: what recipes promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compress import api
from compress.model import load as lm
from helpers.pico import save_pico
from helpers.runs import Setup, job, report_of, stored_tensors

SMALL = ("calibration.num_samples=8", "calibration.seq_len=32")
TOKENS = torch.randint(256, (6, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pico("llama", tmp_path_factory.mktemp("lord") / "model")


def test_ranks_follow_the_bound(model: Path, tmp_path: Path) -> None:
    """The looser bound gives the smaller model, linears have different ranks, and factors can be healed."""
    options = "allocate.options=[{ratio: 0.5}, {ratio: 0.9}, {keep: true}]"
    search = Setup("lord-search", (*SMALL, options, "allocate.samples=4", "allocate.estimator=kl_one_at_a_time"))
    sizes = []
    for bound in (0.002, 0.02):
        out = tmp_path / f"bound {bound}"
        api.quantize(job(model, search.set(f"allocate.target={bound}kl"), out))
        sizes.append(sum(tensor.nbytes for tensor in stored_tensors(out).values()))
    assert sizes[1] < sizes[0]
    stored = stored_tensors(tmp_path / "bound 0.02")
    ranks = {tensor.shape[0] / min(tensor.shape[1], 64) for name, tensor in stored.items() if name.endswith("_proj.a")}
    kept = [name for name in stored if name.endswith("_proj.weight")]
    assert len(ranks) + bool(kept) > 1


def test_factors_are_healed_by_tuning(model: Path, tmp_path: Path) -> None:
    heal = "tune={method: end_to_end, steps: 20, batch_tokens: 64, held_out: 4}"
    api.quantize(job(model, Setup("lord20", (*SMALL, "ratio=0.5", heal)), tmp_path / "out"))
    note = str(report_of(tmp_path / "out")["notes"])
    before, after = note.split("calibration text ")[1].split(";", maxsplit=1)[0].split(" -> ")
    assert float(after) < float(before)


def test_quantized_factors_stay_and_the_adapter_is_trained(model: Path, tmp_path: Path) -> None:
    small = (
        "calibration.num_samples=32",
        *SMALL[1:],
        "tune.steps=20",
        "tune.batch_tokens=128",
        "quantize.ratio=0.5",
        "quantize.lowrank.rank=4",
    )
    for name, settings in (("out", small), ("untrained", (*small, "tune=[]"))):
        api.quantize(job(model, Setup("lord-adapter", settings), tmp_path / name))
    after, before = (stored_tensors(tmp_path / name) for name in ("out", "untrained"))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed and all(".lowrank_" in name for name in changed)
    assert any(name.endswith(".a") and tensor.dtype == torch.int8 for name, tensor in after.items())
    assert lm.load_model(tmp_path / "out", "float32")(input_ids=TOKENS).logits.isfinite().all()
