"""LongBench: 16 English tasks, 5 Chinese ones, and LongBench-E, which has English ones in three ranges of length.

MiniLongBench (arXiv 2505.19959), in a folder of its own, is 237 examples of the 21 tasks that rank models as all do.
Prompts and answer lengths are LongBench's own two files, ``dataset2prompt.json`` and ``dataset2maxlen.json``, read from
the data folder; what stands here is what its scripts pred.py and eval.py decide by a task's name. Source:
github.com/THUDM/LongBench (MIT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvbench.base.errors import MissingData, UsageError, unknown
from kvbench.base.example import Example
from kvbench.tasks.base import Task, read_text
from kvbench.tasks.metrics.text import first_line
from kvbench.tasks.rows import FileRow, is_count, kind, parse, read_lines
from kvbench.tasks.source import Files

FOLDER = "longbench"
PROMPTS, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"
SPLITS = ("en", "zh", "e")
BACKENDS = {"levenshtein": "code_sim", "difflib": "code_sim_difflib"}
BUCKETS = (("0-4k", 4000), ("4-8k", 8000), ("8k+", None))


@dataclass(frozen=True)
class Spec:
    """The metric and the reading of a task.

    extended: LongBench-E has the task too.
    first_line, chat: as in Task.
    newline_ends: a newline ends the answer and cannot begin it.
    size: the number of examples; LongBench-E has other numbers.
    """

    metric: str
    category: str
    extended: bool = False
    chinese: bool = False
    first_line: bool = False
    chat: bool = True
    newline_ends: bool = False
    size: int = 200


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


def names(split: str) -> tuple[str, ...]:
    """Return the names of a split's tasks, in the order of LongBench's tables; ``split`` is en, zh or e."""
    if split == "e":
        return tuple(n for n, s in TASKS.items() if s.extended)
    return tuple(n for n, s in TASKS.items() if s.chinese == (split == "zh"))


def bucket(length: int) -> str:
    """Return the name of the range of LongBench-E for a stored ``length``, in words or Chinese characters."""
    return next(name for name, end in BUCKETS if end is None or length < end)


def metric_name(task: str, code_sim: str) -> str:
    """Return the name of a task's metric. ``code_sim`` is the backend of code similarity, levenshtein or difflib."""
    if code_sim not in BACKENDS:
        raise unknown("backend of code_sim", code_sim, BACKENDS)
    metric = TASKS[task].metric
    return BACKENDS[code_sim] if metric == "code_sim" else metric


def scored_part(task: str, prediction: str) -> str:
    """Return the part of an answer that LongBench's eval.py scores: in few-shot tasks the first line."""
    return first_line(prediction) if TASKS[task].first_line else prediction


def load(
    dataset: str, files: Files, selection: Sequence[str], split: str, code_sim: str, folder: str = FOLDER
) -> list[Task]:
    """Return the selected tasks of one split, or all, read from ``folder`` below the data folder.

    The two official files are always LongBench's own, in its folder. Raises UsageError where files are missing, naming
    them and the ways to get them, and for a damaged line naming file, line and reason.
    """
    if split not in SPLITS:
        raise unknown(f"value of dataset.{dataset}.split", split, SPLITS)
    metric_name("lcc", code_sim)
    for name in selection:
        if name not in names(split):
            raise unknown(f"task of dataset {dataset}", name, names(split))
    wanted = tuple(selection) or names(split)
    paths = _paths(files, {name: places(name, split, folder) for name in wanted})
    prompts, lengths = official(files, PROMPTS), official(files, LENGTHS)
    tasks = []
    for name, path in paths.items():
        spec, template, limit = TASKS[name], prompts.get(name), lengths.get(name)
        if not isinstance(template, str) or template.count("{context}") != 1:
            raise UsageError(f"{FOLDER}/{PROMPTS}: the prompt of {name} must be text with one {{context}}")
        if not is_count(limit):
            reason = f"the answer length of {name} must be a whole number, got {kind(limit)}"
            raise UsageError(f"{FOLDER}/{LENGTHS}: {reason}")
        examples = _examples(path, name, template, limit, split == "e")
        task = Task(
            id=f"{dataset}/{name}",
            examples=examples,
            metric=metric_name(name, code_sim),
            source=f"{path.name}, {len(examples)} examples; prompts of LongBench's {PROMPTS}",
            category=spec.category,
            stop=("\n",) if spec.newline_ends else (),
            forbid_first=("\n",) if spec.newline_ends else (),
            min_new_tokens=int(spec.newline_ends),
            first_line=spec.first_line,
            chat=spec.chat,
            strip=False,
        )
        tasks.append(task)
    return tasks


def places(name: str, split: str, folder: str = FOLDER) -> tuple[str, ...]:
    """Return the places of a task's file below the data folder: as named here, or as LongBench's archive unpacks."""
    ending = "_e" if split == "e" else ""
    return f"{folder}/{name}{ending}.jsonl", f"{folder}/data/{name}{ending}.jsonl"


def _paths(files: Files, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Path]:
    """Return {task: file}, each at the first of its places that exists. Raises MissingData unless all are there."""
    paths = {name: path for name, candidates in wanted.items() if (path := files.first(*candidates))}
    missing = [candidates[0] for name, candidates in wanted.items() if name not in paths]
    if missing:
        where = f" below {files.root}" if files.root else ""
        present = ",".join(f"{files.dataset}/{name}" for name in paths)
        hint = f" What is there can be run by name: {present}" if present else ""
        raise MissingData(
            f"dataset={files.dataset} needs {len(missing)} of {len(wanted)} files that do not exist{where}: "
            f"{', '.join(missing)}: {files.ways()}.{hint}",
            missing if files.root else (),
        )
    return paths


def official(files: Files, name: str) -> Mapping[str, object]:
    """Return one of LongBench's two official files: prompts or lengths of answers by task."""
    path = files.path(f"{FOLDER}/{name}")
    content = parse(path, "", read_text(path, f"dataset={files.dataset}"))
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a JSON object by task, got {kind(content)}")
    return content


def _examples(path: Path, name: str, template: str, limit: int, buckets: bool) -> tuple[Example, ...]:
    prefix, _, suffix = template.partition("{context}")
    repeats: Counter[str] = Counter()
    examples = []
    for row in read_lines(path):
        context, name_in_file = _string(row, "context"), row.name("_id", row.place)
        question, length = _fill(suffix, row), row.value("length")
        if not is_count(length):
            raise row.wrong(f"'length' must be a whole number from 1, got {kind(length)}")
        repeats[name_in_file] += 1
        examples.append(
            Example(
                # a repeated id stays two examples, as for LongBench, which counts lines
                id=name_in_file if repeats[name_in_file] == 1 else f"{name_in_file}#{repeats[name_in_file]}",
                prompt=_fill(prefix, row) + context + question,
                answers=row.texts("answers"),
                max_new_tokens=limit,
                classes=row.texts("all_classes") if TASKS[name].metric == "classification" else (),
                question=question,
                meta={"length": length} | ({"bucket": bucket(length)} if buckets else {}),
            )
        )
    if not examples:
        raise UsageError(f"{path} is empty: it must hold an example a line")
    return tuple(examples)


def _fill(template: str, row: FileRow) -> str:
    return template.replace("{input}", _string(row, "input")) if "{input}" in template else template


def _string(row: FileRow, key: str) -> str:
    """Return text that may be empty, as the input of summaries is."""
    return "" if row.value(key) == "" else row.text(key)
