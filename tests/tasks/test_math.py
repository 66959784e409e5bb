"""The problems of MATH-500 and AIME 2024: prompts, references, and answers that are their own references."""

import pytest
from support.data import data_path
from support.dataset_files import load, write_lines

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import note_own_wording
from kvbench.tasks.metrics import metric, score

ROW = {
    "unique_id": "test/algebra/1.json",
    "subject": "Algebra",
    "level": 2,
    "problem": "What is $\\frac{1}{2}$ of {3}? ",
    "answer": "\\frac{3}{2}",
    "solution": "Half of 3 is $\\boxed{\\frac{3}{2}}$.",
}
INSTRUCTION = "Reason step by step. End with the final answer, and write it inside \\boxed{}.\n"


def test_prompts(tmp_path):
    write_lines(tmp_path / "math500.jsonl", ROW, {**ROW, "unique_id": "test/algebra/2.json"})
    (task,) = load("math500", tmp_path)
    one, two = task.examples
    assert (task.id, task.metric, task.category) == ("math500", "math_equal", "mathematics")
    assert task.note == note_own_wording("math500")
    assert one.prompt == f"What is $\\frac{{1}}{{2}}$ of {{3}}?\n\n{INSTRUCTION}"
    assert (one.id, one.answers, one.max_new_tokens) == (ROW["unique_id"], ("\\frac{3}{2}",), 4096)
    assert one.meta == {"subject": "Algebra"} and two.id == "test/algebra/2.json"
    # the solution is neither read nor scored
    assert "Half of 3" not in one.prompt
    assert load("math500", tmp_path, max_new_tokens=7)[0].examples[0].max_new_tokens == 7


def test_aime_has_numbers_as_ids(tmp_path):
    write_lines(tmp_path / "aime24.jsonl", {"id": 60, "problem": "How many?", "answer": "025"})
    (task,) = load("aime24", tmp_path)
    (one,) = task.examples
    assert (task.id, task.metric, one.id, one.answers) == ("aime24", "math_equal", "60", ("025",))
    assert one.prompt == f"How many?\n\n{INSTRUCTION}" and one.max_new_tokens == 8192
    assert score(task.metric, "so \\boxed{25}", one) == 1.0


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"problem": "p"}, "there is no key 'subject'"),
        ({"problem": "p", "subject": "s"}, "there is no key 'answer'"),
        ({"problem": "", "subject": "s", "answer": "3"}, "'problem' must be text that is not empty"),
        ({"problem": "p", "subject": "s", "answer": 3}, "'answer' must be text that is not empty, got 3"),
        ('{"problem"', "not JSON"),
    ],
)
def test_malformed_lines_are_named(tmp_path, row, reason):
    write_lines(tmp_path / "math500.jsonl", ROW, row)
    with pytest.raises(UsageError, match=rf"math500\.jsonl, line 2: {reason}"):
        load("math500", tmp_path)


@pytest.mark.parametrize("dataset", ["math500", "aime24"])
def test_missing_files_are_named_with_the_command_that_fetches_them(tmp_path, dataset):
    with pytest.raises(UsageError, match=rf"{dataset}\.jsonl not found in .*data fetch {dataset}"):
        load(dataset, tmp_path)


def right(example: Example, wrong: str = "") -> float | None:
    return score("math_equal", f"First I take \\boxed{{0}}. So $\\boxed{{{example.answers[0]}{wrong}}}$.", example)


def test_real_problems_of_math():
    (task,) = load("math500", data_path("math500.jsonl").parent)
    assert len(task.examples) == 500 and len({e.meta["subject"] for e in task.examples}) == 7
    some = task.examples[::20]
    assert [right(e) for e in some] == [1.0] * 25
    assert [right(e, " + 1") for e in some] == [0.0] * 25


def test_real_problems_of_aime():
    (task,) = load("aime24", data_path("aime24.jsonl").parent)
    assert len(task.examples) == 30 and all(0 <= int(e.answers[0]) <= 999 for e in task.examples)
    assert [right(e) for e in task.examples] == [1.0] * 30
    assert metric(task.metric).lengths
