import pytest

from kvbench.base.conf import entries
from kvbench.base.errors import MissingData, UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import LoadContext, Task, load_tasks
from kvbench.tasks.knobs import check_whole, check_word, shuffled_by_seed


def test_draws_depend_on_the_seed_alone():
    # Pinned: another order would change the prompts of every published cell.
    assert list(shuffled_by_seed("abcdef", "0:x")) == list(shuffled_by_seed("abcdef", "0:x"))
    assert "".join(shuffled_by_seed("abcdef", "0:x")) == "fdaecb"
    assert len({"".join(shuffled_by_seed("abcdef", str(seed))) for seed in range(50)}) > 40
    assert sorted(shuffled_by_seed(range(100), "s")) == list(range(100))
    assert list(shuffled_by_seed([], "s")) == []


def test_draws_are_even():
    firsts = [next(iter(shuffled_by_seed("abcd", f"{i}"))) for i in range(4000)]
    assert all(900 < firsts.count(letter) < 1100 for letter in "abcd")


def test_checked_knobs():
    assert check_whole("d", "k", 3) == 3 and check_whole("d", "k", 0, least=0) == 0
    for value in (0, -1, True, 1.0, "3", None):
        with pytest.raises(UsageError, match=r"dataset\.d\.k=.* is not possible: a whole number, 1 or more"):
            check_whole("d", "k", value)
    assert check_word("d", "k", "a", ("a", "b")) == "a"
    with pytest.raises(UsageError, match=r"unknown value c of dataset\.d\.k.*Available: a, b"):
        check_word("d", "k", "c", ("a", "b"))


def test_the_answers_length_is_a_knob_of_datasets_whose_data_says_it_too():
    entry = entries("dataset")["tiny"]
    (own_value,), (same,), (less,) = (
        load_tasks("tiny", {**entry, "max_new_tokens": n}, ["needle"], None) for n in (None, 8, 3)
    )
    # the length that the data says is the same cell, whether typed or not
    assert own_value.content_hash() == same.content_hash() != less.content_hash()
    assert {e.max_new_tokens for e in less.examples} == {3}
    assert [e.prompt for e in less.examples] == [e.prompt for e in own_value.examples]
    for wrong in (0, 2.5, True, "8"):
        with pytest.raises(UsageError, match=r"dataset\.tiny\.max_new_tokens=.*a whole number, 1 or more"):
            load_tasks("tiny", {**entry, "max_new_tokens": wrong}, ["needle"], None)


def test_every_dataset_that_is_answered_takes_max_new_tokens():
    for name, entry in entries("dataset").items():
        target = entry.get("_target_", "")
        read_alone = "tasks.perplexity" in target or "tasks.fidelity" in target
        assert ("max_new_tokens" in entry) != read_alone, name


def count_words(context: LoadContext, words: int, max_new_tokens: int = 4) -> list[Task]:
    """A loader of one's own: it reads no file, and makes a task for every name that it is asked for."""
    prompt = " ".join(["word"] * words)
    if context.chat:
        prompt = context.render(prompt)
    names = context.selection or ("one", "two")
    return [Task(f"{context.dataset}/{n}", (Example(n, prompt, ("a",), max_new_tokens),), "f1", "made") for n in names]


def test_a_loader_gets_the_context_and_the_knobs_of_its_entry():
    entry = {"_target_": f"{__name__}.count_words", "words": 3, "default_limit": None, "hub": {}}
    one, two = load_tasks("own", entry, [], None)
    assert [one.id, two.id] == ["own/one", "own/two"] and one.examples[0].prompt == "word word word"
    (named,) = load_tasks("own", {**entry, "max_new_tokens": 9}, ["two"], None, render=str.upper)
    assert (named.id, named.examples[0].prompt, named.examples[0].max_new_tokens) == ("own/two", "WORD WORD WORD", 9)
    with pytest.raises(TypeError, match="colour"):
        load_tasks("own", {**entry, "colour": 1}, [], None)


def test_the_data_folder_is_opened_by_loaders_that_read_it(tmp_path):
    absent = str(tmp_path / "absent")
    context = LoadContext("own", data=absent)
    with pytest.raises(MissingData, match=r"data\.root=.*absent is not a folder"):
        _ = context.files
    assert load_tasks("tiny", entries("dataset")["tiny"], ["needle"], None, absent)
    with pytest.raises(MissingData, match="is not a folder"):
        load_tasks("gsm8k", entries("dataset")["gsm8k"], [], None, absent)
    assert LoadContext("own", data=str(tmp_path)).files.root == tmp_path
