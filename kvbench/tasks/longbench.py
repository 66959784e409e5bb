"""LongBench: 16 English tasks, 5 Chinese ones, and LongBench-E with English tasks in three ranges of length.

MiniLongBench (arXiv 2505.19959), in a folder of its own, has 237 examples of the 21 tasks. They rank models as all
examples do. Prompts and answer lengths come from LongBench's own two files in the data folder, ``dataset2prompt.json``
and ``dataset2maxlen.json``. This module holds the decisions that LongBench's scripts pred.py and eval.py make by a
task's name. Source: github.com/THUDM/LongBench (MIT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvbench.base.errors import MissingData, UsageError, unknown
from kvbench.base.example import Example
from kvbench.tasks.base import LoadContext, Task, limit_answers, read_text
from kvbench.tasks.knobs import RULES, check_word
from kvbench.tasks.metrics import metric
from kvbench.tasks.metrics.text import first_line
from kvbench.tasks.rows import FileRow, describe_value, is_count, parse_json, read_lines
from kvbench.tasks.source import Files

FOLDER = "longbench"
PROMPTS, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"
SPLITS = ("en", "zh", "e")
MOST_NAMED = 3
"""The most missing files that an error names."""
BACKENDS = {"levenshtein": "code_sim", "difflib": "code_sim_difflib"}
"""The metric of code tasks by the value of the knob ``code_sim``."""
BUCKETS = (("0-4k", 4000), ("4-8k", 8000), ("8k+", None))
"""The ranges of LongBench-E by name, each with its end, which is not included; None is no end."""


@dataclass(frozen=True)
class Spec:
    """One task of LongBench: its metric and category, and how its prompts are read and its answers end.

    metric: the name of the metric. ``code_sim`` stands for the metric of the chosen backend.
    category: the category in LongBench's Table 1.
    extended: True if LongBench-E has the task, too.
    chinese: True if the task is in the split ``zh``, False if it is in ``en``.
    first_line: True if only the first line of an answer is scored.
    chat: False if the prompt is read without the run's chat template.
    newline_ends: True if a newline ends the answer and cannot begin it.
    size: the number of examples. LongBench-E has other numbers.
    """

    metric: str
    category: str
    extended: bool = False
    chinese: bool = False
    first_line: bool = False
    chat: bool = True
    newline_ends: bool = False
    size: int = 200


# the categories of LongBench's Table 1
SINGLE, MULTI, SUMMARY = "single-document QA", "multi-document QA", "summarisation"
FEW_SHOT, SYNTHETIC, CODE = "few-shot", "synthetic", "code"
TASKS: Mapping[str, Spec] = MappingProxyType(
    {
        "narrativeqa": Spec("f1", SINGLE),
        "qasper": Spec("f1", SINGLE, extended=True),
        "multifieldqa_en": Spec("f1", SINGLE, extended=True, size=150),
        "hotpotqa": Spec("f1", MULTI, extended=True),
        "2wikimqa": Spec("f1", MULTI, extended=True),
        "musique": Spec("f1", MULTI),
        "gov_report": Spec("rouge_l", SUMMARY, extended=True),
        "qmsum": Spec("rouge_l", SUMMARY),
        "multi_news": Spec("rouge_l", SUMMARY, extended=True),
        "trec": Spec("classification", FEW_SHOT, extended=True, first_line=True, chat=False),
        "triviaqa": Spec("f1", FEW_SHOT, extended=True, first_line=True, chat=False),
        "samsum": Spec("rouge_l", FEW_SHOT, extended=True, first_line=True, chat=False, newline_ends=True),
        "passage_count": Spec("count", SYNTHETIC, extended=True),
        "passage_retrieval_en": Spec("retrieval", SYNTHETIC, extended=True),
        "lcc": Spec("code_sim", CODE, extended=True, chat=False, size=500),
        "repobench-p": Spec("code_sim", CODE, extended=True, chat=False, size=500),
        "multifieldqa_zh": Spec("qa_f1_zh", SINGLE, chinese=True),
        "dureader": Spec("rouge_zh", MULTI, chinese=True),
        "vcsum": Spec("rouge_zh", SUMMARY, chinese=True),
        "lsht": Spec("classification", FEW_SHOT, chinese=True, first_line=True, chat=False),
        "passage_retrieval_zh": Spec("retrieval_zh", SYNTHETIC, chinese=True),
    }
)


def task_names(split: str) -> tuple[str, ...]:
    """Return the names of a split's tasks, in the order of LongBench's tables. ``split`` is en, zh or e."""
    if split == "e":
        return tuple(name for name, spec in TASKS.items() if spec.extended)
    chinese = split == "zh"
    return tuple(name for name, spec in TASKS.items() if spec.chinese == chinese)


def length_bucket(length: int) -> str:
    """Return the name of LongBench-E's range for a stored ``length`` in words or Chinese characters."""
    # LongBench's eval.py compares this length, not a model's number of tokens; the last range has no end
    return next(name for name, end in BUCKETS if end is None or length < end)


def metric_name(task: str, code_sim: str, rules: str = "scripts") -> str:
    """Return the name of a task's metric.

    code_sim: the backend of code similarity, levenshtein or difflib.
    rules: one of RULES.
    """
    if code_sim not in BACKENDS:
        raise unknown("backend of code_sim", code_sim, BACKENDS)
    name = TASKS[task].metric
    if name == "code_sim":
        name = BACKENDS[code_sim]
    if rules == "mended":
        return metric(name).mended or name
    return name


def scored_part(task: str, prediction: str) -> str:
    """Return the part of an answer that LongBench's eval.py scores. In few-shot tasks this is the first line."""
    if TASKS[task].first_line:
        return first_line(prediction)
    return prediction


def load(
    context: LoadContext,
    split: str,
    code_sim: str,
    folder: str = FOLDER,
    max_new_tokens: int | None = None,
    rules: str = "scripts",
) -> list[Task]:
    """Return the selected tasks of one split, or all, read from ``folder`` below the data folder.

    split: ``en``, ``zh`` or ``e``.
    code_sim: the backend of code similarity, ``levenshtein`` or ``difflib``.
    max_new_tokens: the most tokens of every answer; None: the lengths in LongBench's file.
    rules: ``scripts`` or ``mended``: whether a metric keeps the faults of LongBench's scripts.

    The two official files are always LongBench's own, in LongBench's folder. If files are missing, raises UsageError
    that names them and the ways to get them. For a damaged line the error names file, line and reason.
    """
    dataset, files, selection = context.dataset, context.files, context.selection
    if split not in SPLITS:
        raise unknown(f"value of dataset.{dataset}.split", split, SPLITS)
    # a wrong backend is an error even if no code task is selected
    metric_name("lcc", code_sim)
    check_word(dataset, "rules", rules, RULES)
    for name in selection:
        if name not in task_names(split):
            raise unknown(f"task of dataset {dataset}", name, task_names(split))
    selected = selection or task_names(split)
    paths = _find_files(files, {name: file_places(name, split, folder) for name in selected})
    prompts, lengths = read_official(files, PROMPTS), read_official(files, LENGTHS)
    tasks = []
    for name, path in paths.items():
        spec = TASKS[name]
        template, limit = prompts.get(name), lengths.get(name)
        if not isinstance(template, str) or template.count("{context}") != 1:
            raise UsageError(f"{FOLDER}/{PROMPTS}: the prompt of {name} must be text with one {{context}}")
        if not is_count(limit):
            reason = f"the answer length of {name} must be a whole number, got {describe_value(limit)}"
            raise UsageError(f"{FOLDER}/{LENGTHS}: {reason}")
        examples = _read_examples(path, name, template, limit, with_buckets=split == "e")
        ends: tuple[str, ...] = ("\n",) if spec.newline_ends else ()
        task = Task(
            id=f"{dataset}/{name}",
            examples=examples,
            metric=metric_name(name, code_sim, rules),
            source=f"{path.name}, {len(examples)} examples; prompts of LongBench's {PROMPTS}",
            category=spec.category,
            # pred.py ends samsum's answers at a newline, since models continue with another dialogue. The newline must
            # not be the first token, which would end an empty answer
            stop=ends,
            forbid_first=ends,
            min_new_tokens=1 if spec.newline_ends else 0,
            first_line=spec.first_line,
            chat=spec.chat,
            # eval.py scores answers unchanged, with the spaces at their ends
            strip=False,
        )
        tasks.append(task)
    return limit_answers(dataset, tasks, max_new_tokens)


def file_places(name: str, split: str, folder: str = FOLDER) -> tuple[str, ...]:
    """Return the places of a task's file below the data folder: kvbench's own, then that of the unpacked archive."""
    file = f"{name}_e.jsonl" if split == "e" else f"{name}.jsonl"
    return f"{folder}/{file}", f"{folder}/data/{file}"


def _find_files(files: Files, places_by_task: Mapping[str, tuple[str, ...]]) -> dict[str, Path]:
    """Return {task: file}, each at the first of its places that exists. Raises MissingData unless all exist.

    places_by_task: for each task, the places below the data folder where its file may be.
    """
    # name all missing files in one error: a user fetches them together
    paths = {}
    missing = []
    for name, candidates in places_by_task.items():
        path = files.find_first(*candidates)
        if path:
            paths[name] = path
        else:
            missing.append(candidates[0])
    if not missing:
        return paths
    names = ", ".join(missing[:MOST_NAMED])
    if len(missing) > MOST_NAMED:
        names += f" and {len(missing) - MOST_NAMED} more"
    if files.root is None:
        message = f"dataset={files.dataset} needs {names}, and no data folder is named. {files.advise()}"
    else:
        message = f"{names} not found in {files.root}. {files.advise()}"
    if paths:
        present = ",".join(f"{files.dataset}/{name}" for name in paths)
        message += f" These tasks are there: dataset={present}"
    # without a data folder the names of its files say nothing
    raise MissingData(message, missing if files.root is not None else ())


def read_official(files: Files, name: str) -> Mapping[str, object]:
    """Return the content of one of LongBench's two official files, by task: the prompts, or the lengths of answers.

    name: PROMPTS or LENGTHS.
    """
    path = files.path(f"{FOLDER}/{name}")
    # check here, where the path is known: a wrong file, such as a server's error page, would fail later without it
    content = parse_json(path, place="", text=read_text(path, f"dataset={files.dataset}"))
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object by task, got {describe_value(content)}")
    return content


def _read_examples(path: Path, name: str, template: str, limit: int, with_buckets: bool) -> tuple[Example, ...]:
    """Return the examples of a task's file.

    template: the task's prompt, with ``{context}`` and perhaps ``{input}``.
    limit: the most new tokens of an answer.
    with_buckets: True if an example's meta has its range of lengths in LongBench-E.
    """
    # ``query_aware=false`` withholds the question, the text behind the context
    prefix, _, suffix = template.partition("{context}")
    repeats: Counter[str] = Counter()
    examples = []
    for row in read_lines(path):
        context = _read_possibly_empty(row, "context")
        example_id = row.name("_id", row.place)
        question, length = _fill_input(suffix, row), row.value("length")
        if not is_count(length):
            raise row.wrong(f"'length' must be a whole number from 1, got {describe_value(length)}")
        # a repeated id gives two examples, since LongBench counts lines
        repeats[example_id] += 1
        if repeats[example_id] > 1:
            example_id = f"{example_id}#{repeats[example_id]}"
        prompt = _fill_input(prefix, row) + context + question
        answers = row.texts("answers")
        classes: tuple[str, ...] = ()
        if TASKS[name].metric == "classification":
            classes = row.texts("all_classes")
        meta: dict[str, object] = {"length": length}
        if with_buckets:
            meta["bucket"] = length_bucket(length)
        examples.append(
            Example(
                id=example_id,
                prompt=prompt,
                answers=answers,
                max_new_tokens=limit,
                classes=classes,
                question=question,
                meta=meta,
            )
        )
    if not examples:
        raise UsageError(f"{path} is empty: it must hold an example a line")
    return tuple(examples)


def _fill_input(template: str, row: FileRow) -> str:
    """Return ``template``, a part of the prompt, with the row's input in place of ``{input}``.

    The input is read only if the part has such a place.
    """
    # contexts and inputs may hold braces, and ``str.format`` would read these as fields
    if "{input}" not in template:
        return template
    return template.replace("{input}", _read_possibly_empty(row, "input"))


def _read_possibly_empty(row: FileRow, key: str) -> str:
    """Return the text under ``key``. It may be empty: examples of summaries have no input."""
    # ``row.text`` refuses an empty text
    if row.value(key) == "":
        return ""
    return row.text(key)
