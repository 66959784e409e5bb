"""Synthetic contexts with several questions each: LongEval's lines and lost-in-the-middle's key-value retrieval.

Formats come from github.com/DachengLi1/LongChat (longeval) and github.com/nelson-liu/lost-in-the-middle. Their files
are read if they exist. A published case asks one question, so further questions are drawn. Without the files, contexts
of the same form are generated from a seed.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from kvbench.base.example import Example, Turn
from kvbench.tasks.base import LoadContext, Task
from kvbench.tasks.knobs import check_whole, check_word, shuffled_by_seed
from kvbench.tasks.rows import FileRow, describe_value, read_rows
from kvbench.tasks.tiny import WORDS

Records = Mapping[str, str]
"""The values of one context by the key that a question names, in their order."""

LINES_HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
)
PUBLISHED_LINE = re.compile(r"^line (\S+): REGISTER_CONTENT is <(\d+)>$", re.MULTILINE)
LARGEST_NUMBER = 50_000
"""The largest number of a generated line."""
PAIRS_HEADER = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
# LongEval's lines have made-up names such as "torpid-kid"; kvbench makes such names from the words of the tiny suite
ADJECTIVES = WORDS["moods"] + WORDS["traits"] + WORDS["colours"]
NOUNS = WORDS["objects"] + WORDS["places"] + WORDS["cities"]


@dataclass(frozen=True)
class RecordForm:
    """A kind of context made of records: how it is written, asked about, read from a published file, and generated.

    metric: the name of the metric.
    write: returns the context's text from its records.
    question: the text of a question, with ``{}`` in place of the key.
    most: the largest number of records that a context may have.
    read: returns, from a row of the published file, (the records of its context, the key that it asks for).
    generate: returns, from a seed and a count, that many records.
    """

    metric: str
    write: Callable[[Records], str]
    question: str
    most: int
    read: Callable[[FileRow], tuple[Records, str]]
    generate: Callable[[str, int], Records]


def _write_lines(records: Records) -> str:
    lines = [f"line {name}: REGISTER_CONTENT is <{number}>\n" for name, number in records.items()]
    return LINES_HEADER + "".join(lines)


def _read_lines(row: FileRow) -> tuple[Records, str]:
    """Return (the records of a published prompt, the name of the line that is asked for).

    Raises UsageError for a row without that name.
    """
    # LongEval publishes the whole prompt, so its lines are read back from it
    names = row.value("random_idx")
    if not isinstance(names, list) or not names:
        raise row.wrong(f"'random_idx' must be a list that begins with a line's name, got {describe_value(names)}")
    return dict(PUBLISHED_LINE.findall(row.text("prompt"))), str(names[0])


def _generate_lines(seed: str, count: int) -> Records:
    """Return ``count`` records for LongEval's lines: different names, each with a number from 1 to LARGEST_NUMBER."""
    all_names = [f"{adjective}-{noun}" for adjective, noun in product(ADJECTIVES, NOUNS)]
    records = {}
    for name in islice(shuffled_by_seed(all_names, seed), count):
        # a hash, not a generator: a line's number then does not depend on the lines before it
        number = 1 + int(_digest(f"{seed}/{name}"), 16) % LARGEST_NUMBER
        records[name] = str(number)
    return records


def _write_pairs(records: Records) -> str:
    # laid out as lost-in-the-middle prints its JSON, a pair a line
    pairs = [f'"{key}": "{value}"' for key, value in records.items()]
    return PAIRS_HEADER + "{" + ",\n ".join(pairs) + "}"


def _read_pairs(row: FileRow) -> tuple[Records, str]:
    """Return (the records of a published file's row, the key that is asked for). Raises UsageError for other rows."""
    pairs = row.value("ordered_kv_records")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise row.wrong(f"'ordered_kv_records' must be a list of pairs, got {describe_value(pairs)}")
    return {str(key): str(value) for key, value in pairs}, row.text("key")


def _generate_pairs(seed: str, count: int) -> Records:
    """Return ``count`` records whose keys and values are UUIDs, as published."""
    ids = [str(uuid.UUID(_digest(f"{seed}/{i}")[:32], version=4)) for i in range(2 * count)]
    # the first id is a key, the second its value, the third the next key, and so on
    keys, values = ids[::2], ids[1::2]
    return dict(zip(keys, values, strict=True))


FORMS = {
    "lines": RecordForm(
        metric="last_integer",
        write=_write_lines,
        question="\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {}? I need the number.",
        most=len(ADJECTIVES) * len(NOUNS),
        read=_read_lines,
        generate=_generate_lines,
    ),
    "pairs": RecordForm(
        metric="contains_any_case",
        write=_write_pairs,
        question='\n\nKey: "{}"\nCorresponding value:',
        most=100_000,
        read=_read_pairs,
        generate=_generate_pairs,
    ),
}


def load(
    context: LoadContext,
    form: str,
    records: int | Sequence[int],
    questions: int,
    contexts: int,
    seed: int,
    file: str,
    max_new_tokens: int,
) -> list[Task]:
    """Return a task per number of records. Each of a task's examples asks for ``questions`` different keys.

    form: a name in FORMS.
    records: the number of records in a context, or a list of such numbers.
    contexts: the number of examples of a task. A published file with fewer rows gives fewer examples.
    seed: decides all that is drawn.
    file: the place of the published file below the data folder, with ``{records}`` for the number of records.

    A published case is one row of ``file``: a context with one question, which is asked first. Raises UsageError naming
    file and line for a damaged case.
    """
    dataset, files = context.dataset, context.files
    record_form = FORMS[check_word(dataset, "form", form, FORMS)]
    for knob, value, least in (("contexts", contexts, 1), ("seed", seed, 0), ("max_new_tokens", max_new_tokens, 1)):
        check_whole(dataset, knob, value, least=least)
    if isinstance(records, int):
        records = [records]
    tasks = []
    for count in records:
        check_whole(dataset, "records", count, least=1, most=record_form.most)
        # each question asks for another record
        check_whole(dataset, "questions", questions, least=1, most=count)
        seed_of_count = f"{seed}/{form}/{count}"
        path = files.find_first(file.replace("{records}", str(count)))
        if path:
            cases = (record_form.read(row) for row in read_rows(path))
            source, note = path.name, ""
        else:
            # without end; a generated case has no question of its own
            cases = ((record_form.generate(f"{seed_of_count}/{i}", count), "") for i in itertools.count())
            source = f"generated by kvbench.tasks.records, {count} {form}"
            note = f"{dataset}: {form} in the published form, generated from seed={seed}"
        examples = []
        for i, (values, first_key) in enumerate(islice(cases, contexts)):
            keys = _choose_keys(values, first_key, f"{seed_of_count}/{i}/asked", questions)
            example_id = f"{form}-{count}-{i}"
            examples.append(_make_example(record_form, example_id, values, keys, count, max_new_tokens))
        task = Task(
            id=f"{dataset}/{count}",
            examples=tuple(examples),
            metric=record_form.metric,
            source=source,
            category="synthetic retrieval",
            note=note,
        )
        tasks.append(task)
    return tasks


def _make_example(
    record_form: RecordForm, example_id: str, values: Records, keys: Sequence[str], count: int, max_new_tokens: int
) -> Example:
    """Return the example of one context.

    values: the records of the context.
    keys: the keys that its questions ask for, in order.
    count: the number of records of the task's contexts.
    """
    turns = tuple(Turn(record_form.question.format(key), answers=(values[key],)) for key in keys)
    # record where each answer stands in the context, counted in records: scores may depend on it
    keys_in_order = list(values)
    places = [keys_in_order.index(key) for key in keys]
    return Example(
        id=example_id,
        prompt=record_form.write(values),
        answers=(),
        max_new_tokens=max_new_tokens,
        meta={"records": count, "places": places},
        turns=turns,
    )


def _choose_keys(values: Records, first_key: str, seed: str, questions: int) -> list[str]:
    """Return the keys of the questions: ``first_key`` if it is among the records ``values``, then drawn keys.

    questions: the number of keys, at most the number of records.
    """
    # the seed names the context, so that its questions do not depend on the number of contexts
    drawn_keys = shuffled_by_seed([key for key in values if key != first_key], seed)
    if first_key not in values:
        return list(islice(drawn_keys, questions))
    return [first_key] + list(islice(drawn_keys, questions - 1))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
