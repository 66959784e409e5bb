"""Datasets whose examples are contexts with several questions: their prompts, sizes, metrics and token ids."""

import json
from dataclasses import replace

import pytest
from support.data import data_path

from kvbench.base.conf import entries
from kvbench.base.errors import UsageError
from kvbench.base.example import Example, Turn
from kvbench.tasks.base import Task, load_tasks
from kvbench.tasks.encoding import encode_prompt
from kvbench.tasks.metrics import score
from kvbench.tasks.prompt import PromptPolicy
from kvbench.tasks.records import LINES_HEADER


def load(dataset, data, **knobs):
    (task,) = load_tasks(dataset, {**entries("dataset")[dataset], **knobs}, [], None, str(data))
    return task


def test_xquad_has_the_published_articles_and_questions():
    task = load("xquad", data_path("xquad.en.json").parent)
    counts = [len(e.turns) for e in task.examples]
    assert (len(counts), sum(counts), min(counts), max(counts)) == (48, 1190, 8, 74)
    first = task.examples[0]
    assert (first.id, first.turns[0].answers, first.max_new_tokens) == ("Super_Bowl_50", ("308",), 32)
    assert first.prompt.count("\n\n") == 6 and "\n\nSuper Bowl 50\n\nThe Panthers defense gave up" in first.prompt
    assert first.turns[0].question == "\n\nQuestion: How many points did the Panthers defense surrender?\nAnswer:"
    assert (task.turns, task.metric, task.beside) == ("isolated", "squad_f1", ("squad_em", "best_subspan_em"))
    few = load("xquad", data_path("xquad.en.json").parent, questions=3, turns="own")
    assert {len(e.turns) for e in few.examples} == {3} and few.turns == "own"


def test_qmsum_asks_the_general_queries_first_under_longbenchs_prompt():
    task = load("qmsum", data_path("qmsum_test.jsonl").parent)
    counts = [len(e.turns) for e in task.examples]
    assert (len(counts), sum(counts), min(counts), max(counts)) == (35, 281, 4, 13)
    first = task.examples[0]
    assert len(first.turns) == 13 and "Query: Summarize the whole meeting.\nAnswer:" in first.turns[0].question
    assert first.prompt.startswith("You are given a meeting transcript") and "Barry Hughes: Perfectly" in first.prompt
    spoken = [line.partition(": ")[2] for line in first.prompt.partition("Transcript:\n")[2].split("\n")]
    assert sum(len(text.split()) for text in spoken) == 10_188
    text = "".join(e.prompt for e in task.examples)
    assert not any(mark in text for mark in ("vocalsound", "disfmarker", "a_m_i_", "p_m_s"))


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "want"),
    [
        ("squad_f1", "The Panthers surrendered 308 points.", "308", 0.4),
        ("squad_em", "The Panthers surrendered 308 points.", "308", 0),
        ("squad_em", "The 308.", "308", 1),
        ("best_subspan_em", "The Panthers surrendered 308 points.", "308", 1),
        ("last_integer", "The number in line torpid-kid is <2416>.", "2416", 1),
        ("last_integer", "2416 (line 7)", "2416", 0),
        ("last_integer", "none", "2416", 0),
        ("contains_any_case", "It is AB-1.", "ab-1", 1),
        ("contains_any_case", "It is AB 1.", "ab-1", 0),
    ],
)
def test_metrics_by_hand(metric, prediction, reference, want):
    assert score(metric, prediction, Example("", "", (reference,), 1)) == pytest.approx(want)


def test_generated_pairs_have_the_published_form_and_size(tmp_path):
    task = load("kv_retrieval", tmp_path, contexts=3, questions=4)
    assert (task.id, len(task.examples), task.metric) == ("kv_retrieval/75", 3, "contains_any_case")
    one = task.examples[0]
    assert len(one.asked(0).prompt) == 6_231  # as the first published case
    values = json.loads(one.prompt.partition("JSON data:\n")[2])
    assert len(values) == 75 and len(set(values) | set(values.values())) == 150
    keys = [turn.question.split('"')[1] for turn in one.turns]
    assert len(set(keys)) == 4 and [t.answers for t in one.turns] == [(values[k],) for k in keys]
    assert [list(values)[i] for i in one.meta["places"]] == keys
    again = load("kv_retrieval", tmp_path, contexts=3, questions=4)
    assert again.content_hash() == task.content_hash() != load("kv_retrieval", tmp_path, seed=1).content_hash()
    with pytest.raises(UsageError, match="questions=80 is not possible"):
        load("kv_retrieval", tmp_path, questions=80)


def test_published_records_are_read_and_asked_for_their_own_key_first(tmp_path):
    (tmp_path / "longeval").mkdir()
    rows = "line torpid-kid: REGISTER_CONTENT is <2416>\nline brave-lemon: REGISTER_CONTENT is <7>\n"
    end = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line brave-lemon? I need the number. "
    case = {"random_idx": ["brave-lemon", 1], "expected_number": 7, "prompt": LINES_HEADER + rows + end}
    (tmp_path / "longeval" / "2_lines.jsonl").write_text(json.dumps(case) + "\n")
    (example,) = load("longeval_lines", tmp_path, records=[2], questions=2).examples
    assert example.prompt == LINES_HEADER + rows and example.meta["places"] == [1, 0]
    assert example.turns[0] == Turn(end.rstrip(), ("7",)) and example.turns[1].answers == ("2416",)
    made = load("longeval_lines", tmp_path).examples[0]
    assert made.prompt.startswith(LINES_HEADER) and made.prompt.count("REGISTER_CONTENT is <") == 200
    pairs = {"ordered_kv_records": [["a", "x"], ["b", "y"]], "key": "b", "value": "y"}
    (tmp_path / "kv-retrieval-2_keys.jsonl").write_text(json.dumps(pairs) + "\n")
    (example,) = load("kv_retrieval", tmp_path, records=[2], questions=1).examples
    assert example.asked(0).prompt == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
        '{"a": "x",\n "b": "y"}\n\nKey: "b"\nCorresponding value:'
    )


class Letters:
    """A tokenizer of characters, with a chat template that talks as ``<u>X</u><a>Y</a>``."""

    chat_template = "yes"

    def encode(self, text, add_special_tokens=True):
        return ([1] if add_special_tokens else []) + [ord(c) for c in text]

    def apply_chat_template(self, messages, **_):
        marks = {"user": "u", "assistant": "a"}
        return "".join(f"<{(m := marks[x['role']])}>{x['content']}</{m}>" for x in messages) + "<a>"


def text(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize("turns", ["isolated", "gold", "own"])
def test_a_chat_template_is_cut_behind_the_context(turns):
    example = Example("x", "C\n", (), 5, turns=(Turn("Q? ", ("yes",)), Turn(" R? ", ("no",))))
    task = Task("t", (example,), "f1", "", turns=turns)
    encoded = encode_prompt(Letters(), example, task, PromptPolicy(template="on"), 1000)
    assert text(encoded.ids) == "<u>C\n" and text(encoded.questions[0]) == "Q? </u><a>"
    assert text(encoded.questions[1]) == (" R? </u><a>" if turns == "isolated" else "</a><u>R? </u><a>")
    assert [text(r) for r in encoded.references] == ["yes", "no"] and encoded.between == (turns != "isolated")
    plain = encode_prompt(Letters(), example, task, PromptPolicy(), 1000)
    assert plain.ids == (1, ord("C"), ord("\n")) and text(plain.questions[1]) == " R? " and not plain.between


def test_isolated_questions_have_the_tokens_that_each_has_alone():
    from transformers import AutoTokenizer

    from kvbench.models import embedded

    tokenizer = AutoTokenizer.from_pretrained(embedded.path())
    task = load("kv_retrieval", "/", contexts=1, questions=5, turns="isolated")
    (example,) = task.examples
    together = encode_prompt(tokenizer, example, task, PromptPolicy(), None)
    for i, asked in enumerate(together.questions):
        single = example.asked(i)
        one = Task("t", (single,), "f1", "", query_aware=False)
        alone = encode_prompt(tokenizer, single, one, PromptPolicy(), None)
        assert (alone.ids, alone.question) == (together.ids, asked)
        assert text_of(tokenizer, asked).startswith("Key:")
    own = encode_prompt(tokenizer, example, replace(task, turns="own"), PromptPolicy(), None)
    assert own.ids == together.ids and own.questions[0] == together.questions[0]
    assert text_of(tokenizer, own.questions[1]) == "\n\n" + text_of(tokenizer, together.questions[1])


def text_of(tokenizer, ids):
    return tokenizer.decode(list(ids))


@pytest.mark.parametrize(("turns", "kept"), [("isolated", 11), ("gold", 6), ("own", 3)])
def test_a_context_is_cut_in_its_middle_for_what_is_read_behind_it(turns, kept):
    example = Example("x", "abcdefghijklmnop", (), 5, turns=(Turn("Qq", ("yes",)), Turn("Rrrr", ("no",))))
    task = Task("t", (example,), "f1", "", turns=turns)
    # behind it: Rrrr | Qq, " yes", Rrrr | Qq, 5 tokens and an end, Rrrr; then an answer of 5
    context = {"isolated": 20, "gold": 21, "own": 20}[turns]
    encoded = encode_prompt(Letters(), example, task, PromptPolicy(bos=False), context)
    assert len(encoded.ids) == kept and encoded.cut == 16 - kept
    assert len(encoded) + 5 == context and text(encoded.ids)[0] == "a" and text(encoded.ids)[-1] == "p"
    limited = encode_prompt(Letters(), example, task, PromptPolicy(bos=False, max_length=10), None)
    assert len(limited.ids) == 6
    with pytest.raises(UsageError, match="no room"):
        encode_prompt(Letters(), example, task, PromptPolicy(max_length=4), None)
