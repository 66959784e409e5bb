"""Questions on documents: one document with the answer among others, from SQuAD, HotpotQA, or XQuAD for SQuAD."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
"""The number of documents by which the search for a prompt's size goes on."""


@dataclass(frozen=True)
class AskedOfDocuments:
    """A question about documents of a library.

    text: the question.
    answers: the reference answers.
    gold: the numbers of the documents that hold the answer.
    near: the numbers of other documents on the same subject. RULER fills a prompt with these before it draws others.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """The questions and documents of a file.

    questions: the questions in the order of the file.
    documents: the texts of all documents, sorted. A document's number is its place among them.
    """

    questions: tuple[AskedOfDocuments, ...]
    documents: tuple[str, ...]


def make_prompts(budget: LengthBudget, library: Library) -> Iterator[RulerPrompt]:
    """Yield a prompt for each question of ``library``, in order, filled with documents up to the budget's length."""
    rng = Random(budget.seed)
    # the first question's size serves all questions, as in RULER
    draw_first = partial(_draw_prompt, rng, budget.seed, library, library.questions[0])
    size = budget.bisect(draw_first, STEP)
    for question in library.questions:
        draw = partial(_draw_prompt, rng, budget.seed, library, question)
        yield budget.sample(draw, size, STEP, least=len(question.gold))


def _draw_prompt(rng: Random, seed: int, library: Library, question: AskedOfDocuments, size: int) -> RulerPrompt:
    """Return a prompt with ``size`` documents. Their order is the same for all prompts of one size, as in RULER."""
    numbers = _choose_documents(rng, question, size, total=len(library.documents))
    Random(seed).shuffle(numbers)
    listing = []
    gold_places = []
    for place, number in enumerate(numbers, start=1):
        listing.append(f"Document {place}:\n{library.documents[number]}")
        if number in question.gold:
            gold_places.append(place)
    return RulerPrompt(
        context=CONTEXT.format(context="\n\n".join(listing)),
        question=QUESTION.format(query=question.text),
        prefix=PREFIX,
        answers=question.answers,
        facts={"size": size, "gold": gold_places},
    )


def _choose_documents(rng: Random, question: AskedOfDocuments, size: int, total: int) -> list[int]:
    """Return the numbers of ``size`` documents out of ``total``: the gold ones, then near ones, then any others.

    size: at least the number of gold documents. The searches of LengthBudget try no smaller size.

    If the library has no more than ``size`` documents, return all of them in turn until there are ``size``.
    """
    if size >= total:
        # ``i % total`` begins again behind the last document
        return [i % total for i in range(size)]
    numbers = list(question.gold)
    missing = size - len(numbers)
    if missing <= len(question.near):
        return numbers + rng.sample(question.near, missing)
    # all near documents are taken, and others are drawn
    numbers += question.near
    chosen = set(numbers)
    others = [i for i in range(total) if i not in chosen]
    return numbers + rng.sample(others, size - len(numbers))


def read_squad(path: Path) -> Library:
    """Return the questions and the paragraphs of a file in SQuAD's form. Questions without an answer are left out."""
    articles = [article["paragraphs"] for article in _read_json(path)["data"]]
    texts: set[str] = set()
    for paragraphs in articles:
        texts.update(paragraph["context"] for paragraph in paragraphs)
    # a paragraph that occurs twice is one document
    documents, number = _number_documents(texts)
    questions = []
    for paragraphs in articles:
        article_numbers = [number[paragraph["context"]] for paragraph in paragraphs]
        for paragraph in paragraphs:
            gold = number[paragraph["context"]]
            near = tuple(i for i in article_numbers if i != gold)
            for row in paragraph["qas"]:
                # SQuAD 2.0 has questions that their paragraph does not answer
                if row.get("is_impossible", False):
                    continue
                answers = tuple(answer["text"] for answer in row["answers"])
                questions.append(AskedOfDocuments(row["question"], answers, gold=(gold,), near=near))
    return Library(tuple(questions), documents)


def read_hotpot(path: Path) -> Library:
    """Return the questions and the documents, ten a question, of a file of HotpotQA's distractor setting."""
    rows = _read_json(path)
    texts_by_row = []
    for row in rows:
        texts_by_row.append([f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]])
    documents, number = _number_documents(set(chain.from_iterable(texts_by_row)))
    questions = []
    for row, texts in zip(rows, texts_by_row, strict=True):
        # all ten documents count as gold: RULER puts them into every prompt, distractors included
        gold = tuple(number[text] for text in texts)
        questions.append(AskedOfDocuments(row["question"], (row["answer"],), gold=gold))
    return Library(tuple(questions), documents)


def _number_documents(texts: set[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return (texts in sorted order, the number of each text in this order)."""
    # sorted, since the order of a set differs between runs of Python
    documents = tuple(sorted(texts))
    return documents, {text: i for i, text in enumerate(documents)}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path, "dataset ruler"))
    except ValueError as error:
        raise UsageError(f"dataset ruler: {path} is no JSON: {error}") from None
