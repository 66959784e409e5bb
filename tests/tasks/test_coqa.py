import json

import pytest
from support.dataset_files import load, write_lines

from kvbench.base.errors import UsageError
from kvbench.tasks.metrics import score


def turns(*texts):
    return [{"input_text": text, "turn_id": i} for i, text in enumerate(texts, start=1)]


STORY = {
    "id": "s1",
    "story": "A cat sat {here}.\n\nIt slept. ",
    "questions": turns("Who sat?", "Where? "),
    "answers": turns("A cat", "here"),
    "additional_answers": {"1": turns("a white cat", ""), "0": turns("cat", "here")},
}


def write(folder, *stories):
    (folder / "coqa-dev-v1.0.json").write_text(json.dumps({"version": "1.0", "data": stories}), encoding="utf-8")


def test_turns(tmp_path):
    write(tmp_path, STORY, {**STORY, "id": "s2", "additional_answers": {}})
    (task,) = load("coqa", tmp_path)
    assert (task.id, task.metric, task.cut_at) == ("coqa", "coqa_f1", "\nQ:")
    assert [e.id for e in task.examples] == ["s1-1", "s1-2", "s2-1", "s2-2"]
    one, two = task.examples[:2]
    assert one.prompt.endswith("\n\nA cat sat {here}.\n\nIt slept.\n\nQ: Who sat?\nA:")
    assert two.prompt.endswith("It slept.\n\nQ: Where?\nA:") and two.question == "Q: Where?\nA:"
    assert (one.answers, two.answers) == (("A cat", "cat", "a white cat"), ("here", "here"))
    assert (one.max_new_tokens, two.meta) == (20, {"turn": 2})
    # without "a white cat" the best is "cat": its F1 with "white cat" is 2/3
    assert score(task.metric, task.answer(" the white cat\nQ: And?"), one) == pytest.approx((1 + 1 + 2 / 3) / 3)
    # of two equal references one stays when the other is left out
    assert score(task.metric, "here", two) == 1.0


def test_history(tmp_path):
    third = {**STORY, "questions": turns("1?", "2?", "3?"), "answers": turns("a", "b", "c")}
    write(tmp_path, {k: v for k, v in third.items() if k != "additional_answers"})
    none, one, two, every = (load("coqa", tmp_path, history=h)[0].examples[2].prompt for h in (0, 1, 2, "all"))
    assert none.count("Q: ") == 1
    assert one.endswith("slept.\n\nQ: 2?\nA: b\n\nQ: 3?\nA:")
    assert two == every and two.endswith("slept.\n\nQ: 1?\nA: a\n\nQ: 2?\nA: b\n\nQ: 3?\nA:")


def test_the_hubs_table(tmp_path):
    row = {"story": "S.", "questions": ["1?", "2?"], "answers": {"input_text": ["a", "b"], "answer_start": [0, 1]}}
    write_lines(tmp_path / "coqa_validation.jsonl", row, row)
    (task,) = load("coqa", tmp_path)
    assert [e.id for e in task.examples] == ["coqa-0-1", "coqa-0-2", "coqa-1-1", "coqa-1-2"]
    assert [e.answers for e in task.examples[:2]] == [("a",), ("b",)]
    assert task.source == "CoQA dev, coqa_validation.jsonl"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"story": ""}, "data[1]: 'story' must be text"),
        ({"questions": []}, "data[1]: 'questions' must be a list of objects"),
        ({"questions": [{"text": "?"}]}, "data[1], questions[0]: there is no key 'input_text'"),
        ({"questions": turns(3)}, "data[1]: 'input_text' in 'questions' must be text, got 3"),
        ({"questions": turns("1?", "2?", "3?")}, "data[1]: turn 3 has no answer"),
        ({"questions": turns(" ")}, "data[1]: turn 1 has no question"),
        ({"answers": "a"}, "data[1]: 'answers' must be a list of objects"),
        ({"questions": ["1?"], "answers": {"text": []}}, "data[1], answers: there is no key 'input_text'"),
        ({"additional_answers": [1]}, "data[1]: 'additional_answers' must be an object by annotator"),
    ],
)
def test_malformed_stories_are_named(tmp_path, change, reason):
    write(tmp_path, STORY, {**STORY, "id": "s2", **change})
    with pytest.raises(UsageError) as error:
        load("coqa", tmp_path)
    assert f"coqa-dev-v1.0.json, top level, {reason}" in str(error.value)


def test_other_files_and_bad_knobs(tmp_path):
    with pytest.raises(UsageError, match=r"coqa-dev-v1\.0\.json not found in"):
        load("coqa", tmp_path)
    path = tmp_path / "coqa-dev-v1.0.json"
    path.write_text("[]")
    with pytest.raises(UsageError, match=r"v1\.0\.json: must be a JSON object with a list under 'data', got \[\]"):
        load("coqa", tmp_path)
    path.write_text('{"version": 1}')
    with pytest.raises(UsageError, match="top level: there is no key 'data'"):
        load("coqa", tmp_path)
    path.write_bytes(b'{"data": "\xff"}')
    with pytest.raises(UsageError, match=r"is not UTF-8 text \(byte 10\)"):
        load("coqa", tmp_path)
    for history in (-1, "some", True):
        with pytest.raises(UsageError, match=r"dataset\.coqa\.history="):
            load("coqa", tmp_path, history=history)
