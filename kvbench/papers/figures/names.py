"""Printed names of models, tasks and texts, for the titles and notes of figures."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

MODELS = {"smollm2-135m-q4_1": "SmolLM2-135M", "tiny": "the tiny model"}
"""The printed names of models by their names in conf/model."""
TASKS = {
    "mean": "mean over tasks",
    "narrativeqa": "NarrativeQA",
    "qasper": "Qasper",
    "multifieldqa_en": "MultiFieldQA",
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMQA",
    "musique": "MuSiQue",
    "gov_report": "GovReport",
    "qmsum": "QMSum",
    "multi_news": "MultiNews",
    "trec": "TREC",
    "triviaqa": "TriviaQA",
    "samsum": "SAMSum",
    "passage_retrieval_en": "PassageRetrieval",
    "passage_count": "PassageCount",
    "lcc": "LCC",
    "repobench-p": "RepoBench-P",
    "xsum": "XSum",
    "cnn_dailymail": "CNN/DailyMail",
    "gsm8k": "GSM8K",
    "coqa": "CoQA",
    "pg19": "PG-19",
    "wikitext2": "WikiText-2",
    "first": "MDQA first",
    "middle": "MDQA middle",
    "last": "MDQA last",
}
"""The printed names of tasks by the last part of their ids, and of texts by the first part of theirs."""
SYNTHETIC = {"needle", "hop", "listing", "labels", "multikey", "code"}
"""The tasks of the tiny suite."""
UNITS = ("token", "word", "byte")
"""The last parts that ids of language modelling tasks can have, such as ``pg19/token``."""


def name_model(name: str) -> str:
    """Return the printed name of a model, such as SmolLM2-135M; other models keep their own name."""
    return MODELS.get(name, name)


def name_task(task: str) -> str:
    """Return the printed name of the task with the id ``task``: ``longbench/qasper`` is Qasper.

    The last part of the id decides. A task without a printed name is shown by this part.
    """
    parts = task.split("/")
    if parts[0] == "tiny_stream":
        return "stream of short prompts"
    # pg19/token is the text pg19, measured by token
    if len(parts) > 1 and parts[-1] in UNITS:
        parts.pop()
    # its last part alone would name the model, not the prompts
    if parts == ["fidelity", "tiny"]:
        return "prompts of the tiny suite"
    return TASKS.get(parts[-1], parts[-1])


def name_text(text: str) -> str:
    """Return the printed name of a text that a model read: ``wikitext2/valid.txt, first 80%`` is WikiText-2."""
    return TASKS.get(text.partition("/")[0], text)


def find_model(facts: Mapping[str, str]) -> str:
    """Return the printed name of the model that the facts of a CSV name; '' if they name none."""
    # measured scores have the fact runs: "Model NAME, float32; dataset ..."
    # figures of activations have the fact model: "NAME (fingerprint), float32"
    match = re.search(r"Model ([^,;|]+)", facts.get("runs", "")) or re.match(r"([^ ,]+)", facts.get("model", ""))
    if match is None:
        return ""
    return name_model(match.group(1).strip())


def find_texts(facts: Mapping[str, str]) -> str:
    """Return in words what a figure of activations read, from the facts of its CSV; '' for any other figure.

    The words are the names of the texts or tasks, the number of prompts and their lengths. More than three names are
    replaced by their number.
    """
    if "texts" not in facts:
        return ""
    # facts["texts"] is such as "needle (1), hop (1)": a name may have commas, so the count in brackets ends it
    names = [name_text(name) for name in re.findall(r"(?:^|, )(.+?) \(\d+\)", facts["texts"])]
    text = f"{len(names)} tasks" if len(names) > 3 else ", ".join(names)
    # facts["prompts"] is such as "6 of 512 to 1024 tokens"
    match = re.match(r"(\d+) of (\d+) to (\d+) tokens", facts.get("prompts", ""))
    if match is None:
        return text
    count, shortest, longest = (int(number) for number in match.groups())
    tokens = f"{shortest:,} to {longest:,}" if shortest != longest else f"{longest:,}"
    prompts = f"n = {count} prompts" if count > 1 else "1 prompt"
    return f"{text} · {prompts} of {tokens} tokens"


def find_tasks(data: pd.DataFrame) -> str:
    """Return the printed names of a figure's tasks; of more than four, their number. '' for data without tasks."""
    if "task" not in data:
        return ""
    tasks = list(dict.fromkeys(name_task(task) for task in data["task"] if task != "mean"))
    if set(tasks) == SYNTHETIC:
        return f"{len(tasks)} synthetic tasks"
    if len(tasks) > 4:
        return f"{len(tasks)} tasks"
    return ", ".join(tasks)
