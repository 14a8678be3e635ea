"""Tokenizers in the keys of GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from compress.errors import ExportError
from compress.export.targets.gguf import vocabulary
from compress.export.targets.gguf.architecture import DATA
from compress.storage.checkpoint import write_text

LETTERS = {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁": 3, "a": 4, "b": 5, "ab": 6, "▁a": 7, "▁ab": 8}
MERGES = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁a", "b")]


def saved(model: Tokenizer, directory: Path, **words: str) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=model, **words).save_pretrained(directory)
    write_text(directory / "config.json", json.dumps({"model_type": "llama"}))
    return directory


def sentencepiece(merges: list[tuple[str, str]]) -> Tokenizer:
    model = Tokenizer(models.BPE(vocab=LETTERS, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Replace("▁", " ")
    model.add_special_tokens(["<unk>", "<s>"])
    model.add_tokens(["▁▁"])
    return model


def test_scores_are_the_order_of_merges(tmp_path: Path) -> None:
    """Types: unknown, control, byte; a token of one's own has real spaces; ids without a token are padding."""
    found = vocabulary.metadata(saved(sentencepiece(MERGES), tmp_path, bos_token="<s>", unk_token="<unk>"), 12)
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.tokens"] == [*LETTERS, "  ", "[PAD10]", "[PAD11]"]
    assert found["tokenizer.ggml.token_type"] == [2, 3, 6, 1, 1, 1, 1, 1, 1, 4, 5, 5]
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    assert 0 == scores["ab"] > scores["▁a"] > scores["▁ab"] > scores["a"]
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.unknown_token_id"]) == (1, 0)
    assert found["tokenizer.ggml.add_bos_token"] is False


def test_merges_that_follow_from_no_scores_are_refused(tmp_path: Path) -> None:
    for merges in (MERGES[:3], [MERGES[2], MERGES[0], MERGES[3], MERGES[1]]):
        with pytest.raises(ExportError, match="do not follow from one score"):
            vocabulary.metadata(saved(sentencepiece(merges), tmp_path), 12)


@pytest.mark.parametrize("name", DATA["splits"])
def test_splits_have_their_names(name: str, tmp_path: Path) -> None:
    split = DATA["splits"][name]
    letters = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ignores = split.get("ignore_merges", False)
    model = Tokenizer(models.BPE(vocab={**letters, "th": 256}, merges=[("t", "h")], ignore_merges=ignores))
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if text == "digits"
        else pre_tokenizers.Split(Regex(text), "isolated")
        for text in split["text"]
        if text != "bytes"
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="bytes" in split["text"])
    model.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    model.add_special_tokens(["<eos>", "<end>"])
    directory = saved(model, tmp_path, eos_token="<eos>", chat_template="{{ messages }}")
    write_text(directory / "generation_config.json", json.dumps({"eos_token_id": [257, 258]}))
    found = vocabulary.metadata(directory, 259)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", name)
    assert found["tokenizer.ggml.merges"] == ["t h"] and found["tokenizer.chat_template"] == "{{ messages }}"
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (257, 258)
