import pytest
from support.dataset_files import load, write_table

from kvbench.base.errors import UsageError
from kvbench.tasks.metrics import score


def row(i, **values):
    return {
        "Question": f"What is {i} {{x}}?\n",
        "Correct Answer": f"right {i} ",
        "Incorrect Answer 1": "wrong 1",
        "Incorrect Answer 2": "wrong 2\n",
        "Incorrect Answer 3": "wrong 3",
        "Record ID": f"rec{i}",
        **values,
    }


def test_options_are_shuffled_by_id_and_the_letter_follows(tmp_path):
    write_table(tmp_path / "gpqa_main.csv", *(row(i) for i in range(200)))
    (task,) = load("gpqa", tmp_path)
    assert (task.id, task.metric) == ("gpqa", "letter")
    letters = []
    for i, example in enumerate(task.examples):
        assert example.id == f"rec{i}" and example.max_new_tokens == 32
        question, options, end = example.prompt.split("\n\n")
        assert question == f"What is {i} {{x}}?" and end.endswith("\nAnswer:")
        shown = dict(line.split(" ", 1) for line in options.split("\n"))
        assert sorted(shown) == ["(A)", "(B)", "(C)", "(D)"]
        assert sorted(shown.values()) == sorted([f"right {i}", "wrong 1", "wrong 2", "wrong 3"])
        (letter,) = example.answers
        assert shown[f"({letter})"] == f"right {i}"
        assert score(task.metric, f"({letter})", example) == 1.0
        letters.append(letter)
    assert all(30 < letters.count(letter) < 70 for letter in "ABCD")
    alone = write_table(tmp_path / "gpqa_main.csv", row(57))
    assert load("gpqa", tmp_path)[0].examples[0] == task.examples[57]
    alone.unlink()


def test_another_seed_is_another_order(tmp_path):
    write_table(tmp_path / "gpqa_main.csv", *(row(i) for i in range(40)))
    zero, again, one = (load("gpqa", tmp_path, seed=s)[0] for s in (0, 0, 1))
    assert zero.content_hash() == again.content_hash() != one.content_hash()


def test_rows_without_an_id_are_numbered(tmp_path):
    rows = [{k: v for k, v in row(i).items() if k != "Record ID"} for i in range(2)]
    write_table(tmp_path / "gpqa_main.csv", *rows)
    assert [e.id for e in load("gpqa", tmp_path)[0].examples] == ["gpqa-0", "gpqa-1"]


@pytest.mark.parametrize("key", ["Question", "Correct Answer", "Incorrect Answer 3"])
def test_empty_cells_are_named(tmp_path, key):
    write_table(tmp_path / "gpqa_main.csv", row(0), row(1, **{key: ""}))
    with pytest.raises(UsageError, match=rf"gpqa_main\.csv, row 2: '{key}' must be text that is not empty"):
        load("gpqa", tmp_path)


def test_other_tables_and_bad_knobs(tmp_path):
    write_table(tmp_path / "gpqa_main.csv", {"Question": "q"})
    with pytest.raises(UsageError, match=r"row 1: there is no key '(In)?[Cc]orrect Answer"):
        load("gpqa", tmp_path)
    with pytest.raises(UsageError, match=r"dataset\.gpqa\.seed=-1"):
        load("gpqa", tmp_path, seed=-1)
