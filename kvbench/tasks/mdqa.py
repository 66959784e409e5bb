"""MDQA: a question and k documents. One of them holds the answer, at the first, middle or last place.

Layout and metric come from lost-in-the-middle (github.com/nelson-liu/lost-in-the-middle, MIT; data CC BY-SA). A file
with its retrieved distractors is used unchanged. The oracle file holds gold documents only. Its distractors are the
gold documents of other questions, and these are easier to tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from kvbench.base.errors import UsageError, unknown
from kvbench.base.example import Example
from kvbench.tasks.base import LoadContext, Task, note_own_wording
from kvbench.tasks.knobs import check_whole, check_word, shuffled_by_seed
from kvbench.tasks.metrics.text import normalise_answer
from kvbench.tasks.rows import FileRow, read_rows

INSTRUCTION = (
    "Answer the question by means of the documents below. One of them holds the answer; the others do not matter."
)


@dataclass(frozen=True)
class Document:
    """A passage: its text, and the title of the article that it is from."""

    title: str
    text: str

    @cached_property
    def normalised(self) -> str:
        """The title and the text in lower case without articles and punctuation, as the metric compares answers."""
        return normalise_answer(f"{self.title} {self.text}")


@dataclass(frozen=True)
class Question:
    """A question with its documents, from one line of the file.

    row: the line of the file, which errors name.
    text: the question.
    answers: the references.
    gold: the document that holds the answer.
    other_passages: the line's other documents, which a search retrieved for the question.
    """

    row: FileRow
    text: str
    answers: tuple[str, ...]
    gold: Document
    other_passages: tuple[Document, ...]


def load(
    context: LoadContext,
    file: str,
    documents: int,
    positions: Sequence[str],
    seed: int,
    max_new_tokens: int,
    min_answer_tokens: int,
) -> list[Task]:
    """Return a task per position of the gold document (``mdqa/first``), with the same questions and distractors.

    file: the file of questions and passages, below the data folder.
    documents: the number of documents in a prompt.
    positions: the places of the gold document: ``first``, ``middle`` (the earlier of two middle places) and ``last``.
    seed: decides which documents of other questions are drawn.
    min_answer_tokens: the number of tokens before which an answer cannot end. A chat model that is asked without its
        template often ends at once.

    Distractors are the other passages of a line, then gold documents of other questions in an order drawn for the
    question. No distractor contains an answer, after normalisation, and none occurs twice. The instruction is kvbench's
    own. As in lost-in-the-middle, only the text before an answer's first newline is scored. Raises UsageError naming
    file, line and reason for a record without question, answers or gold document, and if there are too few distractors.
    """
    dataset, files = context.dataset, context.files
    _check_numbers(dataset, documents, seed, max_new_tokens, min_answer_tokens)
    places = _choose_places(dataset, documents, positions, context.selection)
    path = files.path(file)
    questions = [_read_question(row) for row in read_rows(path)]
    # several questions may have the same gold document
    pool = tuple(dict.fromkeys(question.gold for question in questions))
    examples_at: dict[str, list[Example]] = {position: [] for position in places}
    questions_with_foreign = 0
    for i, question in enumerate(questions):
        # the gold document takes one of the places
        distractors = _choose_distractors(question, pool, count=documents - 1, seed=seed)
        # a distractor that is not a passage of the question's own line comes from another question
        if not set(distractors) <= set(question.other_passages):
            questions_with_foreign += 1
        # all positions have the same distractors, so that only the gold document's place differs
        for position, place in places.items():
            prompt, prompt_end = _write_prompt(question, distractors, place)
            examples_at[position].append(
                Example(
                    id=f"mdqa-{i}",
                    prompt=prompt,
                    answers=question.answers,
                    max_new_tokens=max_new_tokens,
                    question=prompt_end,
                    meta={"documents": documents, "gold": place + 1},
                )
            )
    fact = ""
    # foreign distractors are easier than retrieved ones; readers of the scores must know this
    if questions_with_foreign:
        share = f"{questions_with_foreign} of {len(questions)} questions"
        fact = f"in {share} the distractors are gold documents of other questions, which are easier than retrieved ones"
    note = note_own_wording(dataset, fact)
    tasks = []
    for position, examples in examples_at.items():
        task = Task(
            id=f"{dataset}/{position}",
            examples=tuple(examples),
            metric="best_subspan_em",
            source=f"NaturalQuestions-open, {path.name}, {documents} documents",
            category="multi-document QA",
            note=note,
            cut_at="\n",
            min_new_tokens=min_answer_tokens,
        )
        tasks.append(task)
    return tasks


def _check_numbers(dataset: str, documents: int, seed: int, max_new_tokens: int, min_answer_tokens: int) -> None:
    check_whole(dataset, "documents", documents)
    check_whole(dataset, "seed", seed, least=0)
    check_whole(dataset, "max_new_tokens", max_new_tokens)
    check_whole(dataset, "min_answer_tokens", min_answer_tokens, least=0)
    if min_answer_tokens > max_new_tokens:
        raise UsageError(
            f"dataset {dataset}: min_answer_tokens={min_answer_tokens} is not possible: an answer has at most "
            f"max_new_tokens={max_new_tokens} tokens"
        )


def _choose_places(
    dataset: str, documents: int, positions: Sequence[str] | str, selection: Sequence[str]
) -> dict[str, int]:
    """Return the place of the gold document among ``documents``, counted from 0, at each selected position.

    Raises UsageError for an unknown position, or for a selected one that ``positions`` lacks.
    """
    # the result has the order of the tasks, whatever order the knob has
    places = {"first": 0, "middle": (documents - 1) // 2, "last": documents - 1}
    # YAML may give one text instead of a list
    if isinstance(positions, str):
        positions = [positions]
    for position in positions:
        check_word(dataset, "positions", position, places)
    for name in selection:
        if name not in positions:
            raise unknown(f"task of dataset {dataset}", name, positions)
    wanted = selection or positions
    return {position: place for position, place in places.items() if position in wanted}


def _write_prompt(question: Question, distractors: Sequence[Document], place: int) -> tuple[str, str]:
    """Return (prompt with the gold document at ``place``, the question at its end)."""
    documents = list(distractors)
    documents.insert(place, question.gold)
    # numbered from 1 and worded as in lost-in-the-middle's prompts
    lines = [f"Document [{n}](Title: {d.title}) {d.text}" for n, d in enumerate(documents, start=1)]
    listing = "\n".join(lines)
    prompt_end = f"Question: {question.text}\nAnswer:"
    return f"{INSTRUCTION}\n\n{listing}\n\n{prompt_end}", prompt_end


def _read_question(row: FileRow) -> Question:
    """Return the question of a row. Raises UsageError for a row without question, answers or one gold document."""
    passages = row.records("ctxs")
    gold_passages = [passage for passage in passages if passage.values.get("isgold") is True]
    if not gold_passages and len(passages) == 1:
        # the only passage of a line is its gold document, marked or not
        gold_passages = passages
    if len(gold_passages) != 1:
        raise row.wrong(f"one of 'ctxs' must be the gold document (isgold true), got {len(gold_passages)}")
    (gold,) = gold_passages
    # a reference that normalisation leaves empty would be part of every document and of every answer
    answers = tuple(answer for answer in row.texts("answers") if normalise_answer(answer))
    if not answers:
        raise row.wrong("'answers' holds nothing but articles and punctuation")
    others = tuple(_read_document(passage) for passage in passages if passage is not gold)
    return Question(
        row=row,
        text=row.text("question").strip(),
        answers=answers,
        gold=_read_document(gold),
        other_passages=others,
    )


def _read_document(row: FileRow) -> Document:
    """Return a passage. It must have the key of a title, but the title may be null."""
    title = row.value("title")
    if not isinstance(title, str):
        title = ""
    return Document(title, row.text("text"))


def _choose_distractors(question: Question, pool: Sequence[Document], count: int, seed: int) -> list[Document]:
    """Return ``count`` different documents that hold no answer: the line's other passages, then some of ``pool``.

    pool: the gold documents of all questions. The seed and the question decide in which order they are tried.

    Raises UsageError if there are too few such documents.
    """
    answers = [normalise_answer(answer) for answer in question.answers]
    # compare by text: one passage may stand under several titles
    chosen: dict[str, Document] = {}
    for document in chain(question.other_passages, shuffled_by_seed(pool, f"{seed}:{question.text}")):
        if len(chosen) == count:
            break
        if document.text == question.gold.text:
            continue  # the gold document itself is in the pool
        if not any(answer in document.normalised for answer in answers):
            chosen.setdefault(document.text, document)
    if len(chosen) < count:
        raise question.row.wrong(f"{count} distractors without an answer are wanted, there are {len(chosen)}")
    return list(chosen.values())
