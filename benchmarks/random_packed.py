"""Write a packed checkpoint of a model with random codes in the formats of a recipe, to measure speed with.

    python benchmarks/random_llama.py /tmp/model
    python benchmarks/random_packed.py /tmp/model trellis4bit /tmp/model-trellis4bit

Nothing is quantized: a model of any size takes seconds a gigabyte. What such a model writes is noise, and every kernel
does the same work as with a real checkpoint. Calibration text is not needed; recipes that search for bits are refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from measure import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # tests/helpers/stored.py draws random weights

TEXT = "tests/data/books_calib.txt"  # that a plan asks for; it is not read


def write(model: Path, entry: str, out: Path) -> int:
    """Write the checkpoint; return the bytes of its tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    from compress import recipe
    from compress.run.job import Job
    from compress.run.prepare import prepare
    from compress.runtime import hf
    from compress.runtime.embedding import LIKE
    from helpers import stored

    chosen = recipe.load(entry)
    if chosen.allocate is not None:
        raise SystemExit(f"{entry} searches for bits; give a recipe that says them")
    prepared = prepare(Job(str(model), chosen, out=out, calib=str(ROOT / TEXT)))
    packed = prepared.plan.packed
    out.mkdir(parents=True)
    tensors: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    for seed, layer in enumerate(packed):
        for known in (f"{layer.spec.name}.weight", *layer.spec.parameters):
            tensors.pop(known, None)
        parts = stored.random_parts(layer.stored, layer.spec.shape, seed)
        tensors |= {f"{layer.spec.name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    for name in prepared.plan.embedding_tables:
        tensors[f"{name}.{LIKE}"] = torch.empty(0, dtype=prepared.skeleton.dtype)
    for file in model.iterdir():
        if file.suffix in (".json", ".txt", ".jinja", ".model") and "index" not in file.name:
            shutil.copy(file, out)
    config = json.loads((model / "config.json").read_text())
    modules = {layer.spec.name: layer.stored for layer in packed}
    config["quantization_config"] = hf.build_config(modules).to_dict()
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def main() -> None:
    """Write what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise SystemExit(f"{arguments.out} is there already; choose another directory or remove it")
    print(f"{write(arguments.model, arguments.recipe, arguments.out) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
