"""Logits are made from hidden states a few positions at a time, as every family's own model makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.model import block_calls, blockwise, lm_head
from compress.model.skeleton import Skeleton
from compress.numerics import kl
from compress.storage.checkpoint import open_checkpoint

TOKENS = torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama_tied", "opt", "gpt_neox", "gemma2", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_logits_of_every_family(
    name: str, as_tuple: bool, pico_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled or capped as the model does it, a few positions at a time, whatever its blocks return."""
    monkeypatch.setattr(kl, "LOGITS_NBYTES", 4 * 264 * 7)
    skeleton = Skeleton(open_checkpoint(pico_dir(name)))
    model: Any = AutoModelForCausalLM.from_pretrained(pico_dir(name))
    stream = blockwise.HiddenStates(3, None)
    with torch.no_grad():
        expected = model(TOKENS).logits
        calls = blockwise.record_inputs(skeleton, TOKENS, 3, stream, CPU)
        states = stream.read(0, 3)
        for index in range(len(skeleton.blocks)):
            block = skeleton.load_block(index, CPU)
            states = blockwise.run_block(block, calls[index][3], states, "block")
        skeleton.free()
        if as_tuple:
            real = block_calls.StandIn.forward  # a model that wants a tuple takes the first of what it is given
            monkeypatch.setattr(
                block_calls.StandIn, "forward", lambda self, *args, **kwargs: real(self, *args, **kwargs)[0]
            )
        parts = kl.slices(24, skeleton.vocab_size)
        assert [part.stop - part.start for part in parts] == [7, 7, 7, 3]
        with lm_head.logits_of(skeleton, CPU) as logits:
            for row in range(3):
                found = torch.cat([logits(states[row : row + 1, part]) for part in parts])
                assert torch.allclose(found, expected[row], atol=1e-5)
    assert all(p.is_meta for p in skeleton.model.parameters())


def test_divergence_against_the_definition() -> None:
    p, q = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)).unbind(0)
    a, b = p.double().softmax(-1), q.double().softmax(-1)
    assert torch.allclose(kl.from_logits(p, q).double(), (a * (a / b).log()).sum(-1), atol=1e-6)
    assert (kl.from_logits(p, p) == 0).all()
