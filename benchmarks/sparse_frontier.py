"""Measure sparse attention over methods, shares, lengths, phases and tasks, after "The Sparse Frontier" (2504.17768).

    python benchmarks/sparse_frontier.py run --model DIR --text TEXT --calib TEXT [--lengths 1024 2048] [--items 12]
                                             [--tasks ...] [--minutes 4] [--json FILE]
    python benchmarks/sparse_frontier.py show [--json FILE]

An item is a context of a length and an answer. The context goes through the model once, dense, all but its last token;
caches of all methods of the decoding phase are filled from that pass (kv_prompt.py). The last token and the answer are
then read through each of them. Methods of the prompt's phase (sparse_prefill.py) read the context again, each by
itself, and the answer densely. Noted are the nll of the answer, whether all of its tokens are the likeliest ones, and
the KL to the dense pass, mean over the answer's tokens.

A share is that of the past which attention reads, sinks and newest tokens included, in all layers but the first two,
which are dense everywhere; two more layers of `tidal` are, because they choose. Caches store tokens as they are, so
that nothing but what is not read makes the difference. Items are written down one by one: an interrupted run goes on
where it was, and more --items add to what there is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import ROOT

sys.path.insert(0, str(ROOT))

DENSE = 2  # first layers
SINK, TAIL = 4, 32
SHARES = (0.5, 0.25, 0.125)  # of the decoding phase
PREFILL_SHARES = (0.25, 0.0625)
PHASES = ("decoding", "prompt")
READERS = ("double_sparsity", "quest", "tidal", "actqkv")
EVICTIONS: dict[str, dict[str, Any]] = {
    "snapkv": {"method": "snapkv"},
    "expected": {"method": "expected_attention"},
}
TASKS = ("retrieval", "copying", "tracking", "rules", "arithmetic", "text")
TEXT_TOKENS = 32
STORE = {"method": "identity", "sink": SINK, "residual_length": TAIL, "flush": 1}
Figures = dict[str, list[float]]  # name of a method and share -> nll, right, kl


def make_item(task: str, length: int, number: int, material: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a context of about `length` tokens, and of its answer."""
    from compress.evaluate import task_runs

    words, begin = material.windows.flatten().tolist(), list(material.begin)
    draw = random.Random(f"{task} {length} {number}")
    start = draw.randrange(len(words) - length - TEXT_TOKENS)
    if task == "text":
        whole = begin + words[start : start + length - len(begin) + TEXT_TOKENS]
        return whole[:-TEXT_TOKENS], whole[-TEXT_TOKENS:]
    settings: dict[str, dict[str, Any]] = {
        "retrieval": {"lengths": (length,), "count": number + 1},
        "copying": {"length": length - 12},
        "rules": {"length": length - 1},
        "arithmetic": {"examples": length // 9},
        "tracking": {},
    }
    own = settings[task]
    item = task_runs.task(task, material, **{"count": number + 1, **own}).items[number]
    encode = material.encode
    (answer,) = (x if isinstance(x, tuple) else tuple(encode(x)) for x in item.answers[item.right : item.right + 1])
    if isinstance(item.context, tuple):
        return list(item.context), list(answer)
    if task == "tracking":  # the lines lie scattered in text, the question is at the end
        lines, asked = item.context.rsplit(" The value of", 1)
        pieces = [encode(f" {line}.") for line in lines.rstrip(".").split(". ")]
        room = length - sum(map(len, pieces)) - 16
        step, context = room // len(pieces), list(begin)
        for i, piece in enumerate(pieces):
            context += [*words[start + i * step : start + (i + 1) * step], *piece]
        return context + encode(f" The value of{asked}"), list(answer)
    bare = [*begin, *encode(item.context)]
    return bare[: len(begin)] + bare[len(begin) :][-(length - len(begin)) :], list(answer)


def settings_of(name: str, share: float, tokens: int) -> dict[str, Any]:
    """Return the settings of a cache that reads `share` of so many tokens in all layers but the first ones."""
    budget = round(share * tokens)
    if name in EVICTIONS:
        layers = (1.0,) * DENSE + (budget / tokens,) * (1 << 10)
        return {**STORE, "evict": {**EVICTIONS[name], "keep_by_layer": layers, "recent": TAIL}}
    coded = (tokens - SINK - TAIL) // 32 * 32  # labels and blocks of 32 tokens, pages of 16
    keep = max(budget - (tokens - coded), 1) / coded
    return {**STORE, "read": {"method": name, "keep": min(keep, 1.0), "dense_layers": DENSE}}


def read_answer(model: Any, cache: Any, tokens: Any, answer: Sequence[int]) -> Any:
    """Return log-probabilities [n, vocabulary] of the answer behind the last token of a context."""
    logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[0]
    return logits[-len(answer) :].float().log_softmax(-1)


def figures_of(found: Any, base: Any, answer: Any) -> list[float]:
    """Return nll, whether all is right, and KL of log-probabilities to `base`."""
    nll = -float(found.gather(-1, answer[:, None]).mean())
    return [nll, float((found.argmax(-1) == answer).all()), float((base.exp() * (base - found)).sum(-1).mean())]


def measure_item(model: Any, static: Any, context: list[int], answer: list[int], phase: str) -> Figures:
    """Return the figures of every method of a phase at every share."""
    import torch
    from kv_prompt import Prompt
    from sparse_prefill import PATTERNS, read_prompt

    from compress.kv.cache import make_cache
    from compress.kv.sparse.reader import group_queries

    whole = torch.tensor([context + answer[:-1]])
    tokens, last, target = whole[:, : len(context) - 1], whole[:, len(context) - 1 :], torch.tensor(answer)
    count, layers = tokens.shape[1], model.config.num_hidden_layers
    prompt = Prompt(model, tokens)
    base = read_answer(model, prompt.exact, last, answer)
    found = {"dense": figures_of(base, base, target)}
    for name in (*READERS, *EVICTIONS) if phase == "decoding" else ():
        for share in SHARES:
            settings = settings_of(name, share, count)
            if "evict" in settings:
                settings["evict"]["keep_by_layer"] = settings["evict"]["keep_by_layer"][:layers]
            cache = prompt.fill(make_cache(model.config, settings, static if name == READERS[0] else {}, "fused"))
            for layer, (_, query) in zip(cache.layers, prompt.calls, strict=True):
                if name in READERS and layer.reader is not None:
                    scaling = query.shape[-1] ** -0.5
                    layer.reader.watch(group_queries(query[:, :, -64:], layer.reader.spec.heads, scaling))
            found[f"{name} {share:g}"] = figures_of(read_answer(model, cache, last, answer), base, target)
    for name in PATTERNS if phase == "prompt" else ():
        for share in PREFILL_SHARES:
            cache, _ = read_prompt(model, tokens, name, share)
            found[f"{name} {share:g}"] = figures_of(read_answer(model, cache, last, answer), base, target)
    return found


def open_model(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the model in bfloat16, label channels, and what tasks are made of."""
    import torch

    from compress.calib import prefix
    from compress.calib.data import token_windows
    from compress.calib.kv import calibrate
    from compress.evaluate import task_runs
    from compress.evaluate.reader import Execution, load_model
    from compress.kv.cache import coded_layers
    from compress.kv.settings import cache_settings
    from compress.model import load as lm

    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model, Execution("bfloat16", "cpu")), lm.load_tokenizer(args.model)
    settings = cache_settings({**STORE, "read": {"method": READERS[0]}})
    tokens, _ = token_windows(str(args.calib), tokenizer, 512, len(tokenizer), document_tokens=2048)
    static, _ = calibrate(model, coded_layers(model.config, settings), tokens[:2], reading=settings.read)
    windows, _ = token_windows(str(args.text), tokenizer, 1024, len(tokenizer), document_tokens=131_072)
    begun = prefix.of_tokenizer(tokenizer, "auto")
    return model, static, task_runs.material(tokenizer, [model.config], begun, windows)


def run(args: argparse.Namespace) -> None:
    """Measure the items that the file does not have, until the time is over."""
    import torch

    done = keys_of(args.json)
    wanted = [
        (task, length, number, phase)
        for number in range(args.items)
        for length in args.lengths
        for task in args.tasks
        for phase in args.phases
        if f"{args.model.name} {task} {length} {number} {phase}" not in done
    ]
    if not wanted:
        return
    start = time.monotonic()
    model, static, material = open_model(args)
    for task, length, number, phase in wanted:
        key = f"{args.model.name} {task} {length} {number} {phase}"
        if key in keys_of(args.json):
            continue  # another process has measured it meanwhile
        if (time.monotonic() - start) / 60 > args.minutes:
            print(f"{len(wanted)} items were wanted; run again for the rest")
            return
        begun = time.process_time()
        with torch.inference_mode():
            context, answer = make_item(task, length, number, material)
            found = measure_item(model, static, context, answer, phase)
        spent = time.process_time() - begun
        row = {"key": key, "task": task, "length": length, "tokens": len(context), "answer": len(answer)}
        with args.json.open("a") as file:
            file.write(json.dumps({**row, "seconds": round(spent, 1), "figures": rounded(found)}) + "\n")
        print(f"{key}: {spent:.1f} s, dense {found['dense']}", flush=True)


def rounded(found: Figures) -> Figures:
    """Return figures with six digits."""
    return {name: [float(f"{x:.6g}") for x in values] for name, values in found.items()}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Return the items that a file has, each once."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return list({row["key"]: row for row in rows}.values())


def keys_of(file: Path) -> set[str]:
    """Return the names of the items that a file has."""
    return {row["key"] for row in rows_of(file)}


def cells(rows: list[dict[str, Any]]) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    """Yield length, method with share, task ("all": the mean over tasks), and figures with intervals."""
    from compress.evaluate import intervals

    rows = [row for row in rows if row["task"] in TASKS]
    names = list(dict.fromkeys(name for row in rows for name in row["figures"]))
    for length in sorted({row["length"] for row in rows}):
        for name in names:
            for task in [*TASKS, "all"]:
                own = [r for r in rows if r["length"] == length and task in (r["task"], "all") and name in r["figures"]]
                own = list({r["key"].rsplit(" ", 1)[0]: r for r in own}.values())  # the dense pass is in both phases
                if not own:
                    continue
                pairs = [(r["figures"]["dense"], r["figures"][name]) for r in own]
                more = [after[0] - before[0] for before, after in pairs]
                lost = sum(int(b[1] and not a[1]) for b, a in pairs)
                gained = sum(int(a[1] and not b[1]) for b, a in pairs)
                kl = intervals.mean_error([a[2] for _, a in pairs])
                yield (
                    length,
                    name,
                    task,
                    {
                        "items": len(own),
                        "tokens": sum(r["answer"] for r in own),
                        "accuracy": sum(a[1] for _, a in pairs) / len(own),
                        "lost": lost,
                        "gained": gained,
                        "accuracy_interval": intervals.paired_shares(lost, gained, len(own)),
                        "nll": sum(more) / len(more),
                        "nll_interval": intervals.interval(more),
                        "kl": kl[0],
                        "kl_se": kl[1],
                    },
                )


def show(args: argparse.Namespace) -> None:
    """Print a table for each length: nll above the dense pass by method, share and task; write the means down."""
    rows = rows_of(args.json)
    if not rows:
        raise SystemExit(f"{args.json} has no items; run the benchmark first")
    found = list(cells(rows))
    for length in sorted({x[0] for x in found}):
        print(f"\n{length} tokens\n\n| method, share | {' | '.join([*TASKS, 'all'])} |\n|{'---|' * (len(TASKS) + 2)}")
        for name in dict.fromkeys(x[1] for x in found if x[0] == length):
            own = {x[2]: x[3] for x in found if x[:2] == (length, name)}
            print(f"| {name} | {' | '.join(_cell(own.get(task)) for task in [*TASKS, 'all'])} |")
    if args.summary:
        lines = [json.dumps({"length": a, "method": b, "task": c, **d}) for a, b, c, d in found]
        args.summary.write_text('{"rows": [\n' + ",\n".join(lines) + "\n]}\n")


def _cell(own: dict[str, Any] | None) -> str:
    """Return nll above dense with half of its interval, and how many right answers were lost and gained."""
    if own is None:
        return ""
    low, high = own["nll_interval"] or (0.0, 0.0)
    return f"{own['nll']:+.2f} ± {(high - low) / 2:.2f}, {own['accuracy']:.2f} (-{own['lost']} +{own['gained']})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["run", "show"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--calib", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--items", type=int, default=12, help="of each task and length")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--minutes", type=float, default=4, help="no item is begun later")
    parser.add_argument("--json", type=Path, default=ROOT / "models_out/sparse_frontier.jsonl", help="a line an item")
    parser.add_argument("--summary", type=Path, help="show: write the means to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.mode == "show":
        show(args)
    elif not (args.model and args.text and args.calib):
        raise SystemExit("name --model, --text and --calib")
    else:
        run(args)


if __name__ == "__main__":
    main()
