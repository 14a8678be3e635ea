"""Say in sentences what looks broken in a compressed model, from the facts of diagnosis.py.

A part is named where it is unlike its like: the same linear in the other blocks. Coarse codes and scales that
transforms move around change all of them alike, a defect changes one. For a linear these are defects:

    scale   what it puts out, and that over what it takes, are both FAR times those of its like, or less than 1 / FAR
    order   rows whose outputs are those of other rows of the original
    other   outputs that are less like the original's than SUSPECT times the median, in a block that is, too

A linear behind one that is named is not named for `other`: it was given wrong inputs. A block that is far from the
original where none of its linears is gets a sentence of its own. Experts are compared with all experts.

The last norm and the output head have no like. They are named where logits are FAR times the original's, less like it
than STRAYED, or those of other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from compress.evaluate.diagnosis import SAME_BASIS, Block, Facts, Linear
from compress.evaluate.diagnosis_tail import Part, Tail
from compress.pages.checkpoint import SUSPECT, median

FAR = 1.32  # times
SPREADS = 4.0  # times the usual distance from the median of their like
UNLIKE = 0.15  # 1 - correlation
WORSE = 2.0  # times the median error of blocks
BROKEN = 0.25  # error of a block
LOST = 0.5  # 1 - correlation of one expert, whose block may hardly show it
STRAYED = 0.3  # 1 - correlation of what the output head or the last norm puts out
FEW = 3  # linears of a kind below which they have no usual value: theirs should be the original's


def sentences(facts: Facts) -> list[str]:
    """Return what looks broken, worst first by kind; nothing for a sound model."""
    errors = {block.name: block.error for block in facts.blocks}
    paths = {linear.path for block in facts.blocks for linear in block.linears}
    alike = {path: [x for block in facts.blocks for x in block.linears if x.path == path] for path in paths}
    found = []
    if facts.embeddings > SAME_BASIS:
        found.append(
            f"the embeddings are not the original's, nor a rotation of them: relative squared distance "
            f"{facts.embeddings:.2f}"
        )
    for block in facts.blocks:
        usual = median({name: error for name, error in errors.items() if name != block.name}) or block.error
        own = list(_linears(block, usual, alike))
        if not own and block.error > max(BROKEN, SUSPECT * usual):
            own = [
                f"{block.name} adds to the hidden states what the original does not: relative squared error "
                f"{block.error:.2g}, {usual:.2g} in other blocks; none of its linears stands out alone"
            ]
        found += own
    return found + ([] if facts.tail is None else list(_tail(facts.tail)))


def _tail(tail: Tail) -> Iterator[str]:
    """Yield a sentence for a broken last norm, or for a broken output head."""
    if not (tail.moved or _is_off(tail.head)):
        return
    part = tail.norm if _is_off(tail.norm) else tail.head
    if part is tail.head and tail.moved:
        yield f"{part.name} has {tail.moved}"
    elif part.unlike > STRAYED:
        yield f"{part.name} puts out something else than the original: correlation {1 - part.unlike:.2f}"
    else:
        yield f"{part.name} puts out {part.ratio:.1f} times what the original does"


def _is_off(part: Part) -> bool:
    return part.unlike > STRAYED or abs(math.log(max(part.ratio, 1e-9))) > math.log(FAR)


def _linears(block: Block, usual: float, alike: Mapping[str, list[Linear]]) -> Iterator[str]:
    """Yield a sentence for each linear of a block that is broken."""
    is_named = False
    for linear in block.linears:
        like = [x for x in alike[linear.path] if x.name != linear.name]
        if linear.moved:
            said = f"{linear.name} has {linear.moved}"
        elif not (is_named and linear.unlike > UNLIKE) and _is_scaled(
            linear, like, block.error > max(WORSE * usual, 0.1)
        ):
            said = f"{linear.name} puts out {_times(linear, like, is_named):.1f} times what the original does"
        elif not is_named and _is_other(linear, like) and (block.error > WORSE * usual or _is_lost(linear)):
            common = median({x.name: x.unlike for x in like})
            others = "experts" if _is_expert(linear) else "blocks"
            before = [x.path for x in block.linears[: block.linears.index(linear)] if x.unlike > UNLIKE]
            said = (
                f"{linear.name} puts out something else than the original: correlation {1 - linear.unlike:.2f}, "
                f"{1 - common:.2f} in other {others}"
                + (f"; or {', '.join(before)} before it does, which is in another basis" if before else "")
            )
        else:
            continue
        is_named = True
        yield said


def _times(linear: Linear, like: list[Linear], is_behind: bool) -> float:
    """Return how many times its like a linear puts out; behind one that is named, over what it takes, which is off."""
    values = {x.name: x.gain if is_behind else x.ratio for x in (linear, *like)}
    own = values.pop(linear.name)
    return own / (median(values) if len(like) >= FEW else 1.0)


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


def _is_expert(linear: Linear) -> bool:
    return ".*." in linear.path


def _is_lost(linear: Linear) -> bool:
    """Tell whether an expert puts out so little of the original that the block's error need not say it, too."""
    return _is_expert(linear) and linear.unlike > LOST
