"""Make the files that LLM-KICK's tasks read: facts, choices, open and closed book, summaries, and a cloze of books.

    python benchmarks/kick_data.py /tmp/kick
    compress study ./model --task kick_knowledge=/tmp/kick/facts.jsonl --task choices=/tmp/kick/cloze.jsonl ...

Facts are common knowledge, written down here by kind: a question, and pairs of what it asks about and the answer.
`choices.jsonl` asks the same facts with three other answers of the kind, `known.jsonl` lets the task `choices` compare
how likely these four are, and `qa.jsonl` gives, for every second fact, four statements of the kind as evidence.
`cloze.jsonl` is for models that were trained on the books and follow no instruction: text in front of a name that it
has not had, that name, and three others that the books have about as often.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOOKS = Path(__file__).parents[1] / "tests" / "data" / "books_calib.txt"
KINDS = {  # what is asked -> a statement, and "asked: answer" for each fact
    "What is the capital of {}?": (
        "The capital of {} is {}.",
        "France: Paris; Italy: Rome; Spain: Madrid; Germany: Berlin; Japan: Tokyo; China: Beijing; Russia: Moscow; "
        "England: London; Egypt: Cairo; Greece: Athens; Ireland: Dublin; Austria: Vienna; Portugal: Lisbon; "
        "Poland: Warsaw; Norway: Oslo; Sweden: Stockholm; Cuba: Havana; Canada: Ottawa; Kenya: Nairobi; "
        "Turkey: Ankara; Hungary: Budapest; Finland: Helsinki; Denmark: Copenhagen; Belgium: Brussels",
    ),
    "Which chemical element has the symbol {}?": (
        "The symbol {} stands for the element {}.",
        "H: hydrogen; O: oxygen; C: carbon; N: nitrogen; He: helium; Fe: iron; Au: gold; Ag: silver; Na: sodium; "
        "Ca: calcium; Cu: copper; Pb: lead; Zn: zinc; S: sulfur; Cl: chlorine; K: potassium",
    ),
    "Who wrote {}?": (
        "{} was written by {}.",
        "Hamlet: Shakespeare; Emma: Austen; Oliver Twist: Dickens; Dracula: Stoker; Frankenstein: Shelley; "
        "The Odyssey: Homer; War and Peace: Tolstoy; Don Quixote: Cervantes; Moby Dick: Melville; "
        "The Hobbit: Tolkien; Faust: Goethe; Animal Farm: Orwell; The Republic: Plato; Walden: Thoreau",
    ),
    "What is the opposite of {}?": (
        "The opposite of {} is {}.",
        "hot: cold; big: small; fast: slow; up: down; light: dark; wet: dry; young: old; rich: poor; good: bad; "
        "open: closed; full: empty; early: late; strong: weak; high: low",
    ),
    "On which continent is {}?": (
        "{} is a country in {}.",
        "Brazil: South America; Nigeria: Africa; India: Asia; Mexico: North America; Peru: South America; "
        "Ghana: Africa; Thailand: Asia; Switzerland: Europe; Chile: South America; Vietnam: Asia; Romania: Europe",
    ),
}
SUMMARIES = (  # a text, and what a short summary of it says
    (
        "The town library closed its old building in March because rain had come through the roof. Over the summer "
        "volunteers moved forty thousand books to a former school. The new library opened in September with a reading "
        "room for children, and more people visit it than ever.",
        "The town library moved from its leaking building to a former school and has more visitors than ever.",
    ),
    (
        "Bees find their way by the sun. When a bee has found flowers it flies home and dances on the comb. The "
        "direction of the dance tells the other bees where the flowers are, and its speed tells how far away.",
        "Bees tell each other by a dance in which direction and how far away flowers are.",
    ),
    (
        "A farmer planted trees along the edge of his fields. In the first years the trees only took space. Later they "
        "kept the wind from the crops and held the soil in heavy rain, and the harvest grew by a fifth.",
        "Trees along the fields protected crops and soil, and the harvest of the farmer grew by a fifth.",
    ),
    (
        "The bridge over the river was built of wood in 1850. A flood took it away thirty years later. The city then "
        "built a bridge of iron, which still stands, and today only people on foot and on bicycles may use it.",
        "After a flood took the wooden bridge the city built one of iron, for people on foot and on bicycles.",
    ),
    (
        "Glass is made from sand that is heated until it melts. Soda lowers the temperature that is needed, and lime "
        "makes the glass hard. Small amounts of metals give it color: iron makes it green and cobalt makes it blue.",
        "Glass is made from melted sand with soda and lime, and metals give it color.",
    ),
    (
        "The ship left the harbor in the morning with a load of coffee. In the night a storm broke its mast. Fishermen "
        "saw its lights and towed it to an island, where the crew waited two weeks for a new mast.",
        "A ship with coffee lost its mast in a storm and was towed to an island by fishermen.",
    ),
    (
        "Children who learn to play an instrument need much practice. A study followed two hundred of them for five "
        "years. Those who practiced a little every day played better than those who practiced long once a week.",
        "A study found that children who practiced a little every day played better than those who practiced weekly.",
    ),
    (
        "The volcano had been quiet for three hundred years. In May small earthquakes began, and the people of two "
        "villages were brought to the coast. When it broke out in June nobody was hurt, but ash covered the fields.",
        "People were brought away before the volcano broke out, so nobody was hurt, but ash covered the fields.",
    ),
    (
        "Salt was once as dear as silver in places far from the sea. Caravans carried it across the desert, and towns "
        "along their way grew rich. When railways came the price fell, and many of these towns were left.",
        "Towns on the way of caravans grew rich by salt, until railways made it cheap.",
    ),
    (
        "The museum has a clock that was made in 1620. It shows the hours, the day, and the place of the moon. For a "
        "century it did not run, until a watchmaker repaired it in his free time, which took him four years.",
        "A watchmaker repaired the old clock of the museum in four years, after it had not run for a century.",
    ),
)
NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{3,}\b")  # within a sentence
FEWEST, CONTEXT, CLOZES = 12, 400, 240  # times that a name comes; characters in front of it; questions


def facts() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield the question, the answer, its statement, and statements and answers of others of its kind."""
    for question, (statement, listed) in KINDS.items():
        pairs = [tuple(pair.strip().split(": ")) for pair in listed.split(";")]
        for place, (asked, answer) in enumerate(pairs):
            others = [pairs[(place + step) % len(pairs)] for step in range(1, len(pairs))]
            yield (
                question.format(asked),
                answer,
                statement.format(asked, answer),
                [f"{statement.format(*other)}\t{other[1]}" for other in others],
            )


def questions(draw: random.Random) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the lines of facts, choices, and open and closed book."""
    plain, choices, books = [], [], []
    for question, answer, statement, others in facts():
        wrong = list(dict.fromkeys(other.split("\t")[1] for other in others if other.split("\t")[1] != answer))[:3]
        listed = draw.sample([answer, *wrong], 4)
        told = draw.sample([statement, *(other.split("\t")[0] for other in others[:3])], 4)
        plain.append({"question": question, "answers": [answer]})
        choices.append({"question": question, "choices": listed, "answer": listed.index(answer)})
        books.append({**plain[-1], "evidence": " ".join(told)})
    return plain, choices, books


def clozes(draw: random.Random) -> list[Any]:
    """Return questions to a model that was trained on the books: which name follows."""
    text = BOOKS.read_text()
    counts = Counter(NAME.findall(text))
    names = sorted(name for name, count in counts.items() if count >= FEWEST and name.lower() not in text)
    places = [
        found
        for found in NAME.finditer(text)
        if found.group() in names and found.group() not in text[max(0, found.start() - CONTEXT) : found.start()]
    ]
    lines = []
    for found in sorted(draw.sample(places, CLOZES), key=lambda each: each.start()):
        name, front = found.group(), text[found.start() - CONTEXT : found.start() - 1]
        others = [other for other in names if other != name and other not in front]
        by_count = sorted(others, key=lambda other: abs(counts[other] - counts[name]))
        listed = draw.sample([name, *by_count[:3]], 4)
        lines.append({"question": front.partition(" ")[2], "choices": listed, "answer": listed.index(name)})
    return lines


def main(folder: Path) -> None:
    """Write the files; equal calls write equal bytes."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    plain, choices, books = questions(draw)
    summaries = [{"document": document, "summary": summary} for document, summary in SUMMARIES]
    known = [{**each, "question": f"Question: {each['question']}\nAnswer:"} for each in choices]
    asked = {"facts": plain, "choices": choices, "known": known, "qa": books[::2]}
    files = {**asked, "summaries": summaries, "cloze": clozes(draw)}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{folder / name}.jsonl: {len(lines)} lines")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
