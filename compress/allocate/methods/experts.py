"""Experts: bits for the experts of a mixture by how often, how strongly and how much they matter (PMQ of MC-MoE,
arXiv 2410.06270).

The damage of expert i at an option is share_i^alpha * routing_i^beta * error_i^gamma: the share of tokens routed to it,
the sum of its routing probabilities (both normalized in the block), and the error of the block's output with this
expert alone at the option. A 0/1 program takes the options of least damage within the bytes, with at least one expert
of every block at each of the two largest options.

Differences from the paper and its released code, and why:
- The error is the sum over tokens of squared norms, and counts alone (`alpha: 0, beta: 0, gamma: 1`). The paper's is
  the sum of norms, with `error: norms, alpha: 1, beta: 1.5, gamma: 2`. The error is one of the routed output, so it
  holds share and routing weights already; they would count twice, and a sum of squares does not square what many tokens
  add up to. Correlation (Pearson) with the KL of the model with one expert at 2 bits, over all experts of a trained
  mixture (4.4M parameters, benchmarks/small_moe.py): squares 0.94, norms squared 0.90, the paper's 0.59, that of the
  released code 0.42. KL of its models at equal bytes, 16352 tokens, `at_least: 0`: 0.0154 by squares, 0.0189 by the
  paper's score (2.478 bits a weight); 0.0055 and 0.0062 (3.184). A knapsack on the same units by `hessian` or `swap` is
  as good (0.0154 each; 0.0053 and 0.0054), and so are norms squared without the routing (0.0154, the same choice).
- The released code raises the error to alpha, where the paper and its own settings say gamma, so it does not square it;
  `gamma: 1` beside the paper's settings gives the same.
- The paper solves every block by itself with the same budget. Here one program holds all blocks, so that a block whose
  experts matter less gives to others; `scope: block` is the published form, each block having its share by weights, and
  what it leaves unspent goes to the next (KL 0.0306 by squares, 0.0313 by the paper's score, at the first of the sizes
  above).
- It counts bits; here bytes are counted, scales included.

Units that are no experts have damages of another kind, which cannot be added to these: they get one option, `dense`.
Mostly a recipe's rules fix attention, and there are none.

Not done: options for parts of an expert (units should be whole experts). Experts are pruned at run time by
compress/runtime/experts.py (`experts: {prune: true}` of a recipe).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from compress.allocate.problem import Allocated, ChoiceEvaluator, Problem, Unit, entries_at, option_named, rank_options
from compress.allocate.solver import LinearSide, Solution, SolverLimits, solve
from compress.errors import BudgetError, RecipeError

ERRORS = {"squares": "expert_squares", "norms": "expert"}  # their names among damages


@dataclass(frozen=True)
class Config(SolverLimits):
    error: Literal["squares", "norms"] = "squares"  # of the block's output with one expert alone at the option, summed
    # over tokens: squared norms, or norms
    alpha: float = 0.0  # exponent of an expert's share of the tokens
    beta: float = 0.0  # exponent of its share of the routing probabilities
    gamma: float = 1.0  # exponent of the error
    at_least: int = 1  # [experts] of each block at each option of `spread`
    spread: tuple[str, ...] = ()  # names of the options that `at_least` experts of each block get; empty: the two
    # largest
    scope: Literal["model", "block"] = "model"  # one budget for all blocks (model), or to each block its share
    dense: str | None = None  # name of the option of all units that are no experts; null: the largest
    gap: float = 1e-4  # [fraction] between the solution and the bound at which the solver stops

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("alpha", "beta", "gamma", "at_least"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} {getattr(self, key)} is negative")


def needs(config: Config) -> frozenset[str]:
    """Return the error of each expert, and the two scores of its routing."""
    return frozenset({ERRORS[config.error], "share", "routing"})


def allocate(problem: Problem, config: Config, evaluator: ChoiceEvaluator | None = None) -> Allocated:
    problem.check()
    units = problem.units
    experts = [i for i, unit in enumerate(units) if unit.is_expert]
    if not experts:
        raise RecipeError("allocate: there are no experts among the units; use another method, such as knapsack")
    if any("share" not in units[i].scores for i in experts):
        raise RecipeError("allocate: experts are not told apart; set allocate.units to expert")
    chosen = [0] * len(units)
    notes = []
    if others := [i for i, unit in enumerate(units) if not unit.is_expert]:
        dense = option_named([units[i] for i in others], "dense", config.dense, -1)
        for i, entry in zip(others, entries_at([units[i] for i in others], dense), strict=True):
            chosen[i] = entry
        notes.append(f"{len(others)} units that are no experts are stored with {dense}")
    room = problem.budget - sum(units[i].entries[chosen[i]].nbytes for i in others)
    if room <= 0:
        raise BudgetError(f"{notes[0]}, which leaves nothing; raise the target, or name a smaller allocate.dense")
    damage = bound = 0.0
    for group, solution in _solve_groups([units[i] for i in experts], room, config):
        for i, entry in zip(group, solution.choice, strict=True):
            chosen[experts[i]] = entry
        damage, bound = damage + solution.damage, bound + solution.bound
        notes += solution.notes
    return Allocated(tuple(chosen), tuple(dict.fromkeys(notes)), facts={"damage": damage, "bound": bound})


def _solve_groups(experts: Sequence[Unit], room: int, config: Config) -> list[tuple[list[int], Solution]]:
    """Return (indices of units, their solution) of every program: one, or one a block."""
    damages = _damages(experts, config)
    spread = [option_named(experts, "spread", name, 0) for name in config.spread] or rank_options(experts)[-2:]
    blocks = defaultdict[int, list[int]](list)
    for i, unit in enumerate(experts):
        blocks[unit.block].append(i)
    groups = list(blocks.values()) if config.scope == "block" else [list(range(len(experts)))]
    limits = SolverLimits(config.seconds / len(groups), config.gap)
    total, weights, spent, solutions = sum(unit.numel for unit in experts), 0, 0, []
    for group in groups:
        weights += sum(experts[i].numel for i in group)
        problem = Problem(tuple(experts[i] for i in group), room * weights // total - spent)
        sides = _sides(problem.units, spread, config.at_least)
        solution = solve(problem, [damages[i] for i in group], "milp", sides, limits)
        spent += problem.nbytes(solution.choice)
        solutions.append((group, solution))
    return solutions


def _damages(experts: Sequence[Unit], config: Config) -> list[list[float]]:
    share, routing = _normalize(experts, "share"), _normalize(experts, "routing")
    return [
        [
            share[i] ** config.alpha * routing[i] ** config.beta * e.damage[ERRORS[config.error]] ** config.gamma
            for e in unit.entries
        ]
        for i, unit in enumerate(experts)
    ]


def _normalize(experts: Sequence[Unit], score: str) -> list[float]:
    """Return the score of each, as a fraction of its block's sum."""
    total = defaultdict[int, float](float)
    for unit in experts:
        total[unit.block] += unit.scores[score]
    return [unit.scores[score] / total[unit.block] if total[unit.block] > 0 else 0.0 for unit in experts]


def _sides(experts: Sequence[Unit], spread: Sequence[str], at_least: int) -> list[LinearSide]:
    """Ask for at least so many experts of every block at each of the options."""
    pairs = defaultdict[tuple[int, str], list[tuple[int, int]]](list)
    for i, unit in enumerate(experts):
        for index, entry in enumerate(unit.entries):
            pairs[unit.block, entry.option].append((i, index))
    blocks = dict.fromkeys(unit.block for unit in experts)
    return [LinearSide(tuple(pairs[block, name]), low=at_least) for block in blocks for name in spread if at_least]
