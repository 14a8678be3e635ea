"""Name what looks broken in a compressed model, in sentences, from the facts of diagnosis.py and its tokenizer.

A part is named where it is unlike its like: the same linear in the other blocks. Coarse codes and scales that
transforms move around change all of them alike, a defect changes one. For a linear these are defects:

    scale   what it puts out, and that over what it takes, are both FAR times those of its like, or less than 1 / FAR
    order   rows whose outputs are those of other rows of the original
    other   outputs that are less like the original's than SUSPECT times the median, in a block that is, too

A linear behind one that is named is not named for `other`: it was given wrong inputs. A block that is far from the
original where none of its linears is gets a sentence of its own. Experts are compared with all experts.

The last norm and the output head have no like. They are named where logits are FAR times the original's, less like it
than STRAYED, or those of other tokens.

A tokenizer must give the original's tokens: a checkpoint with another one loads, runs and has the same weights, and
only what it reads is not what it was trained on, which no comparison on equal tokens shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from compress.calib import prefix
from compress.calib.documents import documents
from compress.errors import UnsupportedModelError, shown
from compress.evaluate import diagnosis
from compress.evaluate.diagnosis import SAME_BASIS, BlockFacts, Facts, LinearFacts, Tail, TailPart
from compress.evaluate.items import encode_with
from compress.evaluate.pair import Pair
from compress.evaluate.reader import Reader
from compress.evaluate.scores import TextWindows, positions
from compress.model.architectures import max_positions
from compress.pages.checkpoint import SUSPECT, median
from compress.progress import Progress

FAR = 1.32  # times
SPREADS = 4.0  # times the usual distance from the median of their like
UNLIKE = 0.15  # 1 - correlation
WORSE = 2.0  # times the median error of blocks
BROKEN = 0.25  # error of a block
LOST = 0.5  # 1 - correlation of one expert, whose block may hardly show it
STRAYED = 0.3  # 1 - correlation of what the output head or the last norm puts out
FEW = 3  # linears of a kind below which they have no usual value: theirs should be the original's


TOKENIZED_CHARACTERS = 4000
READ_CHARACTERS = 800
DIAGNOSED = (4, 128)  # windows of each text, and tokens of each, that parts are compared on


def sentences(facts: Facts) -> list[str]:
    """Return what looks broken, worst first by kind; nothing for a sound model."""
    errors = {block.name: block.error for block in facts.blocks}
    paths = {linear.path for block in facts.blocks for linear in block.linears}
    alike = {path: [x for block in facts.blocks for x in block.linears if x.path == path] for path in paths}
    defects = []
    if facts.embeddings > SAME_BASIS:
        defects.append(
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
        defects += own
    return defects + ([] if facts.tail is None else list(_tail(facts.tail)))


def find(pair: Pair, texts: Sequence[str], windows: Sequence[TextWindows], progress: Progress) -> list[str]:
    """Return what looks broken in the compressed model of a pair, a sentence each; texts with their windows."""
    progress("comparing layers", 0, 0)
    base, model = pair.base.model, pair.model.model
    sample = next(documents(texts[0]), "")
    defects = [tokenizer_sentence(pair.tokenizers[0], pair.tokenizers[1], model, sample)]
    count, length = DIAGNOSED
    tokens = torch.cat([each.tokens[:count, :length] for each in windows])
    try:
        defects += sentences(diagnosis.compare(base, model, tokens[:: len(windows)]))
    except UnsupportedModelError as error:
        defects.append(f"layers could not be compared one by one: {error}")
    return [each for each in defects if each]


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


def _is_off(part: TailPart) -> bool:
    return part.unlike > STRAYED or abs(math.log(max(part.ratio, 1e-9))) > math.log(FAR)


def _linears(block: BlockFacts, usual: float, alike: Mapping[str, list[LinearFacts]]) -> Iterator[str]:
    """Yield a sentence for each linear of a block that is broken."""
    is_named = False
    for linear in block.linears:
        like = [x for x in alike[linear.path] if x.name != linear.name]
        if linear.moved:
            sentence = f"{linear.name} has {linear.moved}"
        elif not (is_named and linear.unlike > UNLIKE) and _is_scaled(
            linear, like, block.error > max(WORSE * usual, 0.1)
        ):
            sentence = f"{linear.name} puts out {_times(linear, like, is_named):.1f} times what the original does"
        elif not is_named and _is_other(linear, like) and (block.error > WORSE * usual or _is_lost(linear)):
            common = median({x.name: x.unlike for x in like})
            others = "experts" if _is_expert(linear) else "blocks"
            before = [x.path for x in block.linears[: block.linears.index(linear)] if x.unlike > UNLIKE]
            sentence = (
                f"{linear.name} puts out something else than the original: correlation {1 - linear.unlike:.2f}, "
                f"{1 - common:.2f} in other {others}"
                + (f"; or {', '.join(before)} before it does, which is in another basis" if before else "")
            )
        else:
            continue
        is_named = True
        yield sentence


def _times(linear: LinearFacts, like: list[LinearFacts], is_behind: bool) -> float:
    """Return how many times its like a linear puts out; behind one that is named, over what it takes, which is off."""
    values = {x.name: x.gain if is_behind else x.ratio for x in (linear, *like)}
    own = values.pop(linear.name)
    return own / (median(values) if len(like) >= FEW else 1.0)


def _is_scaled(linear: LinearFacts, like: list[LinearFacts], is_block_worse: bool) -> bool:
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


def _is_other(linear: LinearFacts, like: list[LinearFacts]) -> bool:
    common = median({x.name: x.unlike for x in like})
    return linear.unlike > max(UNLIKE, SUSPECT * common)


def _is_expert(linear: LinearFacts) -> bool:
    return ".*." in linear.path


def _is_lost(linear: LinearFacts) -> bool:
    """Tell whether an expert puts out so little of the original that the block's error need not say it, too."""
    return _is_expert(linear) and linear.unlike > LOST


def tokenizer_difference(base: Any, tokenizer: Any, text: str) -> str:
    """Return a clause on how a tokenizer differs from the original's; "" where it does not. text: to try both on."""
    vocabularies = [dict(each.get_vocab()) for each in (base, tokenizer)]
    first, second = vocabularies
    if len(first) != len(second):
        return f"it has {len(second):,} tokens, the original {len(first):,}"
    moved = sorted(token for token, number in first.items() if second.get(token, number) != number)
    absent = sorted(token for token in first if token not in second)
    if absent:
        return f"{len(absent):,} of its {len(first):,} tokens are not the original's, which has {shown(absent[0])}"
    if moved:
        token = moved[0]
        return (
            f"{len(moved):,} of its {len(first):,} tokens have other ids: {shown(token)} is {second[token]}, "
            f"{first[token]} in the original"
        )
    ids = [encode_with(each)(text[:TOKENIZED_CHARACTERS]) for each in (base, tokenizer)]
    if ids[0] != ids[1]:
        place = next((i for i, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), min(map(len, ids)))
        return (
            f"it splits the text otherwise from token {place + 1} on ({len(ids[1])} tokens, {len(ids[0])} originally)"
        )
    begins = [list(each("a", verbose=False)["input_ids"]) for each in (base, tokenizer)]
    if begins[0] != begins[1]:
        return f"it puts other tokens around a text: 'a' is {begins[1]}, {begins[0]} in the original"
    return ""


def tokenizer_sentence(base: Any, tokenizer: Any, model: Any, text: str) -> str:
    """Return a sentence on a tokenizer that is not the original's; "" where it is.

    It says what the difference does: how well the model reads the text through either.
    """
    clause = tokenizer_difference(base, tokenizer, text)
    if not clause:
        return ""
    through = [_nats_per_byte(model, each, text[:READ_CHARACTERS]) for each in (tokenizer, base)]
    read = ""
    if through[0] is not None and through[1] is not None:
        read = (
            f"; through it the model reads the text at {through[0]:.2f} nats a byte, through the original's at "
            f"{through[1]:.2f}"
        )
    advice = ""
    if through[0] is None or (through[1] is not None and through[0] > through[1] + 0.01):
        advice = "; put the tokenizer files of the original in its place"
    return f"the tokenizer is not the original's: {clause}{read}{advice}"


def _nats_per_byte(model: Any, tokenizer: Any, text: str) -> float | None:
    """Return the negative log-likelihood per byte; None where the tokens are not the model's, or too few."""
    config, begun = model.config.get_text_config(), prefix.of_tokenizer(tokenizer)
    ids = begun.before(encode_with(tokenizer)(text))
    if not 2 <= len(ids) <= (max_positions(config) or len(ids)) or max(ids) >= config.vocab_size:
        return None
    nll = positions([Reader(model, name=str(model.name_or_path))], torch.tensor([ids]))[0, begun.unscored :]
    return float(nll.sum()) / len(text.encode())
