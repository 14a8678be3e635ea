"""The original's predictions in a file: what is kept, when it is made again, and divergences from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.calib import reference_logprobs
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.storage.checkpoint import open_checkpoint

TOKENS = torch.randint(0, 256, (3, 10), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("top_k", [16, 1000])
def test_predictions_of_whole_models(
    name: str, top_k: int, pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few positions at a time, each from the model's own logits."""
    monkeypatch.setattr(kl, "LOGITS_NBYTES", 4 * 264 * 3)
    skeleton = Skeleton(open_checkpoint(pico_dir(name)))
    kept = reference_logprobs.load(skeleton, TOKENS, tmp_path, top_k)
    assert all(p.is_meta for p in skeleton.model.parameters())
    assert [file.name for file in tmp_path.iterdir()] == [reference_logprobs.STORE_FILE]
    model: Any = AutoModelForCausalLM.from_pretrained(pico_dir(name))
    with torch.no_grad():
        expected = model(TOKENS).logits.double().log_softmax(-1)
    for sample in range(3):
        row = kept.row(sample, CPU)
        assert row.log_probs.shape == (10, min(top_k, 264)) and row.log_probs.dtype == torch.float32
        assert torch.allclose(row.log_probs.double(), expected[sample].gather(-1, row.ids), atol=2e-5)
        assert torch.allclose(row.log_probs, expected[sample].topk(min(top_k, 264)).values.float(), atol=2e-5)
        if row.tail is None:
            assert top_k > 264
        else:
            rest = 1 - expected[sample].exp().gather(-1, row.ids).sum(-1)
            assert torch.allclose(row.tail.double().exp(), rest, atol=1e-6)


def test_made_once_for_the_same(pico_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def load(name: str = "llama", tokens: torch.Tensor = TOKENS, top_k: int = 8) -> None:
        reference_logprobs.load(Skeleton(open_checkpoint(pico_dir(name))), tokens, tmp_path, top_k, "cpu", said.append)

    load()
    first = (tmp_path / reference_logprobs.STORE_FILE).read_bytes()
    load()
    assert said == ["predicting with the original model"]
    for change in ({"top_k": 9}, {"tokens": TOKENS.flip(0)}, {"name": "qwen2"}, {}):
        load(**change)  # type: ignore[arg-type]
    assert len(said) == 5 and (tmp_path / reference_logprobs.STORE_FILE).read_bytes() == first
    (tmp_path / reference_logprobs.STORE_FILE).write_bytes(first[:-1])
    load()
    assert len(said) == 6 and (tmp_path / reference_logprobs.STORE_FILE).read_bytes() == first
    (tmp_path / reference_logprobs.STORE_FILE).write_bytes(b"")

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reference_logprobs, "predictions", fails)
    with pytest.raises(KeyboardInterrupt):
        load()
    assert [file.name for file in tmp_path.iterdir()] == [reference_logprobs.STORE_FILE], "nothing is left behind"


def logits(scale: float, rows: int = 6, vocabulary: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = 4 * torch.randn(rows, vocabulary, generator=generator)
    return a, a + scale * torch.randn(rows, vocabulary, generator=generator)


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("scale", [3.0, 0.1, 1e-3, 1e-5])
def test_divergence_of_the_whole_vocabulary(scale: float) -> None:
    """However small, although log-probabilities are kept in float32."""
    a, b = logits(scale)
    row = reference_logprobs.predictions(a.clone(), 50)
    for part in (slice(0, 6), slice(2, 5)):
        found = reference_logprobs.divergence(row, part, b[part].clone())
        assert found == pytest.approx(exact(a, b)[part].sum().item(), rel=max(1e-6, 1e-7 / scale))
    assert 0 <= reference_logprobs.divergence(row, slice(0, 6), a.clone()) < 1e-12


@pytest.mark.parametrize("scale", [3.0, 0.1, 1e-3])
def test_divergence_with_the_rest_put_together(scale: float) -> None:
    a, b = logits(scale)
    row = reference_logprobs.predictions(a.clone(), 12)
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    p, q = (torch.cat((x.gather(-1, row.ids), 1 - x.gather(-1, row.ids).sum(-1, keepdim=True)), -1) for x in (p, q))
    found = reference_logprobs.divergence(row, slice(0, 6), b.clone())
    assert found == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-5)
    assert found < exact(a, b).sum().item()


def test_outcomes_without_any_mass() -> None:
    a, b = logits(1.0)
    a[:, 3] = b[:, 3] = -torch.inf
    found = reference_logprobs.divergence(reference_logprobs.predictions(a.clone(), 50), slice(0, 6), b.clone())
    keep = [i for i in range(50) if i != 3]
    assert found == pytest.approx(exact(a[:, keep], b[:, keep]).sum().item(), rel=1e-6)
    b[:, 5] = -torch.inf
    assert reference_logprobs.divergence(
        reference_logprobs.predictions(a.clone(), 50), slice(0, 6), b.clone()
    ) == float("inf")
