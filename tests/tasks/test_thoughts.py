"""Thoughts are taken off before any metric sees an answer, and short answers are asked for without them."""

import json
from dataclasses import replace

import jinja2
import pytest
from transformers import PreTrainedTokenizerBase

from kvbench.base.example import Example
from kvbench.cli.main import main
from kvbench.plan.advice import about_prompts
from kvbench.tasks import metrics
from kvbench.tasks.base import Task
from kvbench.tasks.encoding import encode_prompt
from kvbench.tasks.prompt import PromptPolicy
from kvbench.tasks.thoughts import THOUGHT, Thought, read_thought

QWEN = (
    "{% for m in messages %}<u>{{ m.content.split('</think>')[-1] }}{% endfor %}<a>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
R1 = "{% for m in messages %}<u>{{ m.content }}{% endfor %}<a><think>\n{# ends with </think> #}"
THOUGHTS = {"none": "", "closed": "<think>471. or 382.</think>\n", "cut": "<think>471. or 382. "}
FINAL = "<|channel|>final<|message|>"


class Tags:
    """A tokenizer of characters, to which some marks are special tokens."""

    def __init__(self, template, special=()):
        self.chat_template, self.special = template, special

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=False):
        text = "".join(map(chr, ids))
        for mark in self.special if skip_special_tokens else ():
            text = text.replace(mark, "")
        return text

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **switches):
        return jinja2.Template(self.chat_template).render(messages=messages, **switches)


def task(most, chat=True):
    return Task("t/t", (Example("a", "Q?", ("C",), most),), "letter", "test", chat=chat)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris", "Paris"),
        ("  Paris\n", "  Paris\n"),
        ("<think>Lyon?</think>\n\nParis", "Paris"),
        ("\n<think>\nLyon?\n</think>\n \n    return x", "\n    return x"),
        ("Lyon?</think>Paris", "Paris"),
        ("a</think>b</think>Paris", "Paris"),
        ("Well. <think>Lyon?</think>Paris <think>or</think>again", "Well. Paris again"),
        ("<think></think>", ""),
        ("<think>Paris", None),
        ("<think>a</think>Paris<think>b", None),
        ("a</think>Paris<think>b", None),
        ("", ""),
    ],
)
def test_what_stands_outside_of_thoughts_is_the_answer(text, answer):
    assert THOUGHT.find_answer(text) == answer


def test_a_prompt_may_have_begun_the_thought():
    begun = Thought(begun=True)
    assert begun.find_answer("Lyon? </think>\n\nParis") == "Paris"
    assert begun.find_answer("<think>Lyon? </think>\n\nParis") == "Paris"
    assert begun.find_answer("Paris") is None and begun.find_answer("") is None


@pytest.mark.parametrize("name", [m for m, rule in metrics.METRICS.items() if rule.formula is None])
def test_no_metric_sees_a_thought(name):
    rule = metrics.metric(name)
    if rule.package:
        pytest.importorskip(rule.package)
    for right, wrong in (("Paragraph 3", "Paragraph 4"), ("B", "C"), ("段落3", "段落4")):
        example = Example("a", "p", (right,), 8, classes=(right, wrong))
        thought = f"<think>\n{wrong}? The answer is {right}.\n\\boxed{{{right}}}"
        assert metrics.score(name, thought, example) == metrics.score(name, "", example)
        for answer in (right, wrong):
            bare = metrics.score(name, answer, example)
            assert metrics.score(name, f"{thought}\n</think>\n\n{answer}", example) == bare


def test_a_task_cuts_what_follows_the_thought():
    example = Example("a", "p", ("Paris",), 8)
    t = Task("t/t", (example,), "exact_match", "test", first_line=True, cut_at="\nQ:", lead="")
    assert t.score("<think>Lyon?\nQ: no\n</think>\n\nParis\nQ: more", example) == 1.0
    assert t.score("<think>Paris", example) == 0.0 and t.score("<think>Paris", example, "contains") == 0.0


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [
        (QWEN, "<think>", "</think>"),
        ("[THINK]x[/THINK]", "[THINK]", "[/THINK]"),
        ("<seed:think></seed:think>", "<seed:think>", "</seed:think>"),
        ("◁think▷◁/think▷", "◁think▷", "◁/think▷"),
        ("<|channel|>analysis<|message|>.. <|channel|>final<|message|>", "<|channel|>analysis<|message|>", FINAL),
    ],
)
def test_marks_are_those_of_the_chat_template(template, opening, closing):
    found = read_thought(Tags(template), template, "<u>Q<a>")
    assert (found.opening, found.closing, found.told, found.begun) == (opening, closing, True, False)
    assert found.find_answer(f"{opening}A?{closing}\nC") == "C" and found.find_answer(f"{opening}A") is None
    assert not found.special and read_thought(Tags(template, [closing]), template, "").special


def test_a_template_without_thoughts_changes_no_identity():
    policy = PromptPolicy(template="on")
    plain = policy.find_thought(Tags("<u>{{ messages[0].content }}<a>"), task(32))
    assert plain == THOUGHT and "thought" not in replace(task(32), thought=plain).list_answer_settings()
    told = replace(task(32), thought=policy.find_thought(Tags(QWEN), task(32)))
    assert told.list_answer_settings()["thought"]["closing"] == "</think>"


def test_a_template_that_begins_the_thought_is_told_by_its_prompt():
    assert PromptPolicy(template="on").find_thought(Tags(R1), task(4096)).begun
    assert not PromptPolicy(template="off").find_thought(Tags(R1), task(4096)).begun


@pytest.mark.parametrize(
    ("thinking", "most", "off"), [(None, 32, True), (None, 4096, False), (True, 32, False), (False, 4096, True)]
)
def test_short_answers_are_asked_for_without_a_thought(thinking, most, off):
    policy, tokenizer = PromptPolicy(name="chat", template="skip", thinking=thinking), Tags(QWEN)
    t = task(most)
    ids = encode_prompt(tokenizer, t.examples[0], t, policy, None).ids
    assert ("<think>" in tokenizer.decode(ids)) == off
    identities = [PromptPolicy(template="on", thinking=value).identity(t, tokenizer) for value in (True, False)]
    assert policy.identity(t, tokenizer) == identities[off]


def test_notes_say_what_becomes_of_thoughts():
    def notes(template, most, **settings):
        policy = PromptPolicy(name="chat", template="on", **settings)
        t = replace(task(most), thought=policy.find_thought(Tags(template), task(most)))
        return about_prompts(policy, [t], Tags(template))

    (note,) = notes(QWEN, 32)
    assert note.startswith("t/t: asked without thinking, since a thought does not fit into answers of fewer than 1,024")
    (note,) = notes(R1, 32)
    assert note.startswith("t/t: the model may think, and answers of fewer than 1,024 tokens can end inside a thought")
    assert notes(QWEN, 32, thinking=True) == notes(R1, 32)
    assert notes(QWEN, 32, thinking=False) == notes(QWEN, 4096) == notes(R1, 4096) == []


QUESTION = "the magic number of paris is"
LINES = {
    "prompts": [{"prompt": f"the magic number of paris is {n}. {QUESTION}", "answers": [f"{n}."]} for n in (471, 382)],
    "questions": [
        {"context": "the magic number of paris is 471. ", "questions": 2 * [{"question": QUESTION, "answers": "471."}]}
    ],
}


@pytest.mark.e2e("runs whole command lines")
@pytest.mark.parametrize("lines", LINES)
def test_a_run_stores_thoughts_and_does_not_score_them(tmp_path, capsys, monkeypatch, lines):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES[lines]))
    decode = PreTrainedTokenizerBase.decode

    found = {}
    for name, thought in THOUGHTS.items():

        def decode_behind(self, ids, *args, thought=thought, **options):
            return thought * options.get("skip_special_tokens", False) + decode(self, ids, *args, **options)

        monkeypatch.setattr(PreTrainedTokenizerBase, "decode", decode_behind)
        words = ["run", "model=tiny", "dataset=file", f"path={file}", "metric=contains", "max_new_tokens=8"]
        assert main([*words, f"results={tmp_path / name}", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    summaries = {name: report["rows"][0]["cells"][0] for name, report in found.items()}
    assert summaries["none"]["score"] == summaries["closed"]["score"] > summaries["cut"]["score"] == 0
    assert [summary.get("cut_thoughts", 0) for summary in summaries.values()] == [0, 0, 1]
    told = "answers that end inside their thought, and score as empty ones: full 100 %"
    assert [any(told in note for note in report["notes"]) for report in found.values()] == [False, False, True]
    stored = "".join(path.read_text() for path in (tmp_path / "closed").rglob("samples*.jsonl"))
    assert '"prediction": "<think>471. or 382.' in stored


@pytest.mark.e2e("runs whole command lines")
def test_answers_of_other_programs_are_scored_without_thoughts(tmp_path, capsys):
    rows = [{"pred": f"<think>Lyon?{end}", "answers": ["Paris"]} for end in ("</think>Paris", "</think>Lyon", "Paris")]
    (tmp_path / "qasper.jsonl").write_text(
        "".join(json.dumps(row | {"all_classes": None, "length": 1}) + "\n" for row in rows)
    )
    assert main(["score", str(tmp_path), "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (task["score"], task["cut_thoughts"]) == (33.33, 1 / 3)
    assert main(["score", str(tmp_path)]) == 0
    assert "qasper: 33.3 % of the answers end inside their thought" in capsys.readouterr().out
