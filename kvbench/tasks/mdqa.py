"""MDQA: a question, and k documents of which one holds its answer, at the first, middle or last place.

Layout and metric are those of lost-in-the-middle (github.com/nelson-liu/lost-in-the-middle, MIT; data CC BY-SA). Its
distractors were retrieved; a file that holds them is used as it is. The oracle file holds gold documents only: then
distractors are the gold documents of other questions, which are easier to tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from kvbench.base.errors import unknown
from kvbench.base.example import Example
from kvbench.tasks.base import Task, own_wording
from kvbench.tasks.knobs import drawn, one_of, whole
from kvbench.tasks.metrics.text import normalise_answer
from kvbench.tasks.rows import FileRow, read
from kvbench.tasks.source import Files

INSTRUCTION = (
    "Answer the question by means of the documents below. One of them holds the answer; the others do not matter."
)


@dataclass(frozen=True)
class Document:
    """A passage with the title of its article."""

    title: str
    text: str

    @cached_property
    def normalised(self) -> str:
        """Title and text as the metric compares them."""
        return normalise_answer(f"{self.title} {self.text}")


@dataclass(frozen=True)
class Question:
    """A question with its references, its gold document, and ``own``, the other passages of its line."""

    row: FileRow
    text: str
    answers: tuple[str, ...]
    gold: Document
    own: tuple[Document, ...]


def load(
    dataset: str,
    files: Files,
    selection: Sequence[str],
    file: str,
    documents: int,
    positions: Sequence[str],
    seed: int,
    max_new_tokens: int,
) -> list[Task]:
    """Return a task per position of the gold document (``mdqa/first``), with the same questions and distractors.

    Distractors are a line's own passages, then gold documents of other questions in an order drawn for the question.
    None contains an answer, after normalisation, and none occurs twice. ``middle`` is the earlier of two middle places.
    The instruction is ours. As there, only what stands before the first newline of an answer is scored. Raises
    UsageError naming file, line and reason for a record without question, answers or gold document, and where there are
    too few distractors.
    """
    whole(dataset, "documents", documents)
    whole(dataset, "seed", seed, least=0)
    whole(dataset, "max_new_tokens", max_new_tokens)
    places = {"first": 0, "middle": (documents - 1) // 2, "last": documents - 1}
    positions = [positions] if isinstance(positions, str) else list(positions)
    for position in positions:
        one_of(dataset, "positions", position, places)
    for name in selection:
        if name not in positions:
            raise unknown(f"task of dataset {dataset}", name, positions)
    wanted = [p for p in places if p in (selection or positions)]
    path = files.path(file)
    questions = [_question(row) for row in read(path)]
    pool = tuple(dict.fromkeys(q.gold for q in questions))
    examples_at: dict[str, list[Example]] = {position: [] for position in wanted}
    foreign = 0
    for i, question in enumerate(questions):
        others = _distractors(question, pool, documents - 1, seed)
        foreign += not set(others) <= set(question.own)
        prompt_end = f"Question: {question.text}\nAnswer:"
        for position in wanted:
            ordered = [*others[: places[position]], question.gold, *others[places[position] :]]
            listing = "\n".join(f"Document [{n}](Title: {d.title}) {d.text}" for n, d in enumerate(ordered, start=1))
            examples_at[position].append(
                Example(
                    id=f"mdqa-{i}",
                    prompt=f"{INSTRUCTION}\n\n{listing}\n\n{prompt_end}",
                    answers=question.answers,
                    max_new_tokens=max_new_tokens,
                    question=prompt_end,
                    meta={"documents": documents, "gold": places[position] + 1},
                )
            )
    share = f"{foreign} of {len(questions)} questions"
    note = own_wording(dataset, f"distractors of {share} are gold documents of others" if foreign else "")
    source = f"NaturalQuestions-open, {path.name}, {documents} documents"
    metric, category = "best_subspan_em", "multi-document QA"
    return [
        Task(f"{dataset}/{position}", tuple(examples), metric, source, category, note, cut_at="\n")
        for position, examples in examples_at.items()
    ]


def _question(row: FileRow) -> Question:
    passages = row.records("ctxs")
    gold = [p for p in passages if p.values.get("isgold") is True] or (passages if len(passages) == 1 else [])
    if len(gold) != 1:
        raise row.wrong(f"one of 'ctxs' must be the gold document (isgold true), got {len(gold)}")
    answers = tuple(a for a in row.texts("answers") if normalise_answer(a))
    if not answers:
        raise row.wrong("'answers' holds nothing but articles and punctuation")
    distractors = tuple(_document(p) for p in passages if p is not gold[0])
    return Question(row, row.text("question").strip(), answers, _document(gold[0]), distractors)


def _document(row: FileRow) -> Document:
    title = row.value("title")
    return Document(title if isinstance(title, str) else "", row.text("text"))


def _distractors(question: Question, pool: Sequence[Document], count: int, seed: int) -> list[Document]:
    """Return ``count`` different documents that contain no answer: the line's own first, then drawn from ``pool``."""
    answers = [normalise_answer(answer) for answer in question.answers]
    chosen: dict[str, Document] = {}
    for document in chain(question.own, drawn(pool, f"{seed}:{question.text}")):
        if len(chosen) == count:
            break
        if document.text != question.gold.text and not any(a in document.normalised for a in answers):
            chosen.setdefault(document.text, document)
    if len(chosen) < count:
        raise question.row.wrong(f"{count} distractors without an answer are wanted, there are {len(chosen)}")
    return list(chosen.values())
