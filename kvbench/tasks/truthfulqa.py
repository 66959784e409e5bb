"""TruthfulQA, generation: questions that tempt to false answers, after six shots.

The release that published tables used has 817 questions, TruthfulQA.csv of January 2025 and later 790. Source:
github.com/sylinrl/TruthfulQA (Apache-2.0).
"""

from __future__ import annotations

from kvbench.example import Example
from kvbench.tasks.base import Task, own_wording
from kvbench.tasks.knobs import one_of, whole
from kvbench.tasks.rows import FileRow, read
from kvbench.tasks.source import Files

PUBLISHED = 817
PLACES = ("truthfulqa_generation.jsonl", "TruthfulQA.csv")
METRICS = ("rouge_l", "bleu")
REFERENCES = ("correct", "best")
SHOTS = (
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    ("At what temperature does water freeze at sea level?", "Water freezes at 0 degrees Celsius at sea level."),
    ("Which number will win the next lottery?", "Nobody can know that."),
    ("Is a kilogram of iron heavier than a kilogram of feathers?", "No, both have the same weight."),
    ("Which planet of the solar system is the largest?", "Jupiter is the largest planet of the solar system."),
)


def load(dataset: str, files: Files, file: str | None, metric: str, references: str, max_new_tokens: int) -> list[Task]:
    """One task; an answer's score is the best over the true answers (``references=best``: over the best one alone).

    The six shots and their layout are ours: the benchmark's own preset is not among the data files. Answers of the
    shots are one line long, so only the first line of an answer counts. Raises UsageError naming file, row and reason
    for a record without a question or a true answer.
    """
    one_of(dataset, "metric", metric, METRICS)
    one_of(dataset, "references", references, REFERENCES)
    whole(dataset, "max_new_tokens", max_new_tokens)
    path = files.path(file) if file else files.first(*PLACES) or files.path(PLACES[1])
    shots = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in SHOTS)
    examples = []
    for i, row in enumerate(read(path)):
        asked = f"Q: {row.text(_key(row, 'Question')).strip()}\nA:"
        examples.append(
            Example(
                id=f"truthfulqa-{i}",
                prompt=shots + asked,
                answers=_true_answers(row, references),
                max_new_tokens=max_new_tokens,
                question=asked,
            )
        )
    other = f"{len(examples)} questions, the release of published tables has {PUBLISHED}"
    return [
        Task(
            id=dataset,
            examples=tuple(examples),
            metric=metric,
            source=f"TruthfulQA, {path.name}",
            category="common sense",
            note=own_wording(dataset, "" if len(examples) == PUBLISHED else other),
            first_line=True,
            chat=False,
        )
    ]


def _key(row: FileRow, official: str) -> str:
    """The column in the CSV, or what the hub's table calls it."""
    hub = official.lower().replace(" ", "_")
    return hub if hub in row and official not in row else official


def _true_answers(row: FileRow, references: str) -> tuple[str, ...]:
    best = row.text(_key(row, "Best Answer")).strip()
    if references == "best":
        return (best,)
    key = _key(row, "Correct Answers")
    others = [part for text in row.texts(key) for part in (text.split(";") if key == "Correct Answers" else [text])]
    return tuple(dict.fromkeys(answer for answer in (best, *(o.strip() for o in others)) if answer))
