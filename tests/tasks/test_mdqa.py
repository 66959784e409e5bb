import re

import pytest
from support.data import data_path
from support.dataset_files import load, write_lines
from support.metric_reference import squad_words

from kvbench.base.errors import UsageError
from kvbench.tasks.base import note_own_wording
from kvbench.tasks.metrics import score

DOCUMENT = re.compile(r"^Document \[(\d+)\]\(Title: (.*?)\) (.*)$", re.MULTILINE)


def passage(text, title="T", **more):
    return {"title": title, "text": text, "hasanswer": True, **more}


def line(i, answers=None, others=()):
    gold = passage(f"Text {{{i}}} says answer{i:03}.", f"Title {i}", isgold=True)
    return {"question": f"what is {i}", "answers": answers or [f"Answer{i:03}"], "ctxs": [gold, *others]}


def shown(example):
    """The (title, text) of each document, checked to be numbered from 1."""
    match = DOCUMENT.findall(example.prompt)
    assert [int(number) for number, _, _ in match] == list(range(1, len(match) + 1))
    return [(title, text) for _, title, text in match]


@pytest.mark.parametrize(("documents", "middle"), [(1, 0), (2, 0), (3, 1), (10, 4), (20, 9)])
def test_gold_positions(tmp_path, documents, middle):
    write_lines(tmp_path / "nq_open_oracle.jsonl", *(line(i) for i in range(30)))
    tasks = load("mdqa", tmp_path, documents=documents)
    assert [t.id for t in tasks] == ["mdqa/first", "mdqa/middle", "mdqa/last"]
    for task, at in zip(tasks, (0, middle, documents - 1), strict=True):
        assert (task.metric, len(task.examples)) == ("best_subspan_em", 30)
        for i, example in enumerate(task.examples):
            texts = shown(example)
            gold = (f"Title {i}", f"Text {{{i}}} says answer{i:03}.")
            assert len(set(texts)) == documents and texts.index(gold) == at
            assert example.meta == {"documents": documents, "gold": at + 1}
            assert example.prompt.endswith(f"\n\nQuestion: what is {i}\nAnswer:")
            assert (example.id, example.max_new_tokens) == (f"mdqa-{i}", 100)
            assert example.prompt.endswith(example.question) and example.question.startswith("Question: ")
            assert score(task.metric, f"it is answer{i:03}, of course", example) == 1.0


def test_only_the_text_before_the_first_newline_counts(tmp_path):
    write_lines(tmp_path / "nq_open_oracle.jsonl", *(line(i) for i in range(4)))
    for task in load("mdqa", tmp_path, documents=2):
        one = task.examples[1]
        assert score(task.metric, task.answer(" answer001 \nnothing else"), one) == 1.0
        assert score(task.metric, task.answer("unknown\nQuestion: what is 1\nAnswer: answer001"), one) == 0.0
        assert score(task.metric, task.answer("\nanswer001"), one) == 0.0


def test_positions_share_their_distractors_and_draws_depend_on_the_question(tmp_path):
    write_lines(tmp_path / "nq_open_oracle.jsonl", *(line(i) for i in range(30)))
    first, middle, last = load("mdqa", tmp_path, documents=6)
    orders = set()
    for a, b, c in zip(first.examples, middle.examples, last.examples, strict=True):
        texts = shown(a)
        others = texts[1:]
        assert [t for t in shown(b) if t != texts[0]] == others == shown(c)[:-1]
        orders.add(tuple(others))
    assert len(orders) == 30
    again = load("mdqa", tmp_path, documents=6)[0]
    other = load("mdqa", tmp_path, documents=6, seed=1)[0]
    assert first.content_hash() == again.content_hash() != other.content_hash()


def test_no_distractor_holds_an_answer_or_occurs_twice(tmp_path):
    rows = [line(i) for i in range(12)]
    rows[0]["answers"] = ["ANSWER-001", "the answer002!", "Title 3"]
    rows[5]["ctxs"][0]["text"] = rows[4]["ctxs"][0]["text"]
    rows[6]["ctxs"][0] = passage(rows[0]["ctxs"][0]["text"], "other title", isgold=True)
    write_lines(tmp_path / "nq_open_oracle.jsonl", *rows)
    (task,) = load("mdqa", tmp_path, "first", documents=7)
    # 1, 2 and 3 hold an answer of question 0, 6 has its gold text, 4 and 5 have one text.
    titles = {title for title, _ in shown(task.examples[0])[1:]}
    assert titles - {"Title 4", "Title 5"} == {f"Title {i}" for i in range(7, 12)}
    with pytest.raises(UsageError, match="line 1: 7 distractors without an answer are wanted, there are 6"):
        load("mdqa", tmp_path, documents=8)


def test_passages_of_the_line_itself_come_first(tmp_path):
    others = [passage(f"retrieved {n}", f"R{n}", isgold=False) for n in range(4)]
    others[1]["text"] += " answer000"
    write_lines(tmp_path / "k.jsonl", line(0, others=others), *(line(i, others=others[2:]) for i in range(1, 9)))
    first, last = load("mdqa", tmp_path, file="k.jsonl", documents=4, positions=["last", "first"])
    assert [first.id, last.id] == ["mdqa/first", "mdqa/last"]
    assert [title for title, _ in shown(first.examples[0])] == ["Title 0", "R0", "R2", "R3"]
    assert [title for title, _ in shown(last.examples[0])] == ["R0", "R2", "R3", "Title 0"]
    assert [title for title, _ in shown(first.examples[1])][:3] == ["Title 1", "R2", "R3"]
    assert first.note.startswith("mdqa: in 8 of 9 questions the distractors are gold documents of other questions")
    assert load("mdqa", tmp_path, "first", file="k.jsonl", documents=3)[0].note == note_own_wording("mdqa")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"question": ""}, "'question' must be text"),
        ({"answers": []}, "'answers' must be text or a list"),
        ({"answers": ["The", "."]}, "'answers' holds nothing but articles and punctuation"),
        ({"ctxs": []}, "'ctxs' must be a list of objects"),
        ({"ctxs": [passage("a"), passage("b")]}, r"one of 'ctxs' must be the gold document \(isgold true\), got 0"),
        ({"ctxs": [passage("a", isgold=True)] * 2}, "one of 'ctxs' must be the gold document .*, got 2"),
    ],
)
def test_malformed_lines_are_named(tmp_path, change, reason):
    write_lines(tmp_path / "nq_open_oracle.jsonl", line(0), {**line(1), **change})
    with pytest.raises(UsageError, match=rf"oracle\.jsonl, line 2: {reason}"):
        load("mdqa", tmp_path, documents=2)


def test_malformed_passages_and_bad_knobs(tmp_path):
    with pytest.raises(UsageError, match=r"nq_open_oracle\.jsonl not found in"):
        load("mdqa", tmp_path)
    path = write_lines(tmp_path / "nq_open_oracle.jsonl", line(0, others=[{"title": "t", "isgold": False}]))
    with pytest.raises(UsageError, match=r"line 1, ctxs\[1\]: there is no key 'text'"):
        load("mdqa", tmp_path)
    write_lines(path, line(0))
    with pytest.raises(UsageError, match="line 1: 19 distractors without an answer are wanted, there are 0"):
        load("mdqa", tmp_path)
    with pytest.raises(UsageError, match="Available: first, last, middle"):
        load("mdqa", tmp_path, positions=["second"])
    with pytest.raises(UsageError, match=r"unknown task last of dataset mdqa.*Available: first"):
        load("mdqa", tmp_path, "last", positions="first")
    with pytest.raises(UsageError, match=r"dataset\.mdqa\.documents=0"):
        load("mdqa", tmp_path, documents=0)


def test_real_data():
    tasks = load("mdqa", data_path("nq_open_oracle.jsonl").parent)
    assert [(t.id, len(t.examples)) for t in tasks] == [(f"mdqa/{p}", 600) for p in ("first", "middle", "last")]
    for task, at in zip(tasks, (0, 9, 19), strict=True):
        for example in task.examples[::7]:
            texts = shown(example)
            assert len(set(texts)) == 20
            answers = [" ".join(squad_words(a)) for a in example.answers]
            for n, document in enumerate(texts):
                words = " ".join(squad_words(" ".join(document)))
                assert n == at or not any(a in words for a in answers), example.id
            assert score(task.metric, f"{example.answers[-1]}.", example) == 1.0


def test_an_answer_can_be_kept_from_ending_at_once(tmp_path):
    write_lines(tmp_path / "nq_open_oracle.jsonl", *(line(i) for i in range(4)))
    assert [task.min_new_tokens for task in load("mdqa", tmp_path, documents=2)] == [0, 0, 0]
    assert [task.min_new_tokens for task in load("mdqa", tmp_path, documents=2, min_answer_tokens=1)] == [1, 1, 1]
    with pytest.raises(
        UsageError, match="min_answer_tokens=101 is not possible: an answer has at most max_new_tokens=100"
    ):
        load("mdqa", tmp_path, documents=2, min_answer_tokens=101)
