"""Judge answers, and cut texts to the room that a model has, as LLM-KICK does.

Jaiswal et al., "Compressing LLMs: The Truth is Rarely Pure and Never Simple" (2024, arXiv 2310.01382): compressed
models fail at knowledge-intensive tasks at bits and sparsities where perplexity hardly moves. Its protocols are here:

- containment: an answer counts if any accepted alias occurs in what was written, in lower case and without blanks
  (factoid questions); or either occurs in the other, both normalized (in-context retrieval).
- token F1 and normalization as in SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, no punctuation, no
  articles; the best over all aliases.
- ROUGE-L (Lin 2004): F1 of the longest common subsequence of words, for summaries. LLM-KICK has a GPT-4 judge there,
  which is not run: ROUGE-L and the share of the reference's words are stand-ins that a judge need not agree with.

Data sets are files of the user's, or made by benchmarks/kick_data.py (docs/studies/llm_kick.md). A small model answers
few of such questions: of 79 plain facts SmolLM2-135M writes 7; so they are not in the core.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from compress.evaluate.items import Item, Material
from compress.evaluate.task_scores import TaskScore

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
WORD = re.compile(r"\w+")
LINE_FORM = "docs/results/llm_kick.md says what a line looks like"


def cut_to_room(text: str, tail: str, new_tokens: int, material: Material) -> str:
    """Return as much of a text, from its start, as the model has room for in front of `tail` and the new tokens.

    It gets shorter by a quarter at a time.
    """
    room = material.positions - len(material.begin) - new_tokens
    while text and len(material.encode(text + tail)) > room:
        text = text[: len(text) * 3 // 4]
    return text


def is_answered(item: Item, text: str) -> bool:
    """Tell whether the first written line contains an accepted answer, or the other way round."""
    return contains_either_way(first_written_line(text), item.facts["answers"])


def answer_f1(item: Item, text: str) -> dict[str, float]:
    """Return the token F1 of the first written line, the largest over the accepted answers."""
    return {"token_f1": token_f1(first_written_line(text), item.facts["answers"])}


def compare_books(scores: Sequence[TaskScore]) -> str:
    """Return in a sentence how many of the original's right answers are left without and with evidence, or ""."""
    by_task = {score.task: score.paired for score in scores}
    pair = [by_task.get(f"kick_{book}_book") for book in ("closed", "open")]
    ratios = [f"{x.ratio:.2f} ({x.ratio_low:.2f} to {x.ratio_high:.2f})" for x in pair if x and x.ratio is not None]
    if len(ratios) < len(pair):
        return ""
    return "Right answers, to the original's: {} with the book closed, {} with it open; 95% intervals".format(*ratios)


def squeeze(text: str) -> str:
    """Return text in lower case without blanks."""
    return "".join(text.lower().split())


def contains(text: str, aliases: Sequence[str]) -> bool:
    """Tell whether any alias occurs in what was written, in lower case and without blanks."""
    return any(squeeze(alias) in squeeze(text) for alias in aliases if squeeze(alias))


def normalize(text: str) -> str:
    """Return text as SQuAD compares it: lower case, without punctuation, articles and double blanks."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def first_written_line(text: str) -> str:
    """Return the first line that has text."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def contains_either_way(text: str, aliases: Sequence[str]) -> bool:
    """Tell whether what was written contains an alias, or an alias contains it, both normalized and not empty."""
    words = normalize(text)
    return bool(words) and any(each in words or words in each for alias in aliases if (each := normalize(alias)))


def token_f1(text: str, aliases: Sequence[str]) -> float:
    """Return the largest F1 of normalized words over the aliases."""
    return max((_f1(normalize(text).split(), normalize(alias).split()) for alias in aliases), default=0.0)


def _f1(words: Sequence[str], theirs: Sequence[str]) -> float:
    shared = (Counter(words) & Counter(theirs)).total()
    return 2 * shared / (len(words) + len(theirs)) if shared else float(not words and not theirs)


def rouge_l(text: str, reference: str) -> float:
    """Return the F1 of the longest common subsequence of words, in lower case."""
    words, theirs = WORD.findall(text.lower()), WORD.findall(reference.lower())
    lengths = [0] * (len(theirs) + 1)
    for word in words:
        diagonal = 0
        for j, other in enumerate(theirs, 1):
            diagonal, lengths[j] = lengths[j], diagonal + 1 if word == other else max(lengths[j], lengths[j - 1])
    longest = lengths[-1]
    return 2 * longest / (len(words) + len(theirs)) if longest else 0.0


def coverage(text: str, reference: str) -> float:
    """Return the share of the reference's different words that were written."""
    theirs = set(WORD.findall(reference.lower()))
    return len(theirs & set(WORD.findall(text.lower()))) / len(theirs) if theirs else 0.0
