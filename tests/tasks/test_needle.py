import json
import re
from pathlib import Path

import pytest
import yaml
from support.data import data_path
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvbench.base.errors import UsageError
from kvbench.plan.advice import at_floor
from kvbench.tasks.base import load_tasks
from kvbench.tasks.metrics import score

ROOT = Path(__file__).parents[2]
TINY = ROOT / "kvbench/models/embedded/tiny"
DEFAULTS = yaml.safe_load((ROOT / "conf/dataset/needle.yaml").read_text())["needle"]
SENTENCE_END = re.compile(r"""[.!?]["')”]*\Z""")
ESSAY = " ".join(
    f'Sentence {i} is about the {word}; it says (with 3.5 reasons) "why the {word} matters." Or does it?\n'
    for i, word in enumerate(["river", "hill", "road", "café", "house", "–", "東京", "machine"] * 12)
)


def bpe() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a leading special token, trained on half of the essay."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([ESSAY[: len(ESSAY) // 2]], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


@pytest.fixture(scope="module", params=["bpe", "tiny"])
def tokenizer(request):
    return bpe() if request.param == "bpe" else AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def haystack(tmp_path):
    folder = tmp_path / "essays"
    folder.mkdir()
    (folder / "b.txt").write_text(ESSAY[3000:], encoding="utf-8")
    (folder / "a.md").write_text(ESSAY[:3000], encoding="utf-8")
    (folder / "ignored.csv").write_bytes(b"\xff")
    return folder


def load(tokenizer, **knobs):
    return load_tasks(
        "needle", {**DEFAULTS, **{k: str(v) if k == "haystack" else v for k, v in knobs.items()}}, [], tokenizer
    )


def check(tokenizer, task, needle_of):
    """Every promise of one task's prompts."""
    length = int(task.id.partition("/")[2])
    for example in task.examples:
        n = len(tokenizer.encode(example.prompt))
        assert n == example.meta["tokens"]
        assert length - 3 <= n <= length, example.id
        needle = needle_of(example)
        assert example.prompt.count(needle) == 1
        before = example.prompt[: example.prompt.index(needle)].rstrip()
        assert before in ("", "notes:") or SENTENCE_END.search(before), before[-40:]
        assert len(tokenizer.encode(before)) == example.meta["position"]


def tiny_needle(example):
    city = re.search(r"magic number of (\w+)\?", example.prompt)[1]
    return f"the magic number of {city} is {example.answers[0]}."


def test_prompts_have_the_wanted_tokens_and_needles_stand_at_sentence_ends(tokenizer, haystack):
    tasks = load(tokenizer, haystack=haystack, lengths=[256, 300, 701], depths=[0, 33.3, 50, 100], repeats=2)
    assert [t.id for t in tasks] == ["needle/256", "needle/300", "needle/701"]
    exact = total = 0
    for task in tasks:
        assert len(task.examples) == 8 and task.metric == "contains"
        check(tokenizer, task, tiny_needle)
        exact += sum(e.meta["tokens"] == e.meta["length"] for e in task.examples)
        total += len(task.examples)
    assert exact >= 0.9 * total


def test_depths(haystack):
    tokenizer = bpe()
    (task,) = load(tokenizer, haystack=haystack, lengths=900, depths=[0, 25, 50, 75, 100], repeats=1)
    actual = [e.meta["depth_actual"] for e in task.examples]
    assert [e.meta["depth"] for e in task.examples] == [0, 25, 50, 75, 100]
    assert actual[0] == 0 and task.examples[0].prompt.startswith("notes: the magic number of")
    assert actual == sorted(actual)
    assert actual == pytest.approx([0, 25, 50, 75, 100], abs=5)
    # At depth 100 nothing but the cut sentence and the question follows.
    last = task.examples[-1].prompt.partition(tiny_needle(task.examples[-1]))[2]
    assert not re.search(r"[.!?][\"')]*\s", last.partition("question:")[0])


def test_needle_stands_at_the_nearest_sentence_end(haystack):
    """A slow search over all sentence ends of the text that the prompt holds."""
    (task,) = load(bpe(), haystack=haystack, lengths=500, depths=[10, 40, 80], repeats=3)
    for example in task.examples:
        needle = tiny_needle(example)
        context = example.prompt.removeprefix("notes: ").rpartition(" question:")[0]
        at = context.index(needle)
        text = context.replace(f" {needle}" if at else f"{needle} ", "")
        ends = [0] + [i for i in range(1, len(text)) if SENTENCE_END.search(text[:i]) and text[i].isspace()]
        target = example.meta["depth"] / 100 * len(text)
        assert abs(max(0, at - 1) - target) == min(abs(e - target) for e in ends)


def test_repeats_differ_in_needle_and_text(haystack):
    (task,) = load(bpe(), haystack=haystack, lengths=400, depths=[0, 50], repeats=3)
    assert len({tiny_needle(e) for e in task.examples}) == 6
    assert len({e.prompt[-120:-80] for e in task.examples}) >= 3
    assert [e.meta["repeat"] for e in task.examples] == [0, 0, 1, 1, 2, 2]  # a limit still sees every depth
    first = task.examples[0].prompt.partition(". ")[2]
    assert first.startswith(ESSAY[:60])  # files in the order of their names


def test_deterministic(haystack):
    one, two = (load(bpe(), haystack=haystack, lengths=300)[0].content_hash() for _ in range(2))
    assert one == two


def test_short_text_is_repeated(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("\ufeffOnly this. And “that!”\n", encoding="utf-8")
    tokenizer = bpe()
    (task,) = load(tokenizer, haystack=file, lengths=400, repeats=1)
    check(tokenizer, task, tiny_needle)
    assert task.examples[2].prompt.count("Only this.") > 10
    assert task.source == "real text: one.txt, 1 file"


def test_classical_needle(haystack):
    tokenizer = bpe()
    (task,) = load(tokenizer, haystack=haystack, lengths=600, phrasing="sanfrancisco", repeats=1)
    sentence = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
    check(tokenizer, task, lambda _: sentence)
    example = task.examples[0]
    assert (task.metric, example.answers, example.max_new_tokens) == ("rouge1", (sentence,), 30)
    assert score(task.metric, sentence, example) == 1.0
    (literal,) = load(tokenizer, haystack=haystack, lengths=600, phrasing="sanfrancisco", metric="contains", repeats=1)
    assert literal.examples[0].answers == ("eat a sandwich and sit in Dolores Park on a sunny day",)


def test_needle_of_ones_own(haystack):
    own_value = {"needle": "The {code} is 7.", "question": "What is the {code}?", "answer": "7"}
    tokenizer = bpe()
    (task,) = load(
        tokenizer,
        haystack=haystack,
        lengths=300,
        metric="contains",
        max_new_tokens=5,
        prompt="{context} Q {question}",
        **own_value,
    )
    check(tokenizer, task, lambda _: own_value["needle"])
    example = task.examples[1]
    assert example.prompt.endswith(" Q What is the {code}?")
    assert (task.metric, example.answers, example.max_new_tokens) == ("contains", ("7",), 5)
    (task,) = load(tokenizer, haystack=haystack, lengths=300, needle="A b.", question="What?")
    assert (task.metric, task.examples[0].answers) == ("rouge1", ("A b.",))


def test_missing_haystack(haystack, monkeypatch, tmp_path):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    with pytest.raises(UsageError, match=r"give haystack=FOLDER of \.txt or \.md files"):
        load(bpe(), lengths=300)
    with pytest.raises(UsageError, match=r"no haystack .*nowhere"):
        load(bpe(), haystack=tmp_path / "nowhere")
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    with pytest.raises(UsageError, match=r"no haystack .*paul_graham"):
        load(bpe(), lengths=300)
    haystack.rename(tmp_path / "paul_graham")
    assert load(bpe(), lengths=300)[0].source == "real text: paul_graham, 2 files"


def test_the_default_haystack_lies_below_the_data_root_that_was_given(haystack, monkeypatch, tmp_path):
    for elsewhere in (None, tmp_path / "other"):
        if elsewhere is None:
            monkeypatch.delenv("KVBENCH_DATA", raising=False)
        else:
            elsewhere.mkdir()
            monkeypatch.setenv("KVBENCH_DATA", str(elsewhere))
            haystack = haystack.rename(tmp_path / "essays")
        with pytest.raises(
            UsageError, match=r"paul_graham.*data\.root=FOLDER or the environment variable KVBENCH_DATA"
        ):
            load_tasks("needle", {**DEFAULTS, "lengths": 300}, [], bpe(), str(tmp_path))
        haystack = haystack.rename(tmp_path / "paul_graham")
        (task,) = load_tasks("needle", {**DEFAULTS, "lengths": 300}, [], bpe(), str(tmp_path))
        assert task.source == "real text: paul_graham, 2 files"


def test_haystack_without_text(tmp_path):
    with pytest.raises(UsageError, match=r"has no \.txt or \.md file"):
        load(bpe(), haystack=tmp_path)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(UsageError, match="has no text"):
        load(bpe(), haystack=tmp_path)
    (tmp_path / "a.txt").write_text("no end")
    with pytest.raises(UsageError, match="has no sentence end"):
        load(bpe(), haystack=tmp_path)
    (tmp_path / "b.txt").write_bytes("Fine. Café.".encode("latin-1"))
    with pytest.raises(UsageError, match=r"b\.txt is not UTF-8 text \(byte 9\)"):
        load(bpe(), haystack=tmp_path)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"lengths": 20}, "length 20 is too short: needle and question alone have"),
        ({"lengths": []}, "at least one"),
        ({"lengths": [300, 300]}, "different values"),
        ({"lengths": [300.5]}, r"lengths=300\.5 is not possible: a whole number"),
        ({"depths": [50, 101]}, r"depths=101 is not possible: a number from 0 to 100"),
        ({"depths": "deep"}, "depths='deep'"),
        ({"repeats": 0}, "repeats=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"phrasing": "smal"}, "unknown phrasing .*sanfrancisco"),
        ({"needle": "A b."}, "belong together"),
        ({"answer": "7"}, "belong together"),
        ({"metric": "contain"}, "Did you mean contains"),
        ({"prompt": "{context} only"}, r"must hold \{context\} and \{question\}"),
    ],
)
def test_bad_knobs(haystack, knobs, message):
    with pytest.raises(UsageError, match=message):
        load(bpe(), **{"haystack": haystack, "lengths": 300, **knobs})


def test_room_for_less_than_a_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 5000 + "end. More.")
    with pytest.raises(UsageError, match="less than a sentence"):
        load(bpe(), haystack=tmp_path, lengths=200)


def test_without_a_tokenizer(haystack):
    with pytest.raises(UsageError, match="needs a model with a tokenizer"):
        load(None, haystack=haystack)


def test_paul_graham(tokenizer):
    tasks = load(tokenizer, haystack=data_path("paul_graham"), lengths=512, repeats=2)
    check(tokenizer, tasks[0], tiny_needle)
    assert sum(e.meta["tokens"] == 512 for e in tasks[0].examples) >= 9
    assert json.dumps([dict(e.meta) for e in tasks[0].examples])


def test_answers_are_longer_behind_a_chat_template(haystack):
    for inputs, plain, chat in (
        ({}, 8, 32),
        ({"phrasing": "sanfrancisco"}, 30, 32),
        ({"max_new_tokens": 5}, 5, 5),
        ({"max_new_tokens": 64}, 64, 64),
    ):
        entry = {**DEFAULTS, "haystack": str(haystack), "lengths": 300, "depths": 50, "repeats": 1, **inputs}
        for behind, expected in ((None, plain), (str, chat)):
            (task,) = load_tasks("needle", entry, [], bpe(), render=behind)
            assert [e.max_new_tokens for e in task.examples] == [expected]


def test_a_sentence_to_complete_is_scored_whole_as_papers_do(haystack):
    knobs = {"lengths": [300, 400], "depths": [0, 50], "repeats": 1}
    tasks = load(bpe(), haystack=haystack, phrasing="completion", **knobs)
    needle = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
    for task in tasks:
        (reference,) = {e.answers for e in task.examples}
        assert reference == (needle,) and all(e.prompt.count(needle) == 1 for e in task.examples)
        assert all(e.prompt.endswith(e.question) and e.question.endswith("San Francisco is:") for e in task.examples)
        assert (task.stop, task.min_new_tokens, task.metric) == (("\n",), 1, "rouge1")

        def points(answer, task=task):
            return 100 * score(task.metric, task.answer(answer), task.examples[0])

        assert points(" eat a sandwich and sit in Dolores Park on a sunny day.") == 100
        # 9 of its 21 words are given: precision 1, recall 9/21
        assert points("") == pytest.approx(60)
        assert "an empty one has 60.0" in task.note
        assert at_floor(task, [0.62] * 4) and not at_floor(task, [0.64] * 4)
    (mended, *_) = load(bpe(), haystack=haystack, phrasing="completion", rules="mended", **knobs)
    assert [e.prompt for e in mended.examples] == [e.prompt for e in tasks[0].examples] and not mended.note
    sentence = "eat a sandwich and sit in Dolores Park on a sunny day"
    assert [mended.score(text, mended.examples[0]) for text in ("", f" {sentence}.")] == [0, 1]
    (plain, *_) = load(bpe(), haystack=haystack, phrasing="sanfrancisco", **knobs)
    # nothing of it stands in the identity of tasks without a beginning
    assert "lead" not in plain.list_answer_settings() and tasks[0].list_answer_settings()["lead"]


def test_a_haystack_that_is_repeated_is_noted(tokenizer, haystack, tmp_path):
    (tmp_path / "short.txt").write_text("Not many.", encoding="utf-8")
    short, enough = (load(tokenizer, haystack=h, lengths=[256], depths=[50])[0].note for h in (tmp_path, haystack))
    assert "the haystack of 9 characters is repeated to fill 256 tokens" in short and "repeated" not in enough
