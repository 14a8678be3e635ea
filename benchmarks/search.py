"""Measure what the evolutionary search costs: KL against token-forwards, with our settings and the published ones.

    python benchmarks/search.py [ours] [published] [NAME=SETTINGS ...] [--targets 3.125bpw] [--seeds 3] [--again]
    python benchmarks/search.py --synthetic [...]
    python benchmarks/search.py show

NAME=SETTINGS: ours with other settings, as JSON: random={"surrogate": false}; with {"published": true} among them, the
published with others.
The KL of a search's best choice is that on all sequences the search may use, measured after each generation that has
changed it; this is not counted. Token-forwards count blocks shared between choices once; what the table of damages has
cost is added to those that use it. --synthetic: errors of units as random vectors whose sum is squared, in place of a
model; takes seconds. Rows go to --json as they finish, and those that are there with the same options are not measured
again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import result_file
from measure import ROOT, absolute, add_table_options, in_fresh_process

if TYPE_CHECKING:
    from compress.allocate.problem import Choice, Problem

Row = dict[str, Any]
KINDS = {"qkv": 3.0, "o": 1.0, "gate_up": 5.4, "down": 2.7}  # of the synthetic blocks: weights, in 2^16
BITS = (2, 3, 4, 5)
WIDTH = 64  # of the vectors of errors


class Synthetic:
    """KL is the square of the sum of all units' errors: vectors with common directions, scaled on each sequence."""

    samples, seq_len, blocks = 128, 512, 8

    def __init__(self, seed: int, folder: Path) -> None:
        import torch

        self.torch, self.seed, self.folder, self.forwards = torch, seed, folder, 0.0
        self.say: Callable[[str], None] = lambda text: None
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        units = self.blocks * len(KINDS)
        levels = torch.tensor([4.0**-bits for bits in BITS], dtype=torch.float64)
        sizes = torch.tensor(list(KINDS.values()) * self.blocks, dtype=torch.float64)
        damages = (random(units) + 0.5 * random(self.blocks).repeat_interleave(len(KINDS))).exp()[:, None]
        damages = damages * sizes[:, None] * levels * (0.15 * random(units, len(BITS))).exp()
        damages *= 0.3 / damages[:, 1].sum()
        common = 0.2 * random(units, 1, 6) @ random(6, WIDTH)
        errors = common + 0.5 * random(units, 1, WIDTH) + random(units, len(BITS), WIDTH)
        self.errors = errors / errors.norm(dim=2, keepdim=True) * damages.sqrt()[..., None]
        noise = random(self.samples, 1, 1) + random(self.samples, units, 1) + 0.5 * random(self.samples, 1, WIDTH)
        self.gains = (0.5 * noise).exp()  # [samples, units, WIDTH]

    def problem(self, target: str) -> tuple[Problem, float]:
        """Damages: of each unit alone, on 16 sequences; and the token-forwards that they would take."""
        from compress.allocate.problem import Problem, Unit, UnitEntry

        alone = (self.errors * self.gains[:16, :, None]).square().sum(3).mean(0)
        units = []
        for index, damages in enumerate(alone.tolist()):
            block, (kind, size) = index // len(KINDS), list(KINDS.items())[index % len(KINDS)]
            numel = int(65536 * size)
            pairs = zip(BITS, damages, strict=True)
            entries = tuple(
                UnitEntry(f"int{b}", numel * b // 8, b, {"kl_one_at_a_time": damage}) for b, damage in pairs
            )
            units.append(Unit(f"layers.{block}.{kind}", (f"layers.{block}.{kind}",), block, numel, entries))
        numel = sum(unit.numel for unit in units)
        forwards = len(units) * len(BITS) * 16 * self.seq_len * (self.blocks + 1) / (2 * self.blocks)
        return Problem(tuple(units), int(numel * float(target.removesuffix("bpw")) / 8)), forwards

    def divergence(self, choices: Sequence[Choice], samples: Sequence[int]) -> list[float]:
        prefixes = {choice[: (b + 1) * len(KINDS)] for choice in choices for b in range(self.blocks)}
        self.forwards += len(prefixes) / self.blocks * len(samples) * self.seq_len
        units, gains = self.torch.arange(self.blocks * len(KINDS)), self.gains[list(samples)]
        errors = [self.errors[units, self.torch.tensor(choice)] for choice in choices]
        return [float((error * gains).sum(1).square().sum(1).mean()) for error in errors]


def traced(problem: Problem, config: Any, bench: Any) -> list[Row]:
    """The trace, with the KL on all sequences of what each generation ends with."""
    from compress.allocate.methods import evolve

    known: dict[Choice, float] = {}
    rows = []
    for state in evolve.search(problem, config, bench):
        if state.parent not in known:
            known[state.parent] = bench.divergence([state.parent], range(bench.samples))[0]
        rows.append({**state.trace[-1], "kl": known[state.parent]})
        print(f"generation {state.generation}: KL {rows[-1]['kl']:.5f}, {state.forwards / 1e6:.2f}M", file=sys.stderr)
    return rows


def config_of(settings: Row, generations: int) -> Any:
    from compress.allocate.methods import evolve

    base = evolve.PUBLISHED if settings.pop("published", False) else evolve.Config()
    lists = {key: tuple(value) for key, value in settings.items() if isinstance(value, list)}
    return replace(base, **{"generations": generations} | settings | lists)


def searched(args: argparse.Namespace, settings: Row, target: str, seed: int) -> Row:
    """One search from its beginning."""
    from compress.allocate.methods import evolve

    config = config_of(dict(settings), args.generations)
    needed = evolve.needs(config) - {"joint"}
    with tempfile.TemporaryDirectory() as temporary:
        if args.synthetic:
            synthetic = Synthetic(seed, Path(temporary))
            problem, forwards = synthetic.problem(target)
            rows = traced(problem, config, synthetic)
        else:
            rows, forwards = on_model(args, config, target, seed, Path(temporary))
    return {"trace": rows, "table_forwards": forwards if needed else 0.0, "config": asdict(config)}


def on_model(args: argparse.Namespace, config: Any, target: str, seed: int, folder: Path) -> tuple[list[Row], float]:
    """A search on the measurements in --measurements, which are made where they are missing."""
    from compress import recipe
    from compress.allocate import metrics, session
    from compress.allocate.methods import evolve
    from compress.cli import tables
    from compress.recipe.schema import Target
    from compress.run.job import Job

    loaded = recipe.load(str(args.recipe), args.set)
    given = {"calib": str(args.calib), "processes": args.processes, "measurements": args.measurements}
    asked = Job(str(args.base), loaded, folder / "out", **given)
    with tables.progress_bar() as progress, session.open_measurements(asked, progress) as opened:
        found = metrics.table(opened, evolve.needs(config))
        bench = metrics.evaluator(opened, found)
        bench.seed, bench.folder = seed, folder
        rows = traced(found.problem(Target(target)), config, bench)
    measured = args.measurements / f"measured-{config.estimator}.json"  # not there if it came with the levels
    return rows, json.loads(measured.read_text()).get("forwards", math.nan) if measured.is_file() else 0.0


def reached(row: Row, kl: float) -> float:
    """Token-forwards after which a search is at a KL or below, those of its table included; inf if it never is."""
    return next((step["forwards"] + row["table_forwards"] for step in row["trace"] if step["kl"] <= kl), math.inf)


def present(rows: Sequence[Row]) -> None:
    """Print what each search takes to the best KL of the published settings, and the KL that it ends with."""
    names = ("target", "seed", "settings", "start KL", "end KL", "token-forwards", "to the published KL", "ratio")
    lines = []
    for row in rows:
        same = ("table", "target", "seed", "options")
        peers = [r for r in rows if r["entry"] == "published" and all(r[key] == row[key] for key in same)]
        kls = [step["kl"] for step in row["trace"]]
        cells = [row["target"], str(row["seed"]), row["entry"], f"{kls[0]:.5f}", f"{min(kls):.5f}"]
        cells.append(f"{(row['trace'][-1]['forwards'] + row['table_forwards']) / 1e6:.2f}M")
        if peers:
            best = min(step["kl"] for step in peers[0]["trace"])
            mine, theirs = reached(row, best), reached(peers[0], best)
            cells += [f"{mine / 1e6:.2f}M", f"{mine / theirs:.3f}" if theirs else "-"]
        lines.append(cells + [""] * (len(names) - len(cells)))
    result_file.present("search.py", names, lines, ["settings"])


def measure(args: argparse.Namespace) -> None:
    options = {"generations": args.generations, "recipe": str(args.recipe), "set": args.set}
    table = "synthetic" if args.synthetic else args.base.name
    for target in args.targets:
        for name, settings in args.entries.items():
            for seed in range(args.seeds):
                mine = {"options": {} if args.synthetic else options, "target": target, "seed": seed}
                mine["options"]["generations"] = args.generations
                identity = {"table": table, "entry": name, "settings": settings, **mine}
                work = partial(in_fresh_process, searched, args, settings, target, seed)
                result_file.add(args.json, identity, args.again, f"{name} {target} {seed}", work)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="ours, published or NAME=SETTINGS", default=["ours", "published"])
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--targets", nargs="*", default=["3.125bpw"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--generations", type=int, default=60)
    add_table_options(parser, "search", max_tokens=None)
    parser.add_argument("--recipe", default="mixed3bit")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="over the recipe's settings")
    parser.add_argument("--measurements", type=absolute, default=ROOT / "models_out/search-measurements")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args(argv)
    args.entries = {}
    for word in args.what:
        name, _, settings = word.partition("=")
        args.entries[name] = json.loads(settings) if settings else {"published": True} if name == "published" else {}
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    if "show" not in args.what:
        measure(args)
    present(result_file.read(args.json))


if __name__ == "__main__":
    main(sys.argv[1:])
