"""Compare weights with levels: separate ones of each width, sums of parts, and slices of one code, in one table.

    python benchmarks/nested.py [ENTRY ...] [--model DIR --calib FILE --text FILE] [--max-tokens 65536]
    python benchmarks/nested.py show

An entry is one of `ENTRIES`, a method with its settings. All are one-sided and see the same text; embeddings and head
stay as they are. Each is quantized once, and scored at every level beside the original, in float32, all levels on the
same windows. Rows go to --json as they finish, and those that are there are not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import result_file
from measure import ROOT, absolute, in_fresh_process, run_quantize

Row = dict[str, Any]
INT = ("method=gptq", "group_size=128", "two_sided=false")
LOW = (*INT, "symmetric=false", "incoherence=true")  # what 2 bits need
TRELLIS = ("method=trellis", "state_bits=12", "incoherence=true")
MATQUANT = ("method=matquant", "group_size=128", "symmetric=false", "incoherence=true")
ENTRIES: dict[str, tuple[str, ...]] = {
    "int 8": (*INT, "bits=8"),
    "int 4 + 4": (*INT, "bits=8", "nested=true"),
    "int 4, rotated": (*LOW, "bits=4"),
    "int 2 + 2 + 4, rotated": (*LOW, "bits=8", "nested=[2, 4, 8]"),
    "sliced 2 + 2, rotated": (*MATQUANT, "level_weights=[0]"),
    **{f"sliced 2 + 2, rotated, weight {w}": (*MATQUANT, f"level_weights=[{w}]") for w in (0.01, 0.1, 1)},
    "trellis 2": (*TRELLIS, "bits=2"),
    "trellis 4": (*TRELLIS, "bits=4"),
    "trellis 2 + 2": (*TRELLIS, "bits=4", "nested=true"),
    "trellis 2 + 2, damp 0.15": (*TRELLIS, "bits=4", "nested=true", "damp=0.15"),
    "trellis 2 + 2.5, damp 0.15": (*TRELLIS, "bits=2", "nested=[2, 4.5]", "damp=0.15"),
    "e8p 2": ("method=e8p", "bits=2", "incoherence=true"),
    "e8p 4": ("method=e8p", "bits=4", "incoherence=true"),
}
SEQ_LEN = 512


def score(directory: Path, base: Path, text: Path, max_tokens: int) -> list[Row]:
    """Bits of the linears, and figures beside the original, at each level; run in a fresh process."""
    import torch

    from compress import formats
    from compress.evaluate import scores
    from compress.evaluate.reader import Reader
    from compress.export.source import open_source
    from compress.formats import levels
    from compress.model import load

    cut = scores.text_windows([base], text, SEQ_LEN, max_tokens)
    linears = (weight for weight in open_source(directory).packed if ".layers." in weight.module)
    packed = {weight.module: weight.read() for weight in linears}
    known = sorted({level for weight in packed.values() for level in levels.levels(weight.stored)}) or [0]
    rows: list[Row] = []
    models = [load.load_model(base, "float32") for _ in (0, *known)]
    with torch.no_grad():
        for level, model in zip(known, models[1:], strict=True):
            views = {name: levels.view(weight, level or None) for name, weight in packed.items()}
            for name, view in views.items():
                model.get_submodule(name).get_parameter("weight").copy_(formats.decode(view, torch.float32))
            numel = sum(rows * columns for rows, columns in (view.shape for view in views.values()))
            rows.append({"level": level, "bpw": 8 * sum(view.nbytes for view in views.values()) / numel})
        readers = [Reader(model, name="a level") for model in models]
        columns: list[list[torch.Tensor]] = [[] for _ in known]
        for windows in cut.tokens.split(scores.windows_at_a_time(readers, SEQ_LEN)):
            original, *predicted = (reader.predictions(windows) for reader in readers)
            for column, logits in zip(columns, predicted, strict=True):
                column.append(scores.score([logits, original], windows[:, 1:].flatten()))
    for row, column in zip(rows, columns, strict=True):
        figures = torch.cat(column, 1).view(4, len(cut.tokens), SEQ_LEN - 1)[..., cut.prefix.unscored :]
        row |= vars(scores.summary(figures, text.name, SEQ_LEN, cut.prefix.text))
    return rows


def measure(entry: str, args: argparse.Namespace, work: Path) -> Row:
    """Quantize by one entry, and score it."""
    out, recipe = work / "out", work / "base.yaml"
    recipe.write_text("calibration: {importance: auto}\nquantize: {method: gptq}\n")
    options = [word for setting in ENTRIES[entry] for word in ("--set", setting)]
    run_quantize(args.model, recipe, args.calib, out, {}, options)
    return {"levels": in_fresh_process(score, out, args.model, args.text, args.max_tokens)}


def show(rows: list[Row]) -> None:
    """Print the table: an entry's levels in a line each."""
    cells = [
        (row["model"], row["entry"], f"{level['level'] or ''}", f"{level['bpw']:.3f}", f"{level['kl_mean']:.6f}")
        + (f"{level['kl_se']:.6f}", f"{level['perplexity']:.2f}", f"{level['tokens']}")
        for row in rows
        for level in row["levels"]
    ]
    names = ("model", "entry", "level", "bits", "KL", "standard error", "perplexity", "tokens")
    result_file.present("weights with levels", names, cells, names[:2])


def main() -> None:
    """Measure what is asked for, and print all that is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", metavar="ENTRY", help=", ".join(ENTRIES))
    parser.add_argument("--model", type=absolute, default=ROOT / "tests/models/books-8m")
    parser.add_argument("--calib", type=absolute, default=ROOT / "tests/data/books_calib.txt")
    parser.add_argument("--text", type=absolute, default=ROOT / "tests/data/books_heldout.txt")
    parser.add_argument("--max-tokens", type=int, default=65_536)
    parser.add_argument("--json", type=absolute, default=ROOT / "benchmarks/results/nested.json")
    args = parser.parse_args()
    for entry in [] if args.entries == ["show"] else args.entries or ENTRIES:
        if entry not in ENTRIES:
            parser.error(f"unknown entry {entry!r}; known: {', '.join(ENTRIES)}")
        with tempfile.TemporaryDirectory() as work:
            identity = {"entry": entry, "model": args.model.name, "text": args.text.name, "asked": args.max_tokens}
            result_file.add(args.json, identity, False, entry, partial(measure, entry, args, Path(work)))
    show(result_file.read(args.json))


if __name__ == "__main__":
    main()
