import json
from collections import Counter

import pytest
from support.data import data_path
from support.dataset_files import load, write_lines

from kvbench.base.errors import UsageError
from kvbench.tasks.base import note_own_wording
from kvbench.tasks.metrics import score


def row(answer=3, of="integer", **values):
    return {
        "Question": "What is {x}?",
        "Answer": answer,
        "Answer_type": of,
        "Picture": None,
        "id": "x/1.json",
        **values,
    }


def write(folder, *rows):
    (folder / "theoremqa_test.json").write_text(json.dumps(rows), encoding="utf-8")


def test_pictures_are_skipped_and_counted(tmp_path):
    write(tmp_path, row(), row(id="p", Picture="images/a.png", Answer="anything"), row(2.5, "float", id="y"))
    (task,) = load("theoremqa", tmp_path)
    assert [e.id for e in task.examples] == ["x/1.json", "y"]
    assert task.note == note_own_wording("theoremqa", "1 of 3 questions need a picture and are left out")
    one = task.examples[0]
    assert one.prompt.endswith("\n\nProblem: What is {x}?\n\nSolution:")
    assert (one.answers, one.max_new_tokens, one.meta["answer_type"]) == (("3",), 512, "integer")


@pytest.mark.parametrize(
    ("answer", "of", "reference"),
    [
        (3, "integer", "3"),
        ("11760", "integer", "11760"),
        (1.0, "float", "1.0"),
        (1, "float", "1.0"),
        ("1", "float", "1.0"),
        (4e-05, "float", "4e-05"),
        (True, "bool", "True"),
        ("False", "bool", "False"),
        ("(c)", "option", "(c)"),
        ([0, 5], "list of integer", "[0, 5]"),
        ("[0, 5]", "list of integer", "[0, 5]"),
        ([0.5, 2.0], "list of float", "[0.5, 2.0]"),
    ],
)
def test_references_keep_their_type(tmp_path, answer, of, reference):
    write(tmp_path, row(answer, of))
    (example,) = load("theoremqa", tmp_path)[0].examples
    assert example.answers == (reference,)
    assert score("theorem", f"The answer is {reference}.", example) == 1.0
    hub = tmp_path / "hub"
    hub.mkdir()
    write_lines(hub / "theoremqa_test.jsonl", row(str(answer), of))
    assert load("theoremqa", hub)[0].examples == (example,)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (row("three"), "'Answer' must be of the type 'integer', got \"three\""),
        (row(2.5), "'Answer' must be of the type 'integer', got 2.5"),
        (row(True), "'Answer' must be of the type 'integer', got true"),
        (row(3, "bool"), "'Answer' must be of the type 'bool', got 3"),
        (row([], "list of integer"), "'Answer' must be of the type 'list of integer'"),
        (row(3, "complex"), "'Answer_type' must be one of integer, float"),
        (row(Question=""), "'Question' must be text"),
        ({"Question": "q"}, "there is no key 'Picture'"),
    ],
)
def test_malformed_entries_are_named(tmp_path, wrong, reason):
    write(tmp_path, row(id="0"), wrong)
    with pytest.raises(UsageError) as error:
        load("theoremqa", tmp_path)
    assert f"theoremqa_test.json, entry 2: {reason}" in str(error.value)


def test_equal_ids_and_missing_files(tmp_path):
    with pytest.raises(UsageError, match=r"theoremqa_test\.json not found in"):
        load("theoremqa", tmp_path)
    write(tmp_path, row(), row())
    with pytest.raises(UsageError, match=r"two examples have the id 'x/1\.json'"):
        load("theoremqa", tmp_path)


def test_real_data():
    (task,) = load("theoremqa", data_path("theoremqa_test.json").parent)
    assert len(task.examples) == 747 and task.note.startswith("theoremqa: 53 of 800 questions need a picture")
    kinds = Counter(e.meta["answer_type"] for e in task.examples)
    assert kinds == {
        "float": 360,
        "integer": 200,
        "bool": 112,
        "list of integer": 51,
        "option": 16,
        "list of float": 8,
    }
    assert all(score("theorem", f"So the answer is: {e.answers[0]}.", e) == 1.0 for e in task.examples)
