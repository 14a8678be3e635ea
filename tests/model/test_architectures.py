"""Checkpoints that are no language models, or not under their own names, are named as what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress import importers, recipe
from compress.errors import CompressError
from compress.importers import open_checkpoint
from compress.model import architectures
from compress.model.load import load_model
from compress.model.skeleton import Skeleton
from compress.run import source
from compress.run.job import Job
from helpers import pico

Changed = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def configure(directory: Path, **values: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return directory


def renamed(pico_dir: Callable[..., Path], directory: Path, change: Changed, name: str = "llama") -> Path:
    """A checkpoint whose tensors `change` gives."""
    directory.mkdir()
    for file in pico_dir(name).iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = {key: value for file in pico_dir(name).glob("*.safetensors") for key, value in load_file(file).items()}
    save_file(change(tensors), directory / "model.safetensors", {"format": "pt"})
    return directory


def refused(directory: Path, *words: str) -> None:
    """Planning and loading refuse it, each in one line with these words."""
    for read in (lambda: Skeleton(open_checkpoint(directory)).check_tensors(), lambda: load_model(directory)):
        with pytest.raises(CompressError) as raised:
            read()
        line = str(raised.value)
        assert "\n" not in line and str(directory) in line
        assert all(word in line for word in words), line
        assert "quantized by another tool" not in line


def test_a_reward_model_is_opened_with_its_head(tmp_path: Path) -> None:
    model = pico.build("llama")
    model.config.num_labels = 1
    transformers.LlamaForSequenceClassification(model.config).save_pretrained(tmp_path / "reward")
    Skeleton(open_checkpoint(tmp_path / "reward")).check_tensors()
    with pytest.raises(CompressError, match="is a 'LlamaForSequenceClassification', a model for classes or scores"):
        load_model(tmp_path / "reward")  # where a language model is asked for
    assert load_model(tmp_path / "reward", tasks=None).score.weight.shape == (1, 64)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LlamaForMultipleChoice", "a model that chooses answers"),
        ("SomeForRewardModel", "a reward model"),
        ("SomeForProcessRewardModel", "a reward model"),
        ("SomeForEmbedding", "an embedding model"),
    ],
)
def test_other_purposes_are_known_by_the_class(
    name: str, words: str, pico_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where the tensors would fit a language model."""
    directory = renamed(pico_dir, tmp_path / "m", lambda tensors: tensors, "llama_tied")
    refused(configure(directory, architectures=[name]), f"is a '{name}': {words}")


OPENED = {
    ("llama", "LlamaForCausalLM"): "language",
    ("llama", "LlamaModel"): "embedding",
    ("gpt2", "GPT2Model"): "language",  # its head is its table
    ("bart", "BartModel"): "translation",
    ("t5", "T5Model"): "translation",
    ("albert", "AlbertModel"): "embedding",
    ("qwen3", "Qwen3ForTokenClassification"): "tags",
    ("bert", "BertModel"): "embedding",
    ("bert", "BertForMaskedLM"): "masked",
    ("bert", "BertLMHeadModel"): "language",
    ("bert", "BertForPreTraining"): "embedding",
    ("xlm-roberta", "XLMRobertaForSequenceClassification"): "classes",
    ("bert", "BertForQuestionAnswering"): "answers",
    ("t5", "T5EncoderModel"): "embedding",
    ("t5", "T5ForConditionalGeneration"): "translation",
    ("bart", "BartForConditionalGeneration"): "translation",
    ("bart", "BartForCausalLM"): "language",
    ("whisper", "WhisperForConditionalGeneration"): "speech",
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): "language",
    ("bart", "Unknown"): "language",
    ("bert", "Unknown"): "language",
}


@pytest.mark.parametrize(("kind", "name"), OPENED)
def test_what_a_model_is_for(kind: str, name: str) -> None:
    config = transformers.AutoConfig.for_model(kind, architectures=[name])
    assert architectures.task(config) == OPENED[kind, name]


@pytest.mark.parametrize("head", ["score.weight", "v_head.summary.weight", "classifier.dense.weight"])
def test_a_head_that_the_configuration_does_not_name(head: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = renamed(pico_dir, tmp_path / "m", lambda tensors: {**tensors, head: torch.ones(1, 64)})
    refused(directory, f"has {head}, the head of a reward model", "give the language model")


def test_a_class_without_a_head_stands_for_a_language_model_whose_head_is_its_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = pico.build("llama_tied")
    pico.save(model.model, tmp_path / "m")
    source.open_model(Job(str(tmp_path / "m"), recipe.load("int8"), tmp_path / "out"))
    assert "names 'LlamaModel', a class without an output head" in caplog.text
    assert torch.equal(load_model(tmp_path / "m").lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_an_embedding_model(name: str, tmp_path: Path) -> None:
    model = pico.build(name)
    pico.save(model.model, tmp_path / "m")
    if name == "llama_tied":
        (tmp_path / "m" / "modules.json").write_text("[]")
    Skeleton(open_checkpoint(tmp_path / "m")).check_tensors()
    assert torch.equal(load_model(tmp_path / "m", tasks=None).norm.weight, model.model.norm.weight)
    with pytest.raises(CompressError, match="is a 'LlamaModel', a model for embeddings; this needs a language model"):
        load_model(tmp_path / "m")
    configure(tmp_path / "m", architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    refused(tmp_path / "m", "has no tensor for lm_head.weight", r"under architectures there (LlamaModel)")


def test_a_head_that_is_lost_may_be_the_table(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = renamed(pico_dir, tmp_path / "m", lambda tensors: tensors, "llama_tied")
    with pytest.raises(CompressError, match="its output head; if that is its table .* set tie_word_embeddings to true"):
        Skeleton(open_checkpoint(configure(directory, tie_word_embeddings=False))).check_tensors()


# ---------------------------------------------------------------- names of wrappers


def within(name: str) -> str:
    return name.replace("layers.1.", "layers.1._checkpoint_wrapped_module._orig_mod.")


WRAPPERS: dict[str, Callable[[str], str]] = {
    "module": lambda name: f"module.{name}",
    "_orig_mod": lambda name: f"_orig_mod.{name}",
    "base_model": lambda name: f"base_model.model.{name}",
    "nested": lambda name: f"module._orig_mod.base_model.model.{name}",
    "within": within,
    "both": lambda name: f"module.{within(name)}",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_of_wrappers_are_taken_off(wrapper: str, pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    wrap = WRAPPERS[wrapper]
    directory = renamed(pico_dir, tmp_path / "m", lambda tensors: {wrap(key): x for key, x in tensors.items()})
    checkpoint = open_checkpoint(directory)
    Skeleton(checkpoint).check_tensors()
    assert checkpoint.base.startswith("names without ")
    plain = load_model(pico_dir("llama"))
    for name, weight in load_model(directory).state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name]), name


def test_names_that_do_not_fit_stay_an_error(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    """One tensor without the prefix, and a prefix that no wrapper has."""
    for number, wrap in enumerate((lambda n: n if "norm" in n else f"module.{n}", lambda n: f"policy.{n}")):
        directory = renamed(
            pico_dir, tmp_path / str(number), lambda tensors, wrap=wrap: {wrap(key): x for key, x in tensors.items()}
        )
        assert not open_checkpoint(directory).base
        with pytest.raises(CompressError, match="that LlamaForCausalLM does not use, first (module|policy)"):
            Skeleton(open_checkpoint(directory)).check_tensors()


def test_names_that_would_become_the_same_stay_as_they_are() -> None:
    names = ["module.a.weight", "module.a._orig_mod.weight"]
    assert importers.plain_names(names) == {name: name for name in names}


def test_an_adapter_that_is_not_merged(pico_dir: Callable[..., Path], tmp_path: Path) -> None:
    def adapted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        q = "model.layers.0.self_attn.q_proj"
        tensors[f"{q}.base_layer.weight"] = tensors.pop(f"{q}.weight")
        more = {f"{q}.lora_A.default.weight": torch.ones(2, 64), f"{q}.lora_B.default.weight": torch.ones(64, 2)}
        return {f"base_model.model.{key}": x for key, x in {**tensors, **more}.items()}

    directory = renamed(pico_dir, tmp_path / "m", adapted)
    refused(directory, "holds 3 tensors of an adapter that is not merged", "merge_and_unload", "--adapter")
