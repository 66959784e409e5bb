import pytest
from support.data import data_path
from support.dataset_files import load, write_lines

from kvbench.base.errors import UsageError
from kvbench.tasks.metrics import score

ASKED = "Summarize the above article in 1 sentence.\n"


def articles(folder, dataset="xsum", keys=("document", "summary"), test=5, train=20):
    for split, n in (("test", test), ("train", train)):
        rows = [
            {keys[0]: f"{split} {i}.\nMore {{x}}. ", keys[1]: f"Sum {split}\n{i} .", "id": f"{split}{i}"}
            for i in range(n)
        ]
        write_lines(folder / f"{dataset}_{split}.jsonl", *rows)


def test_articles_without_shots(tmp_path):
    articles(tmp_path)
    (task,) = load("xsum", tmp_path)
    assert (task.id, task.metric, task.cut_at, task.chat) == ("xsum", "rouge_l", "###", False)
    assert task.source == "xsum_test.jsonl, 0 shots"
    example = task.examples[3]
    assert example.prompt == f"###\nArticle: test 3. More {{x}}.\n\n{ASKED}"
    assert (example.id, example.answers, example.max_new_tokens) == ("test3", ("Sum test 3 .",), 64)
    assert example.question == ASKED
    assert task.answer("Sum test 3 .\n\n###\nArticle: more") == "Sum test 3 ."
    assert score(task.metric, task.answer(" Sum test 3 .\n###"), example) == pytest.approx(1)


@pytest.mark.parametrize("shots", [1, 3, 5])
def test_shots(tmp_path, shots):
    articles(tmp_path)
    (task,) = load("xsum", tmp_path, shots=shots)
    prompts = [e.prompt for e in task.examples]
    assert all(p.count("###\nArticle: ") == shots + 1 and p.count(ASKED) == shots + 1 for p in prompts)
    before = {p.rpartition("###")[0] for p in prompts}
    assert len(before) == 1
    (before,) = before
    blocks = before.split("\n\n###\n")
    assert len(set(blocks)) == len(blocks) == shots
    for block in before.strip().removeprefix("###\n").split("\n\n###\n"):
        number = block.removeprefix("Article: train ").partition(".")[0]
        assert block == f"Article: train {number}. More {{x}}.\n\n{ASKED}Sum train {number} ."
    assert task.content_hash() == load("xsum", tmp_path, shots=shots)[0].content_hash()
    others = {load("xsum", tmp_path, shots=shots, seed=s)[0].content_hash() for s in range(5)}
    assert len(others) > 2


def test_long_articles_are_no_shots(tmp_path):
    articles(tmp_path)
    rows = [{"document": "long " * 600, "summary": "no"}, {"document": "short one", "summary": "yes"}]
    write_lines(tmp_path / "xsum_train.jsonl", *rows)
    (task,) = load("xsum", tmp_path, shots=1)
    assert task.examples[0].prompt.startswith(f"###\nArticle: short one\n\n{ASKED}yes\n\n###\n")
    with pytest.raises(UsageError, match=r"dataset\.xsum\.shots=2 is not possible: of the first 2 articles .* only 1"):
        load("xsum", tmp_path, shots=2)
    assert load("xsum", tmp_path, shots=2, shot_words=600)


def test_cnn_dailymail(tmp_path):
    articles(tmp_path, "cnn_dailymail", ("article", "highlights"))
    (task,) = load("cnn_dailymail", tmp_path, shots=1)
    requested = "Summarize the above article in 3 sentences.\n"
    assert all(e.prompt.endswith(f"\n\n{requested}") and e.prompt.count(requested) == 2 for e in task.examples)
    assert {e.max_new_tokens for e in task.examples} == {128}
    (one,) = load("cnn_dailymail", tmp_path, sentences=1)
    assert one.examples[0].prompt.endswith(f"\n\n{ASKED}")


def test_ready_prompts(tmp_path):
    articles(tmp_path)
    prompt = f"###\nArticle: ready\n\n{ASKED}"
    write_lines(tmp_path / "xsum_helm_0shot.jsonl", *[{"prompt": prompt, "summary": "r"}] * 3)
    (auto,) = load("xsum", tmp_path)
    assert auto.source == "ready prompts, xsum_helm_0shot.jsonl, 0 shots"
    assert [(e.id, e.prompt, e.question) for e in auto.examples] == [(f"xsum-{i}", prompt, ASKED) for i in range(3)]
    assert len(load("xsum", tmp_path, source="articles")[0].examples) == 5
    assert load("xsum", tmp_path, shots=1)[0].source == "xsum_test.jsonl, 1 shot"
    with pytest.raises(UsageError, match=r"xsum_helm_1shot\.jsonl not found in"):
        load("xsum", tmp_path, source="prompts", shots=1)
    assert len(load("xsum", tmp_path, examples=2)[0].examples) == 2
    for wrong in ("Article: x\n\nSummarize.", "###\nArticle: x"):
        write_lines(tmp_path / "xsum_helm_0shot.jsonl", {"prompt": wrong, "summary": "r"})
        with pytest.raises(UsageError, match=r"0shot\.jsonl, line 1: 'prompt' must begin with '###'"):
            load("xsum", tmp_path)


def test_number_of_examples(tmp_path):
    articles(tmp_path, test=1010)
    assert len(load("xsum", tmp_path)[0].examples) == 1000
    assert len(load("xsum", tmp_path, examples=None)[0].examples) == 1010


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"summary": "s"}, "there is no key 'document'"),
        ({"document": "", "summary": "s"}, "'document' must be text that is not empty"),
        ({"document": "d", "summary": 3}, "'summary' must be text"),
        ("[]", "must be a JSON object"),
    ],
)
def test_malformed_lines_are_named(tmp_path, row, reason):
    good = {"document": "d", "summary": "s"}
    write_lines(tmp_path / "xsum_test.jsonl", good, row)
    with pytest.raises(UsageError, match=rf"xsum_test\.jsonl, line 2: {reason}"):
        load("xsum", tmp_path)
    write_lines(tmp_path / "xsum_test.jsonl", good)
    write_lines(tmp_path / "xsum_train.jsonl", row)
    with pytest.raises(UsageError, match=rf"xsum_train\.jsonl, line 1: {reason}"):
        load("xsum", tmp_path, shots=1)


def test_missing_files_and_bad_knobs(tmp_path):
    with pytest.raises(UsageError, match=r"xsum_test\.jsonl not found in"):
        load("xsum", tmp_path)
    for knob, value in (("shots", -1), ("sentences", 0), ("examples", 0), ("shot_words", 0), ("seed", "x")):
        with pytest.raises(UsageError, match=rf"dataset\.xsum\.{knob}="):
            load("xsum", tmp_path, **{knob: value})
    with pytest.raises(UsageError, match="Available: articles, auto, prompts"):
        load("xsum", tmp_path, source="hub")


def test_real_prompts():
    (task,) = load("xsum", data_path("xsum_helm_0shot.jsonl").parent)
    assert len(task.examples) == 300 and task.source.startswith("ready prompts")
    assert all(e.prompt.startswith("###\nArticle: ") and e.question == ASKED for e in task.examples)
    assert all(e.prompt.count("###") == 1 and len(e.answers) == 1 for e in task.examples)


def test_own_layout_equals_that_of_the_ready_prompts(tmp_path):
    (ready,) = load("xsum", data_path("xsum_helm_0shot.jsonl").parent)
    texts = [e.prompt.removeprefix("###\nArticle: ").removesuffix(f"\n\n{ASKED}") for e in ready.examples]
    rows = ({"document": t, "summary": e.answers[0]} for t, e in zip(texts, ready.examples, strict=True))
    write_lines(tmp_path / "xsum_test.jsonl", *rows)
    (built,) = load("xsum", tmp_path)
    assert [e.prompt for e in built.examples] == [e.prompt for e in ready.examples]
