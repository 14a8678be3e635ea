"""Say in sentences what looks broken in a compressed model, from the facts of diagnosis.py.

A part is named where it is unlike its like: the same linear in the other blocks. Coarse codes and scales that
transforms move around change all of them alike, a defect changes one. For a linear these are defects:

    scale   what it puts out, and that over what it takes, are both FAR times those of its like, or less than 1 / FAR
    order   rows whose outputs are those of other rows of the original
    other   outputs that are less like the original's than SUSPECT times the median, in a block that is, too

The last norm and the output head are compared on the original's hidden states: logits FAR times as large, in another
order, or unlike the original's by more than UNLIKE.

A linear behind one that is named is not named for `other`: it was given wrong inputs. A block that is far from the
original where none of its linears is gets a sentence of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from compress.evaluate.diagnosis import SAME_BASIS, Block, Facts, Linear, said
from compress.evaluate.diagnosis_end import End
from compress.pages.outliers import SUSPECT, median

FAR = 1.32  # times
SPREADS = 4.0  # times the usual distance from the median of their like
UNLIKE = 0.15  # 1 - correlation
WORSE = 2.0  # times the median error of blocks
BROKEN = 0.25  # error of a block
HEAD = "the output head"
FEW = 3  # linears of a kind below which they have no usual value: theirs should be the original's


def sentences(facts: Facts) -> list[str]:
    """Return what looks broken, worst first by kind; nothing for a sound model."""
    usual = median({block.name: block.error for block in facts.blocks})
    paths = {linear.path for block in facts.blocks for linear in block.linears}
    alike = {path: [x for block in facts.blocks for x in block.linears if x.path == path] for path in paths}
    found = []
    if facts.embeddings > SAME_BASIS:
        found.append(
            f"the embeddings are not the original's, nor a rotation of them: relative squared distance "
            f"{facts.embeddings:.2f}"
        )
    for block in facts.blocks:
        own = list(_linears(block, usual, alike))
        if not own and block.error > max(BROKEN, SUSPECT * usual):
            own = [
                f"{block.name} adds to the hidden states what the original does not: relative squared error "
                f"{block.error:.2g}, {usual:.2g} in other blocks; none of its linears stands out alone"
            ]
        found += own
    return found if facts.end is None else [*found, *_end(facts.end)]


def _linears(block: Block, usual: float, alike: Mapping[str, list[Linear]]) -> Iterator[str]:
    """Yield a sentence for each linear of a block that is broken."""
    is_named = False
    for linear in block.linears:
        like = [x for x in alike[linear.path] if x.block != linear.block]
        if linear.moved:
            said = f"{linear.name} has {linear.moved}"
        elif not (is_named and linear.unlike > UNLIKE) and _is_scaled(
            linear, like, block.error > max(WORSE * usual, 0.1)
        ):
            said = f"{linear.name} puts out {linear.ratio / _usual_ratio(like):.1f} times what the original does"
        elif not is_named and _is_other(linear, like) and block.error > WORSE * usual:
            common = median({x.name: x.unlike for x in like})
            before = [x.path for x in block.linears[: block.linears.index(linear)] if x.unlike > UNLIKE]
            said = (
                f"{linear.name} puts out something else than the original: correlation {1 - linear.unlike:.2f}, "
                f"{1 - common:.2f} in other blocks"
                + (f"; or {', '.join(before)} before it does, which is in another basis" if before else "")
            )
        else:
            continue
        is_named = True
        yield said


def _end(end: End) -> Iterator[str]:
    """Yield a sentence if the last norm or the output head is broken."""
    is_norm = end.norm_ratio is not None and abs(math.log(end.norm_ratio)) > math.log(FAR)
    name = "the last norm and the output head" if end.norm_ratio is None else "the last norm" if is_norm else HEAD
    if end.moved:
        yield f"{HEAD} has {said(end.moved)}"
    elif abs(math.log(end.ratio)) > math.log(FAR):
        yield f"{name}: logits are {end.ratio:.1f} times the original's, on its own hidden states"
    elif end.unlike > UNLIKE:
        yield f"{name}: logits are not the original's on its own hidden states, correlation {1 - end.unlike:.2f}"


def _usual_ratio(like: list[Linear]) -> float:
    return median({x.name: x.ratio for x in like}) if len(like) >= FEW else 1.0


def _is_scaled(linear: Linear, like: list[Linear], is_block_worse: bool) -> bool:
    """Tell whether a linear puts out far more or less than its like."""
    far, spread = [], 0.0
    for own, others in (
        (linear.gain, [x.gain for x in like]),
        (linear.ratio, [x.ratio for x in like]),
    ):
        logs = {str(i): math.log(value) for i, value in enumerate(others)}
        middle = median(logs) if len(logs) >= FEW else 0.0
        spread = median({i: abs(value - middle) for i, value in logs.items()}) if len(logs) >= FEW else math.inf
        far.append(math.log(own) - middle)
        if abs(far[-1]) < math.log(FAR) or (len(logs) >= FEW and abs(far[-1]) < SPREADS * spread):
            return False
    return far[0] * far[1] > 0 and (is_block_worse or spread < 0.1)


def _is_other(linear: Linear, like: list[Linear]) -> bool:
    common = median({x.name: x.unlike for x in like})
    return linear.unlike > max(UNLIKE, SUSPECT * common)
