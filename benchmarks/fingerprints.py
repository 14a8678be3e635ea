"""Hash the checkpoints of every recipe, so that a change of structure can prove that it changed no byte.

    python benchmarks/fingerprints.py before.json            # on the old tree
    python benchmarks/fingerprints.py after.json --against before.json

Each recipe runs in a cheap setting on the first two blocks of the bundled model and on two small random models, one of
them a mixture of experts. A row holds the sha256 of all safetensors shards and of config.json, and that of the reloaded
model's logits and of the tokens that it generates through its cache. A recipe that a model is too small for has the
line of its refusal as its row. Hashes are equal on one machine with one version of torch, and nowhere else: sums of
floating-point numbers are taken in another order by other processors. The exit status is 1 where rows differ.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")

BUNDLED = ROOT / "tests/models/books-8m"
TEXT = ROOT / "tests/data/books_calib.txt"
BLOCKS = 2  # of the bundled model
WIDE = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}  # so that no method finds them too small
PICO = {"llama": WIDE, "mixtral": {**WIDE, "intermediate_size": 128}}
CHEAP = ["calibration.num_samples=4", "calibration.seq_len=64"]
CHEAPER = {  # settings of single recipes that would take minutes
    "int2-lrec": ["tune.steps=3"],
    "evo2.5bit": ["allocate.samples=4", "allocate.generations=2"],
    "evo3bit": ["allocate.samples=4", "allocate.generations=2"],
    "mixed2bit": ["allocate.samples=4"],
    "mixed3bit": ["allocate.samples=4"],
    "moe2.5bit": ["allocate.target=3.1bpw"],
}
PROMPT = 200  # tokens: more than what caches keep exact
NEW = 8  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--against", type=Path, help="JSON file to compare with")
    parser.add_argument("--only", default="*", help="recipes, as a pattern")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    asked = parser.parse_args()
    recipes = sorted(path.stem for path in (ROOT / "recipes").rglob("*.yaml"))
    with tempfile.TemporaryDirectory() as folder:
        models = prepare(Path(folder))
        cases = [(r, m) for r in recipes if fnmatch.fnmatch(r, asked.only) for m in models]
        with ThreadPoolExecutor(asked.jobs) as pool:
            rows = dict(pool.map(lambda case: (f"{case[0]} {case[1]}", in_child(case[0], models[case[1]])), cases))
    asked.out.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    if asked.against is None:
        return
    before = json.loads(asked.against.read_text())
    different = [name for name, row in rows.items() if before.get(name) != row]
    for name in different:
        print(f"{name}: {json.dumps(before.get(name))} -> {json.dumps(rows[name])}")
    print(f"{len(rows) - len(different)} of {len(rows)} rows are equal")
    sys.exit(bool(different))


def prepare(folder: Path) -> dict[str, Path]:
    """Write the models."""
    import torch
    from safetensors.torch import load_file, save_file

    from helpers import pico

    torch.set_num_threads(1)
    models = {name: pico.save_pico(name, folder / name, changes=changes) for name, changes in PICO.items()}
    bundled = folder / "bundled"
    shutil.copytree(BUNDLED, bundled)
    config = json.loads((bundled / "config.json").read_text())
    (bundled / "config.json").write_text(json.dumps({**config, "num_hidden_layers": BLOCKS}))
    tensors = load_file(bundled / "model.safetensors")
    kept = {
        k: t for k, t in tensors.items() if ".layers." not in k or int(k.split(".layers.")[1].split(".")[0]) < BLOCKS
    }
    save_file(kept, bundled / "model.safetensors", {"format": "pt"})
    return {**models, "bundled": bundled}


def in_child(recipe: str, model: Path) -> dict[str, str]:
    """The row of one run, made by a process of its own."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        try:
            row = one(recipe, model)
        except BaseException:  # noqa: BLE001 (a child reports whatever ended it)
            row = {"error": traceback.format_exc().strip().splitlines()[-1]}
        with os.fdopen(writable, "w") as file:
            file.write(json.dumps(row))
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process died"}


def one(recipe: str, model: Path) -> dict[str, str]:
    """Quantize, hash what was written, load it and hash what it computes."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        settings = [*CHEAP, *CHEAPER.get(recipe, [])]
        words = ["quantize", str(model), "--recipe", recipe, "--calib", str(TEXT), "--out", str(out)]
        code, said = command([*words, *(word for text in settings for word in ("--set", text))])
        if code:
            return {"refused": said.strip().splitlines()[-1].replace(folder, "").replace(str(model.parent), "")}
        row = {"config.json": sha256((out / "config.json").read_bytes())}
        digest = hashlib.sha256()
        for path in sorted(out.rglob("*.safetensors")):
            digest.update(path.name.encode() + path.read_bytes())
        return {**row, "shards": digest.hexdigest()[:16], **run(out, torch)}


def command(words: list[str]) -> tuple[int, str]:
    """Exit status of a command line, and what it printed on stderr."""
    from compress.__main__ import main as compress

    sys.argv = ["compress", *words]
    said = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            compress()
    except SystemExit as end:
        return (end.code if isinstance(end.code, int) else int(bool(end.code))), said.getvalue()
    return 0, said.getvalue()


def run(directory: Path, torch: Any) -> dict[str, str]:
    """Hashes of the logits of a packed model, and of what it generates."""
    import compress

    model = compress.load(directory, dtype=torch.float32)
    tokens = torch.randint(200, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens).logits
        half = model.to(torch.bfloat16)(tokens[:, :4]).logits
        written = model.to(torch.float32).generate(tokens, max_new_tokens=NEW, do_sample=False)
    return {
        "logits": sha256(logits.numpy().tobytes()),
        "bfloat16": sha256(half.float().numpy().tobytes()),
        "generated": sha256(written.numpy().tobytes()),
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    main()
