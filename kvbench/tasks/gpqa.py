"""GPQA, main set: 448 multiple-choice questions. Gated: its authors ask not to publish its examples.

Source: huggingface.co/datasets/Idavidrein/gpqa (CC BY 4.0), file gpqa_main.csv.
"""

from __future__ import annotations

from kvbench.example import Example
from kvbench.tasks.base import Task, own_wording
from kvbench.tasks.knobs import drawn, whole
from kvbench.tasks.rows import FileRow, read
from kvbench.tasks.source import Files

LETTERS = "ABCD"
OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def load(dataset: str, files: Files, file: str, seed: int, max_new_tokens: int) -> list[Task]:
    """One task; the file names the right option first, so each question's four are put in an order drawn by its id.

    The wording of the prompt is ours. Raises UsageError naming file, row and reason for a record without a question
    or an option.
    """
    whole(dataset, "max_new_tokens", max_new_tokens)
    whole(dataset, "seed", seed, least=0)
    path = files.path(file)
    examples = tuple(_example(row, i, seed, max_new_tokens) for i, row in enumerate(read(path)))
    return [Task(dataset, examples, "letter", f"GPQA, {path.name}", "science", own_wording(dataset))]


def _example(row: FileRow, index: int, seed: int, max_new_tokens: int) -> Example:
    name = row.name("Record ID", f"gpqa-{index}")
    order = list(drawn(OPTIONS, f"{seed}:{name}"))
    options = "\n".join(f"({letter}) {row.text(key).strip()}" for letter, key in zip(LETTERS, order, strict=True))
    return Example(
        id=name,
        prompt=f"{row.text('Question').strip()}\n\n{options}\n\nAnswer with the letter of the right option.\nAnswer:",
        answers=(LETTERS[order.index(OPTIONS[0])],),
        max_new_tokens=max_new_tokens,
        classes=tuple(LETTERS),
    )
