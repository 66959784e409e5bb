"""Made contexts with several questions each: LongEval's lines and the key-value retrieval of lost-in-the-middle.

Formats are those of github.com/DachengLi1/LongChat (longeval) and github.com/nelson-liu/lost-in-the-middle. Their files
are read where they are; they ask one question a case, so others are drawn. Without them contexts of the same form are
generated from a seed.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from kvbench.base.example import Example, Turn
from kvbench.tasks.base import Task
from kvbench.tasks.knobs import drawn, one_of, whole
from kvbench.tasks.rows import FileRow, kind, read
from kvbench.tasks.source import Files
from kvbench.tasks.tiny import WORDS

Records = Mapping[str, str]
"""The values of one context by the key that is asked, in their order."""

LINES_HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
PUBLISHED_LINE = re.compile(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", re.MULTILINE)
LARGEST_NUMBER = 50_000
PAIRS_HEADER = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
ADJECTIVES = WORDS["moods"] + WORDS["traits"] + WORDS["colours"]
NOUNS = WORDS["objects"] + WORDS["places"] + WORDS["cities"]


@dataclass(frozen=True)
class RecordForm:
    """The form of a context of records.

    written: the context's text. question: a template, ``{}`` is the key. most: the most records of a context.
    published: the records of a case in the published file, and the key that it asks for.
    generated: as many records from a seed.
    """

    metric: str
    written: Callable[[Records], str]
    question: str
    most: int
    published: Callable[[FileRow], tuple[Records, str]]
    generated: Callable[[str, int], Records]


def _written_lines(records: Records) -> str:
    return LINES_HEADER + "".join(f"line {k}: REGISTER_CONTENT is <{v}>\n" for k, v in records.items())


def _published_lines(row: FileRow) -> tuple[Records, str]:
    asked = row.value("random_idx")
    if not isinstance(asked, list) or not asked:
        raise row.wrong(f"'random_idx' must be a list that begins with a line's name, got {kind(asked)}")
    return dict(PUBLISHED_LINE.findall(row.text("prompt"))), str(asked[0])


def _generated_lines(seed: str, count: int) -> Records:
    names = islice(drawn([f"{a}-{n}" for a, n in product(ADJECTIVES, NOUNS)], seed), count)
    return {name: str(1 + int(_digest(f"{seed}/{name}"), 16) % LARGEST_NUMBER) for name in names}


def _written_pairs(records: Records) -> str:
    return PAIRS_HEADER + "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in records.items()) + "}"


def _published_pairs(row: FileRow) -> tuple[Records, str]:
    rows = row.value("ordered_kv_records")
    if not isinstance(rows, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in rows):
        raise row.wrong(f"'ordered_kv_records' must be a list of pairs, got {kind(rows)}")
    return {str(key): str(value) for key, value in rows}, row.text("key")


def _generated_pairs(seed: str, count: int) -> Records:
    ids = [str(uuid.UUID(_digest(f"{seed}/{i}")[:32], version=4)) for i in range(2 * count)]
    return dict(zip(ids[::2], ids[1::2], strict=True))


FORMS = {
    "lines": RecordForm(
        "last_integer",
        _written_lines,
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {}? I need the number.",
        len(ADJECTIVES) * len(NOUNS),
        _published_lines,
        _generated_lines,
    ),
    "pairs": RecordForm(
        "contains_any_case",
        _written_pairs,
        '\n\nKey: "{}"\nCorresponding value:',
        100_000,
        _published_pairs,
        _generated_pairs,
    ),
}


def load(
    dataset: str,
    files: Files,
    form: str,
    records: int | Sequence[int],
    questions: int,
    contexts: int,
    seed: int,
    file: str,
    max_new_tokens: int,
) -> list[Task]:
    """Return a task per number of records, with ``contexts`` examples that are asked ``questions`` different keys each.

    The first question of a published case is its own. Raises UsageError naming file and line for a damaged case.
    """
    shape = FORMS[one_of(dataset, "form", form, FORMS)]
    for knob, value, least in (("contexts", contexts, 1), ("seed", seed, 0), ("max_new_tokens", max_new_tokens, 1)):
        whole(dataset, knob, value, least)
    tasks = []
    for count in [records] if isinstance(records, int) else records:
        whole(dataset, "records", count, 1, shape.most)
        whole(dataset, "questions", questions, 1, count)
        path = files.first(file.replace("{records}", str(count)))
        cases: Iterable[tuple[Records, str]] = (
            map(shape.published, read(path))
            if path
            else ((shape.generated(f"{seed}/{form}/{count}/{i}", count), "") for i in range(contexts))
        )
        examples = []
        for i, (values, own) in enumerate(islice(cases, contexts)):
            others = drawn([key for key in values if key != own], f"{seed}/{form}/{count}/{i}/asked")
            asked = list(islice([own, *others] if own in values else others, questions))
            places = list(values)
            examples.append(
                Example(
                    id=f"{form}-{count}-{i}",
                    prompt=shape.written(values),
                    answers=(),
                    max_new_tokens=max_new_tokens,
                    meta={"records": count, "places": [places.index(key) for key in asked]},
                    turns=tuple(Turn(shape.question.format(key), (values[key],)) for key in asked),
                )
            )
        task = Task(
            id=f"{dataset}/{count}",
            examples=tuple(examples),
            metric=shape.metric,
            source=path.name if path else f"generated by kvbench.tasks.records, {count} {form}",
            category="synthetic retrieval",
            note="" if path else f"{dataset}: {form} in the published form, generated from seed={seed}",
        )
        tasks.append(task)
    return tasks


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
