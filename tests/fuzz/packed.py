"""Class "packed": everything in a packed checkpoint. It is opened, run, verified and inspected after the change.

A case is {"base": NAME, "edits": [...], "plain": BOOL}; `fuzz/edits.py` says what an edit is. Plain: transformers alone
loads it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from fuzz import edits, guards, verdicts
from fuzz.sandbox import Case
from fuzz.verdicts import Verdict

CHEAP = ("calibration.num_samples=4", "calibration.seq_len=64")
SHORT = ("quantize.iterations=2", "quantize.sweeps=1")  # a search: what is stored has the same form
WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256, "num_attention_heads": 2}
WIDE["num_key_value_heads"] = 1
BASES: dict[str, tuple[str, str, tuple[str, ...]]] = {  # name -> model, recipe, overrides
    "int4": ("llama", "int4", ("quantize.group_size=32", "quantize.symmetric=false")),
    "trellis": ("llama", "trellis2bit", ("quantize.state_bits=12",)),
    "gptvq": ("llama", "gptvq2bit", SHORT),
    "lattice": ("llama", "glvq2bit", SHORT),
    "moe": ("mixtral", "moe2.5bit", ("allocate.target=3.1bpw",)),
    "structured": ("llama", "layerwise-zd", ()),
    "lowrank": ("llama", "int3-eora", ("quantize.group_size=32", "incoherence=false")),
    "lord": ("llama", "lord20", ()),
    "vptq": ("llama", "vptq2bit", SHORT),
    "e8p": ("llama", "e8p2bit", ("quantize.sweeps=1",)),
    "pvq": ("llama", "pvq3bit", ()),
    "nf": ("llama", "lq-lora2.75", ()),
    "w4a4": ("llama", "w4a4kv4", ()),
    "rotated": ("llama", "quarot4bit", ()),
    "smooth": ("llama", "w8a8-smooth", ()),
    "os": ("llama", "w8a8-os", ()),
}
CACHES = ("kv2", "kvquant3", "rotatekv2", "kivi2", "squat2", "gear4", "zipkv", "kv3", "kv4", "kv8", "pca4")  # of int8
NAMES = ("int4", "kv2", "trellis", "kvquant3", "gptvq", "rotatekv2")
NAMES += tuple(name for name in (*BASES, *CACHES) if name not in NAMES)
FEW = 4  # of NAMES, that a short campaign makes
PROMPT = 40  # tokens
NEW = 6  # tokens


def prepare(folder: Path, name: str) -> Path:
    """Return a packed checkpoint, written the first time."""
    return _prepared(folder, name)[0]


@functools.cache
def _prepared(folder: Path, name: str) -> tuple[Path, str]:
    """The directory, and what the unchanged model computes."""
    import compress
    from compress import recipe
    from compress.run.job import Job
    from helpers import pico

    kind, recipe_name, overrides = BASES[name] if name in BASES else ("llama", "int8", (_cache(name),))
    model = folder / f"{kind}-wide"
    if not model.exists():
        changes = {**WIDE, "intermediate_size": 128} if kind == "mixtral" else WIDE
        pico.save_pico(kind, model, changes=changes)
    out = folder / f"base-packed-{name}"
    compress.quantize(Job(str(model), recipe.load(recipe_name, [*CHEAP, *overrides]), out, calib=pico.__file__))
    return edits.sealed(out), computed(load(out))


def _cache(name: str) -> str:
    """Return the override that gives a recipe the cache of another, which takes over after some tokens."""
    from compress import recipe

    section = recipe.data(name)["kv_cache"]
    short = {key: 16 for key in ("residual_length", "flush") if key in section}
    return "kv_cache=" + json.dumps({**section, **short, **({"group_size": 32} if name == "rotatekv2" else {})})


def make(random: Random, folder: Path, few: bool = False) -> Case:
    name = random.choice(NAMES[: FEW if few else None])
    directory = prepare(folder, name)
    names = sorted(path.name for path in directory.iterdir())
    often = [n for n in names if n.endswith(".safetensors") or n == "config.json"] * 4
    count = random.choice([1, 1, 1, 2, 3])
    changes = [edits.random_edit(directory, random, names + often) for _ in range(count)]
    signed = [{"sign": True}] if random.random() < 0.5 else []
    return {"base": name, "plain": random.random() < 0.3, "edits": [*changes, *signed]}


def judge(case: Case, folder: Path, place: Path) -> Verdict:
    """Load it, verify it, inspect it; the worst counts."""
    base, expected = _prepared(folder, case["base"])
    directory = edits.linked(base, place / "model")
    edits.apply(directory, case["edits"])
    plain = case.get("plain", False) and not any(edit.get("fifo") for edit in case["edits"])  # transformers waits there
    loaded, model = verdicts.attempt(lambda: load(directory, plain), theirs=plain)
    found = None
    if model is not None:
        loaded, found = verdicts.attempt(lambda: computed(model), theirs=True)
    if loaded.is_failure:
        return loaded._replace(detail=f"{'load' if model is None else 'run'}, {loaded.detail}")
    if found == "unstable":
        return Verdict("unstable", "run, two equal calls differ")
    verified, ran = verdicts.command_ran(["verify", str(directory), "--json"])
    if verified.is_failure:
        return verified._replace(detail=f"verify, {verified.detail}")
    if found != expected and verified.kind == "ok" and _is_checked(ran.out) and not _is_signed(case):
        what = "the model computes something else" if found else f"loading says {loaded.detail[:150]}"
        return Verdict("silent", f"verify passes, and {what}")
    inspected = verdicts.command(["inspect", str(directory), *(["--json"] if len(str(case)) % 2 else [])])
    if inspected.is_failure:
        return inspected._replace(detail=f"inspect, {inspected.detail}")
    return next((each for each in (loaded, verified, inspected) if each.kind != "ok"), loaded)


def _is_checked(out: str) -> bool:
    """Return whether `verify` says that it compared hashes: a checkpoint without a manifest is what it is."""
    return json.loads(out).get("manifest", "checked") == "checked"


def _is_signed(case: Case) -> bool:
    return any(edit.get("sign") for edit in case["edits"])


def load(directory: Path, plain: bool = False) -> Any:
    """Load a model whose stored tensors lie in front of pages that cannot be read; `plain`: by transformers alone."""
    from transformers import AutoModelForCausalLM

    import compress

    with guards.guarded_cache():
        opened = AutoModelForCausalLM.from_pretrained if plain else compress.load
        model = opened(directory, dtype=torch.float32)
    guards.guard(model)
    return model


def computed(model: Any) -> str:
    """Hash the logits and tokens of a model; "unstable" where a second call gives others."""
    vocabulary = max(1, min(200, model.get_input_embeddings().num_embeddings))
    tokens = torch.randint(vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    results = [_once(model, tokens) for _ in range(2)]
    return results[0] if results[0] == results[1] else "unstable"


def _once(model: Any, tokens: Tensor) -> str:
    with torch.no_grad():
        logits = model(tokens).logits
        written = model.generate(tokens, max_new_tokens=NEW, do_sample=False)
    return hashlib.sha256(logits.float().numpy().tobytes() + written.numpy().tobytes()).hexdigest()
