"""A model whose tokenizer begins texts with BOS is calibrated, scored and asked with it, and the records say so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress import api
from compress.cli import options
from compress.errors import OutputError
from compress.evaluate import Execution, cache_scores, evaluate, record, sampling, suite, task_runs
from compress.evaluate.generation import prompt_ids
from compress.evaluate.scores import text_windows
from compress.model.load import load_config, load_tokenizer
from compress.study import folder
from compress.study.grid import Settings
from helpers.pico import EOS_ID, beginning, pico_tokenizer, save_pico
from helpers.runs import GPTQ, RTN, TEXT, cli, command, interrupt, job, one_line, report_of

BOS_ID = EOS_ID + 1
SAID = "each window begins with <bos>, as the tokenizer does"
NEVER = "no window begins with <bos>, as bos: never says"
HELD_OUT = TEXT.with_name("books_heldout.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_pico("llama", tmp_path_factory.mktemp("begun") / "m")
    beginning(pico_tokenizer(), "<bos>", end="<eos>").save_pretrained(directory)
    return directory


def slow_nll(directory: Path, windows: torch.Tensor, first: int) -> float:
    """The mean over the tokens from `first` on."""
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        log_probs = loaded(windows).logits[:, first - 1 : -1].double().log_softmax(-1)
    return float(-log_probs.gather(-1, windows[:, first:, None]).mean())


def test_the_token_behind_bos_is_scored_and_bos_is_not(model: Path) -> None:
    found = evaluate(model, HELD_OUT, seq_len=32, max_tokens=256)
    cut = text_windows([model], HELD_OUT, 32, 256)
    assert (cut.tokens[:, 0] == BOS_ID).all() and not (cut.tokens[:, 1:] == BOS_ID).any()
    assert found.begins_with == "<bos>" and found.tokens == 8 * 31
    assert found.nll == pytest.approx(slow_nll(model, cut.tokens, 1), rel=1e-5)
    bare = evaluate(model, HELD_OUT, seq_len=32, max_tokens=256, execution=Execution(bos="never"))
    assert bare.begins_with == "" and bare.tokens == 8 * 31 and bare.nll != found.nll


def test_of_a_longer_beginning_no_token_is_scored(tmp_path: Path) -> None:
    two = save_pico("llama", tmp_path / "m")
    beginning(pico_tokenizer(), "<first>", "<bos>").save_pretrained(two)
    found = evaluate(two, HELD_OUT, base=two, seq_len=32, max_tokens=256)
    assert found.tokens == 8 * 30
    assert found.nll == pytest.approx(slow_nll(two, text_windows([two], HELD_OUT, 32, 256).tokens, 2), rel=1e-5)
    asked = suite.SuiteRequest("quick", (str(HELD_OUT),), seq_len=32, max_tokens=256)
    of_suite = suite.run(two, two, asked, Execution())
    assert of_suite.texts[0].nll == pytest.approx(found.nll) and of_suite.floor["tokens"] == 4 * 30


def test_prompts_and_tasks_begin_alike(model: Path) -> None:
    assert prompt_ids(model, "ab")[0] == BOS_ID and len(prompt_ids(model, "ab")) == 3
    assert len(prompt_ids(model, "ab", is_first=False)) == 2
    asked = suite.SuiteRequest("quick", (str(HELD_OUT),), seq_len=64, max_tokens=512)
    found = suite.run(model, model, asked, Execution())
    assert found.begins_with == "<bos>" and {row.begins_with for row in found.texts} == {"<bos>"}
    bare = suite.run(model, model, asked, Execution(bos="never"))
    assert bare.begins_with == "" and bare.texts[0].nll != found.texts[0].nll


def test_what_tasks_are_made_of_has_no_bos_inside(model: Path) -> None:
    cut = text_windows([model], HELD_OUT, 64, 512)
    made = task_runs.material(load_tokenizer(model), [load_config(model)], cut.prefix, cut.tokens)
    assert made.begin == (BOS_ID,) and made.windows.shape == (8, 63) and BOS_ID not in made.windows


def test_sampling_and_caches_begin_alike(model: Path, tmp_path: Path) -> None:
    settings = sampling.default_settings([1.0], [0], [1.0], [0.0])
    request = sampling.SamplingRequest(HELD_OUT, settings, seq_len=32, max_tokens=128, prompts=0, prompt_tokens=8)
    assert sampling.measure(model, model, request).begins_with == "<bos>"
    (tmp_path / "exact.yaml").write_text("kv_cache: {method: identity, sink: 1, residual_length: 4}")
    caches = options.cache_recipes([str(tmp_path / "exact.yaml")])
    scores, _ = cache_scores.evaluate([model], HELD_OUT, caches, None, (64, 256), Execution())
    alone = evaluate(model, HELD_OUT, seq_len=64, max_tokens=256)
    assert scores.begins_with == "<bos>" and scores.base_perplexity == pytest.approx(alone.perplexity, rel=1e-4)


def test_plans_reports_and_scores_say_it(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    planned = cli("plan", *command(model, GPTQ, out)[1:])
    assert planned.code == 0 and SAID in planned.out + planned.err
    done = cli(*command(model, GPTQ, out))
    assert done.code == 0 and SAID in done.out + done.err
    found = report_of(out)["calibration"]
    assert found["begins_with"] == "<bos>" and "begun with `<bos>`" in (out / "README.md").read_text()
    bare = cli(*command(model, GPTQ.set("calibration.bos=never"), tmp_path / "bare"))
    assert NEVER in bare.out + bare.err and report_of(tmp_path / "bare")["calibration"]["begins_with"] == ""
    assert report_of(tmp_path / "bare")["calibration"]["sha256"] != found["sha256"]
    shared = ["--base", str(model), "--text", str(HELD_OUT), "--seq-len", "32", "--max-tokens", "128"]
    for more, said in (([], SAID), (["--bos", "never"], NEVER)):
        scored = cli("eval", str(out), *shared, *more)
        assert scored.code == 0 and said in scored.out + scored.err
        assert cli("inspect", str(out), "--page", *shared, *more).code == 0
    kept = record.load(out)["texts"]
    assert [row["begins_with"] for row in kept] == ["<bos>", ""] and kept[0]["kl_mean"] != kept[1]["kl_mean"]


def test_the_own_text_begins_alike_and_cannot_begin_with_nothing(model: Path, tmp_path: Path) -> None:
    written, bare = (command(model, GPTQ.set(f"calibration.bos={bos}"), tmp_path / bos) for bos in ("auto", "never"))
    done, refused = (cli(*("self" if word == str(TEXT) else word for word in words)) for words in (written, bare))
    assert done.code == 0 and report_of(tmp_path / "auto")["calibration"]["begins_with"] == "<bos>"
    assert refused.code == 1 and "give --calib" in one_line(refused) and not (tmp_path / "never.partial").exists()


def test_an_interrupted_run_goes_on_with_the_same_beginning_only(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped = cli(*command(model, GPTQ, out), prepare=interrupt("compress.quant.gptq", "quantize_rows", 10))
    assert stopped.code != 0
    with pytest.raises(OutputError, match="recipe"):
        api.quantize(job(model, GPTQ.set("calibration.bos=never"), out))
    api.quantize(job(model, GPTQ, out))


def test_studies_with_and_without_are_two(model: Path) -> None:
    settings = Settings(str(model), (str(HELD_OUT),))
    bare, begun = (folder.identity(settings, "f", text) for text in ("", "<bos>"))
    assert bare == folder.identity(settings, "f") and "begins with" not in bare
    assert begun == {**bare, "begins with": "<bos>"}
    assert dataclasses.replace(settings, bos="never").bos == "never"


@pytest.mark.slow
@pytest.mark.parametrize(("bos", "said"), [("auto", "<bos>"), ("never", NEVER)])
def test_a_study_of_such_a_model_is_none_of_an_older_version(bos: str, said: str, model: Path, tmp_path: Path) -> None:
    """Its cells were calibrated without, whatever is scored."""
    words = ["study", str(model), "--recipes", "int8", "--text", str(HELD_OUT), "--window", "32", "--max-tokens", "64"]
    assert cli(*words, "--out", str(tmp_path / "s"), "--bos", bos).code == 0
    opened = json.loads(folder.StudyFolder(tmp_path / "s").run.read_text())["identity"]
    assert opened["begins with"] == said


def test_data_free_runs_say_nothing_of_windows(model: Path, tmp_path: Path) -> None:
    done = cli("plan", *command(model, RTN, tmp_path / "out")[1:], "--json")
    assert done.code == 0 and SAID not in done.out + done.err and json.loads(done.out)
