"""Measure recipes, and single changes of recipes, on a real pretrained model: stored bits, divergence, and seconds.

    python benchmarks/real_model.py MODEL [ENTRY ...] --calib TEXT --text TEXT [--samples 16] [--blocks 6]
    python benchmarks/real_model.py show

An ENTRY is `recipe` or `recipe+change+change`; the changes are those of CHANGES: `int3+rotate+attention`. Of a recipe
in BASES a plain form is taken and changed, with groups that divide 576; `recipe+as_is` is the recipe as it stands.
Without entries: every change alone at int3, int4 and vq2bit. Rows go to --json as they finish, and those that are there
with the same options are not measured again. --blocks: only that many decoder blocks are quantized, spread evenly from
the first to the last. The model is scored on the first windows of --text in float32, against the model as it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT, absolute, in_fresh_process, run_quantize, spread_blocks

Row = dict[str, Any]
SEQ_LEN, WINDOWS = 1024, 8
GROUP_64 = {"group_size": 64}  # 576 columns do not divide by 128
KEPT = {"embeddings": {"keep": True}, "head": {"keep": True}}
ALIKE = {"calibration": {"importance": "none"}}  # all tokens count alike
PLAIN = {"quantize": {**GROUP_64, "incoherence": False}, **ALIKE, **KEPT}
BASES: dict[str, Row] = {
    **{name: PLAIN for name in ("int4", "int3", "int2")},
    "vq2bit": {"quantize": {"state_bits": 14}, **ALIKE},
    **{name: ALIKE for name in ("vq3bit", "trellis4bit", "e8p2bit")},
    **{name: KEPT for name in ("quarot4bit", "rsq3bit", "w4a8", "w4a4kv4")},
    "int3-eora": {"quantize": {"incoherence": False}, **ALIKE},
    "glvq2bit": {"quantize": {"incoherence": False}},
}
ROTATE = {"method": "rotate"}
AS_IS = "as_is"  # in the place of changes
CHANGES: dict[str, Row] = {  # name -> sections of a recipe that are changed
    "rotate": {"transform": [ROTATE]},
    "seeds": {"transform": [{**ROTATE, "seeds": 8}]},
    "learn": {"transform": [{**ROTATE, "learn": 32}]},
    "tables": {"embeddings": {"bits": 8}, "head": {"bits": 8}},
    "incoherence": {"quantize": {"incoherence": True}},
    "plain": {"quantize": {"incoherence": False}},
    "attention": {"calibration": {"importance": "attention"}},
    "activation_norm": {"calibration": {"importance": "activation_norm"}},
    "first_tokens": {"calibration": {"importance": "first_tokens"}},
    "token_rarity": {"calibration": {"importance": "token_rarity"}},
    "awq": {"transform": [{"method": "awq"}]},
    "smooth": {"transform": [{"method": "smooth"}]},
    "outlier_suppression": {"transform": [{"method": "outlier_suppression"}]},
    "asymmetric": {"quantize": {"symmetric": False}},
    "column_order": {"quantize": {"act_order": False}},
    "no_sweeps": {"quantize": {"sweeps": 0}},
    "sweeps_3": {"quantize": {"sweeps": 3}},
    "damp_0.001": {"quantize": {"damp": 0.001}},
    "damp_0.05": {"quantize": {"damp": 0.05}},
    "damp_0.2": {"quantize": {"damp": 0.2}},
    "no_clip_search": {"quantize": {"clip_search": False}},
    "late_groups": {"quantize": {"static_groups": False}},
    "group_32": {"quantize": {"group_size": 32}},
    "rows": {"quantize": {"group_size": -1}},
    "rtn": {"quantize": {"method": "rtn"}},
    "correction_0": {"calibration": {"target_correction": 0.0}},
    "correction_0.25": {"calibration": {"target_correction": 0.25}},
    "correction_0.5": {"calibration": {"target_correction": 0.5}},
    "blockwise": {"tune": {"method": "blockwise", "steps": 20, "between": 60}},
    "learned_codes": {"tune": {"method": "blockwise", "codes": "straight_through", "steps": 60, "between": 20}},
    "end_to_end": {"tune": {"method": "end_to_end", "steps": 20}},
    "rank_8": {"quantize": {"lowrank": {"rank": 8, "bits": 4}}},
    "samples_4": {"calibration": {"num_samples": 4}},
    "samples_64": {"calibration": {"num_samples": 64}},
    "rolled_4": {"calibration": {"rolled": 4}},
    "state_10": {"quantize": {"state_bits": 10}},
    "state_12": {"quantize": {"state_bits": 12}},
    "state_14": {"quantize": {"state_bits": 14}},
    "state_16": {"quantize": {"state_bits": 16}},
}
OF_GPTQ = [
    "rotate",
    "incoherence",
    "attention",
    "rotate+attention",
    "activation_norm",
    "first_tokens",
    "token_rarity",
    "awq",
    "smooth",
    "outlier_suppression",
    "asymmetric",
    "column_order",
    "no_sweeps",
    "sweeps_3",
    "damp_0.001",
    "damp_0.05",
    "damp_0.2",
    "no_clip_search",
    "late_groups",
    "group_32",
    "rows",
    "rtn",
    "correction_0.25",
    "correction_0.5",
    "rank_8",
    "samples_4",
    "samples_64",
    "rolled_4",
    "seeds",
    "learn",
]
OF_TRELLIS = [
    "plain",
    "attention",
    "damp_0.05",
    "correction_0",
    "correction_0.5",
    "rotate",
    "rank_8",
    "samples_4",
    "samples_64",
    "state_12",
]
ENTRIES = [
    entry
    for base, changes in (("int3", OF_GPTQ), ("int4", OF_GPTQ), ("vq2bit", OF_TRELLIS))
    for entry in (base, *(f"{base}+{change}" for change in changes))
]


def recipe_of(entry: str, samples: int, left_out: list[int]) -> Row:
    """Return the recipe of an entry as the data of its YAML file."""
    import yaml

    name, *changes = entry.split("+")
    recipe: Row = yaml.safe_load(next((ROOT / "recipes").rglob(f"{name}.yaml")).read_text())
    recipe["calibration"] = {**recipe.get("calibration", {}), "num_samples": samples, "seq_len": SEQ_LEN}
    made = [BASES.get(name, {}), *(CHANGES[change] for change in changes)] if changes != [AS_IS] else []
    for change in made:
        for section, value in change.items():
            before = recipe.get(section)
            if section in KEPT:
                recipe[section] = value
            else:
                recipe[section] = {**(before or {}), **value} if isinstance(value, dict) else [*(before or []), *value]
    if recipe.get("quantize", {}).get("method") == "rtn":
        recipe["quantize"] = {k: v for k, v in recipe["quantize"].items() if k not in ("act_order", "sweeps", "damp")}
    recipe["ignore"] = [*recipe.get("ignore", []), *(f"*.layers.{block}.*" for block in left_out)]
    return recipe


def score(directory: Path, base: Path, text: Path, kept: Path) -> Row:
    """Score a checkpoint; the logits of the base model are kept in a file, [windows, seq_len - 1, vocabulary]."""
    import torch
    from safetensors.torch import load_file, save_file

    from compress.evaluate import scores
    from compress.model import load

    cut = scores.text_windows([directory, base], text, SEQ_LEN, SEQ_LEN * WINDOWS)
    windows = cut.tokens

    def logits(of: Path) -> list[torch.Tensor]:
        model = load.load_model(of, "float32")
        with torch.no_grad():
            return [model(input_ids=window[None], use_cache=False).logits[0, :-1] for window in windows]

    if not kept.exists():
        save_file({"logits": torch.stack(logits(base))}, kept)
    original = load_file(kept)["logits"]
    pairs = zip(logits(directory), original, windows, strict=True)
    figures = [scores.score([ours, theirs], window[1:]) for ours, theirs, window in pairs]
    return asdict(scores.summary(torch.stack(figures, 1), text.name, SEQ_LEN, cut.prefix.text))


def measure(entry: str, args: argparse.Namespace, work: Path) -> Row:
    """Quantize and score one entry."""
    recipe, out = work / "recipe.yaml", work / "out"
    _, left_out = spread_blocks(args.model, args.blocks)
    recipe.write_text(json.dumps(recipe_of(entry, args.samples, left_out)))
    run, report = run_quantize(args.model, recipe, args.calib, out, {}, [])
    row: Row = {"bpw": report["bpw"], **asdict(run)}
    row["checkpoint_bytes"] = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    kept = work / f"logits-{args.text.stem}.safetensors"
    return row | in_fresh_process(score, out, args.model, args.text, kept)


def table(rows: list[Row]) -> None:
    """Print the rows by their base; the last column divides their divergence by that of the base without changes."""
    plain = {(row["entry"], row["samples"], row["blocks"]): row["kl_mean"] for row in rows}
    cells = []
    for row in rows:
        base = plain.get((row["entry"].split("+")[0], row["samples"], row["blocks"]))
        entry = row["entry"] + (f" ({row['blocks']} blocks)" if row["blocks"] else "")
        cell = [entry, f"{row['bpw']:.3f}", f"{row['checkpoint_bytes'] / 2**20:.1f}", f"{row['kl_mean']:.4f}"]
        cell += [f"{row['kl_se']:.4f}", f"{row['perplexity']:.2f}", f"{row['same_top1']:.1%}", f"{row['cpu_s']:.0f}"]
        cells.append([*cell, f"{row['kl_mean'] / base:.3f}" if base else ""])
    names = ["recipe", "bits", "MiB", "KL", "s.e.", "perplexity", "same top-1", "CPU s", "KL ratio"]
    result_file.present("A real model", names, cells, left=["recipe"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=str, help="a checkpoint directory, or `show`")
    parser.add_argument("entries", nargs="*", metavar="ENTRY")
    parser.add_argument("--calib", type=absolute)
    parser.add_argument("--text", type=absolute)
    parser.add_argument("--samples", type=int, default=16, help=f"calibration windows of {SEQ_LEN} tokens")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--json", type=absolute, default=ROOT / "benchmarks/results/real_model.json")
    parser.add_argument("--work", type=absolute)
    args = parser.parse_args()
    if args.model != "show":
        args.model = absolute(args.model)
        with tempfile.TemporaryDirectory() as temporary:
            work = args.work or Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            for entry in args.entries or ENTRIES:
                identity = {"entry": entry, "samples": args.samples, "blocks": args.blocks, "model": args.model.name}
                identity |= {"calib": args.calib.name, "text": args.text.name}
                result_file.add(args.json, identity, False, entry, partial(measure, entry, args, work))
    table(result_file.read(args.json))


if __name__ == "__main__":
    main()
