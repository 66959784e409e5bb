"""The scores that LongBench's official evaluator printed for real LLaMA-2-7B-chat answers, to the last digit."""

import json

import pytest
from support.data import data_path

from kvbench.base.example import Example
from kvbench.tasks.metrics import score
from kvbench.tasks.metrics.text import first_line

METRIC_OF = {
    **dict.fromkeys(["narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"], "f1"),
    **dict.fromkeys(["gov_report", "qmsum", "multi_news", "samsum"], "rouge_l"),
    **dict.fromkeys(["trec", "lsht"], "classification"),
    **dict.fromkeys(["lcc", "repobench-p"], "code_sim_difflib"),
    "passage_count": "count",
    "passage_retrieval_en": "retrieval",
}
FIRST_LINE_ONLY = {"trec", "triviaqa", "samsum", "lsht"}


def mean_score(task: str, metric: str) -> float:
    lines = data_path("predictions", "llama2-7b-chat-4k", f"{task}.jsonl").read_text(encoding="utf-8").split("\n")
    scores = []
    for row in map(json.loads, filter(None, lines)):
        example = Example("", "", tuple(row["answers"]), 1, tuple(row["all_classes"] or ()))
        prediction = first_line(row["pred"]) if task in FIRST_LINE_ONLY else row["pred"]
        scores.append(score(metric, prediction, example))
    return round(100 * sum(scores) / len(scores), 2)


@pytest.mark.parametrize("task", METRIC_OF)
def test_score_of_the_official_evaluator(task):
    official = json.loads(data_path("predictions", "llama2-7b-chat-4k", "result.json").read_text())
    assert mean_score(task, METRIC_OF[task]) == official[task]


@pytest.mark.parametrize(("task", "expected"), [("lcc", 60.87), ("repobench-p", 54.45)])
def test_code_sim_with_levenshtein(task, expected):
    assert mean_score(task, "code_sim") == expected
