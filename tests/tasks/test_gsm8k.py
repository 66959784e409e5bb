import pytest
from support.data import data_path
from support.dataset_files import load, write_lines

from kvbench.base.errors import UsageError
from kvbench.tasks.metrics import score

ROW = {"question": "How many eggs are 2 {boxes} of 6?", "answer": "2*6 = <<2*6=12>>12\n#### 1,012"}


def test_prompts(tmp_path):
    write_lines(tmp_path / "gsm8k_test.jsonl", ROW, {**ROW, "answer": "#### -3"})
    (task,) = load("gsm8k", tmp_path)
    one, two = task.examples
    assert (task.id, task.metric, [e.id for e in task.examples]) == ("gsm8k", "gsm8k", ["gsm8k-0", "gsm8k-1"])
    assert one.prompt.startswith("How many eggs are 2 {boxes} of 6?\n\n") and "\nThe answer is: N\n" in one.prompt
    assert (one.answers, two.answers, one.max_new_tokens) == (("1,012",), ("-3",), 500)
    assert score(task.metric, "2 * 506 = 1012.\nThe answer is: 1012", one) == 1.0
    assert load("gsm8k", tmp_path, max_new_tokens=7)[0].examples[0].max_new_tokens == 7


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "#### 3"}, "there is no key 'question'"),
        ({"question": "", "answer": "#### 3"}, "'question' must be text that is not empty"),
        ({"question": "q"}, "there is no key 'answer'"),
        ({"question": "q", "answer": "3"}, "'answer' must end in '#### N'"),
        ({"question": "q", "answer": "#### three"}, "'answer' must end in '#### N'"),
        ('{"question"', "not JSON"),
    ],
)
def test_malformed_lines_are_named(tmp_path, row, reason):
    write_lines(tmp_path / "gsm8k_test.jsonl", ROW, row)
    with pytest.raises(UsageError, match=rf"gsm8k_test\.jsonl, line 2: {reason}"):
        load("gsm8k", tmp_path)


def test_missing_files_and_bad_knobs(tmp_path):
    with pytest.raises(UsageError, match=r"gsm8k_test\.jsonl not found in .*data fetch gsm8k"):
        load("gsm8k", tmp_path)
    with pytest.raises(UsageError, match=r"dataset\.gsm8k\.max_new_tokens=0"):
        load("gsm8k", tmp_path, max_new_tokens=0)


def test_real_data():
    (task,) = load("gsm8k", data_path("gsm8k_test.jsonl").parent)
    assert len(task.examples) == 1319 and task.examples[0].answers == ("18",)
    assert sum("," in e.answers[0] for e in task.examples) == 14
    assert all(score("gsm8k", f"The answer is: {e.answers[0]}", e) == 1.0 for e in task.examples)
