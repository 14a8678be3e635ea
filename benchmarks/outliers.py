"""Measure recipes and transforms on a clean model, and on the same model with planted outliers.

    python benchmarks/outliers.py [clean] [planted] [ENTRY ...] [--seeds 3] [--again]
    python benchmarks/outliers.py show

An ENTRY is a recipe, with settings and transforms: int4, int3+rotate, int8:method=rtn,activations={bits: 8}+smooth.
planted: in every norm of the residual stream a few channels are multiplied by 20 to 60, and divided in what reads the
norm; so are channels between up_proj and down_proj. The function of the model is the same but for the rounding of its
weights, and so is the text it is scored against: the clean model's distribution. (The stream itself cannot be scaled
without changing the function: the mean square that the norms divide by would change.)
Rows go to --json as they finish, and those that are there with the same options are not measured again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import low_bit
import result_file
from measure import add_table_options, in_fresh_process
from quantize import Setting, run_ours, score

Row = dict[str, Any]
W8A8 = "int8:method=rtn,group_size=-1,activations={bits: 8}"
STATIC = "int8:method=rtn,group_size=-1,activations={bits: 8; scale: tensor}"
ENTRIES = ["int4", "int3", W8A8, STATIC, "vq2bit", "w4a8", "w4a4kv4", "awq4bit", "rsq3bit", "quarot4bit"]
ENTRIES += [
    f"{entry}+{transform}" for entry in ("int4", "int3") for transform in ("rotate", "merged", "smooth", "awq", "os")
]
ENTRIES += [f"{entry}+{transform}" for entry in (W8A8, STATIC) for transform in ("rotate", "smooth", "os")]
TRANSFORMS = {
    "rotate": "{method: rotate}",
    "merged": "{method: rotate, online: false}",
    "smooth": "{method: smooth}",
    "os": "{method: outlier_suppression}",
    "awq": "{method: awq}",
}
FACTORS = (20.0, 30.0, 45.0, 60.0)  # of the planted channels, everywhere


def plant(model: Path, out: Path) -> None:
    """A copy of a llama-like model with outliers; saved in float32, so that nothing is rounded again."""
    import torch

    from compress.model.load import load_model, load_tokenizer

    net: Any = load_model(model, "float32")
    generator = torch.Generator().manual_seed(0)
    factors = torch.tensor(FACTORS)

    def scale(made: torch.Tensor, readers: Sequence[torch.Tensor]) -> None:
        channels = torch.randperm(made.shape[0], generator=generator)[: len(factors)]
        shape = (-1, *[1] * (made.dim() - 1))
        made[channels] *= factors.view(shape)
        for weight in readers:
            weight[:, channels] /= factors

    with torch.no_grad():
        for layer in net.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            scale(layer.input_layernorm.weight, readers)
            scale(layer.post_attention_layernorm.weight, [mlp.gate_proj.weight, mlp.up_proj.weight])
            scale(mlp.up_proj.weight, [mlp.down_proj.weight])
    net.save_pretrained(out)
    load_tokenizer(model).save_pretrained(out)


def overrides(entry: str) -> list[str]:
    """--set values of an entry."""
    _, settings = low_bit.parsed(entry.partition("+")[0])
    transforms = [TRANSFORMS[name] for name in entry.split("+")[1:]]
    found = [setting.replace(";", ",") for setting in settings]
    return found + ([f"transform=[{', '.join(transforms)}]"] if transforms else [])


def measured(args: argparse.Namespace, entry: str, model: Path, seed: int, out: Path) -> Row:
    options = [part for value in overrides(entry) for part in ("--set", value)]
    args.model = model
    run, report = run_ours(
        args, Setting(low_bit.parsed(entry.partition("+")[0])[0]), out, *options, "--seed", str(seed)
    )
    row = {"bpw": report["bpw"], "products": report["products"], **asdict(run)}
    return row | in_fresh_process(score, out, args.base, args.text, args.seq_len, args.max_tokens)


def measure(args: argparse.Namespace, work: Path) -> None:
    models = {"clean": args.base, "planted": work / "planted"}
    if "planted" in args.modes:
        in_fresh_process(plant, args.base, models["planted"])
    keys = ("num_samples", "seq_len", "max_tokens", "env")
    for mode in args.modes:
        for entry in args.entries or ENTRIES:
            for seed in range(args.seeds):
                options = {"seed": seed, **{key: getattr(args, key) for key in keys}}
                identity = {"table": mode, "entry": entry, "options": options}
                work_of = partial(measured, args, entry, models[mode], seed, work / "out")
                row = result_file.add(args.json, identity, args.again, f"{mode} {entry}", work_of)
                if row is not None:
                    kl, wall = row["kl_mean"], row["wall_s"]
                    print(f"{mode} {entry} {seed}: KL {kl:.5f}, {wall:.0f} s", file=sys.stderr)


def present(rows: Sequence[Row]) -> None:
    """Print one line for each entry and mode: the mean over seeds, and the lowest and highest."""
    names = ("model", "entry", "bpw", "KL", "se", "seeds (lowest to highest)", "ppl", "tokens", "CPU s")
    lines = []
    for mode, entry in dict.fromkeys((row["table"], row["entry"]) for row in rows):
        mine = [row for row in rows if (row["table"], row["entry"]) == (mode, entry)]
        kl = sorted(row["kl_mean"] for row in mine)
        spread = f"{len(kl)} ({kl[0]:.5f} to {kl[-1]:.5f})" if len(kl) > 1 else "1"
        average = {key: sum(row[key] for row in mine) / len(mine) for key in ("bpw", "kl_mean", "perplexity", "cpu_s")}
        cells = [mode, entry, f"{average['bpw']:.3f}", f"{average['kl_mean']:.5f}", f"{mine[0]['kl_se'] or 0:.5f}"]
        cells += [spread, f"{average['perplexity']:.2f}", str(mine[0]["tokens"]), f"{average['cpu_s']:.0f}"]
        lines.append(cells)
    result_file.present("outliers.py", names, lines, names[:2])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="MODE or ENTRY")
    parser.add_argument("--seeds", type=int, default=1)
    add_table_options(parser, "outliers")
    args = parser.parse_args(argv)
    args.env = dict(args.env)
    args.modes = [word for word in args.what if word in ("clean", "planted")] or ["clean", "planted"]
    args.entries = [word for word in args.what if word not in ("clean", "planted", "show")]
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    if "show" not in args.what:
        with tempfile.TemporaryDirectory() as temporary:
            measure(args, Path(temporary))
    present(result_file.read(args.json))


if __name__ == "__main__":
    main(sys.argv[1:])
