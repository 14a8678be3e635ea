"""Models that write no text go the whole way: calibrated, packed, loaded by their own classes, and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from compress import api
from compress.calib import data, prefix
from compress.calib.output_gradients import SampledStates
from compress.errors import CalibrationError, CheckpointError, RecipeError, UnsupportedModelError
from compress.evaluate import encoders, pooling
from compress.evaluate.reader import Execution
from compress.model import load
from compress.model.skeleton import Skeleton
from compress.progress import silent
from compress.run import source, verify
from compress.runtime.linear import PackedLinear
from compress.storage.checkpoint import open_checkpoint
from helpers import encoders as tiny
from helpers.encoders import CLS_ID, EOS_ID
from helpers.runs import TEXT, Setup, cli, job, one_line, report_of

INT8 = Setup("int8")
INT4 = Setup("int4", ("calibration.num_samples=16", "calibration.seq_len=64"))
IDS = torch.randint(5, 250, (8, 48), generator=torch.Generator().manual_seed(1))
SENTENCES = {  # what sentence-transformers has beside a model
    "modules.json": [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
    "sentence_bert_config.json": {"max_seq_length": 100},
    "config_sentence_transformers.json": {"prompts": {"query": "ask: ", "document": ""}},
}


class Packed(NamedTuple):
    model: Any  # the original
    base: Path
    directory: Path

    def loaded(self, kind: Any = None) -> Any:
        return (kind or type(self.model)).from_pretrained(self.directory)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """packed(class, setup) -> the model, packed once."""
    made: dict[tuple[str, Setup], Packed] = {}

    def pack(name: str, setup: Setup = INT4) -> Packed:
        if (name, setup) not in made:
            folder = tmp_path_factory.mktemp(name)
            model = tiny.save(name, folder / "base")
            for file, values in SENTENCES.items() if name == "BertModel" else ():
                (folder / "base" / file).parent.mkdir(exist_ok=True)
                (folder / "base" / file).write_text(json.dumps(values))
            api.quantize(job(folder / "base", setup, folder / "out"))
            made[name, setup] = Packed(model, folder / "base", folder / "out")
        return made[name, setup]

    return pack


@torch.no_grad()
def cosine(first: Any, other: Any) -> float:
    """The mean cosine of the averaged states of random tokens."""
    states = [model.base_model(input_ids=IDS)[0].mean(1) for model in (first, other)]
    return nn.functional.cosine_similarity(*states, dim=-1).mean().item()


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification", "ModernBertForMaskedLM"])
def test_a_packed_model_is_loaded_by_its_own_class_and_as_a_body(name: str, packed: Callable[..., Packed]) -> None:
    made = packed(name)
    loaded, body = made.loaded(), made.loaded(transformers.AutoModel)
    assert 0.97 < cosine(made.model, loaded) < 1
    with torch.no_grad():
        assert torch.equal(body(input_ids=IDS)[0], loaded.base_model(input_ids=IDS)[0])
    assert torch.equal(api.load(made.directory)(input_ids=IDS)[0], loaded(input_ids=IDS)[0])
    kept = [key for key, module in loaded.named_modules() if isinstance(module, nn.Linear)]
    assert not any(isinstance(loaded.get_submodule(key), PackedLinear) for key in kept)
    assert all("layer" not in key for key in kept), "blocks are packed, and pooler, head and classifier are not"
    assert "two_sided" not in report_of(made.directory)["notes"], "gradients could be taken"
    verify.verify(made.directory)


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "least"), [(INT8, 0.995), (INT4, 0.97)], ids=["int8", "int4"])
@pytest.mark.parametrize("name", tiny.CASES)
def test_every_architecture(name: str, setup: Setup, least: float, packed: Callable[..., Packed]) -> None:
    least = 0.93 if name in ("Qwen3Model", "EuroBertModel") and setup is INT4 else least  # gated random linears
    made = packed(name, setup)
    assert least <= cosine(made.model, made.loaded()) < 1


def test_what_makes_embeddings_goes_along(packed: Callable[..., Packed], tmp_path: Path) -> None:
    made = packed("BertModel")
    for file, values in SENTENCES.items():
        assert json.loads((made.directory / file).read_text()) == values
    listed = json.loads((made.directory / "compress_manifest.json").read_text())["files"]
    assert set(SENTENCES) <= listed.keys()
    again = source.resolve(str(made.base), dtype="bfloat16")  # a directory of links
    assert {path.parent.name for path in source.model_files(again)} >= {"1_Pooling"}
    (made.directory / "1_Pooling" / "config.json").write_text("{}")
    with pytest.raises(Exception, match="1_Pooling/config.json is not the file that was written"):
        verify.verify(made.directory)
    (made.directory / "1_Pooling" / "config.json").write_text(json.dumps(SENTENCES["1_Pooling/config.json"], indent=0))


# ---------------------------------------------------------------- calibration


def windows(directory: Path) -> Tensor:
    begun = prefix.of_directory(directory)
    return data.calibration(TEXT, load.load_tokenizer(directory), 3, 64, 0, 264, begun).tokens


def test_windows_are_whole_texts(packed: Callable[..., Packed]) -> None:
    tokens = windows(packed("BertModel").base)
    assert (tokens[:, 0] == CLS_ID).all() and (tokens[:, -1] == EOS_ID).all()
    assert not torch.isin(tokens[:, 1:-1], torch.tensor([CLS_ID, EOS_ID])).any()
    copied = data.roll_windows(tokens, 2, 1, 1)
    assert (copied[:, 0] == CLS_ID).all() and (copied[:, -1] == EOS_ID).all()
    assert torch.equal(copied[1::2].sort(1).values, tokens.sort(1).values)


def test_windows_of_a_reranker_are_pairs_whose_texts_it_tells_apart(packed: Callable[..., Packed]) -> None:
    base = packed("BertForSequenceClassification").base
    tokens, begun = windows(base), prefix.of_directory(base)
    assert begun.sentence == (
        "each window begins with <cls> and has its two texts parted by <eos> and ends with <eos>, as the tokenizer does"
    )
    parts = [(row == EOS_ID).nonzero().flatten().tolist() for row in tokens]
    assert all(len(each) == 2 and 1 < each[0] < 64 // 3 and each[1] == 63 for each in parts)
    skeleton, seen = Skeleton(open_checkpoint(base)), list[Tensor]()
    skeleton.load_rest(torch.device("cpu"))
    skeleton.model.base_model.embeddings.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["token_type_ids"]), with_kwargs=True
    )
    with pytest.raises(RuntimeError):  # the blocks are not loaded
        skeleton.read(tokens)
    made = tiny.tokenizer()("ab", "cde")
    assert [row.tolist() for row in seen[0]] == [[0] * (each[0] + 1) + [1] * (63 - each[0]) for each in parts]
    assert made["token_type_ids"] == [0] * 4 + [1] * 4


def test_an_encoder_writes_no_calibration_text(packed: Callable[..., Packed]) -> None:
    with pytest.raises(CalibrationError, match="base writes no text to calibrate on; give --calib"):
        data.self_prefix(packed("BertModel").base, "auto")


def test_what_needs_predictions_is_refused_before_anything_is_done(
    packed: Callable[..., Packed], tmp_path: Path
) -> None:
    base = packed("BertModel").base
    with pytest.raises(RecipeError, match="trains by the divergence of predictions, and this model makes none"):
        api.quantize(job(base, Setup("int2-tuned"), tmp_path / "out"))
    with pytest.raises(UnsupportedModelError, match="a model for embeddings; this needs a language model"):
        api.quantize(job(base, INT8.set("accept={kl: 0.1}"), tmp_path / "out"))


def test_the_gradient_at_states_is_noise_of_unit_variance() -> None:
    def gradient(seed: int, sample: int, parts: list[slice]) -> Tensor:
        states = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).requires_grad_()
        loss = SampledStates(64, seed)
        sum(loss(sample, part, states[part]) for part in parts).backward()  # type: ignore[union-attr]
        assert states.grad is not None
        return states.grad

    whole = gradient(0, 1, [slice(0, 64)])
    assert torch.allclose(gradient(0, 1, [slice(0, 17), slice(17, 64)]), whole, atol=1e-5)
    covariance = whole.T @ whole / 64
    assert abs(covariance.diagonal().mean() - 1) < 0.05 and abs(covariance.triu(1).sum() / 4560) < 0.05
    assert not torch.allclose(gradient(0, 2, [slice(0, 64)]), whole)


# ---------------------------------------------------------------- scores


def compare(made: Packed, base: Path | None = None) -> encoders.EncoderScores:
    return encoders.evaluate(made.directory, str(TEXT), base or made.base, (None, 6000), Execution(), silent)


def test_scores_of_an_embedding_model(packed: Callable[..., Packed]) -> None:
    made = packed("BertModel")
    scores = compare(made)
    assert scores.pooling == "cls token" and scores.kl_mean is None and scores.questions > 4
    for figure in (scores.cosine_mean, scores.cosine_p1, scores.spearman, scores.ndcg10):
        assert 0.8 < figure < 1
    same = compare(Packed(made.model, made.base, made.base))
    assert (same.cosine_p1, same.spearman, same.ndcg10) == pytest.approx((1, 1, 1))
    assert same.recall1 == same.base_recall1 == scores.base_recall1


def test_scores_of_a_reranker(packed: Callable[..., Packed]) -> None:
    scores = compare(packed("BertForSequenceClassification", INT8))
    assert scores.kendall_tau is not None and 0.8 < scores.kendall_tau < 1
    assert scores.score_difference is not None and 0 < scores.score_difference < 0.5


def test_scores_of_a_model_of_masked_words(packed: Callable[..., Packed]) -> None:
    scores = compare(packed("ModernBertForMaskedLM"))
    assert scores.kl_mean is not None and 0 < scores.kl_mean < 0.2 and scores.kendall_tau is None
    assert scores.same_choice is not None and 0.5 < scores.same_choice <= 1


def test_the_command_needs_the_original(packed: Callable[..., Packed]) -> None:
    made = packed("BertModel")
    words = ["eval", str(made.directory), "--text", str(TEXT)]
    assert "a model with an encoder is compared" in cli(*words).err
    result = cli(*words, "--base", str(made.base), "--max-tokens", "4000", "--json")
    assert result.code == 0 and json.loads(result.out)["cosine_mean"] > 0.9
    refused = one_line(cli("generate", str(made.directory), "--prompt", "a"))
    assert "is a 'BertModel', a model for embeddings; this needs a language model" in refused


def test_poolings() -> None:
    states, mask = torch.arange(12.0).view(1, 4, 3), torch.tensor([[1, 1, 1, 0]])
    rows = states[0]
    expected = {
        "cls_token": rows[0],
        "mean_tokens": rows[:3].mean(0),
        "max_tokens": rows[2],
        "mean_sqrt_len_tokens": rows[:3].sum(0) / 3**0.5,
        "weightedmean_tokens": (rows[0] + 2 * rows[1] + 3 * rows[2]) / 6,
        "lasttoken": rows[2],
    }
    assert expected.keys() == pooling.POOLINGS.keys()
    for mode, vector in expected.items():
        assert torch.allclose(pooling.Pooling((mode,)).pool(states, mask)[0], vector), mode
    assert pooling.Pooling(("cls_token", "lasttoken")).pool(states, mask).shape == (1, 6)


@pytest.mark.parametrize("text", ["{}", "[1]", "[{}]", "["])
def test_a_list_of_layers_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json is n"):
        pooling.read(tmp_path, nn.Linear(1, 1))


def test_rank_figures_by_their_definitions() -> None:
    first, other = torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([4.0, 1.0, 2.0, 3.0])
    assert encoders.kendall(first, other) == pytest.approx(5 / 6)
    assert encoders.kendall(first, -first) == pytest.approx(-5 / 6)
    ranks = torch.tensor([[4.0, 1.0, 2.5, 2.5], [4.0, 1.0, 2.0, 3.0]])
    assert encoders.spearman(first, other) == pytest.approx(torch.corrcoef(ranks)[0, 1].item())
    lists = torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[0.5, 0.9, 0.1]])  # gains 3, 2, 1
    best, given = 3 + 2 / 1.584962500721156 + 0.5, 2 + 3 / 1.584962500721156 + 0.5
    assert encoders.ndcg(lists[0].double(), lists[1].double()) == pytest.approx(given / best)
