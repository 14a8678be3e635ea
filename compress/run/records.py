"""Write what a finished checkpoint says of itself, facts of the run only: model card, report, page, manifest.

The front matter of the model card (README.md) names the base model only by its hub id: the one that was given, or
loaded. License, language and kind of task are those of the base's own card, where that lies beside the base.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from compress import process_memory
from compress.errors import first_line, one_line
from compress.kv.settings import KINDS
from compress.model.architectures import opener
from compress.pages import checkpoint as pages
from compress.progress import note
from compress.run.job import RunState, write_manifest
from compress.storage.checkpoint import write_text
from compress.storage.files import open_regular, read_text
from compress.storage.manifest import CARD, PAGE, RECIPE, REPORT
from compress.storage.paths import HUB_ID
from compress.types import LayerPlan

PACKAGE = "compress-llm"
READ = 1 << 16  # bytes of the base's card
FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---\s*?$", re.DOTALL | re.MULTILINE)
COPIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
WORD = re.compile(r"[\w.:/+-]{1,200}")
HUB_SNAPSHOT = re.compile(r"models--([\w.-]+)--([\w.-]+)/snapshots/[0-9a-f]+/?$")
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForMultimodalLM": "any-to-any",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
}


class Words(yaml.SafeLoader):
    """Reads `no` as the language that it is: YAML would make it False."""

    yaml_implicit_resolvers: ClassVar = {  # type: ignore[misc]  # the stubs take it for one of instances
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:bool"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


PACKED = """# {model}, quantized with compress (recipe {recipe})

{bpw:.3f} stored bits per packed weight, {whole:.3f} over the whole model; {total} in all (the original: {source}). The
weights are packed: transformers and vLLM read them where the package `{package}` is installed. Without it,
transformers stops with an error that says so.

```
pip install {package}
```

In transformers:

```python
import compress  # registers the format; not needed where torch loads installed backends by itself
from transformers import {opener}

model = {opener}.from_pretrained("path/to/this/directory")
```

In vLLM, with `pip install vllm` beside it: `vllm serve path/to/this/directory`.
{base}{made}
Not measured by the run that wrote this: divergence from the original, tasks, speed. `compress eval DIR --base ORIGINAL
--text FILE` gives perplexity and KL divergence. `recipe.yaml` is the recipe with every default, `report.json` what
happened (`compress inspect DIR --page` makes a page of it), `compress verify DIR` checks the files.
"""

TRANSFORMED = """# {model}, transformed with compress (recipe {recipe})

Transformed weights in full precision ({total}; the original: {source}): it loads like any checkpoint. What was done,
and whether it changed the function, is under `notes` in `report.json`.
{base}{made}
`recipe.yaml` is the recipe with every default, `report.json` what happened, `compress verify DIR` checks the files.
"""

CACHED = """# {model}, with a compressed key-value cache (recipe {recipe})

The weights are those of the original ({total}; the original: {source}), not quantized. What was added is how the keys
and values of earlier tokens are kept during generation.

```
pip install {package}
```

```python
import compress  # registers the cache; not needed where torch loads installed backends by itself
from transformers import {opener}

model = {opener}.from_pretrained("path/to/this/directory")
model.generate(...)  # keeps its keys and values as described here
```

Without the package, transformers loads the weights and keeps an exact cache.
{base}{made}
Not measured by the run that wrote this: divergence through the cache, memory, speed. `compress kv bench DIR --text
FILE` compares it with the exact cache. `recipe.yaml` is the recipe with every default, `report.json` what happened,
`compress verify DIR` checks the files.
"""

BASE = """
base: {base}. The weights were decoded while they were read: the size of the original, and all errors, are those of the
decoded weights.
"""


def write(directory: Path, run: RunState, result: dict[str, Any]) -> None:
    """Write model card, report and page, and at last the manifest, which has the hash of every file."""
    write_text(directory / CARD, text(run, result))
    write_text(directory / REPORT, json.dumps(result, indent=1) + "\n")
    _write_page(directory, result, run.job.out)
    write_manifest(directory, run.job, run.prepared.skeleton.checkpoint)


def _write_page(directory: Path, result: dict[str, Any], out: Path) -> None:
    """Write the page of a checkpoint; one that cannot be written is a note, since the checkpoint does without."""
    page = directory / PAGE
    try:
        write_text(page, pages.page(result, read_text(directory / RECIPE)))
    except Exception as error:  # noqa: BLE001  (whatever is wrong with a page, the checkpoint is finished)
        page.with_name(page.name + ".part").unlink(missing_ok=True)
        note(f"no {PAGE} was written ({first_line(error)}); compress inspect {out} --page tries it again")


def text(run: RunState, report: Mapping[str, Any]) -> str:
    """Return the card of a run with this report."""
    checkpoint, opened_by = run.prepared.skeleton.checkpoint, opener(run.prepared.skeleton.config).__name__
    front = front_matter(run, report, base_card(checkpoint.directory), opened_by)
    body = _body(run, report).format(
        model=plain(report["model"]),
        recipe=code(report["recipe"]),
        bpw=report["bpw"],
        whole=report["whole"]["bpw"],
        total=process_memory.show(report["nbytes"]["total"]),
        source=process_memory.show(report["source_nbytes"]),
        package=PACKAGE,
        base=BASE.format(base=plain(report["base"])) if report["base"] else "",
        made=_how_made(run, report),
        opener=opened_by,
    )
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n{body}"


def plain(text: str) -> str:
    """Return text as Markdown that shows it as it is: names of models and files may hold HTML, links or line ends."""
    return re.sub(r"([\\`*_\[\]#|~])", r"\\\1", html.escape(one_line(text), quote=False))


def code(text: str) -> str:
    """Return text as a code span of Markdown, with more backticks around it than are in it."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    inner = f" {one_line(text)} " if "`" in text else one_line(text)
    return f"{fence}{inner}{fence}"


def _body(run: RunState, report: Mapping[str, Any]) -> str:
    """Return the text of a card for what a run has made."""
    if run.layers:
        return PACKED
    return CACHED if report["kv_cache"] and not run.job.recipe.transform else TRANSFORMED


def front_matter(run: RunState, report: Mapping[str, Any], base: Mapping[str, Any], opened_by: str) -> dict[str, Any]:
    """Return what the hub reads of a card; `base`: that of the base's, `opened_by`: the automatic class."""
    job = run.job
    front: dict[str, Any] = {"library_name": "transformers"}
    if (name := base_model(job.model, job.base_model)) is not None:
        front["base_model"] = name
        front |= {"base_model_relation": "quantized"} if run.layers else {}
    front |= {"pipeline_tag": TASKS[opened_by]} if opened_by in TASKS else {}
    front |= {key: base[key] for key in COPIED if key in base}
    if run.layers:
        front["tags"] = ["compress", "quantized", f"{_bits(run.prepared.plan.layers)}-bit"]
    else:
        front["tags"] = ["compress"]
    source = (report["calibration"] or {}).get("source") or ""
    if job.calib is not None and HUB_ID.fullmatch(source) and not Path(job.calib).exists():
        front["datasets"] = [source]
    return front


def _bits(layers: Sequence[LayerPlan]) -> int:
    """Return the bits of a weight of the blocks, without those of scales where they are few."""
    stored = 8 * sum(layer.nbytes for layer in layers) / max(1, sum(layer.spec.numel for layer in layers))
    return max(1, int(stored + 0.25))


def base_model(model: str, given: str | None) -> str | None:
    """Return the hub id of the original: given, or that of `model` where it is one or lies in the hub's cache.

    What the config.json of a local directory says is not asked: a fine-tuned model names there what it began from.
    """
    if given is not None:
        return given
    path = Path(model)
    if path.exists():
        cached = HUB_SNAPSHOT.search(str(path.resolve()))
        return "/".join(cached.groups()) if cached else None
    return model if HUB_ID.fullmatch(model) and not model.startswith(".") else None


def base_card(directory: Path) -> dict[str, Any]:
    """Return words and lists of words of the front matter of a directory's card; {} where there is none to be read."""
    try:
        with open_regular(directory / CARD) as stream:
            front = FRONT.match(stream.read(READ).decode(errors="replace"))
        values = yaml.load(front[1], Loader=Words) if front else None
    except (OSError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    return {key: value for key, value in values.items() if _is_words(value)} if isinstance(values, dict) else {}


def _is_words(value: object) -> bool:
    words = value if isinstance(value, list) else [value]
    return bool(words) and all(isinstance(word, str) and WORD.fullmatch(word) for word in words)


def _stays(evict: Mapping[str, Any]) -> str:
    """Return how much of a prompt a cache that evicts keeps."""
    if shares := evict.get("keep_by_layer"):
        return f"{min(shares):.0%} to {max(shares):.0%} of the tokens stay in each layer"
    return f"{evict['keep']:.0%} of the tokens stay" if "keep" in evict else f"{evict['tokens']} tokens stay"


def _cache(section: Mapping[str, Any]) -> str:
    """Return how keys and values are kept, in a line; `section`: that of config.json."""
    said = []
    for kind in KINDS:
        coding = section[kind]
        bits = f", {coding['bits']:g} bits" if isinstance(coding.get("bits"), int | float) else ""
        said.append(f"{kind} by {code(coding['method'])}{bits}, the last {coding['residual_length']} tokens exact")
    said = [said[0].replace("keys by", "keys and values by", 1)] if section["keys"] == section["values"] else said
    others = f"; {len(section['layers'])} layers have settings of their own" if section["layers"] else ""
    if evict := section.get("evict"):
        others += f". Tokens are evicted: {_stays(evict)}, chosen by {code(evict['method'])}"
    return f"Cache of generation: {'; '.join(said)}, and the first {section['keys']['sink']}{others}."


def _how_made(run: RunState, report: Mapping[str, Any]) -> str:
    """Return how the weights and the cache were made, in a few lines."""
    lines, calibration = [], report["calibration"]
    if calibration is None:
        lines.append("No calibration text was used.")
    else:
        source = "text that the model wrote itself" if calibration["self_generated"] else code(calibration["source"])
        begun = f", each begun with {code(calibration['begins_with'])}" if calibration["begins_with"] else ""
        lines.append(
            f"Calibrated on {calibration['num_samples']} samples of {calibration['seq_len']} tokens{begun}: {source}."
        )
    if report["kv_cache"]:
        lines.insert(0, _cache(report["kv_cache"]))
    if run.job.adapter is not None:
        lines.append("A LoRA adapter was merged in first.")
    if report["fallbacks"]:
        lines.append(f"{len(report['fallbacks'])} weights fell back from the recipe (`fallbacks` in `report.json`).")
    return "\n" + "\n".join(lines) + "\n"
