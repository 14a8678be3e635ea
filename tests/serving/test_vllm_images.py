"""Packed models of text beside images in vLLM. Runs where vLLM is: `make vllm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compared import HEADS, SMALL, check
from in_vllm import needed, served

from compress import api
from helpers import pico, runs, wrappers

pytestmark = needed

# of those whose vLLM code runs without torchvision, which has no build for CPUs on PyPI
SPECIAL = ("<a>", "<b>", "<c>", "<global-img>", "<end_of_utterance>", "<fake_token_around_image>", "<image>")
SIDE = 28  # of an image, one token
IMAGES = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_image_splitting": False,
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with packed text, and its processor."""
    folder = tmp_path_factory.mktemp("idefics3")
    model = pico.save(wrappers.build("idefics3", HEADS), folder / "model")
    tokenizer = pico.pico_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids("<image>") == wrappers.IMAGE_ID
    tokenizer.save_pretrained(model)
    (model / "preprocessor_config.json").write_text(json.dumps({**IMAGES, "processor_class": "Idefics3Processor"}))
    settings = {"processor_class": "Idefics3Processor", "image_seq_len": 1}
    (model / "processor_config.json").write_text(json.dumps(settings))
    api.quantize(runs.job(model, runs.Setup("int4", SMALL), folder / "packed"))
    return folder / "packed"


def test_text_alone(checkpoint: Path, tmp_path: Path) -> None:
    check(checkpoint, served(checkpoint, tmp_path))
    assert "packed weights" in (tmp_path / "log").read_text()


def test_images_in_the_text(checkpoint: Path, tmp_path: Path) -> None:
    """They matter: two of them after the same text give different answers."""
    from PIL import Image
    from transformers import AutoImageProcessor

    pictures, files = [], []
    for seed in range(2):
        pixels = torch.randint(256, (SIDE, SIDE, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        pictures.append(Image.fromarray(pixels.numpy()))
        files.append(tmp_path / f"{seed}.png")
        pictures[-1].save(files[-1])
    prompts = [[5, 9, wrappers.IMAGE_ID, 31, 7]] * 2
    answers = served(checkpoint, tmp_path, prompts=prompts, images=files)
    assert [each["prompt"].count(wrappers.IMAGE_ID) for each in answers] == [1, 1]
    prepared = AutoImageProcessor.from_pretrained(checkpoint)
    inputs = [dict(prepared(picture, return_tensors="pt")) for picture in pictures]
    check(checkpoint, answers, lambda model: None, inputs)
    assert answers[0]["logprobs"] != answers[1]["logprobs"]
