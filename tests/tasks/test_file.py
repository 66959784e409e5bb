import json
import re
from pathlib import Path

import pytest
import yaml
from support.data import data_path

from kvbench.base.errors import UsageError
from kvbench.tasks.base import load_tasks

DEFAULTS = yaml.safe_load((Path(__file__).parents[2] / "conf/dataset/file.yaml").read_text())["file"]


def load(path, **knobs):
    (task,) = load_tasks("file", {**DEFAULTS, "path": str(path) if path else None, **knobs}, [], None)
    return task


@pytest.fixture
def write(tmp_path):
    def write(*lines) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
        return path

    return write


def test_examples(write):
    path = write(
        {"prompt": "a?", "answers": "b"},
        "",
        {"prompt": "c\u2028d", "answers": ["e", ""], "id": 7, "max_new_tokens": 3, "all_classes": ["e", "f"]},
        {"prompt": "g", "answers": "h", "all_classes": None, "max_new_tokens": None, "more": {}},
        "",
    )
    task = load(path)
    assert (task.id, task.metric, task.source) == ("file/prompts", "f1", "prompts.jsonl")
    one, two, three = task.examples
    assert (one.id, one.prompt, one.answers, one.max_new_tokens, one.classes) == ("line-1", "a?", ("b",), 64, ())
    assert (two.id, two.prompt, two.answers, two.max_new_tokens) == ("7", "c\u2028d", ("e", ""), 3)
    assert two.classes == ("e", "f")
    assert (three.id, three.max_new_tokens, three.classes) == ("line-4", 64, ())


def test_other_keys_and_windows_files(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a", "ref": "b", "n": 5, "name": "x"}\r\n')
    task = load(path, prompt_key="q", answers_key="ref", id_key="name", max_new_tokens_key="n", metric="rouge_l")
    example = task.examples[0]
    assert (example.id, example.prompt, example.answers, example.max_new_tokens) == ("x", "a", ("b",), 5)


def test_a_line_says_where_its_question_begins(write):
    path = write(
        {"context": "It is red.", "question": " What is?", "answers": "It"},
        {"prompt": "It is red. What is?", "question": "What is?", "answers": "It"},
        {"prompt": "It is red. What is?", "question": "What?", "answers": "It"},
        {"prompt": "It is red. What is?", "question": ["What is?"], "answers": "It"},
    )
    examples = load(path).examples
    assert {e.prompt for e in examples} == {"It is red. What is?"}
    assert [e.question for e in examples] == [" What is?", "What is?", "", ""]
    (example,) = load(write({"text": "a", "q": "b", "answers": "c"}), context_key="text", question_key="q").examples
    assert (example.prompt, example.question) == ("ab", "b")


GOOD = {"prompt": "a", "answers": "b"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "answers": "b"', r"not JSON: .* at character \d+"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", r"must be a JSON object, got \[1, 2\]"),
        ({"answers": "b"}, "there is no key 'prompt'; its keys: 'answers'"),
        ({"prompt": "a", "output": "b"}, "there is no key 'answers'; its keys: 'prompt', 'output'"),
        ({"context": "a", "answers": "b"}, "there is no key 'question'"),
        ({"prompt": 3, "answers": "b"}, "'prompt' must be text that is not empty, got 3"),
        ({"prompt": "", "answers": "b"}, "'prompt' must be text that is not empty"),
        ('{"prompt": "\\ud800", "answers": "b"}', "'prompt' holds half a surrogate pair"),
        ({"prompt": "a", "answers": []}, "'answers' must be text or a list of texts"),
        ({"prompt": "a", "answers": ["b", 4]}, r"'answers' must be .* got \[\"b\", 4\]"),
        ({"prompt": "a", "answers": None}, "'answers' must be .* got null"),
        ({"prompt": "a", "answers": [""]}, "'answers' is empty: metric=f1 compares answers with a reference"),
        ({"prompt": "a", "answers": "\n "}, "'answers' is empty: metric=f1 compares answers with a reference"),
        ({**GOOD, "max_new_tokens": 0}, "'max_new_tokens' must be a whole number from 1, got 0"),
        ({**GOOD, "max_new_tokens": True}, "'max_new_tokens' must be a whole number"),
        ({**GOOD, "id": [1]}, "'id' must be text or a whole number"),
        ('{"id": "x\\udfff", "prompt": "a", "answers": "b"}', "'id' holds half a surrogate pair"),
        ({**GOOD, "id": "line-1"}, "its id 'line-1' is that of line 1"),
        ({**GOOD, "all_classes": {"x": 1}}, "'all_classes' must be text or a list of texts"),
    ],
)
def test_malformed_line_is_named_and_left_out(write, line, reason):
    task = load(write(GOOD, "", line, {"prompt": "c", "answers": "d"}))
    assert [example.prompt for example in task.examples] == ["a", "c"]
    (said,) = task.left_out
    assert re.search(rf"prompts\.jsonl, line 3: {reason}", said)


def test_a_file_without_one_good_line_is_refused_with_its_first_reason(write):
    with pytest.raises(UsageError, match=r"prompts\.jsonl, line 1: there is no key 'prompt'"):
        load(write({"answers": "b"}, "[1, 2]"))


def test_wrong_encoding_is_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a", "answers": "b"}\n{"prompt": "caf\xe9", "answers": "b"}\n')
    (said,) = load(path).left_out
    assert said.endswith("latin.jsonl, line 2: not UTF-8 text (byte 15 of the line)")


def test_classification_needs_classes(write):
    path = write(GOOD)
    with pytest.raises(UsageError, match="line 1: metric classification needs a list of labels under the key 'all_cl"):
        load(path, metric="classification")


def test_no_file(tmp_path, write):
    with pytest.raises(UsageError, match=r"give path=FILE\.jsonl"):
        load(None)
    with pytest.raises(UsageError, match=r"there is no file .*nowhere"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(UsageError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(UsageError, match=r"prompts\.jsonl is empty"):
        load(write("", " "))


def test_bad_knobs(write):
    path = write(GOOD)
    with pytest.raises(UsageError, match="unknown metric blue"):
        load(path, metric="blue")
    with pytest.raises(UsageError, match="max_new_tokens='many'"):
        load(path, max_new_tokens="many")


def test_xsum_prompts():
    path = data_path("xsum_helm_0shot.jsonl")
    task = load(path, answers_key="summary", max_new_tokens_key="max_tokens", metric="rouge_l")
    assert task.id == "file/xsum_helm_0shot" and len(task.examples) == 300
    assert {e.max_new_tokens for e in task.examples} == {64}
    assert all(e.prompt.startswith("###\nArticle: ") and len(e.answers) == 1 for e in task.examples)


def test_empty_references_of_questions_are_named_and_metrics_of_empty_answers_take_them(write):
    path = write(
        {"context": "a", "questions": [{"question": "b?", "answers": "c"}, {"question": "d?", "answers": [""]}]}
    )
    with pytest.raises(UsageError, match=r"line 1, questions\[1\]: 'answers' is empty: metric=f1"):
        load(path)
    assert load(path, metric="squad_f1").examples[0].turns[1].answers == ("",)
