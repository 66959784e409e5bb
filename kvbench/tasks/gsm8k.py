"""GSM8K: 1,319 word problems of the test split, without shots. Source: github.com/openai/grade-school-math (MIT)."""

from __future__ import annotations

from kvbench.example import Example
from kvbench.metrics.answers import last_number
from kvbench.tasks.base import Task, own_wording
from kvbench.tasks.knobs import whole
from kvbench.tasks.rows import FileRow, read
from kvbench.tasks.source import Files

PROMPT = (
    "{question}\n\n"
    "Solve this problem step by step. The last line of your answer must be:\n"
    "The answer is: N\n"
    "where N stands for the number that was asked for, without a unit.\n"
)


def load(dataset: str, files: Files, file: str, max_new_tokens: int) -> list[Task]:
    """One task; the reference is what follows ``####`` in the worked solution. The wording of the prompt is ours.

    Raises UsageError naming file, line and reason for a record without a question or a final number.
    """
    whole(dataset, "max_new_tokens", max_new_tokens)
    path = files.path(file)
    examples = tuple(
        Example(f"gsm8k-{i}", PROMPT.format(question=row.text("question")), (_final(row),), max_new_tokens)
        for i, row in enumerate(read(path))
    )
    return [Task(dataset, examples, "gsm8k", f"GSM8K, {path.name}", "mathematics", own_wording(dataset))]


def _final(row: FileRow) -> str:
    _, mark, final = row.text("answer").rpartition("####")
    if not mark or last_number(final) is None:
        raise row.wrong("'answer' must end in '#### N' with a number")
    return final.strip()
