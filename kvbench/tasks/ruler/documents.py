"""Questions on documents: the one with the answer among others, from SQuAD, HotpotQA, or XQuAD in SQuAD's place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.tasks.base import read_text
from kvbench.tasks.ruler.fitting import LengthBudget, RulerPrompt

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
CONTEXT = INSTRUCTION + "The following are given documents.\n\n{context}\n\n"
QUESTION = INSTRUCTION + "Question: {query}"
PREFIX = " Answer:"
STEP = 10


@dataclass(frozen=True)
class AskedOfDocuments:
    """A question with its references. gold, near: the numbers of its documents, and of others on its subject."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """Questions in the order of their file, and all documents, sorted."""

    questions: tuple[AskedOfDocuments, ...]
    documents: tuple[str, ...]


def prompts(budget: LengthBudget, library: Library) -> Iterator[RulerPrompt]:
    """Yield a prompt for each question, in order."""
    rng = Random(budget.seed)
    first = partial(_draw, rng, budget.seed, library, library.questions[0])
    size = budget.bisect(first, STEP)
    for question in library.questions:
        yield budget.sample(partial(_draw, rng, budget.seed, library, question), size, STEP, len(question.gold))


def _draw(rng: Random, seed: int, library: Library, question: AskedOfDocuments, size: int) -> RulerPrompt:
    """Return a prompt with ``size`` documents. Their order is the same for all prompts of one size, as in RULER."""
    gold, near, total = question.gold, question.near, len(library.documents)
    if size >= total:
        numbers = [i % total for i in range(size)]
    elif size - len(gold) > len(near):
        others = [i for i in range(total) if i not in {*gold, *near}]
        numbers = [*gold, *near, *rng.sample(others, size - len(gold) - len(near))]
    else:
        numbers = [*gold, *rng.sample(near, size - len(gold))]
    Random(seed).shuffle(numbers)
    listing = (f"Document {place}:\n{library.documents[i]}" for place, i in enumerate(numbers, start=1))
    ranks = [place for place, i in enumerate(numbers, start=1) if i in gold]
    return RulerPrompt(
        context=CONTEXT.format(context="\n\n".join(listing)),
        question=QUESTION.format(query=question.text),
        prefix=PREFIX,
        answers=question.answers,
        facts={"size": size, "gold": ranks},
    )


def squad(path: Path) -> Library:
    """Read a file of SQuAD's form; questions without an answer are left out."""
    articles = [article["paragraphs"] for article in _json(path)["data"]]
    number, documents = _numbered(p["context"] for article in articles for p in article)
    questions = []
    for article in articles:
        of_article = [number[p["context"]] for p in article]
        for paragraph in article:
            gold = number[paragraph["context"]]
            near = tuple(i for i in of_article if i != gold)
            for row in paragraph["qas"]:
                if not row.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in row["answers"])
                    questions.append(AskedOfDocuments(row["question"], answers, (gold,), near))
    return Library(tuple(questions), documents)


def hotpot(path: Path) -> Library:
    """Read a file of HotpotQA's distractor setting: ten documents a question."""
    rows = _json(path)
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in rows]
    number, documents = _numbered(text for row in texts for text in row)
    return Library(
        tuple(
            AskedOfDocuments(row["question"], (row["answer"],), tuple(number[t] for t in own))
            for row, own in zip(rows, texts, strict=True)
        ),
        documents,
    )


def _numbered(texts: Iterator[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return ({text: number}, texts) of all different texts in sorted order."""
    documents = tuple(sorted(set(texts)))
    return {text: i for i, text in enumerate(documents)}, documents


def _json(path: Path) -> Any:
    try:
        return json.loads(read_text(path, "dataset ruler"))
    except ValueError as error:
        raise UsageError(f"dataset ruler: {path} is no JSON: {error}") from None
